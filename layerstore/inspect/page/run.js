// The run that is shown, what was picked of it, and what is known about its layers.

const facts = JSON.parse(document.getElementById("facts").textContent);
// In `layer`, `compare` and `pin`, -1 stands for none; `pin` is an index into facts.pins.
const state = { run: 0, policy: "latest", save: 0, layer: -1, compare: -1, pin: -1, metric: null };

const LOGICAL = 0, UNIQUE = 1, INHERITED = 2, DERIVED = 3, WRITTEN = 4;
const run = () => facts.runs[state.run];
const saves = () => run().saves;
const count = () => saves().step.length;
const deduplicated = (bytes) => bytes[LOGICAL] - bytes[UNIQUE];
// The sizes that are not zero, each with its words.
const sizes = (...parts) => parts.filter(([bytes]) => bytes).map(([bytes, words]) => `${size(bytes)} ${words}`).join(", ") || "nothing";
const written = (bytes) => (bytes[WRITTEN] ? `${size(bytes[WRITTEN])} written` : "nothing had to be written, the store had all of it");
const whatIf = () => (state.policy === "latest" ? null : run().what_if[state.policy] ?? null);

// The index of each layer's origin in a composite of the save `column`; empty if the composite cannot be made.
function taken(column, policy = state.policy) {
  return (run().composites[policy] ?? [])[column] ?? run().composites.latest[column];
}

// The save that a layer's version comes from, in a composite of the save `column`; null if the save lacks the layer.
function origin(column, layer) {
  const asked = taken(column);
  const index = (asked.length ? asked : run().composites.latest[column])[layer];
  return index === undefined || index < 0 ? null : originAt(run().origins, index, column);
}

function originAt(of, index, column) {
  const own = of.run[index] === run().run;
  return {
    run: of.run[index], attempt: of.attempt[index], step: of.step[index], time: of.time[index], own, precision: of.precision?.[index],
    saves: own ? saves().save_number[column] - of.save_number[index] : null,
    steps: own ? saves().step[column] - of.step[index] : null,
  };
}

const digits = (text, layer) => text.slice(layer * 8, layer * 8 + 8);
const isSame = (column, layer) => taken(column)[layer] === run().composites.latest[column][layer];

// The column of the save `of`; -1 if it is not shown, or of another run.
const columnOf = (of) => (of.own ? saves().step.findIndex((step, column) => step === of.step && saves().attempt[column] === of.attempt) : -1);

// A save whose sizes equal those of the save before has no list of its own.
function sizesAt(column) {
  for (let at = column; at >= 0; at -= 1) if (run().layer_bytes[at] !== null) return run().layer_bytes[at];
  return [];
}

// The version of a layer in the composite of a save, and then its size. If the save that it comes from is not shown,
// the version is unknown, and the size is approximate: that of the layer's version in the save itself.
function version(column, layer) {
  if (isSame(column, layer)) return digits(run().versions[column], layer);
  const of = origin(column, layer);
  const from = of === null ? -1 : columnOf(of);
  return from < 0 ? "" : digits(run().versions[from], layer);
}

function layerSize(column, layer) {
  const of = origin(column, layer);
  const from = isSame(column, layer) || of === null ? column : columnOf(of);
  const bytes = sizesAt(from < 0 ? column : from)[layer] ?? null;
  return bytes === null ? "" : `${from < 0 ? "about " : ""}${size(bytes)}`;
}

const moved = (column, layer) => {
  const found = run().drift[column]?.[layer] ?? null;
  return found === null ? "" : typeof found === "string" ? found : `${Number((100 * found).toPrecision(3))}\u00a0%`;
};

function age(of) {
  if (of.saves === null) return "age not known: of another run";
  if (of.saves === 0 && of.steps === 0) return "saved at this step";
  if (of.steps < 0) return "newer than this step";
  return `${counted(of.saves, "save")}, ${counted(of.steps, "step")} old`;
}

function oldest(column) {
  let worst = null;
  for (let layer = 0; layer < run().layers.length; layer += 1) {
    const of = origin(column, layer);
    if (of && (worst === null || (of.steps ?? Infinity) > (worst.steps ?? Infinity))) worst = { ...of, layer };
  }
  return worst;
}

const mixture = (column) => (run().mixtures[state.policy] ?? run().mixtures.latest)[column];

// The sentence that the command line prints about a mixture; empty if nothing is mixed.
function mixtureText(found, step) {
  if (found === null) return "";
  const [others, layers, areOlder] = found;
  return `${others} of ${layers} layers ${others === 1 ? "is" : "are"} ${areOlder ? "older than" : "not from"} step ${step}: ` +
    "this model never existed during training (docs/evidence.md says what that costs)";
}

// Only a run that has compact saves has precisions; null stands for one that this report does not know.
const hasPrecisions = () => saves().precision !== undefined;
const isCompact = (of) => of.precision !== undefined && of.precision !== "exact";

const precisionText = (of) =>
  of.precision === undefined ? "" : of.precision === null ? "not kept bit for bit" : `precision ${of.precision}`;

const placeOf = (of) => `${of.own ? "" : `${of.run} `}step ${number(of.step)}${run().attempts > 1 || !of.own ? `, attempt ${of.attempt}` : ""}`;
