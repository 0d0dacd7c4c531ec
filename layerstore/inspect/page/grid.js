// Where columns are on the page, and what all pictures share.

let grid = null;

function measure() {
  const width = Math.max(320, Math.floor($("main").clientWidth));
  const labels = width < 700 ? 96 : 190;
  const attempts = saves().attempt;
  const breaks = attempts.filter((each, index) => index && each !== attempts[index - 1]).length;
  const gap = breaks > 30 ? 2 : 8;
  // Leave room beside the last column for half of its label.
  const room = width - labels - 24 - breaks * gap;
  let cell = Math.max(2.25, room / Math.max(1, count()));
  if (cell > 5) cell = Math.floor(cell * 2) / 2;
  const left = [];
  let x = labels;
  for (let column = 0; column < count(); column += 1) {
    if (column && attempts[column] !== attempts[column - 1]) x += gap;
    left.push(x);
    x += cell;
  }
  grid = { labels, cell, left, right: x, width: Math.max(width, Math.ceil(x) + 24), isWide: x + 24 > width };
}

const middle = (column) => grid.left[column] + grid.cell / 2;
const inner = () => grid.cell - (grid.cell > 24 ? 2 : grid.cell > 5 ? 1 : 0);

function columnAt(x) {
  let found = 0;
  for (let column = 0; column < count(); column += 1) if (grid.left[column] <= x) found = column;
  return found;
}

function ticks(svg, y) {
  const widest = Math.max(...saves().step.map((step) => number(step).length)) * 6.6 + 10;
  const stride = [1, 2, 5, 10, 20, 25, 50, 100, 200].find((each) => each * grid.cell >= widest) ?? 400;
  let last = -Infinity;
  for (let column = 0; column < count(); column += 1) {
    // Label the first column and every stride-th one, so that labels do not jump about.
    if ((column + 1) % stride && !(column === 0 && stride > 1)) continue;
    if (middle(column) < last + widest) continue;
    last = middle(column);
    svg.append(s("line", { class: "axis", x1: middle(column), x2: middle(column), y1: y, y2: y + 4 }));
    svg.append(s("text", { x: middle(column), y: y + 15, "text-anchor": "middle" }, number(saves().step[column])));
  }
}

function attemptLabels(svg, y) {
  if (run().attempts < 2) return;
  let last = -Infinity;
  saves().attempt.forEach((attempt, column) => {
    if (column && attempt === saves().attempt[column - 1]) return;
    if (grid.left[column] < last) return;
    svg.append(s("text", { x: grid.left[column], y }, `attempt ${attempt}`));
    last = grid.left[column] + 62;
  });
}

function canvas(id, height, label) {
  const svg = s("svg", { width: grid.width, height, viewBox: `0 0 ${grid.width} ${height}`, role: "img", "aria-label": label });
  svg.append(s("rect", { class: "band", y: 0, height: height - 20, width: 0 }));
  $(id).replaceChildren(svg);
  $(id).classList.toggle("wide", grid.isWide);
  return svg;
}

const rect = (x, y, width, height) => `M${x.toFixed(2)} ${y.toFixed(2)}h${width.toFixed(2)}v${height.toFixed(2)}h${(-width).toFixed(2)}z`;
