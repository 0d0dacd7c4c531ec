// What saves took.

const TIMED = [
  { name: "training was held up", style: "blocked", d: (x, y) => `M${x - 3} ${y}a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z` },
  { name: "until durable", style: "durable", d: (x, y) => `M${x} ${y - 4}l4 4l-4 4l-4 -4z` },
  { name: "until visible", style: "visible", d: (x, y) => `M${x - 3} ${y - 3}l6 6m0 -6l-6 6` },
];

function drawTiming() {
  const summary = run().timings;
  show("timing-section", summary !== null);
  if (summary === null) return;
  const told = ["blocked", "durable", "visible"].filter((name) => summary[name] !== null).map((name, index) =>
    `${TIMED[index].name} ${seconds(summary[name].median)}, at most ${seconds(summary[name].max)}`);
  $("timing-facts").textContent = `${counted(summary.saves, "save")} made in training` +
    `${summary.given_up ? `, ${number(summary.given_up)} of them given up` : ""}. Medians: ${told.join("; ")}. On the first rank, since save() began.`;
  const values = saves().timing.flatMap((each) => each ?? []).filter((each) => each !== null && each > 0);
  show("timing", values.length > 0);
  show("timing-legend", values.length > 0);
  if (!values.length) return;
  const height = 170, base = height - 24, top = 12;
  const svg = canvas("timing", height, "Seconds that each save took, on a logarithmic scale");
  const low = Math.floor(Math.log10(Math.min(...values))), high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values))));
  const y = (value) => base - 6 - (base - 6 - top) * ((Math.log10(value) - low) / (high - low));
  for (let power = low; power <= high; power += 1) {
    svg.append(s("line", { class: "axis", x1: grid.labels, x2: grid.right, y1: y(10 ** power), y2: y(10 ** power) }));
    svg.append(s("text", { x: grid.labels - 8, y: y(10 ** power) + 4, "text-anchor": "end" }, seconds(10 ** power)));
  }
  TIMED.forEach((kind, index) => {
    const marks = saves().timing.map((each, column) =>
      each !== null && each[index] !== null && each[index] > 0 ? kind.d(middle(column), y(each[index])) : "");
    svg.append(s("path", { class: kind.style, d: marks.join("") }));
  });
  ticks(svg, base);
  legend("timing-legend", TIMED.map((kind) => ({ name: kind.name, draw: swatches([["path", { class: kind.style, d: kind.d(11, 7) }]]) })));
}
