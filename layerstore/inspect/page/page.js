// The page as a whole.

function figure(value, text) { return h("div", {}, h("b", {}, value), h("span", {}, text)); }

function nothingText() {
  const pins = facts.pins.length + facts.pins_left_out;
  if (!pins) return "No commits yet; next: layerstore ingest CHECKPOINT";
  return `Every commit was dropped; ${counted(pins, "pin")} ${pins === 1 ? "remains" : "remain"}.`;
}

function drawHeader() {
  const stats = facts.stats;
  document.title = `layerstore report: ${shown(facts.store)}`;
  $("store").replaceChildren(foreign(facts.store), ", as it was ", when(facts.time), " UTC",
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
  if (!facts.runs.length) notes.push(h("p", { class: "note" }, nothingText()));
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
    link.addEventListener("click", () => { choose(index); follow(); });
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

const PICTURES = ["metric", "heat", "storage", "added", "drift", "timing", "retention"];

// The policies by which the composites or the storage can be shown.
const policies = () => [...new Set([...Object.keys(run().composites), ...Object.keys(run().what_if)])];

function drawRun() {
  const of = run();
  $("run-facts").replaceChildren(counted(of.commits, "commit"), of.attempts > 1 ? ` in ${counted(of.attempts, "attempt")}` : "",
    ...(of.first_time === null ? [] : [", ", when(of.first_time), " to ", when(of.last_time)]), `, ${counted(of.layers.length + of.layers_left_out, "layer")}`);
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
  for (const id of ["metric", "metric-label", "heat", "legend", "keys", "what-if", "picked", "compared", "policy-label"]) show(id, isDrawn);
  for (const id of ["storage", "storage-legend", "added-title", "added", "saves-details"]) show(id, isDrawn);
  if (!policies().includes(state.policy)) state.policy = "latest";
  $("policy").replaceChildren(...policies().map((name) => h("option", { value: name }, name === "latest" ? "latest: as saved" : `${name}: what if`)));
  $("policy").value = state.policy;
  show("policy-label", isDrawn && policies().length > 1);
  for (const id of ["drift-section", "timing-section", "retention-section"]) show(id, isDrawn);
  if (!isDrawn) {
    drawPins();
    $("storage-facts").textContent = `Different bytes: ${size(of.total.unique_bytes)}.`;
    return;
  }
  measure();
  drawMetrics();
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
  state.layer = state.compare = state.pin = -1;
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
  show("main", facts.runs.length + facts.pins.length > 0);
  if (!facts.runs.length) {
    for (const section of document.querySelectorAll("main > section")) section.hidden = true;
    drawPins();
    return;
  }
  for (const id of PICTURES) {
    $(id).addEventListener("mousemove", hover);
    $(id).addEventListener("mouseleave", () => show("tip", false));
    $(id).addEventListener("click", (event) => {
      const at = place(event);
      if (!at.isOn) return;
      if (event.shiftKey) { compareWith(at.column); return; }
      state.pin = -1;
      pick(at.column, id === "heat" || id === "drift" ? at.layer : state.layer);
      follow();
    });
  }
  $("heat").addEventListener("keydown", key);
  // Once the key is released, not at each repetition while it is held: browsers limit how often an address may change.
  $("heat").addEventListener("keyup", (event) => { if (moveBy(event)) follow(); });
  const chosen = (id, act) => $(id).addEventListener("change", () => { act($(id).value); follow(); });
  chosen("run", (index) => choose(Number(index)));
  chosen("policy", (policy) => { state.policy = policy; state.pin = -1; drawRun(); });
  chosen("compare", (column) => compareWith(Number(column)));
  $("metric-name").addEventListener("change", () => { state.metric = $("metric-name").value; drawMetrics(); mark(); });
  $("copy-link").addEventListener("click", () => copy(`${document.URL.split("#")[0]}#${fragment()}`, $("copy-link")));
  // Begin with the run of the most commits, not with a retry or a test of one save; of equals, with the last saved.
  const order = [(each) => Math.min(1, each.saves.step.length), (each) => each.commits, (each) => each.last_time ?? ""];
  const before = (one, other) => order.reduce((found, of) => found || (of(other) > of(one)) - (of(other) < of(one)), 0);
  choose(facts.runs.indexOf([...facts.runs].sort(before)[0]));
  honour();
  addEventListener("hashchange", honour);
  let waiting = 0, wide = $("main").clientWidth;
  new ResizeObserver(() => {
    if ($("main").clientWidth === wide) return;
    wide = $("main").clientWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(drawRun);
  }).observe($("main"));
}

begin();
