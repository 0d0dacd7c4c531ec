// What lies under the pointer, and moves by keys.

function cellText(column, layer) {
  const of = origin(column, layer), name = shown(run().layers[layer]);
  const head = `${name}\nat ${shown(saves().reference[column])}`;
  if (of === null) return `${head}\nno such layer`;
  const known = version(column, layer), bytes = layerSize(column, layer), drift = moved(column, layer);
  return [head, `version of ${shown(placeOf(of))}`, age(of), `saved ${time(of.time)}`, precisionText(of), known && `version ${known}…`, bytes,
    drift && `had moved ${drift}`].filter(Boolean).join("\n");
}

function columnText(id, column) {
  const head = shown(saves().reference[column]);
  if (id === "metric") return [head, ...measuredAt(column)].join("\n");
  const found = whatIf();
  if ((id === "storage" || id === "added") && found !== null) {
    return `${head}\nby ${state.policy}, with all before: ${size(found.total_bytes[column])}, as it is ${size(saves().total_bytes[column][UNIQUE])}\n` +
      `this save: ${size(found.bytes[column])}, as it is ${size(saves().bytes[column][UNIQUE])}`;
  }
  if (id === "storage" || id === "added") {
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

// By how many saves and layers a key moves, if it moves at all.
function moveBy(event) {
  if (event.altKey || event.ctrlKey || event.metaKey) return undefined;
  const far = Math.max(5, Math.round(count() / 20));
  return {
    ArrowLeft: [-1, 0], ArrowRight: [1, 0], PageUp: [-far, 0], PageDown: [far, 0],
    Home: [-count(), 0], End: [count(), 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
  }[event.key];
}

function key(event) {
  const move = moveBy(event);
  if (event.key === "Escape") show("tip", false);
  if (!move) return;
  event.preventDefault();
  state.pin = -1;
  pick(state.save + move[0], state.layer + move[1]);
}
