// Pictures with a row for each layer: ages and drift.

// The older a layer, the thinner its stroke, so that ages can be told apart without colour.
const AGES = [
  { upto: 0, name: "saved at this step", height: 1, style: "c0" },
  { upto: 1, name: "1 save old", height: 0.6, style: "c1" },
  { upto: 3, name: "2 to 3", height: 0.48, style: "c2" },
  { upto: 7, name: "4 to 7", height: 0.36, style: "c3" },
  { upto: 15, name: "8 to 15", height: 0.26, style: "c4" },
  { upto: Infinity, name: "16 and more", height: 0.16, style: "c5" },
];
const OTHER = { name: "of another run", height: 0.6, style: "other", dashed: true };
const FAINT = new Map([...AGES, OTHER].map((kind) => [kind, { ...kind, style: `${kind.style} compact` }]));
const MOVES = [
  { upto: 0.001, name: "below 0.1 %", height: 0.16, style: "c0" },
  { upto: 0.003, name: "to 0.3 %", height: 0.3, style: "c1" },
  { upto: 0.01, name: "to 1 %", height: 0.44, style: "c2" },
  { upto: 0.03, name: "to 3 %", height: 0.6, style: "c3" },
  { upto: 0.1, name: "to 10 %", height: 0.8, style: "c4" },
  { upto: Infinity, name: "more, or no number any more", height: 1, style: "c5" },
];
const ageOf = (of) => {
  if (of.saves === null) return OTHER;
  if (of.saves <= 0 && of.steps !== 0) return AGES[1];
  return AGES.find((each) => of.saves <= each.upto);
};
const ageClass = (column, layer) => {
  const of = origin(column, layer);
  if (of === null) return null;
  return isCompact(of) ? FAINT.get(ageOf(of)) : ageOf(of);
};
const moveClass = (column, layer) => {
  const moved = run().drift[column]?.[layer] ?? null;
  if (moved === null) return null;
  return typeof moved === "string" ? MOVES.at(-1) : MOVES.find((each) => moved < each.upto) ?? MOVES.at(-1);
};

const rowHeight = () => {
  const rows = run().layers.length;
  return rows <= 24 ? 18 : rows <= 48 ? 13 : rows <= 100 ? 9 : Math.max(3, Math.floor(900 / rows));
};

function short(name, room) {
  const text = shown(name);
  const most = Math.max(4, Math.floor(room / 6.1));
  return text.length <= most ? text : `…${text.slice(text.length - most + 1)}`;
}

function cells(svg, top, height, classOf) {
  const paths = new Map();
  run().layers.forEach((_, layer) => {
    let from = 0;
    for (let column = 1; column <= count(); column += 1) {
      const kind = classOf(from, layer);
      // Neighbouring cells of the same age form one stroke; a cell whose layer was saved at its step stands alone.
      const goesOn = column < count() && kind !== null && kind.height < 1 && !kind.dashed &&
        classOf(column, layer) === kind && saves().attempt[column] === saves().attempt[from];
      if (goesOn) continue;
      if (kind !== null) {
        const high = Math.max(1, (height - 1) * kind.height);
        const y = top + layer * height + (height - 1 - high) / 2;
        const end = grid.left[column - 1] + (kind.height < 1 && !kind.dashed ? grid.cell : inner());
        const width = kind.dashed ? (end - grid.left[from]) * 0.6 : end - grid.left[from];
        if (!paths.has(kind)) paths.set(kind, []);
        paths.get(kind).push(rect(grid.left[from], y, width, high));
      }
      from = column;
    }
  });
  for (const [kind, parts] of paths) svg.append(s("path", { class: kind.style, d: parts.join("") }));
}

function rowLabels(svg, top, height) {
  const every = Math.ceil(12 / height);
  run().layers.forEach((name, layer) => {
    if (layer % every) return;
    const label = s("text", { x: grid.labels - 8, y: top + layer * height + height / 2 + 3.5, "text-anchor": "end" });
    label.append(short(name, grid.labels - 12), s("title", {}, shown(name)));
    svg.append(label);
  });
}

function legend(id, kinds) {
  $(id).replaceChildren(...kinds.map((kind) => {
    const swatch = s("svg", { width: 22, height: 14, "aria-hidden": "true" });
    if (kind.draw) kind.draw(swatch);
    else {
      const high = 13 * kind.height;
      const strokes = kind.dashed ? [[1, 6], [12, 6]] : [[1, 20]];
      for (const [x, width] of strokes) swatch.append(s("path", { class: kind.style, d: rect(x, (14 - high) / 2, width, high) }));
    }
    return h("span", {}, swatch, kind.name);
  }));
}

const TOP = 16;

// A mark above a column or, in the legend, above a block.
const keyframe = (x, y) => `M${(x - 3).toFixed(2)} ${y}h6l-3 4z`;
const PRECISIONS = {
  name: "marked: an exact save; fainter: in fewer bytes",
  draw: (swatch) => swatch.append(s("path", { class: "keyframe", d: keyframe(5.5, 0) }),
    s("path", { class: "c0", d: rect(1, 5, 9, 8) }), s("path", { class: "c0 compact", d: rect(12, 5, 9, 8) })),
};

function drawKeyframes(svg) {
  const marks = saves().precision.map((precision, column) => (precision === "exact" ? keyframe(grid.left[column] + inner() / 2, TOP - 5) : ""));
  svg.append(s("path", { class: "keyframe", d: marks.join("") }));
}

function drawHeat() {
  const height = rowHeight();
  const bottom = TOP + height * run().layers.length;
  const svg = canvas("heat", bottom + 22, "");
  svg.setAttribute("role", "presentation");
  svg.removeAttribute("aria-label");
  attemptLabels(svg, hasPrecisions() ? 9 : 11);
  cells(svg, TOP, height, ageClass);
  if (hasPrecisions()) drawKeyframes(svg);
  rowLabels(svg, TOP, height);
  ticks(svg, bottom + 2);
  for (const style of ["compared", "cursor"]) svg.append(s("rect", { class: style, width: 0, height: 0, x: 0, y: 0 }));
  const others = run().origins.run.some((name) => name !== run().run);
  legend("legend", [...AGES, ...(others ? [OTHER] : []), ...(hasPrecisions() ? [PRECISIONS] : [])]);
}

function drawDrift() {
  const has = run().drift.some((each) => each !== null);
  show("drift-section", has);
  if (!has) return;
  const height = rowHeight();
  const svg = canvas("drift", TOP + height * run().layers.length + 22, "How far each layer had moved at each save; the table of the picked step has the numbers");
  attemptLabels(svg, 11);
  cells(svg, TOP, height, moveClass);
  rowLabels(svg, TOP, height);
  ticks(svg, TOP + height * run().layers.length + 2);
  legend("drift-legend", MOVES);
}
