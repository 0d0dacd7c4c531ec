// Two saves of the run, compared by the versions of their layers.

const NONE = -1;

function compareWith(column) {
  state.compare = column === state.save || column < 0 || column >= count() ? NONE : column;
  state.pin = NONE;
  mark();
  drawPicked();
  drawCompared();
  follow();
}

// For each layer: whether two saves have the same version, its size in each, and, if recorded, how far it moved.
function differences(a, b) {
  const [left, right] = [sizesAt(a), sizesAt(b)];
  return run().layers.map((name, layer) => {
    const [before, after] = [digits(run().versions[a], layer), digits(run().versions[b], layer)];
    const isIn = [before, after].map((each) => !each.startsWith("-"));
    const status = !isIn[0] && !isIn[1] ? "in neither" : !isIn[0] ? "only in the later" : !isIn[1] ? "only in the earlier" : before === after ? "same" : "differs";
    return { name, status, before: left[layer] ?? 0, after: right[layer] ?? 0, moved: movedBetween(a, b, layer) };
  });
}

// A save records how far a layer moved since its last version: the version in `a` if the save before `b` has it, too.
function movedBetween(a, b, layer) {
  const follows = b > 0 && saves().attempt[b - 1] === saves().attempt[b] && saves().save_number[b - 1] + 1 === saves().save_number[b];
  return follows && digits(run().versions[a], layer) === digits(run().versions[b - 1], layer) ? moved(b, layer) : "";
}

function sharedText(layers, bytes) {
  const more = run().versions_overlap ? "at least " : "";
  if (!layers) return more ? "They share no whole layer." : "They share nothing.";
  return `They share ${more}${size(bytes)}, in ${counted(layers, "equal layer")}.`;
}

function drawCompared() {
  const options = saves().reference.map((reference, column) => [column, reference]).filter(([column]) => column !== state.save).reverse();
  $("compare").replaceChildren(h("option", { value: NONE }, "no other"), ...options.map(([column, reference]) => h("option", { value: column }, shown(reference))));
  $("compare").value = state.compare;
  show("compare-label", count() > 1);
  show("compared", state.compare >= 0);
  if (state.compare < 0) return;
  const [a, b] = [state.save, state.compare].sort((one, other) => one - other);
  const rows = differences(a, b);
  const of = (status) => rows.filter((row) => row.status === status);
  const sum = (found, side) => found.reduce((total, row) => total + row[side], 0);
  const names = [a, b].map((column) => saves().reference[column]);
  const only = [["only in the earlier", names[0]], ["only in the later", names[1]]].filter(([status]) => of(status).length)
    .map(([status, name]) => ` ${counted(of(status).length, "layer")} only in ${shown(name)}.`).join("");
  $("compared-summary").replaceChildren(h("strong", { class: "foreign" }, shown(names[0])), " and ", h("strong", { class: "foreign" }, shown(names[1])),
    `, as they were saved: ${number(of("differs").length)} of ${counted(rows.length, "layer")} differ.${only} ${sharedText(of("same").length, sum(of("same"), "after"))} ` +
    `The layers take ${size(sum(rows, "before"))} in the earlier and ${size(sum(rows, "after"))} in the later.`);
  const there = `--store ${quoted(facts.store)}`;
  $("compared-commands").replaceChildren(...commands([shown(`layerstore diff ${there} ${wordFor(a)} ${wordFor(b)} --stat`)]));
  const hasMoved = rows.some((row) => row.moved);
  const columns = [{ name: "Layer" }, { name: "Versions" }, { name: shown(names[0]), right: true }, { name: shown(names[1]), right: true },
    { name: "Shared", right: true }, ...(hasMoved ? [{ name: "Moved", right: true }] : [])];
  const amount = (bytes) => (bytes ? size(bytes) : "");
  $("compared-layers").replaceChildren(table(columns, rows.map((row) => [foreign(row.name), row.status, amount(row.before), amount(row.after),
    row.status === "same" ? amount(row.after) : "", ...(hasMoved ? [row.moved] : [])])));
}
