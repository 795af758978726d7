// The third view: every measured cell, to search, sort, narrow, and take along as CSV. One page of rows is in the document.
import { byId, data, el, feed, maps, swatch } from "./dom.js";
import { mapOf } from "./details.js";
import { go, read } from "./state.js";

const PAGE = 100;
const HEADS = {
  policy: ["Policy"], capacity: ["Capacity", 0], perplexity: ["Perplexity", 4], right: ["Right, %", 3], ms: ["ms/token", 3], kib: ["K/V, KiB", 4],
  model: ["Model"], suite: ["Suite"], task: ["Task"], status: ["Status"], device: ["Device"], measured: ["Measured"], cell: ["Repeat"],
};
const SELECTS = ["suite", "model", "status"];
const at = Object.fromEntries(data.columns.map((name, place) => [name, place]));
const KEYS = Object.keys(HEADS);
const pictures = Object.fromEntries(Object.entries(maps).map(([cell, shown]) => [cell.slice(0, 8), shown]));
const collator = new Intl.Collator("en", { numeric: true });
const texts = [], places = {};
let ready = false;

function prepare() {
  ready = true;
  for (const row of data.cells) texts.push(row.join(" ").toLowerCase());
  for (const name of SELECTS) {
    const values = [...new Set(data.cells.map((row) => row[at[name]]))].sort(collator.compare);
    byId(`cells-${name}`).append(new Option("all", ""), ...values.map((value) => new Option(value, value)));
  }
  byId("cells-hide").append(...KEYS.filter((key) => key !== "policy").map((key) => el("label", {}, el("input", { type: "checkbox", value: key, onchange: hideChosen }), HEADS[key][0])));
}

const hideChosen = () => go({ hide: [...byId("cells-hide").querySelectorAll("input:not(:checked)")].map(({ value }) => value).join("."), page: "" });

export function setUpCells() {
  byId("cells-find").addEventListener("input", (event) => go({ find: event.target.value, page: "" }));
  for (const name of SELECTS) byId(`cells-${name}`).addEventListener("change", (event) => go({ [`c-${name}`]: event.target.value, page: "" }));
  byId("cells-form").addEventListener("submit", (event) => event.preventDefault());
  byId("cells-form").addEventListener("reset", (event) => {
    event.preventDefault();
    go({ find: "", sort: "", page: "", hide: "", ...Object.fromEntries(SELECTS.map((name) => [`c-${name}`, ""])) });
  });
  byId("cells-csv").addEventListener("click", download);
  byId("cells-previous").addEventListener("click", () => go({ page: String(pageOf(read()) - 1) }));
  byId("cells-next").addEventListener("click", () => go({ page: String(pageOf(read()) + 1) }));
}

const pageOf = (state) => Math.max(1, Math.floor(Number(state.page)) || 1);

// A number by which a row is sorted: its figure, or the place of its text among all texts of the column.
function sortable(key) {
  if (HEADS[key][1] !== undefined) return (row) => row[at[key]];
  if (!places[key]) {
    const values = [...new Set(data.cells.map((row) => row[at[key]]))].sort(collator.compare);
    places[key] = new Map(values.map((value, place) => [value, place]));
  }
  return (row) => places[key].get(row[at[key]]);
}

// Indices of the rows that match, in their order. Missing figures come last either way.
export function matching(state) {
  const words = (state.find ?? "").toLowerCase().split(/\s+/).filter(Boolean), chosen = SELECTS.filter((name) => state[`c-${name}`]);
  const found = [];
  data.cells.forEach((row, i) => {
    if (words.every((word) => texts[i].includes(word)) && chosen.every((name) => row[at[name]] === state[`c-${name}`])) found.push(i);
  });
  const key = (state.sort ?? "").replace(/^-/, "");
  if (!(key in HEADS)) return found;
  const value = sortable(key), down = state.sort.startsWith("-") ? -1 : 1, values = data.cells.map(value);
  return found.sort((i, j) => (values[i] === null || values[j] === null ? (values[i] === null) - (values[j] === null) : down * (values[i] - values[j])) || i - j);
}

const hiddenIn = (state) => new Set((state.hide ?? "").split("."));

export function showCells() {
  if (!ready) prepare();
  const state = read(), rows = matching(state), pages = Math.max(1, Math.ceil(rows.length / PAGE)), page = Math.min(pageOf(state), pages);
  const keys = KEYS.filter((key) => !hiddenIn(state).has(key)), first = (page - 1) * PAGE, shown = rows.slice(first, first + PAGE);
  byId("cells-head").replaceChildren(...keys.map((key) => headOf(key, state.sort ?? "")));
  byId("cells-body").replaceChildren(...(shown.length ? shown.flatMap((i) => linesOf(data.cells[i], keys, state.open)) : [nothing(keys.length)]));
  byId("cells-count").textContent = rows.length ? `${(first + 1).toLocaleString("en")} to ${(first + shown.length).toLocaleString("en")} of ${rows.length.toLocaleString("en")} cells` : `0 of ${data.cells.length.toLocaleString("en")} cells`;
  byId("cells-previous").disabled = page <= 1;
  byId("cells-next").disabled = page >= pages;
  if (byId("cells-find").value !== (state.find ?? "")) byId("cells-find").value = state.find ?? "";
  for (const name of SELECTS) byId(`cells-${name}`).value = state[`c-${name}`] ?? "";
  for (const box of byId("cells-hide").querySelectorAll("input")) box.checked = keys.includes(box.value);
}

const nothing = (columns) => el("tr", { role: "row" }, el("td", { role: "cell", colspan: columns, className: "nothing", textContent: "No cell matches. Take a word from the search, or choose “all”." }));

function headOf(key, sort) {
  const order = sort === key ? "ascending" : sort === `-${key}` ? "descending" : null;
  const next = sort === key ? `-${key}` : sort === `-${key}` ? "" : key;
  const focus = () => byId("cells-head").querySelector(`[data-key="${key}"] button`)?.focus();
  return el("th", { scope: "col", role: "columnheader", "data-key": key, "aria-sort": order, className: HEADS[key][1] === undefined ? "" : "number" },
    el("button", { type: "button", textContent: HEADS[key][0], onclick: () => { go({ sort: next, page: "" }); focus(); } }));
}

// A row and, if it has pictures and was opened, a line with them.
function linesOf(row, keys, opened) {
  const cell = row[at.cell], open = opened === cell && cell in pictures, line = lineOf(row, keys, open);
  return open ? [line, el("tr", { role: "row", className: "opened", id: `open-${cell}` }, el("td", { role: "cell", colspan: keys.length }, ...pictures[cell].map(mapOf)))] : [line];
}

function policyOf(row, open) {
  const cell = row[at.cell], name = [swatch(row[at.name]), row[at.policy]];
  if (!(cell in pictures)) return name;
  const toggle = () => { go({ open: open ? "" : cell }); byId(`cell-${cell}`)?.focus(); };
  return [el("button", { type: "button", id: `cell-${cell}`, "aria-expanded": String(open), "aria-controls": open ? `open-${cell}` : null, onclick: toggle }, name[0], el("span", {}, name[1], el("small", { textContent: open ? "hide its pictures" : "show its pictures" })))];
}

function lineOf(row, keys, open) {
  return el("tr", { role: "row" }, ...keys.map((key) => {
    const [label, digits] = HEADS[key], value = row[at[key]];
    if (key === "policy") return el("th", { scope: "row", role: "rowheader", className: "policy" }, ...policyOf(row, open));
    const text = key === "cell" ? `bench run ${value} --fresh` : value === null ? "" : digits ? Number(value.toPrecision(digits)).toLocaleString("en") : value.toLocaleString("en");
    const kind = digits !== undefined ? "number" : key === "status" && value !== "ok" ? "bad" : "";
    return el("td", { role: "cell", "data-label": label, className: kind }, key === "cell" ? el("code", { textContent: text }) : text);
  }));
}

// Text that a spreadsheet won't run as a formula (OWASP, CSV Injection), quoted.
const field = (value) => {
  const text = value === null ? "" : String(value);
  return `"${(typeof value === "string" && /^[=+\-@\t\r]/.test(text.trimStart()) ? `'${text}` : text).replaceAll('"', '""')}"`;
};

export function csv(state) {
  const keys = KEYS.filter((key) => !hiddenIn(state).has(key));
  return [keys, ...matching(state).map((i) => keys.map((key) => data.cells[i][at[key]]))].map((row) => row.map(field).join(",")).join("\r\n");
}

function download() {
  const link = el("a", { href: URL.createObjectURL(new Blob([csv(read())], { type: "text/csv" })), download: `kv-bench-cells-${feed.measured}.csv` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
