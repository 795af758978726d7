// The first view: one question at one budget, its answer in a sentence, a chart, and a row a policy.
import { budgetName, byId, bytes, el, feed, number, rowName, share, short, signed, swatch } from "./dom.js";
import { address, chosenBudget, chosenQuestion, go, read, UNITS } from "./state.js";
import { drawChart } from "./chart.js";
import { details } from "./details.js";
import { answerMetric, nllMetric, stepTime } from "./pairs.js";

const weight = (question) => Math.max(...question.budgets.map(({ rows }) => rows.length)) + (question.measure === "perplexity" ? 1000 : 0);
const sorted = [...feed.questions].sort((x, y) => weight(y) - weight(x));
const modelOf = (question) => `${question.model}, ${question.dtype}`;
const several = (name) => new Set(feed.questions.map((question) => question[name])).size > 1;

export function questionName(question) {
  const policies = Math.max(...question.budgets.map(({ rows }) => rows.length));
  const extra = [several("evict") && question.evict !== "at every step" ? `evicting ${question.evict}` : "", machines(question) ? `on ${question.machine}` : ""];
  return `${question.subject} · ${question.suite}, ${policies} ${policies === 1 ? "policy" : "policies"}${extra.filter(Boolean).map((part) => `, ${part}`).join("")}`;
}

const machines = (question) => new Set(feed.questions.filter((q) => q.suite === question.suite && q.model === question.model).map((q) => q.machine)).size > 1;

export function setUpAnswer() {
  const model = byId("model"), question = byId("question"), unit = byId("unit");
  model.append(...[...new Set([...feed.questions].map(modelOf))].sort().map((name) => new Option(name, name)), new Option("another model", ""));
  unit.append(...Object.entries(UNITS).map(([name, { label }]) => new Option(label, name)));
  model.addEventListener("change", () => go(model.value ? { q: sameSubject(model.value), model: "", open: "" } : { model: "?" }));
  byId("other-model").addEventListener("change", (event) => go(otherModel(event.target.value)));
  question.addEventListener("change", () => go({ q: question.value, open: "" }));
  unit.addEventListener("change", () => go({ unit: unit.value === "tokens" ? "" : unit.value, budget: startOf(unit.value) }));
  byId("most").addEventListener("change", (event) => go({ budget: event.target.value }));
  byId("control").addEventListener("change", (event) => go({ random: event.target.checked ? "" : "0" }));
  for (const name of ["x", "y"]) byId(`cost-${name}`).addEventListener("change", (event) => go({ [name]: event.target.value }));
  byId("ask").addEventListener("submit", (event) => event.preventDefault());
}

// A model that was measured is chosen; of another, the page says how to measure it.
function otherModel(name) {
  const known = feed.questions.find((question) => [question.model, modelOf(question)].includes(name.trim()));
  return known ? { q: sameSubject(modelOf(known)), model: "", open: "" } : { model: name.trim() || "?" };
}

// The question of another model that is most like the one shown.
function sameSubject(model) {
  const now = chosenQuestion(read()), those = sorted.filter((question) => modelOf(question) === model);
  const like = (question) => (question.subject === now?.subject) * 2 + (question.suite === now?.suite);
  return those.reduce((best, question) => (like(question) > like(best) ? question : best)).id;
}

// What a unit starts with: half of dense's bytes, or the budget shown.
function startOf(unit) {
  if (unit === "share") return "50";
  const { budget } = chosenBudget(chosenQuestion(read()), read());
  return budget ? String(number(UNITS[unit].of(budget), 6)).replaceAll(",", "") : "";
}

export function showAnswer() {
  const state = read(), question = chosenQuestion(state);
  byId("answer-view").classList.toggle("empty", !question);
  if (!question) {
    byId("sentence").textContent = "No record has a perplexity or right answers yet. All cells are in the third view.";
    return;
  }
  const { budget, fits } = chosenBudget(question, state);
  fillControls(question, budget, state);
  byId("about").textContent = question.about;
  byId("sentence").textContent = budget.answer;
  byId("fit").textContent = fitting(question, budget, state, fits);
  byId("half").textContent = halved(question, budget);
  const sizes = atEqualBytes(question);
  byId("formats").hidden = sizes.length === 0;
  byId("equal-bytes").replaceChildren(...sizes.map((size) => el("li", { textContent: `At 1/${Math.round(1 / size.share)} of dense's bytes: ${size.finding}` })));
  showCost(question, budget, state);
  showChart(question, budget, state);
  showTable(question, budget, state);
}

function fillControls(question, budget, state) {
  byId("model").value = state.model ? "" : modelOf(question);
  byId("other-model").parentElement.hidden = !state.model;
  byId("other-model").value = state.model === "?" ? "" : state.model ?? "";
  const those = sorted.filter((other) => modelOf(other) === modelOf(question));
  byId("question").replaceChildren(...those.map((other) => new Option(questionName(other), other.id, false, other === question)));
  byId("unit").value = state.unit in UNITS ? state.unit : "tokens";
  byId("budgets").replaceChildren(...question.budgets.map((other) => el("button", {
    type: "button", "aria-pressed": String(other === budget), textContent: budgetLabel(other, byId("unit").value),
    title: `${budgetName(other.capacity)}, ${bytes(other.kv_bytes)}`, onclick: () => go({ budget: UNITS[byId("unit").value].of(other) }),
  })));
  byId("most").value = Number(state.budget) > 0 ? state.budget : "";
}

function budgetLabel(budget, unit) {
  const value = UNITS[unit].of(budget);
  return value === null ? "–" : number(value, unit === "tokens" ? 9 : 2);
}

// What the reader asked for and nobody measured, with the command that would.
function fitting(question, budget, state, fits) {
  const unit = byId("unit").value, most = Number(state.budget), said = [];
  if (state.model) said.push(`Nobody measured ${state.model === "?" ? "another model" : state.model} here: bench run ${question.suite} --model ${state.model === "?" ? "FOLDER_OR_HUB_ID" : state.model} does. Below is ${question.model}.`);
  if (!(most > 0)) return said.join(" ");
  const measured = UNITS[unit].of(budget);
  if (measured === null) return [...said, "The bytes of these caches are not known as that."].join(" ");
  if (Math.abs(measured - most) <= 1e-6 * most) return said.join(" ");
  const limit = { tokens: `${number(most, 9)} tokens`, kib: `${number(most, 6)} KiB`, share: `${number(most, 4)} % of dense's bytes${question.dense_bytes ? ` (${bytes((question.dense_bytes * most) / 100)})` : ""}` }[unit];
  const holds = `${budgetName(budget.capacity)} in ${bytes(budget.kv_bytes)}${budget.kv_share === null ? "" : `, ${share(budget.kv_share)} of dense`}`;
  said.push(fits ? `Within ${limit}, the largest cache measured here keeps ${holds}.` : `No cache measured here is within ${limit}; the smallest keeps ${holds}.`);
  const capacity = budget.capacity === null ? 0 : Math.floor(((budget.capacity + 1) * most) / (unit === "tokens" ? budget.capacity + 1 : measured)) - (unit === "tokens" ? 0 : 1);
  if (capacity > 0 && capacity !== budget.capacity) said.push(`To measure ${number(capacity, 9)} tokens: bench run ${question.suite} --set capacity=[${capacity}]`);
  return said.join(" ");
}

function halved(question, budget) {
  if (budget.capacity === null) return "";
  const half = question.budgets.filter((other) => other.capacity !== null && other.capacity <= budget.capacity / 2).at(-1);
  return half ? `With half of that? At ${budgetName(half.capacity)}: ${half.finding}` : "";
}

// The best policy of each size, whatever the format of K and V.
const atEqualBytes = (question) => feed.equal_bytes.filter((formats) => formats.questions.includes(question.id)).flatMap(({ sizes }) => sizes);

function showCost(question, budget, state) {
  const rows = [...budget.rows, ...question.references];
  const best = rows[0], other = budget.rows.find((row) => row.policy !== best.policy && row.kind === "cache") ?? rows[1] ?? best;
  const x = rows.find((row) => row.id === state.x) ?? other, y = rows.find((row) => row.id === state.y) ?? best;
  for (const [name, chosen] of [["x", x], ["y", y]]) {
    byId(`cost-${name}`).replaceChildren(...rows.map((row) => new Option(row.kind === "reference" ? rowName(row) : row.name, row.id, false, row === chosen)));
  }
  byId("cost").textContent = x === y ? "Choose two policies." : cost({ question, row: y }, { question, row: x });
  byId("cost-more").href = address({ tab: "compare", a: `${question.id}~${y.id}`, b: `${question.id}~${x.id}` });
}

// In words, what the second loses to the first.
export function cost(a, b) {
  const nll = a.question.measure === "perplexity", metric = nll ? nllMetric(a, b) : answerMetric(a, b);
  if (!metric || metric.change === null) return `That can't be told: ${metric?.why || "nothing was measured of both"}.`;
  const unit = nll ? " % of perplexity" : " points of right answers", scale = nll ? 1 : -100;
  const [value, ...ends] = [metric.change, metric.low, metric.high].map((part) => (part === null ? null : scale * part));
  if (ends[0] === null) return `${signed(value)}${unit}, but ${metric.why || "there is no interval"}.`;
  const [low, high] = ends.sort((p, q) => p - q);
  if (low <= 0 && high >= 0) return `The difference is within the noise: ${signed(value)}${unit} [${signed(low)}, ${signed(high)}].`;
  const sizes = [low, high].map(Math.abs).sort((p, q) => p - q);
  return `${value > 0 ? "It loses" : "It gains"} ${short(value)}${unit} [${sizes.map(short).join(", ")}].`;
}

function showChart(question, budget, state) {
  const place = byId("chart"), width = Math.max(300, Math.min(1296, place.clientWidth || 880));
  const chart = drawChart(question, budget, { unit: byId("unit").value, control: state.random !== "0", width });
  const controls = question.budgets.some(({ rows }) => rows.some((row) => row.kind === "control"));
  byId("control").checked = state.random !== "0";
  byId("control").parentElement.hidden = !controls;
  place.replaceChildren(...(chart ? [chart.root, ...(chart.legend ? [chart.legend] : [])] : [el("p", { className: "note", textContent: "Nothing to draw: no policy was measured against another." })]));
}

// Columns of the table; only those with a figure are shown. `best` is 1 where more is better and -1 where less is.
function columns(question, rows, references) {
  const tasks = [...new Set(rows.flatMap((row) => row.answers.map(({ task }) => task)))], perplexity = question.measure === "perplexity";
  const answersOf = (row, task) => row.answers.find((answers) => answers.task === task);
  return [
    { head: "Rank", text: (row) => (row.rank ? (row.rank[0] === row.rank[1] ? `${row.rank[0]}` : `${row.rank[0]}–${row.rank[1]}`) : "–") },
    { head: "Policy" },
    { head: perplexity ? `Perplexity lost, %${ofTokens(Math.max(1, ...rows.map((row) => row.loss?.stride ?? 1)))}` : "Points lost", value: (row) => row.loss?.value ?? null, best: -1, text: lossText },
    { head: "Perplexity", value: (row) => references[row.id] ?? row.perplexity, best: -1, text: (row) => number(references[row.id] ?? row.perplexity, 4) + ofTokens(row.stride) },
    ...tasks.map((task) => ({ head: `${task}, % right`, value: (row) => answersOf(row, task)?.share ?? null, best: 1, text: (row) => answersText(answersOf(row, task)) })),
    { head: "K/V of dense", value: (row) => row.kv_share, text: (row) => (row.kv_bytes === 0 ? "no cache" : row.kv_share === null ? bytes(row.kv_bytes) : `${share(row.kv_share)} (${bytes(row.kv_bytes)})`) },
    { head: "ms/token", value: (row) => stepTime(question, row), best: -1, text: (row) => number(stepTime(question, row)) },
    { head: "× dense", value: (row) => row.times_dense?.[0] ?? null, best: -1, text: (row) => (row.times_dense ? number(row.times_dense[0]) : "") },
    { head: "Tokens read", value: (row) => row.tokens_read, text: (row) => (row.tokens_read === null ? "" : row.tokens_read.toLocaleString("en")) },
    { head: "Code", text: (row) => row.code, fact: "all run the code of" },
    { head: "Status", text: (row) => row.status, fact: "status of all:" },
  ].filter(({ value }) => !value || rows.some((row) => value(row) !== null));
}

const ofTokens = (stride) => (stride > 1 ? ` (1 token in ${stride})` : "");
const lossText = (row) => (!row.loss ? "" : `${signed(row.loss.value)}${row.loss.low === null ? (row.loss.nats ? " (too short)" : " (too few streams)") : ` [${signed(row.loss.low)}, ${signed(row.loss.high)}]`}`);
const answersText = (answers) => (answers ? `${Math.round(100 * answers.share)} [${answers.low === null ? "too few streams" : `${Math.round(100 * answers.low)}, ${Math.round(100 * answers.high)}`}]` : "");

function showTable(question, budget, state) {
  const rows = [...budget.rows, ...question.references], all = columns(question, rows, budget.references);
  const same = all.filter(({ fact, text }) => fact && rows.length > 1 && rows.every((row) => text(row) === text(rows[0])));  // a fact is no column
  const shown = all.filter((column) => !same.includes(column));
  const bests = shown.map(({ value, best }) => (best ? budget.rows.map(value).filter((x) => x !== null).reduce((x, y) => (best * y > best * x ? y : x), -best * Infinity) : null));
  byId("policies-caption").textContent = `Policies at ${budgetName(budget.capacity)}, ${question.model}, ${question.subject}, evicting ${question.evict}, on ${question.machine}${same.map(({ fact, text }) => `, ${fact} ${text(rows[0])}`).join("")}`;
  byId("policies-head").replaceChildren(...shown.map(({ head, value }) => el("th", { scope: "col", role: "columnheader", className: numeric(head, value), textContent: head })));
  byId("policies-body").replaceChildren(...rows.flatMap((row) => {
    const open = state.open === row.id;
    const line = el("tr", { role: "row", className: row.kind, id: `row-${row.id}` }, ...shown.map(({ head, text, value }, i) => (head === "Policy"
      ? policyCell(row, open)
      : el("td", { role: "cell", "data-label": head, className: numeric(head, value) }, value && bests[i] !== null && row.kind !== "reference" && value(row) === bests[i] ? best(text(row)) : text(row)))));
    return open ? [line, el("tr", { role: "row", className: "opened", id: `open-${row.id}` }, el("td", { role: "cell", colspan: shown.length }, details(question, row)))] : [line];
  }));
}

const numeric = (head, value) => (value || head === "Rank" ? "number" : "");
const best = (text) => el("strong", {}, text, el("span", { className: "hidden", textContent: " (best)" }));

function policyCell(row, open) {
  const parameters = Object.entries(row.parameters).filter(([, value]) => value !== null).map(([key, value]) => `${key} ${value}`).join(", ");
  const extra = [row.kind === "reference" ? "reference" : "", row.kind === "reference" && row.capacity !== null ? budgetName(row.capacity) : "", parameters].filter(Boolean).join(", ");
  return el("th", { scope: "row", role: "rowheader", className: "policy" },
    el("button", { type: "button", "aria-expanded": String(open), "aria-controls": open ? `open-${row.id}` : null, onclick: () => { go({ open: open ? "" : row.id }); byId(`row-${row.id}`)?.querySelector("button").focus(); } },
      swatch(row.policy), el("span", {}, row.policy, extra ? el("small", { textContent: extra }) : null)));
}
