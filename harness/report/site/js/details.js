// What a row opens to: parameters, provenance, every cell with the command that repeats it, and maps.
import { bytes, el, feed, maps, number } from "./dom.js";
import { address } from "./state.js";

const facts = (pairs) => el("dl", {}, ...pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined)
  .map(([name, value]) => el("div", {}, el("dt", { textContent: name }), el("dd", {}, value))));

export function details(question, row) {
  const parameters = Object.entries(row.parameters).filter(([, value]) => value !== null).map(([key, value]) => `${key} ${value}`);
  return el("div", { className: "details" },
    facts([
      ["Parameters", parameters.join(", ") || "none"], ["Positions", row.positions], ["Evicts", row.evict], ["Seed", String(row.seed)],
      ["K and V", row.kv_bytes === 0 ? "keeps no cache" : bytes(row.kv_bytes)], ["Source", source(row)], ["Against dense", againstDense(question, row)],
    ]),
    el("p", {}, el("a", { href: address({ tab: "compare", a: `${question.id}~${row.id}`, b: rivalOf(question, row) }), textContent: `Compare ${row.name} with another` })),
    cellTable(row), ...row.cells.flatMap((cell) => (maps[cell.cell] ?? []).map(mapOf)), provenance(row));
}

function source(row) {
  if (!row.arxiv) return row.paper || row.code;
  return el("span", {}, `${row.code}, after `, el("a", { href: `https://arxiv.org/abs/${row.arxiv}`, textContent: row.paper.split(";")[0] }));
}

function againstDense(question, row) {
  const dense = row.loss_to_dense, unit = question.measure === "perplexity" ? "% of perplexity" : "points";
  return dense ? `${number(dense.value, 3)} ${unit}${dense.low === null ? "" : ` [${number(dense.low, 3)}, ${number(dense.high, 3)}]`}` : null;
}

export function rivalOf(question, row) {
  const budget = question.budgets.find(({ rows }) => rows.includes(row)) ?? question.budgets[0];
  const rival = budget?.rows.find((other) => other !== row) ?? question.references.find((other) => other !== row);
  return rival ? `${question.id}~${rival.id}` : "";
}

function cellTable(row) {
  const head = ["Task", "Figure", "Measured", "Repeat it"];
  return el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": `Cells of ${row.name}` }, el("table", { className: "plain" },
    el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col", textContent: text })))),
    el("tbody", {}, ...row.cells.map((cell) => el("tr", {},
      el("td", { textContent: cell.task }), el("td", { textContent: cell.status === "ok" ? cell.figure : cell.status }),
      el("td", { textContent: cell.measured }), el("td", {}, el("code", { textContent: cell.command })))))));
}

function provenance(row) {
  const entries = [...new Set(row.cells.map((cell) => cell.provenance))].map((at) => feed.provenance[at]);
  const distinct = (value) => [...new Set(entries.map(value).filter(Boolean))].join("; ");
  return el("details", {}, el("summary", { textContent: "Provenance" }), facts([
    ["Device", distinct((x) => [x.device, x.instructions, x.threads && `${x.threads} threads`].filter(Boolean).join(", "))],
    ["Platform", distinct((x) => x.platform)], ["Versions", distinct((x) => Object.entries(x.versions).map((pair) => pair.join(" ")).join(", "))],
    ["Data", distinct((x) => x.data)], ["sha256 of token ids", distinct((x) => x.ids_sha256)], ["sha256 of weights", distinct((x) => x.weights_sha256)],
    ["Data seed", distinct((x) => (x.data_seed === null ? "" : String(x.data_seed)))], ["Read by", distinct((x) => x.method)],
  ]));
}

const CAPTIONS = {
  kept: "What it keeps: darker where more KV heads hold a position.",
  attention: "Mean attention logits: blue above 0, red below.",
};

export function mapOf({ kind, columns, rows, layers }) {
  return el("figure", { className: "maps" }, el("div", { className: "layers" }, ...layers.map(({ layer, png, width, height }) => el("div", {},
    el("img", { src: `data:image/png;base64,${png}`, width, height, alt: `${CAPTIONS[kind]} Layer ${layer}; across: ${columns}; up: ${rows}.` }), `layer ${layer}`))),
    el("figcaption", { textContent: `${CAPTIONS[kind]} Across: ${columns}. Down: ${rows}.` }));
}
