// How much the saves take: all up to each step, and each alone; as saved, or as a policy would have.

function patterns(svg, id) {
  svg.append(s("defs", {},
    s("pattern", { id: `hatch-${id}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
      s("path", { class: "hatch", d: "M-1 7L7 -1M-1 1L1 -1M5 7L7 5" })),
    s("pattern", { id: `dots-${id}`, width: 5, height: 5, patternUnits: "userSpaceOnUse" },
      s("circle", { class: "dots", cx: 2.5, cy: 2.5, r: 1.2 }))));
}

function swatches(parts) {
  return (swatch) => { for (const [tag, attributes] of parts) swatch.append(s(tag, attributes)); };
}

function niceTicks(top, parts = 4) {
  const rough = top / parts;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let value = 0; value <= top * 1.0001; value += step) found.push(value);
  return found;
}

// What a picture of bytes is drawn from: as the run was saved, or as the policy would have saved it.
function storage() {
  const of = saves(), found = whatIf();
  const whole = (bytes) => bytes[LOGICAL] + bytes[DERIVED];
  const picture = (bytes, asked, estimated) => bytes.map((each, column) => (found === null
    ? { stored: each[UNIQUE], sure: each[UNIQUE], listed: each[LOGICAL], whole: whole(each), line: each[WRITTEN] }
    : { stored: asked[column], sure: asked[column] - estimated[column], listed: whole(each), whole: whole(each), line: each[UNIQUE] }));
  const alone = (totals) => totals.map((each, column) => each - (column ? totals[column - 1] : 0));
  return {
    totals: picture(of.total_bytes, found?.total_bytes, found?.estimated_bytes),
    // The estimated part of one save is the difference between two totals, so it is known only if all saves are shown.
    own: picture(of.bytes, found?.bytes, found === null || count() < run().commits ? of.step.map(() => 0) : alone(found.estimated_bytes)),
  };
}

function storageText() {
  const last = run().total, found = whatIf();
  const whole = last.logical_bytes + last.derived_bytes;
  if (found !== null) return `As if ${state.policy} had made every save of this run; the line is what the run takes as it is.`;
  const left = last.inherited_bytes ? ` (${size(last.inherited_bytes)} of these in layers that a save did not write)` : "";
  return `All saves of this run up to each step. Whole checkpoints would have taken ${size(whole)}: ` +
    `${sizes([last.unique_bytes, "are different bytes"], [last.logical_bytes - last.unique_bytes, `were there already${left}`],
      [last.derived_bytes, "follow from others"])}. ` +
    (last.written_bytes ? `Its writers put ${size(last.written_bytes)} into the store.` : "Nothing was written: the store already had all of it.");
}

function whatIfText(found) {
  const { bytes: total, estimated_bytes: estimated, first_bytes: first } = found.total, is = run().total.unique_bytes;
  const later = size(Math.round((total - first) / (run().commits - 1)));
  const against = total === is ? "the same as now" : total < is
    ? `instead of ${size(is)}, ${(is / total).toFixed(1)} × fewer bytes` : `instead of ${size(is)}`;
  return `If ${state.policy} (default settings) had made every save of this run: ${size(total)}, ${against}; ` +
    `the first save ${size(first)}, later ones ${later} on average. ` +
    (estimated ? `${size(estimated)} of it are an estimate: layers that ${state.policy} would have saved where this run did not, counted with the size that they had.`
      : "This is exact: the store has every version that it counts.");
}

function drawBytes(id, height, label, bytes, line) {
  const base = height - 24, top = 8;
  const svg = canvas(id, height, label);
  const most = Math.max(1, ...bytes.map((each) => Math.max(each.whole, each.line, each.stored)));
  const y = (value) => base - (base - top) * (value / most);
  patterns(svg, id);
  for (const value of niceTicks(most, height > 120 ? 4 : 2)) {
    svg.append(s("line", { class: "axis", x1: grid.labels, x2: grid.right, y1: y(value), y2: y(value) }));
    svg.append(s("text", { x: grid.labels - 8, y: y(value) + 4, "text-anchor": "end" }, size(Math.round(value))));
  }
  const bars = (from, to) => bytes.map((each, column) => (to(each) <= from(each) ? "" : rect(grid.left[column], y(to(each)), inner(), y(from(each)) - y(to(each))))).join("");
  svg.append(s("path", { class: "unique", d: bars(() => 0, (each) => each.sure) }));
  svg.append(s("path", { class: "estimated", d: bars((each) => each.sure, (each) => each.stored) }));
  svg.append(s("path", { fill: `url(#hatch-${id})`, d: bars((each) => each.stored, (each) => each.listed) }));
  svg.append(s("path", { fill: `url(#dots-${id})`, d: bars((each) => each.listed, (each) => each.whole) }));
  svg.append(s("path", { class: line, d: bytes.map((each, column) => `M${grid.left[column]} ${y(each.line).toFixed(2)}h${inner()}`).join("") }));
  ticks(svg, base);
}

function drawStorage() {
  const found = whatIf(), { totals, own } = storage();
  $("storage-facts").textContent = storageText();
  $("what-if").textContent = found === null ? "" : whatIfText(found);
  show("what-if", found !== null);
  drawBytes("storage", 190, found === null
    ? "Storage over time: different bytes, deduplicated bytes and derived bytes of all saves up to each step"
    : `Storage over time, had ${state.policy} made every save`, totals, "written");
  drawBytes("added", 104, found === null ? "What each save added" : `What each save would have added by ${state.policy}`, own, "written");
  const box = { x: 1, y: 1, width: 20, height: 12 };
  const filled = (style) => swatches([["rect", { ...box, class: style }]]);
  const patterned = (name) => swatches([["rect", { ...box, class: `${name}-edge` }], ["rect", { ...box, fill: `url(#${name}-storage)` }]]);
  const line = swatches([["path", { class: "written", d: "M1 7h20" }]]);
  legend("storage-legend", found === null ? [
    { name: "different bytes", draw: filled("unique") },
    { name: "deduplicated: there already", draw: patterned("hatch") },
    { name: "derived: follows from others, not stored", draw: patterned("dots") },
    { name: "written, by the writers’ account", draw: line },
  ] : [
    { name: `stored, had ${state.policy} made every save`, draw: filled("unique") },
    ...(found.total.estimated_bytes ? [{ name: "of it estimated", draw: filled("estimated") }] : []),
    { name: "the rest of whole checkpoints: not stored", draw: patterned("hatch") },
    { name: "stored by this run as it is", draw: line },
  ]);
}
