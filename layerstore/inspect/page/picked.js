// What was picked, a save or a pin: its composite, layer by layer, and the commands that show and write it.

const fateText = (fate) => (fate === null ? "" : `${FATES[fate[0]].name}: ${fate[1]}${fate[2] ? `; ${size(fate[2])} go with it` : ""}`);

// The word for a save in a command: its reference, or its id if no reference refers to this save alone.
const wordFor = (column) => {
  const reference = saves().reference[column];
  return quoted(/ of attempt \d+$/.test(reference) ? saves().commit[column].slice(0, 12) : reference);
};

function layersOfSave(column) {
  return run().layers.map((name, layer) => ({
    name, from: origin(column, layer), version: version(column, layer), size: layerSize(column, layer), moved: moved(column, layer),
  }));
}

function drawLayers(layers) {
  const hasMoved = layers.some((each) => each.moved);
  const columns = [
    { name: "Layer" }, { name: "From" }, { name: "Saved (UTC)" }, { name: "Steps old", right: true }, { name: "Saves old", right: true },
    { name: "Version", code: true }, { name: "Size", right: true }, ...(hasMoved ? [{ name: "Moved", right: true }] : []),
  ];
  const rows = layers.map(({ name, from, version: id, size: bytes, moved: distance }) => {
    const last = hasMoved ? [distance] : [];
    if (from === null) return [foreign(name), "no such layer", "", "", "", "", "", ...last];
    return [foreign(name), foreign(placeOf(from)), from.time === undefined ? "" : time(from.time), from.steps === null ? "?" : number(from.steps),
      from.saves === null ? "?" : number(from.saves), id, bytes, ...last];
  });
  $("composite").replaceChildren(table(columns, rows, state.layer));
}

const IDS = ["commit", "base"];

function drawFacts(lines) {
  const found = lines.filter((line) => line !== null && line[1]);
  $("picked-facts").replaceChildren(...found.flatMap(([name, ...text]) => [h("dt", {}, name), h("dd", { class: IDS.includes(name) ? "code" : null }, ...text)]));
}

function drawMixture(sentence) {
  $("mixture").textContent = sentence;
  show("mixture", sentence !== "");
}

function drawCommands(word, policy, isCompact = false) {
  const there = `--store ${quoted(facts.store)}`, compose = `layerstore compose ${there} ${word}`;
  $("commands").replaceChildren(...commands([
    shown(`layerstore show ${there} ${word}`), shown(`${compose}${policy} -o resume`), ...(isCompact ? [shown(`${compose} --exact -o exact`)] : [])]));
}

function precisionOf(column) {
  if (!hasPrecisions()) return "";
  const precision = saves().precision[column];
  return precision === "exact" ? "exact, bit for bit" : `${precision ?? "not bit for bit"}; compose --exact takes the newest exact save at or before it`;
}

function drawPicked() {
  const pin = facts.pins[state.pin];
  $("picked-title").textContent = pin === undefined ? "Picked step" : "Picked pin";
  if (pin !== undefined) drawPickedPin(pin);
  else drawPickedSave();
  drawPins();
}

function drawPickedPin(pin) {
  const layers = layersOfPin(pin);
  const what = pin.is_composite ? `a composite of ${counted(layers?.length ?? 0, "layer")} on top of ` : "";
  $("picked-summary").replaceChildren(h("strong", { class: "foreign" }, shown(pin.pin)), ` pins ${layers === null ? "" : what}`, foreign(pin.reference),
    layers === null ? ": its layers are not in this report; layerstore show has them." : ".");
  drawMixture(mixtureText(pin.mixture, pin.step));
  drawFacts([
    [pin.is_composite ? "base" : "commit", pin.commit],
    ["saved", when(pin.time), `, attempt ${pin.attempt}`],
    pin.made === null ? null : ["pinned", when(pin.made), ", by the time of its file"],
    ["chosen by", shown(chosenBy(pin))],
  ]);
  drawCommands(quoted(pin.pin), "");
  drawLayers(layers ?? []);
  show("composite", layers !== null);
}

function drawPickedSave() {
  const column = state.save, of = saves(), reference = of.reference[column];
  const isThere = taken(column).length !== 0;
  const worst = oldest(column);
  const fresh = run().layers.filter((_, layer) => origin(column, layer)?.steps === 0).length;
  const by = state.policy === "latest" ? "as it was saved" : `by ${state.policy}`;
  $("picked-summary").replaceChildren(h("strong", { class: "foreign" }, shown(reference)), ` ${by}: ` + (!isThere ? "it cannot be composed; layerstore compose says why." :
    `${fresh} of ${counted(run().layers.length, "layer")} from this very step` +
    (worst === null || worst.steps === 0 ? "." : ". The oldest is ")),
    ...(!isThere || worst === null || worst.steps === 0 ? [] : [foreign(run().layers[worst.layer]), `: ${age(worst)}.`]));
  drawMixture(mixtureText(mixture(column), of.step[column]));
  const bytes = of.bytes[column], found = whatIf();
  drawFacts([
    ["commit", of.commit[column]],
    ["saved", when(of.time[column]), `, attempt ${of.attempt[column]}, ${of.layers_saved[column]} layers written under ${shown(of.policy[column])}`],
    ["bytes", `${size(bytes[LOGICAL] + bytes[DERIVED])} as a whole checkpoint: ` +
      `${sizes([bytes[UNIQUE], "new to the run"], [deduplicated(bytes), "there already"], [bytes[DERIVED], "derived"])}; ${written(bytes)}`],
    found === null ? null : ["what if", `${size(found.bytes[column])} new to the run, had ${state.policy} made every save; ${size(found.total_bytes[column])} with all before`],
    ["precision", precisionOf(column)],
    ["measured", measuredAt(column).join(", ")],
    ["pins", of.pins[column].map(shown).join(", ")],
    of.has_moments[column] ? null : ["lacks", "its moments: gc has removed them"],
    of.timing[column] ? ["took", TIMED.map((kind, index) => `${kind.name} ${seconds(of.timing[column][index])}`).join(", ")] : null,
    of.fate[column] ? ["retention", shown(fateText(of.fate[column]))] : null,
  ]);
  drawCommands(wordFor(column), state.policy === "latest" ? "" : ` --policy ${state.policy}`, hasPrecisions() && of.precision[column] !== "exact");
  drawLayers(layersOfSave(column));
  show("composite", true);
}

const spoken = (column) => {
  const worst = oldest(column);
  return `${shown(saves().reference[column])}, ${worst === null || worst.steps === 0 ? "all layers from this step" : `oldest layer ${age(worst)}`}`;
};

function frame(style, column, layer) {
  const node = $("heat").querySelector(`.${style}`), height = rowHeight(), all = layer < 0;
  node.setAttribute("visibility", column < 0 ? "hidden" : "visible");
  if (column < 0) return;
  node.setAttribute("x", grid.left[column] - 0.75);
  node.setAttribute("width", inner() + 1.5);
  node.setAttribute("y", all ? TOP - 1 : TOP + layer * height - 0.75);
  node.setAttribute("height", all ? height * run().layers.length + 1 : height + 0.5);
}

function mark() {
  for (const svg of document.querySelectorAll(".pickable > svg")) {
    const band = svg.querySelector(".band");
    band.setAttribute("x", grid.left[state.save] - 0.5);
    band.setAttribute("width", grid.cell);
  }
  const heat = $("heat");
  heat.setAttribute("aria-valuemin", 1);
  heat.setAttribute("aria-valuemax", count());
  heat.setAttribute("aria-valuenow", state.save + 1);
  heat.setAttribute("aria-valuetext", spoken(state.save));
  frame("cursor", state.save, state.layer);
  frame("compared", state.compare, -1);
}

function pick(column, layer = state.layer) {
  state.save = Math.min(count() - 1, Math.max(0, column));
  state.layer = Math.min(run().layers.length - 1, Math.max(-1, layer));
  if (state.compare === state.save) state.compare = -1;
  mark();
  drawPicked();
  drawCompared();
  if (state.layer >= 0) $("live").textContent = cellText(state.save, state.layer);
}
