// A table with a row for each policy and a column for each budget or question. A row opens to its details.
import { byId, el, interval, number, share, signed } from "./dom.js";
import { details } from "./details.js";
import { go } from "./state.js";

// What a cell shows: the loss to the reference, or the figure itself where nothing can be paired. [text, interval]
export function shown(row, column) {
  const [answers] = row.answers, perplexity = column.budget.references[row.id] ?? row.perplexity;
  if (row.loss) return [signed(row.loss.value), interval(row.loss.low, row.loss.high)];
  if (row.kind === "reference" && column.budget.reference === row.id) return ["0", "reference"];
  if (column.question.measure === "perplexity") return [perplexity === null ? "–" : number(perplexity, 4), "perplexity"];
  const percent = (value) => String(Math.round(100 * value));
  return answers ? [`${percent(answers.share)} %`, interval(answers.low, answers.high, percent)] : ["–", row.status];
}

function cell(row, column) {
  if (!row) return el("td", { className: column.chosen ? "chosen" : "" });
  const [text, ends] = shown(row, column), of = column.budget.rows.length, best = row.rank?.[0] === 1;
  const middle = row.rank && of > 1 ? ((row.rank[0] + row.rank[1]) / 2 - 1) / (of - 1) : null;
  const flag = row.status === "ok" ? null : el("small", { className: "bad", textContent: row.status });
  const node = el("td", { className: `number${column.chosen ? " chosen" : ""}`, title: row.rank ? `rank ${row.rank.join(" to ")} of ${of}` : "not ranked" },
    best ? el("strong", {}, text, el("span", { className: "hidden", textContent: " (may be the best)" })) : text,
    el("small", { textContent: ends }), flag);
  if (middle !== null) node.style.setProperty("--good", `${Math.round(45 * (1 - middle))}%`);
  return node;
}

// Bars of a column's intervals on one axis, which is logarithmic far from 0, so that small and large losses are legible.
function bars(column, rows) {
  const losses = rows.map((row) => row?.loss).filter((loss) => loss && loss.low !== null);
  if (losses.length < 2) return null;
  const bend = Math.max(0.05, losses.map(({ value }) => Math.abs(value)).sort((x, y) => x - y)[losses.length >> 1]);
  const bent = (value) => Math.asinh(value / bend), ends = [0, ...losses.flatMap(({ low, high }) => [low, high])].map(bent);
  const low = Math.min(...ends), high = Math.max(...ends), place = (value) => (100 * (bent(value) - low)) / (high - low);
  const bar = ({ low: from, high: to, value }) => el("span", { className: "bar", "aria-hidden": "true" },
    el("i", { className: "zero", style: `left:${place(0)}%` }),
    el("i", { className: "ends", style: `left:${place(from)}%;width:${place(to) - place(from)}%` }), el("i", { className: "dot", style: `left:${place(value)}%` }));
  return (row) => (row?.loss && row.loss.low !== null ? bar(row.loss) : null);
}

// More columns, of the chosen one's rows; those that say the same of all policies are left out.
const MORE = [
  ["Perplexity", (row, { budget }) => number(budget.references[row.id] ?? row.perplexity, 4) + (row.stride > 1 ? ` (1 token in ${row.stride})` : "")],
  ["% right", (row) => row.answers.map((answers) => Math.round(100 * answers.share)).join("; ")],
  ["K/V of dense", (row) => (row.kv_share === null ? "" : share(row.kv_share))],
  ["ms/token", (row) => number(row.ms)], ["× dense", (row) => number(row.times_dense?.[0])],
  ["Tokens read", (row) => number(row.tokens_read, 9)],
];

// columns: [{ title, note, question, budget, rows (by key), chosen, pick }]. keys: of the rows, in order.
export function fillMatrix(id, columns, keys, data, open) {
  const now = columns.find(({ chosen }) => chosen), rowOf = (key) => now?.rows.get(key), bar = now && bars(now, keys.map(rowOf));
  const own = keys.map(rowOf).filter((row) => row && row.kind !== "reference");
  const more = now ? MORE.filter(([, text]) => new Set(own.map((row) => text(row, now))).size > 1) : [];
  const heads = columns.map(({ title, note, chosen, pick }) => el("th", { scope: "col", className: `number${chosen ? " chosen" : ""}` },
    el("button", { type: "button", "aria-pressed": String(Boolean(chosen)), onclick: pick }, title, note ? el("small", { textContent: note }) : null)));
  byId(`${id}-head`).replaceChildren(el("th", { scope: "col", textContent: "Policy" }), ...heads,
    ...more.map(([head]) => el("th", { scope: "col", className: "number more", textContent: head })),
    ...(bar ? [el("th", { scope: "col", className: "more", textContent: "Interval" })] : []));
  const width = 1 + columns.length + more.length + (bar ? 1 : 0);
  byId(`${id}-body`).replaceChildren(...keys.flatMap((key) => {
    const held = columns.find(({ rows, chosen }) => chosen && rows.has(key)) ?? columns.find(({ rows }) => rows.has(key));
    const first = held.rows.get(key), row = rowOf(key), opened = first.id === open;
    const line = el("tr", { className: first.kind, id: `row-${first.id}` }, policyCell(first, opened), columns.map((column) => cell(column.rows.get(key), column)),
      more.map(([, text]) => el("td", { className: "number more" }, row ? text(row, now) : "")), bar ? el("td", { className: "more" }, bar(row)) : null);
    return opened ? [line, el("tr", { className: "opened", id: `open-${first.id}` }, el("td", { colspan: width }, details(data, held, first)))] : [line];
  }));
}

function policyCell(row, open) {
  const [policy, settings] = row.name.split(/ (?=\()/), at = row.kind === "reference" && row.capacity !== null ? ` at ${row.capacity.toLocaleString("en")}` : "";
  const extra = [row.kind === "reference" ? `reference${at}` : "", settings?.slice(1, -1)].filter(Boolean).join(", ");
  const toggle = () => { go({ open: open ? "" : row.id }); byId(`row-${row.id}`)?.querySelector("button").focus(); };
  return el("th", { scope: "row", className: "policy" },
    el("button", { type: "button", "aria-expanded": String(open), "aria-controls": open ? `open-${row.id}` : null, onclick: toggle },
      policy.split(/(?<=_)/).flatMap((part) => [part, el("wbr")]), extra ? el("small", { textContent: extra }) : null));
}
