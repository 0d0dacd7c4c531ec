// A link to what was picked, in the page's fragment, and buttons that copy.
// The fragment is compared with names in the facts; a note quotes it as text, never as markup.

const isUnique = (of, column) => of.saves.step.filter((step) => step === of.saves.step[column]).length === 1;

// The fragment that refers to what is picked now.
function fragment() {
  const found = new URLSearchParams();
  const pin = facts.pins[state.pin];
  const name = (key, column) => {
    found.set(key, saves().step[column]);
    if (!isUnique(run(), column)) found.set(key === "step" ? "attempt" : `${key}-attempt`, saves().attempt[column]);
  };
  found.set("run", run().run);
  if (pin !== undefined) found.set("pin", pin.pin);
  else if (count()) name("step", state.save);
  if (state.policy !== "latest") found.set("policy", state.policy);
  if (state.compare >= 0) name("compare", state.compare);
  return found.toString();
}

// Put what is picked into the page's address, without an entry in the browser's history.
function follow() {
  history.replaceState(null, "", `#${fragment()}`);
  show("link-note", false);
}

// The column of a link's step, or of the nearest step before it; without an attempt in the link, the last such column.
function columnNamed(of, step, attempt) {
  let best = -1;
  of.saves.step.forEach((each, column) => {
    if (attempt !== null && of.saves.attempt[column] !== attempt) return;
    if (each <= step && (best < 0 || each >= of.saves.step[best])) best = column;
  });
  return best;
}

const numberIn = (text) => (/^\d{1,15}$/.test(text ?? "") ? Number(text) : null);

// Pick what the page's fragment refers to; return whether it refers to anything.
function honour() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const notes = [];
  if (!["run", "step", "pin"].some((key) => asked.has(key))) return false;
  const index = asked.has("run") ? facts.runs.findIndex((each) => each.run === asked.get("run")) : state.run;
  if (index < 0) notes.push(`This report does not show the run ${shown(asked.get("run"))}, which the link names.`);
  else state.run = index;
  const of = run();
  const named = (key, attemptKey) => {
    const step = numberIn(asked.get(key));
    if (!asked.has(key)) return -1;
    const column = step === null ? -1 : columnNamed(of, step, numberIn(asked.get(attemptKey)));
    if (column < 0 || of.saves.step[column] !== step) {
      notes.push(`Step ${shown(asked.get(key))} of the link is not shown here${column < 0 ? "" : "; the nearest before it is"}.`);
    }
    return column;
  };
  const save = index < 0 ? -1 : named("step", "attempt");
  state.save = save < 0 ? count() - 1 : save;
  state.layer = -1;
  state.compare = index < 0 ? -1 : named("compare", "compare-attempt");
  if (state.compare === state.save) state.compare = -1;
  state.policy = policies().includes(asked.get("policy")) ? asked.get("policy") : "latest";
  state.pin = asked.has("pin") ? facts.pins.findIndex((each) => each.pin === asked.get("pin")) : -1;
  if (asked.has("pin") && state.pin < 0) notes.push(`This report does not list the pin ${shown(asked.get("pin"))}, which the link names.`);
  if (state.pin >= 0) goToPin(state.pin);
  drawRuns();
  drawRun();
  $("link-note").textContent = notes.join(" ");
  show("link-note", notes.length > 0);
  return true;
}

// -- copying ------------------------------------------------------------------------------------------------

function copyButton(textOf, label) {
  const button = h("button", { type: "button", class: "copy", "aria-label": label }, "Copy");
  button.addEventListener("click", () => copy(textOf(), button));
  return button;
}

async function copy(text, button) {
  const isCopied = await copied(text);
  for (const other of document.querySelectorAll("button.copied")) {
    other.textContent = other.id === "copy-link" ? "Copy link" : "Copy";
    other.classList.remove("copied");
  }
  button.textContent = isCopied ? "Copied" : "Select and copy it by hand";
  button.classList.add("copied");
  $("live").textContent = isCopied ? "Copied" : "Not copied";
}

// Some browsers do not let a page from a file use the clipboard. Then copy a selection, as a user would by hand.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const at = document.activeElement;
    const area = h("textarea", { readonly: "", class: "hidden-text", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const is = document.execCommand("copy");
    area.remove();
    at?.focus({ preventScroll: true });
    return is;
  }
}

// Commands, each with its button.
const commands = (lines) => lines.map((line) => h("div", { class: "command" }, h("pre", {}, line), copyButton(() => line, `Copy: ${line}`)));
