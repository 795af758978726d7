// What a row opens to: its difference to each rival, every cell with the command that repeats it, pictures, and provenance.
import { bytes, el, interval, number, parametersOf, share, signed, table, tokens } from "./dom.js";

const facts = (pairs) => el("dl", {}, pairs.filter(([, value]) => value).map(([name, value]) => el("div", {}, el("dt", { textContent: name }), el("dd", {}, value))));

export function details(data, { question, budget }, row) {
  const cells = row.cells.map((id) => data.cells.find(({ cell }) => cell === id));
  const paper = data.papers[row.policy] ?? {}, dense = row.loss_to_dense;
  return el("div", { className: "details" },
    facts([
      ["Parameters", parametersOf(row)], ["Positions", row.positions], ["Evicts", row.evict], ["Seed", String(row.seed)], [question.measure === "perplexity" ? "K and V, all streams" : "K and V", `${bytes(row.kv_bytes)}${row.kv_share === null ? "" : `, ${share(row.kv_share)} of dense`}${row.kv_read_bytes === null ? "" : `, of which a step reads ${bytes(row.kv_read_bytes)}`}`],
      ["Code", row.code], ["Paper", paper.arxiv ? el("a", { href: `https://arxiv.org/abs/${paper.arxiv}`, textContent: paper.paper.split(";")[0] }) : paper.paper],
      ["Lost to dense", dense && `${signed(dense.value)} ${interval(dense.low, dense.high)}`],
      ["Right answers", row.answers.map(({ task, right, questions }) => `${task}: ${right} of ${questions}`).join("; ")],
    ]),
    rivals(question, budget, row),
    table("Measure it again", ["Command", "Figure", "Task", "Measured"],
      cells.map((cell) => [el("code", { textContent: cell.command }), cell.status === "ok" ? cell.figure : cell.status, cell.task, cell.measured])),
    cells.flatMap((cell) => (data.pictures[cell.cell] ?? []).map(mapOf)), provenance(cells.map((cell) => data.provenance[cell.provenance])));
}

// What the row loses to each other of its budget, from the intervals that ranks follow from.
function rivals(question, { capacity, rows, pairs }, row) {
  const i = rows.indexOf(row), nll = question.measure === "perplexity", percent = (value) => (nll ? 100 * Math.expm1(Math.min(value, 700)) : 100 * value);
  const lines = rows.flatMap((other, j) => {
    const pair = i < 0 || i === j ? 0 : pairs[pairIndex(Math.min(i, j), Math.max(i, j), rows.length)];
    if (!pair) return [];
    const [value, low, high] = i > j ? pair : [-pair[0], ...pair.slice(1).map((end) => -end).reverse()];
    const verdict = low === undefined ? "no interval" : low > 0 ? "worse" : high < 0 ? "better" : "can't tell";
    return [[other.name, signed(percent(value)), low === undefined ? "" : interval(percent(low), percent(high)), el("span", { className: verdict, textContent: verdict })]];
  });
  const unit = nll ? "% of perplexity" : "points of right answers";
  return lines.length ? table(`${row.name} against the others at ${tokens(capacity)}, ${unit} lost`, ["Other", "Lost", "95 % interval", row.name], lines) : null;
}

export const pairIndex = (i, j, count) => i * count - (i * (i + 1)) / 2 + j - i - 1;

function provenance(entries) {
  const distinct = (value) => [...new Set(entries.map(value).filter(Boolean))].join("; ");
  return el("details", {}, el("summary", { textContent: "Provenance" }), facts([
    ["Device", distinct((x) => [x.device, x.instructions, x.threads && `${x.threads} threads`].filter(Boolean).join(", "))],
    ["Platform", distinct((x) => x.platform)], ["Versions", distinct((x) => Object.entries(x.versions).map((pair) => pair.join(" ")).join(", "))],
    ["Data", distinct((x) => x.data)], ["sha256 of token ids", distinct((x) => x.ids_sha256)], ["sha256 of weights", distinct((x) => x.weights_sha256)],
    ["Data seed", distinct((x) => number(x.data_seed, 12))], ["Read by", distinct((x) => x.method)],
  ]));
}

const CAPTIONS = {
  kept: "What it keeps: darker where more KV heads hold a position.",
  attention: "Mean attention logits: blue above 0, red below.",
};

export function mapOf({ kind, columns, rows, layers }) {
  return el("figure", { className: "maps" }, el("div", { className: "layers" }, layers.map(({ layer, png, width, height }) => el("div", {},
    el("img", { src: `data:image/png;base64,${png}`, width, height, alt: `${CAPTIONS[kind]} Layer ${layer}; across: ${columns}; up: ${rows}.` }), `layer ${layer}`))),
    el("figcaption", { textContent: `${CAPTIONS[kind]} Across: ${columns}. Down: ${rows}.` }));
}
