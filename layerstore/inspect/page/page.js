"use strict";
// Draws the facts that are in this page. Foreign text is only ever set as text, never as markup.
(() => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const state = { run: 0, policy: "latest", save: 0, layer: -1 };
  const $ = (id) => document.getElementById(id);

  // -- words --------------------------------------------------------------------------------------------------

  // What moves a cursor or reorders a line is shown escaped, as the command line does.
  const shown = (text) =>
    String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (sign) => `\\u{${sign.codePointAt(0).toString(16)}}`);
  const number = (value) => value.toLocaleString("en-US");
  const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
  const size = (bytes) => {
    if (bytes < 1000) return `${bytes} B`;
    const units = ["kB", "MB", "GB", "TB", "PB"];
    let power = 1;
    while (power < units.length && bytes / 1000 ** power >= 999.95) power += 1;
    return `${(bytes / 1000 ** power).toFixed(1)} ${units[power - 1]}`;
  };
  const seconds = (value) => {
    if (value === null) return "not known";
    if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
    return `${Number(value.toPrecision(3))} s`;
  };
  const time = (iso) => (iso === null ? "not visible any more" : iso.replace("T", " ").replace("Z", ""));
  const quoted = (word) => (/^[A-Za-z0-9@~._\/-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
  const percent = (share) => `${(100 * share).toFixed(1)} %`;

  // -- elements -----------------------------------------------------------------------------------------------

  const fill = (node, attributes, children) => {
    for (const [name, value] of Object.entries(attributes ?? {})) if (value !== null) node.setAttribute(name, value);
    for (const child of children) if (child !== null) node.append(child);
    return node;
  };
  const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const foreign = (text) => h("span", { class: "foreign" }, shown(text));
  const show = (id, is) => { $(id).hidden = !is; };

  function table(columns, rows, at = -1) {
    const kind = (column) => (column.right ? "number" : column.code ? "code" : null);
    const head = h("tr", {}, ...columns.map((column) => h("th", { class: kind(column), scope: "col" }, column.name)));
    const body = rows.map((cells, place) =>
      h("tr", { class: place === at ? "at" : null }, ...cells.map((cell, index) => h("td", { class: kind(columns[index]) }, cell))));
    return h("table", {}, h("thead", {}, head), h("tbody", {}, ...body));
  }

  // -- one run ------------------------------------------------------------------------------------------------

  const LOGICAL = 0, UNIQUE = 1, INHERITED = 2, DERIVED = 3, WRITTEN = 4;
  const run = () => facts.runs[state.run];
  const saves = () => run().saves;
  const count = () => saves().step.length;
  const deduplicated = (bytes) => bytes[LOGICAL] - bytes[UNIQUE];
  // Sizes with what they are of, those that there are.
  const sizes = (...parts) => parts.filter(([bytes]) => bytes).map(([bytes, words]) => `${size(bytes)} ${words}`).join(", ") || "nothing";
  const written = (bytes) => (bytes[WRITTEN] ? `${size(bytes[WRITTEN])} written` : "nothing had to be written, the store had all of it");

  // Which save the version of a layer comes from, in a composite of the save `column`; null where there is none.
  function origin(column, layer) {
    const asked = (run().composites[state.policy] ?? [])[column] ?? run().composites.latest[column];
    const index = asked[layer];
    if (index === undefined || index < 0) return null;
    const of = run().origins;
    const own = of.run[index] === run().run;
    return {
      index, run: of.run[index], attempt: of.attempt[index], step: of.step[index], time: of.time[index], own,
      saves: own ? saves().save_number[column] - of.save_number[index] : null,
      steps: own ? saves().step[column] - of.step[index] : null,
    };
  }

  const isSame = (column, layer) => {
    const asked = (run().composites[state.policy] ?? [])[column];
    return !asked || asked[layer] === run().composites.latest[column][layer];
  };
  const version = (column, layer) =>
    isSame(column, layer) ? run().versions[column].slice(layer * 8, layer * 8 + 8) : "";

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

  // -- places on the page -------------------------------------------------------------------------------------

  let grid = null;

  function measure() {
    const width = Math.max(320, Math.floor($("main").clientWidth));
    const labels = width < 700 ? 96 : 190;
    const attempts = saves().attempt;
    const breaks = attempts.filter((each, index) => index && each !== attempts[index - 1]).length;
    const gap = breaks > 30 ? 2 : 8;
    // Beside the last column there is place for half of its label.
    const room = width - labels - 24 - breaks * gap;
    let cell = Math.min(40, Math.max(2.25, room / Math.max(1, count())));
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
  const inner = () => (grid.cell > 5 ? grid.cell - 1 : grid.cell);

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
      // In step with the saves of each attempt, so that labels do not jump about.
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

  // -- pictures of layers and saves ---------------------------------------------------------------------------

  // The older, the thinner: colour is not needed to tell.
  const AGES = [
    { upto: 0, name: "saved at this step", height: 1, style: "c0" },
    { upto: 1, name: "1 save old", height: 0.6, style: "c1" },
    { upto: 3, name: "2 to 3", height: 0.48, style: "c2" },
    { upto: 7, name: "4 to 7", height: 0.36, style: "c3" },
    { upto: 15, name: "8 to 15", height: 0.26, style: "c4" },
    { upto: Infinity, name: "16 and more", height: 0.16, style: "c5" },
  ];
  const OTHER = { name: "of another run", height: 0.6, style: "other", dashed: true };
  const MOVES = [
    { upto: 0.001, name: "below 0.1 %", height: 0.16, style: "c0" },
    { upto: 0.003, name: "to 0.3 %", height: 0.3, style: "c1" },
    { upto: 0.01, name: "to 1 %", height: 0.44, style: "c2" },
    { upto: 0.03, name: "to 3 %", height: 0.6, style: "c3" },
    { upto: 0.1, name: "to 10 %", height: 0.8, style: "c4" },
    { upto: Infinity, name: "more, or no number any more", height: 1, style: "c5" },
  ];
  const ageClass = (column, layer) => {
    const of = origin(column, layer);
    if (of === null) return null;
    if (of.saves === null) return OTHER;
    if (of.saves <= 0 && of.steps !== 0) return AGES[1];
    return AGES.find((each) => of.saves <= each.upto);
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
        // Neighbours of one age are one stroke; what was saved at its own step stands alone.
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

  function drawHeat() {
    const height = rowHeight();
    const bottom = TOP + height * run().layers.length;
    const svg = canvas("heat", bottom + 22, "");
    svg.setAttribute("role", "presentation");
    svg.removeAttribute("aria-label");
    attemptLabels(svg, 11);
    cells(svg, TOP, height, ageClass);
    rowLabels(svg, TOP, height);
    ticks(svg, bottom + 2);
    svg.append(s("rect", { class: "cursor", width: 0, height: 0, x: 0, y: 0 }));
    const others = run().origins.run.some((name) => name !== run().run);
    legend("legend", [...AGES, ...(others ? [OTHER] : [])]);
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

  // -- pictures of numbers ------------------------------------------------------------------------------------

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

  function niceTicks(top) {
    const rough = top / 4;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    const found = [];
    for (let value = 0; value <= top * 1.0001; value += step) found.push(value);
    return found;
  }

  function drawStorage() {
    const totals = saves().total_bytes;
    const last = run().total;
    const whole = last.logical_bytes + last.derived_bytes;
    const left = last.inherited_bytes ? ` (${size(last.inherited_bytes)} of these in layers that a save did not write)` : "";
    $("storage-facts").textContent =
      `All saves of this run up to each step. Whole checkpoints would have taken ${size(whole)}: ` +
      `${sizes([last.unique_bytes, "are different bytes"], [last.logical_bytes - last.unique_bytes, `were there already${left}`],
        [last.derived_bytes, "follow from others"])}. ` +
      (last.written_bytes ? `Its writers put ${size(last.written_bytes)} into the store.` : "Its writers had nothing to put into the store, which had all of it.");
    const height = 190, base = height - 24, top = 8;
    const svg = canvas("storage", height, "Storage over time: different bytes, deduplicated bytes and derived bytes of all saves up to each step");
    const most = Math.max(1, ...totals.map((each) => each[LOGICAL] + each[DERIVED]), ...totals.map((each) => each[WRITTEN]));
    const y = (bytes) => base - (base - top) * (bytes / most);
    patterns(svg, "storage");
    for (const value of niceTicks(most)) {
      svg.append(s("line", { class: "axis", x1: grid.labels, x2: grid.right, y1: y(value), y2: y(value) }));
      svg.append(s("text", { x: grid.labels - 8, y: y(value) + 4, "text-anchor": "end" }, size(Math.round(value))));
    }
    const unique = [], shared = [], derived = [];
    totals.forEach((bytes, column) => {
      const bar = (from, to) => rect(grid.left[column], y(to), inner(), y(from) - y(to));
      unique.push(bar(0, bytes[UNIQUE]));
      shared.push(bar(bytes[UNIQUE], bytes[LOGICAL]));
      derived.push(bar(bytes[LOGICAL], bytes[LOGICAL] + bytes[DERIVED]));
    });
    svg.append(s("path", { class: "unique", d: unique.join("") }));
    svg.append(s("path", { fill: "url(#hatch-storage)", d: shared.join("") }));
    svg.append(s("path", { fill: "url(#dots-storage)", d: derived.join("") }));
    const line = totals.map((bytes, column) => `${column ? "L" : "M"}${grid.left[column]} ${y(bytes[WRITTEN]).toFixed(2)}h${inner()}`);
    svg.append(s("path", { class: "written", d: line.join("") }));
    ticks(svg, base);
    const box = { x: 1, y: 1, width: 20, height: 12 };
    legend("storage-legend", [
      { name: "different bytes", draw: swatches([["rect", { ...box, class: "unique" }]]) },
      { name: "deduplicated: there already", draw: swatches([["rect", { ...box, class: "hatch-edge" }], ["rect", { ...box, fill: "url(#hatch-storage)" }]]) },
      { name: "derived: follows from others, not stored", draw: swatches([["rect", { ...box, class: "dots-edge" }], ["rect", { ...box, fill: "url(#dots-storage)" }]]) },
      { name: "written, by the writers’ account", draw: swatches([["path", { class: "written", d: "M1 7h20" }]]) },
    ]);
  }

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

  const FATES = {
    keep: { name: "stays", style: "kept", d: (x, width) => rect(x, 4, width, 22) },
    trim: { name: "stays, its moments go", style: "trimmed", d: (x, width) => rect(x, 15, width, 11) },
    remove: { name: "goes", style: "removed", d: (x, width) => `M${x} 10L${x + width} 20M${x} 20L${x + width} 10` },
  };

  function planText(plan) {
    const keeps = plan.commits_removed || plan.commits_trimmed
      ? `remove ${counted(plan.commits_removed, "commit")} and keep ${number(plan.commits_kept)}`
      : `remove no commit: ${plan.commits_kept === 1 ? "the one there is stays" : `all ${number(plan.commits_kept)} stay`}`;
    const trimmed = plan.commits_trimmed ? `, ${number(plan.commits_trimmed)} of them without their moments` : "";
    const later = plan.bytes_freed_later ? `, and ${size(plan.bytes_freed_later)} later, which is too young now` : "";
    const freed = `It would free ${plan.bytes_freed ? size(plan.bytes_freed) : later ? "nothing at once" : "nothing"}${later}.`;
    const unserved = plan.unserved ? ` At ${counted(plan.unserved, "kept step")} a composite by ${plan.unserved_policies.join(" or ")} would have other versions then.` : "";
    return `A collection by these rules would ${keeps}${trimmed}. ${freed}${unserved}`;
  }

  function drawRetention() {
    const plan = facts.retention;
    const stats = facts.stats;
    const command = "layerstore gc --store " + quoted(facts.store);
    if (plan === null) {
      const free = !stats.unneeded?.bytes ? "" :
        ` What no visible commit and no pin needs takes ${size(stats.unneeded.bytes)}: layerstore gc frees it.`;
      $("retention-facts").textContent = `No rule was given, so that every visible commit stays.${free} A report with rules shows what they would leave:`;
      $("retention-command").textContent = `layerstore report --store ${quoted(facts.store)} --keep-last 3 --keep-every 1000 -o report.html`;
      show("retention", false);
      show("retention-legend", false);
      return;
    }
    $("retention-command").textContent = shown(`${command} --dry-run ${plan.rules}`);
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

  // -- the picked step ----------------------------------------------------------------------------------------

  const fateText = (fate) => (fate === null ? "" : `${FATES[fate[0]].name}: ${fate[1]}${fate[2] ? `; ${size(fate[2])} go with it` : ""}`);
  const moved = (column, layer) => {
    const found = run().drift[column]?.[layer] ?? null;
    return found === null ? "" : typeof found === "string" ? found : `${Number((100 * found).toPrecision(3))} %`;
  };

  function drawPicked() {
    const column = state.save, of = saves(), reference = of.reference[column];
    const isThere = run().composites[state.policy][column]?.length !== 0;
    const worst = oldest(column);
    const fresh = run().layers.filter((_, layer) => origin(column, layer)?.steps === 0).length;
    const by = state.policy === "latest" ? "as it was saved" : `by ${state.policy}`;
    $("picked-summary").replaceChildren(h("strong", { class: "foreign" }, shown(reference)), ` ${by}: ` + (!isThere ? "it cannot be composed; layerstore compose says why." :
      `${fresh} of ${counted(run().layers.length, "layer")} from this very step` +
      (worst === null || worst.steps === 0 ? "." : ". The oldest is ")),
      ...(worst === null || worst.steps === 0 ? [] : [foreign(run().layers[worst.layer]), `: ${age(worst)}.`]));
    const bytes = of.bytes[column];
    const lines = [
      ["commit", of.commit[column]],
      ["saved", `${time(of.time[column])}, attempt ${of.attempt[column]}, ${of.layers_saved[column]} layers written under ${shown(of.policy[column])}`],
      ["bytes", `${size(bytes[LOGICAL] + bytes[DERIVED])} as a whole checkpoint: ` +
        `${sizes([bytes[UNIQUE], "new to the run"], [deduplicated(bytes), "there already"], [bytes[DERIVED], "derived"])}; ${written(bytes)}`],
      of.pins[column].length ? ["pins", of.pins[column].map(shown).join(", ")] : null,
      of.has_moments[column] ? null : ["lacks", "its moments: a collection has dropped them"],
      of.timing[column] ? ["took", TIMED.map((kind, index) => `${kind.name} ${seconds(of.timing[column][index])}`).join(", ")] : null,
      of.fate[column] ? ["retention", shown(fateText(of.fate[column]))] : null,
    ].filter((line) => line !== null);
    $("picked-facts").replaceChildren(...lines.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]));
    // Where no name means it alone, its id does.
    const word = quoted(/ of attempt \d+$/.test(reference) ? of.commit[column].slice(0, 12) : reference);
    const policy = state.policy === "latest" ? "" : ` --policy ${state.policy}`;
    const there = `--store ${quoted(facts.store)}`;
    $("commands").textContent = shown(`layerstore show ${there} ${word}`) + "\n" +
      shown(`layerstore compose ${there} ${word}${policy} -o resume`);
    const drifts = run().drift[column] !== null;
    const columns = [
      { name: "Layer" }, { name: "From" }, { name: "Saved (UTC)" }, { name: "Steps old", right: true }, { name: "Saves old", right: true },
      { name: "Version", code: true }, ...(drifts ? [{ name: "Moved", right: true }] : []),
    ];
    const rows = run().layers.map((name, layer) => {
      const from = origin(column, layer);
      if (from === null) return [foreign(name), "no such layer", "", "", "", "", ...(drifts ? [""] : [])];
      const place = `${from.own ? "" : `${from.run} `}step ${number(from.step)}${run().attempts > 1 || !from.own ? `, attempt ${from.attempt}` : ""}`;
      return [foreign(name), foreign(place), time(from.time), from.steps === null ? "?" : number(from.steps),
        from.saves === null ? "?" : number(from.saves), version(column, layer), ...(drifts ? [moved(column, layer)] : [])];
    });
    $("composite").replaceChildren(table(columns, rows, state.layer));
  }

  const spoken = (column) => {
    const worst = oldest(column);
    return `${shown(saves().reference[column])}, ${worst === null || worst.steps === 0 ? "all layers from this step" : `oldest layer ${age(worst)}`}`;
  };

  function mark() {
    for (const svg of document.querySelectorAll(".pickable > svg")) {
      const band = svg.querySelector(".band");
      band.setAttribute("x", grid.left[state.save] - 0.5);
      band.setAttribute("width", grid.cell);
    }
    const heat = $("heat"), cursor = heat.querySelector(".cursor");
    heat.setAttribute("aria-valuemin", 1);
    heat.setAttribute("aria-valuemax", count());
    heat.setAttribute("aria-valuenow", state.save + 1);
    heat.setAttribute("aria-valuetext", spoken(state.save));
    const height = rowHeight();
    const all = state.layer < 0;
    cursor.setAttribute("x", grid.left[state.save] - 0.75);
    cursor.setAttribute("width", inner() + 1.5);
    cursor.setAttribute("y", all ? TOP - 1 : TOP + state.layer * height - 0.75);
    cursor.setAttribute("height", all ? height * run().layers.length + 1 : height + 0.5);
  }

  function pick(column, layer = state.layer) {
    state.save = Math.min(count() - 1, Math.max(0, column));
    state.layer = Math.min(run().layers.length - 1, Math.max(-1, layer));
    mark();
    drawPicked();
    if (state.layer >= 0) $("live").textContent = cellText(state.save, state.layer);
  }

  // -- what lies below the pointer ----------------------------------------------------------------------------

  function cellText(column, layer) {
    const of = origin(column, layer), name = shown(run().layers[layer]);
    const head = `${name}\nat ${shown(saves().reference[column])}`;
    if (of === null) return `${head}\nno such layer`;
    const place = `version of ${of.own ? "" : `${shown(of.run)}, `}step ${number(of.step)}${run().attempts > 1 || !of.own ? `, attempt ${of.attempt}` : ""}`;
    const known = version(column, layer);
    const drift = moved(column, layer);
    return [head, place, age(of), `saved ${time(of.time)}`, known && `version ${known}…`, drift && `had moved ${drift}`].filter(Boolean).join("\n");
  }

  function columnText(id, column) {
    const head = shown(saves().reference[column]);
    if (id === "storage") {
      const [total, own] = [saves().total_bytes[column], saves().bytes[column]];
      return `${head}, with all before\n${sizes([total[UNIQUE], "different"], [deduplicated(total), "deduplicated"], [total[DERIVED], "derived"])}\n` +
        `${written(total)}\nthis save: ${sizes([own[UNIQUE], "different"])}; ${written(own)}`;
    }
    if (id === "timing") {
      const took = saves().timing[column];
      return took === null ? `${head}\nnot made in training, or not noted` : [head, ...TIMED.map((kind, index) => `${kind.name}: ${seconds(took[index])}`)].join("\n");
    }
    if (id === "retention") return `${head}\n${shown(fateText(saves().fate[column]))}`;
    return head;
  }

  function place(event) {
    const svg = event.currentTarget.querySelector("svg");
    const box = svg.getBoundingClientRect();
    const scale = grid.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const layer = Math.floor((y - TOP) / rowHeight());
    return { isOn: x >= grid.labels - 2 && x <= grid.right + 2, column: columnAt(x), layer: layer >= 0 && layer < run().layers.length ? layer : -1 };
  }

  function tip(event, text) {
    const node = $("tip");
    node.hidden = false;
    node.textContent = text;
    const box = node.getBoundingClientRect();
    const x = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
    const y = Math.min(event.clientY + 14, innerHeight - box.height - 6);
    node.style.left = `${Math.max(4, x)}px`;
    node.style.top = `${Math.max(4, y)}px`;
  }

  function hover(event) {
    const id = event.currentTarget.id, at = place(event);
    const hasRows = id === "heat" || id === "drift";
    if (!at.isOn || (hasRows && at.layer < 0)) { show("tip", false); return; }
    tip(event, hasRows ? cellText(at.column, at.layer) : columnText(id, at.column));
  }

  function key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const far = Math.max(5, Math.round(count() / 20));
    const moves = {
      ArrowLeft: [-1, 0], ArrowRight: [1, 0], PageUp: [-far, 0], PageDown: [far, 0],
      Home: [-count(), 0], End: [count(), 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
    };
    const move = moves[event.key];
    if (event.key === "Escape") show("tip", false);
    if (!move) return;
    event.preventDefault();
    pick(state.save + move[0], state.layer + move[1]);
  }

  // -- the whole ----------------------------------------------------------------------------------------------

  function figure(value, text) { return h("div", {}, h("b", {}, value), h("span", {}, text)); }

  function drawHeader() {
    const stats = facts.stats;
    document.title = `layerstore report: ${shown(facts.store)}`;
    $("store").replaceChildren(foreign(facts.store), `, as it was ${time(facts.time)} UTC`,
      ...(facts.run === null ? [] : [", run ", foreign(facts.run), " only"]));
    $("figures").replaceChildren(
      figure(number(stats.commits), `commits of ${counted(stats.run_count, "run")}`),
      figure(size(stats.logical_bytes), "logical: if each were stored whole"),
      figure(size(stats.unique_bytes), `unique: each object once, ${percent(stats.saved_ratio)} saved`),
      figure(size(stats.physical_bytes), "physical: on disk"));
    const notes = [];
    if (facts.runs_left_out) notes.push(h("p", { class: "note" }, `${counted(facts.runs_left_out, "run")} more are in the figures and not below; layerstore report --run RUN shows one.`));
    if (stats.missing) notes.push(h("p", { class: "note warn" }, `${counted(stats.missing, "object")} missing: layerstore verify names what that costs.`));
    if (facts.left_out.length) {
      notes.push(h("p", { class: "note warn" }, "What could not be read is in no figure:"),
        h("ul", {}, ...facts.left_out.map((each) => h("li", {}, foreign(each)))));
    }
    if (!facts.runs.length) notes.push(h("p", { class: "note" }, "No commits yet; next: layerstore ingest CHECKPOINT"));
    $("notes").replaceChildren(...notes);
  }

  function drawRuns() {
    show("runs-section", facts.runs.length > 1);
    show("run-label", facts.runs.length > 1);
    const counted_ = new Map(facts.stats.runs.map((each) => [each.run, each]));
    const columns = [{ name: "Run" }, { name: "Commits", right: true }, { name: "Last saved (UTC)" }, { name: "Logical", right: true },
      { name: "Unique", right: true }, { name: "Only its own", right: true }];
    const rows = facts.runs.map((each, index) => {
      const link = h("button", { type: "button", class: "link foreign" }, shown(each.run));
      link.addEventListener("click", () => choose(index));
      const bytes = counted_.get(each.run);
      return [link, number(each.commits), each.last_time === null ? "" : time(each.last_time),
        ...(bytes ? [size(bytes.logical_bytes), size(bytes.unique_bytes), bytes.own_bytes === null ? "" : size(bytes.own_bytes)] : ["", "", ""])];
    });
    $("runs").replaceChildren(table(columns, rows, state.run));
    $("run").replaceChildren(...facts.runs.map((each, index) => h("option", { value: index }, shown(each.run))));
    $("run").value = state.run;
  }

  function drawSaves() {
    const of = saves();
    const columns = [{ name: "Step" }, { name: "Saved (UTC)" }, { name: "Attempt", right: true }, { name: "Layers written", right: true },
      { name: "Oldest, saves", right: true }, { name: "Unique so far", right: true }, { name: "Written so far", right: true },
      { name: "Held up", right: true }, { name: "After gc" }];
    const rows = of.step.map((_, column) => [foreign(of.reference[column]), time(of.time[column]), number(of.attempt[column]),
      number(of.layers_saved[column]), of.oldest_saves[column] === null ? "?" : number(of.oldest_saves[column]),
      size(of.total_bytes[column][UNIQUE]), size(of.total_bytes[column][WRITTEN]),
      of.timing[column] ? seconds(of.timing[column][0]) : "", shown(fateText(of.fate[column]))]);
    $("saves").replaceChildren(table(columns, rows));
  }

  const PICTURES = ["heat", "storage", "drift", "timing", "retention"];

  function drawRun() {
    const of = run();
    $("run-facts").textContent = `${counted(of.commits, "commit")}` + (of.attempts > 1 ? ` in ${counted(of.attempts, "attempt")}` : "") +
      (of.first_time === null ? "" : `, ${time(of.first_time)} to ${time(of.last_time)}`) + `, ${counted(of.layers.length + of.layers_left_out, "layer")}`;
    const notes = [];
    if (count() < of.commits) {
      notes.push(`Sampled: ${number(count())} of ${counted(of.commits, "save")} are shown, evenly chosen, with the first and the last, ` +
        `and as far as there is room those with pins and the ends of attempts. Totals count all of them.` +
        (count() ? "" : ` layerstore report --run ${quoted(of.run)} shows this run alone.`));
    }
    if (of.layers_left_out) notes.push(`${counted(of.layers_left_out, "layer")} more are not shown.`);
    $("sampled").textContent = shown(notes.join(" "));
    show("sampled", notes.length > 0);
    const isDrawn = count() > 0 && of.layers.length > 0;
    for (const id of ["heat", "legend", "keys", "picked", "policy-label"]) show(id, isDrawn);
    for (const id of ["storage", "storage-legend", "saves-details"]) show(id, isDrawn);
    const policies = Object.keys(of.composites);
    $("policy").replaceChildren(...policies.map((name) => h("option", { value: name }, name === "latest" ? "latest: as saved" : name)));
    if (!policies.includes(state.policy)) state.policy = "latest";
    $("policy").value = state.policy;
    show("policy-label", isDrawn && policies.length > 1);
    for (const id of ["drift-section", "timing-section", "retention-section"]) show(id, isDrawn);
    if (!isDrawn) {
      $("storage-facts").textContent = `Different bytes: ${size(of.total.unique_bytes)}.`;
      return;
    }
    measure();
    drawHeat();
    drawStorage();
    drawDrift();
    drawTiming();
    drawRetention();
    drawSaves();
    pick(state.save);
  }

  function choose(index) {
    state.run = index;
    state.save = Math.max(0, facts.runs[index].saves.step.length - 1);
    state.layer = -1;
    drawRuns();
    drawRun();
  }

  const THEMES = ["system", "light", "dark"];

  function begin() {
    drawHeader();
    let theme = 0;
    $("theme").addEventListener("click", () => {
      theme = (theme + 1) % THEMES.length;
      $("theme").textContent = `Theme: ${THEMES[theme]}`;
      if (theme) document.documentElement.dataset.theme = THEMES[theme];
      else delete document.documentElement.dataset.theme;
    });
    if (!facts.runs.length) return;
    show("main", true);
    for (const id of PICTURES) {
      $(id).addEventListener("mousemove", hover);
      $(id).addEventListener("mouseleave", () => show("tip", false));
      $(id).addEventListener("click", (event) => {
        const at = place(event);
        if (at.isOn) pick(at.column, id === "heat" || id === "drift" ? at.layer : state.layer);
      });
    }
    $("heat").addEventListener("keydown", key);
    $("run").addEventListener("change", () => choose(Number($("run").value)));
    $("policy").addEventListener("change", () => { state.policy = $("policy").value; drawRun(); });
    // A retry or a test of one save is not what somebody comes for; of equal runs the one that was saved last is.
    const order = [(each) => Math.min(1, each.saves.step.length), (each) => each.commits, (each) => each.last_time ?? ""];
    const before = (one, other) => order.reduce((found, of) => found || (of(other) > of(one)) - (of(other) < of(one)), 0);
    choose(facts.runs.indexOf([...facts.runs].sort(before)[0]));
    let waiting = 0, wide = $("main").clientWidth;
    new ResizeObserver(() => {
      if ($("main").clientWidth === wide) return;
      wide = $("main").clientWidth;
      cancelAnimationFrame(waiting);
      waiting = requestAnimationFrame(drawRun);
    }).observe($("main"));
  }

  begin();
})();
