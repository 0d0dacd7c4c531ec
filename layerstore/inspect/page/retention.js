// What a collection would do to the saves.

const cross = (x, width) => `M${x} 10L${x + width} 20M${x} 20L${x + width} 10`;
const FATES = {
  keep: { name: "stays", style: "kept", d: (x, width) => rect(x, 4, width, 22) },
  trim: { name: "stays, its moments go", style: "trimmed", d: (x, width) => rect(x, 15, width, 11) },
  remove: { name: "goes", style: "removed", d: (x, width) => cross(x + Math.max(0, width - 14) / 2, Math.min(14, width)) },
};

function planText(plan) {
  const keeps = plan.commits_removed || plan.commits_trimmed
    ? `remove ${counted(plan.commits_removed, "commit")} and keep ${number(plan.commits_kept)}`
    : `remove no commit: ${plan.commits_kept === 1 ? "the one there is stays" : `all ${number(plan.commits_kept)} stay`}`;
  const trimmed = plan.commits_trimmed ? `, ${number(plan.commits_trimmed)} of them without their moments` : "";
  const later = plan.bytes_freed_later ? `, and ${size(plan.bytes_freed_later)} later, which is too young now` : "";
  const freed = `It would free ${plan.bytes_freed ? size(plan.bytes_freed) : later ? "nothing at once" : "nothing"}${later}.`;
  return `A collection by these rules would ${keeps}${trimmed}. ${freed}`;
}

function drawRetention() {
  const plan = facts.retention;
  const stats = facts.stats;
  const command = "layerstore gc --store " + quoted(facts.store);
  if (plan === null) {
    const free = !stats.unneeded?.bytes ? "" :
      ` What no visible commit and no pin needs takes ${size(stats.unneeded.bytes)}: layerstore gc frees it.`;
    $("retention-facts").textContent = `No rules given: every visible commit stays.${free} A report with rules shows what they would leave:`;
    $("retention-command").replaceChildren(...commands([shown(`layerstore report --store ${quoted(facts.store)} --keep-last 3 --keep-every 1000 -o report.html`)]));
    show("retention", false);
    show("retention-legend", false);
    return;
  }
  $("retention-command").replaceChildren(...commands([shown(`${command} --dry-run ${plan.rules}`)]));
  if (plan.refusal !== null) {
    $("retention-facts").textContent = `A collection by these rules would refuse: ${shown(plan.refusal)}`;
    show("retention", false);
    show("retention-legend", false);
    return;
  }
  $("retention-facts").textContent = planText(plan);
  const fates = saves().fate;
  show("retention", fates.some((each) => each !== null));
  show("retention-legend", true);
  const svg = canvas("retention", 52, "What a collection would make of each save");
  for (const [verdict, kind] of Object.entries(FATES)) {
    const marks = fates.map((each, column) => (each !== null && each[0] === verdict ? kind.d(grid.left[column], inner()) : ""));
    svg.append(s("path", { class: kind.style, d: marks.join("") }));
  }
  svg.append(s("text", { x: grid.labels - 8, y: 19, "text-anchor": "end" }, "after gc"));
  ticks(svg, 30);
  legend("retention-legend", Object.values(FATES).map((kind) => ({ name: kind.name, draw: (swatch) => {
    const drawing = s("g", { transform: "translate(0 -8)" }, s("path", { class: kind.style, d: kind.d(2, 14) }));
    swatch.append(drawing);
  } })));
}
