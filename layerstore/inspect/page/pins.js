// The list of pins, and opening one.

function drawPins() {
  show("pins-section", facts.pins.length > 0);
  if (!facts.pins.length) return;
  const columns = [{ name: "Pin" }, { name: "Points at" }, { name: "Chosen by", wide: true }, { name: "Made (UTC)" }, { name: "Saved (UTC)" }, { name: "What it is", wide: true }];
  const rows = facts.pins.map((pin, index) => {
    return [facts.runs.length ? pinLink(pin, index) : foreign(pin.pin), foreign(pin.reference), foreign(chosenBy(pin)), pin.made === null ? "" : time(pin.made), time(pin.time),
      pin.mixture === null ? "one save" : `a mixture: ${mixtureText(pin.mixture, pin.step)}`];
  });
  $("pins").replaceChildren(table(columns, rows, state.pin));
  $("pins-more").textContent = facts.pins_left_out ? `${counted(facts.pins_left_out, "pin")} more: layerstore pin --list has them.` : "";
}

function pinLink(pin, index) {
  const link = h("button", { type: "button", class: "link foreign" }, shown(pin.pin));
  link.addEventListener("click", () => pickPin(index));
  return link;
}

function chosenBy(pin) {
  const settings = Object.entries(pin.policy_parameters).map(([name, value]) => `${name}=${value}`).join(", ");
  return pin.mixture === null ? "" : `${pin.policy}${settings ? ` (${settings})` : ""}`;
}

// Go to the run and the save of the pin's base, as far as this report shows them.
function goToPin(index) {
  const pin = facts.pins[index];
  const at = facts.runs.findIndex((each) => each.run === pin.run);
  state.pin = index;
  state.compare = -1;
  state.layer = -1;
  state.policy = "latest";
  if (at >= 0 && facts.runs[at].saves.step.length) {
    state.run = at;
    const column = saves().commit.indexOf(pin.commit);
    state.save = column < 0 ? Math.min(state.save, count() - 1) : column;
  }
}

function pickPin(index) {
  goToPin(index);
  drawRuns();
  drawRun();
  follow();
  $("picked").scrollIntoView({ block: "start" });
}

// The layers of a pin: its own, or those of the save that it refers to; null if this report has neither.
function layersOfPin(pin) {
  const of = pin.taken;
  if (of === null) {
    const column = pin.is_composite || pin.run !== run().run ? -1 : saves().commit.indexOf(pin.commit);
    return column < 0 ? null : layersOfSave(column);
  }
  const names = of.layers ?? facts.runs.find((each) => each.run === pin.run).layers;
  return names.map((name, layer) => {
    const index = of.origin[layer], own = of.origins.run[index] === pin.run;
    const from = { run: of.origins.run[index], attempt: of.origins.attempt[index], step: of.origins.step[index], own };
    from.steps = own ? pin.step - from.step : null;
    from.saves = own ? pin.save_number - of.origins.save_number[index] : null;
    const column = own && pin.run === run().run ? columnOf(from) : -1;
    if (column >= 0) from.time = saves().time[column];
    return { name, from, version: digits(of.version, layer), size: of.bytes[layer] === null ? "" : size(of.bytes[layer]), moved: "" };
  });
}
