// What training measured, at the saves and between them: a strip above the picture of the layers, with the same columns.

const STRIP = 84;

function drawMetrics() {
  const names = Object.keys(run().metrics);
  if (!names.includes(state.metric)) state.metric = names[0] ?? null;
  show("metric-label", names.length > 1);
  show("metric", names.length > 0);
  if (state.metric === null) return;
  $("metric-name").replaceChildren(...names.map((name) => h("option", { value: name }, shown(name))));
  $("metric-name").value = state.metric;
  const values = run().metrics[state.metric], curve = run().curves?.[state.metric] ?? [];
  const known = [...values.filter((value) => value !== null), ...curve.map(([, , value]) => value)];
  const low = Math.min(...known), high = Math.max(...known), top = 12, base = STRIP - 10;
  const y = (value) => (high === low ? (top + base) / 2 : base - (base - top) * ((value - low) / (high - low)));
  const ends = curve.length ? [curve[0][2], curve.at(-1)[2]] : [known[0], known.at(-1)];
  const svg = canvas("metric", STRIP, `${shown(state.metric)}${curve.length ? "" : " at each save"}: ${measured(ends[0])} to ${measured(ends[1])}`);
  svg.querySelector(".band").setAttribute("height", STRIP);
  for (const value of new Set([high, low])) {
    svg.append(s("line", { class: "axis", x1: grid.labels, x2: grid.right, y1: y(value), y2: y(value) }));
    svg.append(s("text", { x: grid.labels - 8, y: y(value) + 4, "text-anchor": "end" }, measured(value)));
  }
  const label = s("text", { class: "strong", x: grid.labels - 8, y: (top + base) / 2 + 4, "text-anchor": "end" });
  label.append(short(state.metric, grid.labels - 12), s("title", {}, shown(state.metric)));
  if (high !== low) svg.append(label);
  // The line connects neighbouring saves of one attempt, and breaks where nothing was measured.
  const line = curve.length ? logged(curve, y) : values.map((value, column) => {
    if (value === null) return "";
    const goesOn = column && values[column - 1] !== null && saves().attempt[column] === saves().attempt[column - 1];
    return `${goesOn ? "L" : "M"}${middle(column).toFixed(2)} ${y(value).toFixed(2)}`;
  });
  svg.append(s("path", { class: "curve", d: line.join("") }));
  const dot = Math.min(3, Math.max(1.2, grid.cell / 4));
  const dots = values.map((value, column) => (value === null ? "" : `M${(middle(column) - dot).toFixed(2)} ${y(value).toFixed(2)}a${dot} ${dot} 0 1 0 ${2 * dot} 0a${dot} ${dot} 0 1 0 ${-2 * dot} 0z`));
  svg.append(s("path", { class: "point", d: dots.join("") }));
}

// What a Trainer logged is drawn between the columns of the saves before and after it in the same attempt.
function logged(curve, y) {
  const steps = saves().step, attempts = saves().attempt;
  let column = 0;
  return curve.map(([attempt, step, value], index) => {
    const goesOn = index && curve[index - 1][0] === attempt;
    const first = attempts.indexOf(attempt), last = attempts.lastIndexOf(attempt);
    column = goesOn ? column : first;
    while (column < last && steps[column] < step) column += 1;
    const from = column > first ? [steps[column - 1], middle(column - 1)] : [Math.min(begins(curve, attempt), steps[column]), grid.left[column]];
    const share = steps[column] === from[0] ? 1 : (step - from[0]) / (steps[column] - from[0]);
    const x = from[1] + share * (middle(column) - from[1]);
    return `${goesOn ? "L" : "M"}${x.toFixed(2)} ${y(value).toFixed(2)}`;
  });
}

const begins = (curve, attempt) => curve.find(([of]) => of === attempt)[1];

const measured = (value) => (value === null ? "not measured" : String(Number(value.toPrecision(4))));

const measuredAt = (column) => Object.entries(run().metrics).map(([name, values]) => [name, values[column]])
  .filter(([, value]) => value !== null).map(([name, value]) => `${shown(name)} ${measured(value)}`);
