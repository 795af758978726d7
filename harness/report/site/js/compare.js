// The second view: two rows of any question, with differences by metric, by position in the stream, by task and by question.
import { budgetName, byId, bytes, el, feed, marked, number, point, questions, rowsOf, short, signed, svg, swatch } from "./dom.js";
import { chosenBudget, chosenQuestion, go, read } from "./state.js";
import { horizontal, linear, ticks, vertical } from "./axes.js";
import { questionName } from "./answer.js";
import { answerMetrics, blocksOf, bytesMetric, byPosition, nllMetric, timeMetric } from "./pairs.js";

const SIDES = ["a", "b"];

export function setUpCompare() {
  const models = Map.groupBy ? Map.groupBy(feed.questions, ({ model }) => model) : null;
  for (const side of SIDES) {
    const options = models
      ? [...models].map(([label, those]) => el("optgroup", { label }, ...those.map((q) => new Option(questionName(q), q.id))))
      : feed.questions.map((q) => new Option(`${q.model}: ${questionName(q)}`, q.id));
    byId(`${side}-question`).append(...options);
    byId(`${side}-question`).addEventListener("change", (event) => go({ [side]: `${event.target.value}~${likeliest(questions.get(event.target.value), side)}` }));
    byId(`${side}-row`).addEventListener("change", (event) => go({ [side]: `${byId(`${side}-question`).value}~${event.target.value}` }));
  }
}

// In another question, the policy that was chosen, at the nearest budget.
function likeliest(question, side) {
  const now = sideOf(read(), side)?.row, rows = rowsOf(question);
  const like = (row) => (row.policy === now?.policy) * 4 + (row.name === now?.name) * 2 + (row.capacity === now?.capacity);
  return rows.reduce((best, row) => (like(row) > like(best) ? row : best)).id;
}

function sideOf(state, side) {
  const [q, id] = (state[side] ?? "").split("~"), question = questions.get(q);
  const row = question && rowsOf(question).find((other) => other.id === id);
  return row ? { question, row } : starting(state, side);
}

// Without a choice: the two best of the question that is shown.
function starting(state, side) {
  const question = chosenQuestion(state), rows = question ? [...(chosenBudget(question, state).budget?.rows ?? []), ...question.references] : [];
  const row = rows[side === "a" ? 0 : 1] ?? rows[0];
  return row ? { question, row } : null;
}

export function showCompare() {
  const state = read(), [a, b] = SIDES.map((side) => sideOf(state, side));
  if (!a || !b) {
    byId("compared").replaceChildren(el("p", { textContent: "Nothing to compare yet." }));
    return;
  }
  for (const [side, { question, row }] of [["a", a], ["b", b]]) {
    byId(`${side}-question`).value = question.id;
    byId(`${side}-row`).replaceChildren(...groupsOf(question).map(([label, rows]) => el("optgroup", { label }, ...rows.map((other) => new Option(nameIn(other), other.id, false, other === row)))));
  }
  const answers = answerMetrics(a, b), metrics = [nllMetric(a, b), ...answers, timeMetric(a, b), bytesMetric(a, b)].filter(Boolean);
  byId("compared").replaceChildren(summary(a, b, metrics), table(a, b, metrics), ...byStream(a, b), ...byQuestion(a, b, answers));
}

const groupsOf = (question) => [...question.budgets.map((budget) => [budgetName(budget.capacity), budget.rows]), ["references", question.references]].filter(([, rows]) => rows.length);
const nameIn = (row) => (row.kind === "reference" && row.capacity !== null ? `${row.name} at ${row.capacity}` : row.name);

function summary(a, b, metrics) {
  const counts = ["better", "worse", "same", "can't tell"].map((verdict) => [metrics.filter((metric) => metric.verdict === verdict).length, verdict]).filter(([count]) => count);
  const name = ({ row }) => el("span", { className: "who" }, swatch(row.policy), nameIn(row), el("small", { textContent: ` ${budgetName(row.capacity)}`.replace(" as the prompt decides", " all tokens") }));
  return el("p", { className: "versus" }, name(b), " against ", name(a), `: ${counts.map(([count, verdict]) => `${count} ${verdict}`).join(", ") || "no figure in common"}.`);
}

const SHOWN = {
  perplexity: { value: (x) => number(x, 5), change: (x) => `${signed(x)} %` },
  "ms/token": { value: (x) => number(x), change: (x) => `${signed(100 * x)} %` },
  "K/V bytes": { value: (x) => (x === 0 ? "no cache" : bytes(x)), change: (x) => (x < 0 ? `−${bytes(-x)}` : x > 0 ? `+${bytes(x)}` : "0") },
};
const ANSWERS = { value: (x) => `${number(100 * x)} %`, change: (x) => `${signed(100 * x)} points` };

function table(a, b, metrics) {
  const head = ["Figure", a.row.name, b.row.name, "Difference", "95 % interval", "Verdict on the second", "Note"];
  const lines = metrics.map((metric) => {
    const shown = SHOWN[metric.metric] ?? ANSWERS, interval = metric.low === null || metric.metric === "K/V bytes" ? "" : `[${shown.change(metric.low)}, ${shown.change(metric.high)}]`;
    const texts = [shown.value(metric.a), shown.value(metric.b), metric.change === null ? "" : shown.change(metric.change), interval];
    return el("tr", { role: "row" }, el("th", { scope: "row", role: "rowheader", textContent: metric.metric }),
      ...texts.map((text, i) => el("td", { role: "cell", className: "number", "data-label": head[i + 1], textContent: text })),
      el("td", { role: "cell", "data-label": head[5], className: `verdict ${metric.verdict.replace(/\W/g, "")}`, textContent: metric.verdict }),
      el("td", { role: "cell", "data-label": "Why", className: "why", textContent: metric.why }));
  });
  return el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Differences" }, el("table", { role: "table", className: "cards" },
    el("caption", { className: "hidden", textContent: "Differences of the two by figure and task" }),
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...head.map((text, i) => el("th", { scope: "col", role: "columnheader", className: i > 0 && i < 5 ? "number" : "", textContent: text })))),
    el("tbody", { role: "rowgroup" }, ...lines)));
}

function byStream(a, b) {
  const metric = nllMetric(a, b), drawn = blocksOf(a, b), buckets = byPosition(a, b);
  if (!metric || (!buckets.length && !drawn)) return [];
  const [mean, low, high] = metric.nats ?? [];
  const note = mean === undefined ? `Over the whole stream they can't be compared: ${metric.why}.`
    : `Over the whole stream: ${signedNats(mean)} nats per token${low === null ? "; the text is too short for an interval" : ` [${signedNats(low)}, ${signedNats(high)}]`}. A stretch has no interval of its own: it is too short for one.`;
  const rows = buckets.map(([from, to, x, y]) => el("tr", {}, el("th", { scope: "row", textContent: `${from.toLocaleString("en")} to ${to.toLocaleString("en")}` }),
    ...[number(Math.exp(Math.min(x, 700)), 5), number(Math.exp(Math.min(y, 700)), 5), `${signed(100 * Math.expm1(Math.min(y - x, 700)))} %`].map((text) => el("td", { className: "number", textContent: text }))));
  return [el("h2", { textContent: "By position in the stream" }), el("p", { className: "note", textContent: note }), ...(mean !== undefined && drawn?.differences.length > 1 ? [blocks(b, drawn, mean)] : []),
    rows.length ? el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Perplexity by position" }, el("table", { className: "plain" },
      el("thead", {}, el("tr", {}, ...["Tokens", `${a.row.name}, perplexity`, `${b.row.name}, perplexity`, "Difference"].map((text, i) => el("th", { scope: "col", className: i ? "number" : "", textContent: text })))), el("tbody", {}, ...rows))) : ""];
}

const signedNats = (value) => `${value < 0 ? "−" : "+"}${number(Math.abs(value), 2)}`;

// The difference in each block of the stream, the mean as a line.
function blocks(b, { differences, grid }, mean) {
  const width = Math.max(300, Math.min(1200, byId("compared").clientWidth || 880)), height = 220, left = 64, right = width - 10, top = 28, bottom = height - 46;
  const values = differences.map((sum, i) => sum / grid.tokens[i]), starts = [0];
  for (const tokens of grid.tokens) starts.push(starts.at(-1) + tokens);
  const y = linear([Math.min(0, ...values), Math.max(0, ...values)], [bottom, top]), x = linear([0, starts.at(-1)], [left, right]);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Difference in nats per token in each of ${values.length} blocks of the stream, ${short(starts.at(-1) / values.length)} scored tokens each.` },
    vertical(y, ticks(y.domain, 4), { left, right, title: "difference, nats per token" }),
    horizontal(x, ticks([0, starts.at(-1)], 4), { top, bottom, title: `scored tokens after the caches filled (${grid.start.toLocaleString("en")})` }),
    svg("line", { x1: left, x2: right, y1: y(0), y2: y(0), class: "reference" }), svg("line", { x1: left, x2: right, y1: y(mean), y2: y(mean), class: "chosen" }));
  chart.append(marked(b.row.policy, ...values.map((value, i) => point(b.row.policy, x((starts[i] + starts[i + 1]) / 2), y(value)))));
  return el("figure", {}, chart);
}

const KINDS = { both: "both right", a: "only the first", b: "only the second", neither: "neither" };

// A strip a task: one mark a question.
function byQuestion(a, b, answers) {
  const strips = answers.flatMap(({ outcomes }) => outcomes);
  if (!strips.length) return [];
  return [el("h2", { textContent: "By question" }), el("p", { className: "legend-line" }, ...Object.entries(KINDS).map(([kind, text]) => el("span", {}, square(kind), text))),
    ...strips.map(({ task, pair: [x, y] }) => {
      const kinds = [...x].map((right, i) => (right === "1" ? (y[i] === "1" ? "both" : "a") : y[i] === "1" ? "b" : "neither"));
      const said = Object.entries(KINDS).map(([kind, text]) => `${text} ${kinds.filter((other) => other === kind).length}`).join(", ");
      return el("figure", { className: "strip" }, el("figcaption", {}, el("b", { textContent: task }), ` ${said}`), el("div", { role: "img", "aria-label": `${task}: ${said}` }, ...kinds.map(square)));
    })];
}

const square = (kind, place) => el("i", { className: `q ${kind}`, title: place === undefined ? null : `question ${place + 1}: ${KINDS[kind]}` });
