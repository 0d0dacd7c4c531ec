// Words and elements. Foreign text is only ever set as text, never as markup.

// Escape characters that move a cursor or reorder a line, as the command line does.
const shown = (text) =>
  String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (sign) => `\\u{${sign.codePointAt(0).toString(16)}}`);
const number = (value) => value.toLocaleString("en-US");
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
// A number and its unit stay on one line.
const size = (bytes) => {
  if (bytes < 1000) return `${bytes}\u00a0B`;
  const units = ["kB", "MB", "GB", "TB", "PB"];
  let power = 1;
  while (power < units.length && bytes / 1000 ** power >= 999.95) power += 1;
  return `${(bytes / 1000 ** power).toFixed(1)}\u00a0${units[power - 1]}`;
};
const seconds = (value) => {
  if (value === null) return "not known";
  if (value < 1) return `${Number((value * 1e3).toPrecision(3))}\u00a0ms`;
  return `${Number(value.toPrecision(3))}\u00a0s`;
};
const time = (iso) => (iso === null ? "not visible any more" : iso.replace("T", " ").replace("Z", ""));
const quoted = (word) => (/^[A-Za-z0-9@~._\/-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;

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
const $ = (id) => document.getElementById(id);
// A time in running text; its class keeps it from being broken at its hyphens.
const when = (iso) => h("span", { class: "whole" }, time(iso));
const show = (id, is) => { $(id).hidden = !is; };

function table(columns, rows, at = -1) {
  const kind = (column) => (column.right ? "number" : column.code ? "code" : column.wide ? "wide" : null);
  const head = h("tr", {}, ...columns.map((column) => h("th", { class: kind(column), scope: "col" }, column.name)));
  const body = rows.map((cells, place) =>
    h("tr", { class: place === at ? "at" : null }, ...cells.map((cell, index) => h("td", { class: kind(columns[index]) }, cell))));
  return h("table", {}, h("thead", {}, head), h("tbody", {}, ...body));
}
