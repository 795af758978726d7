// The second view: policies against all questions that a model was asked at one budget, shaded by rank.
import { budgetName, byId, el, feed, number, signed, swatch } from "./dom.js";
import { chosenBudget, chosenQuestion, go, read } from "./state.js";
import { stepTime, sumsOf } from "./pairs.js";

const askedModel = (question) => `${question.model}, ${question.dtype}, ${question.machine}`;
const positionsOf = (question) => [...new Set(question.budgets.flatMap(({ rows }) => rows.map((row) => row.positions)))].join(", ");

export function setUpGood() {
  const counts = new Map();
  for (const question of feed.questions) counts.set(askedModel(question), (counts.get(askedModel(question)) ?? 0) + 1);
  byId("good-model").append(...[...counts].sort(([, x], [, y]) => y - x).map(([name, count]) => new Option(`${name} (${count} question${count === 1 ? "" : "s"})`, name)));
  byId("good-model").addEventListener("change", (event) => go(mostAsked(event.target.value)));
  byId("good-budget").addEventListener("change", (event) => go({ budget: event.target.value, unit: "" }));
  byId("good-positions").addEventListener("change", (event) => go({ q: event.target.value }));
}

// The budget and positions at which a model was asked most.
function mostAsked(model) {
  const found = new Map();
  for (const question of feed.questions.filter((other) => askedModel(other) === model)) {
    for (const { capacity } of question.budgets) {
      const key = `${positionsOf(question)} ${capacity}`, { count } = found.get(key) ?? { count: 0 };
      found.set(key, { count: count + 1, q: question.id, budget: String(capacity), unit: "" });
    }
  }
  const [{ count, ...asked }] = [...found.values()].sort((x, y) => y.count - x.count);
  return asked;
}

const fill = (name, options, chosen) => byId(name).replaceChildren(...options.map(([value, text]) => new Option(text, value, false, value === chosen)));

export function showGood() {
  const state = read(), first = chosenQuestion(state);
  if (!first) return;
  const capacity = chosenBudget(first, state).budget?.capacity ?? null, mode = positionsOf(first);
  const those = feed.questions.filter((question) => askedModel(question) === askedModel(first));
  const asked = those.filter((question) => positionsOf(question) === mode && question.budgets.some((budget) => budget.capacity === capacity));
  const capacities = [...new Set(those.flatMap(({ budgets }) => budgets.map((budget) => budget.capacity)))].filter((x) => x !== null).sort((x, y) => x - y);
  byId("good-model").value = askedModel(first);
  fill("good-budget", capacities.map((x) => [String(x), budgetName(x)]), String(capacity));
  const modes = new Map(those.map((question) => [positionsOf(question), question.id]).reverse());
  fill("good-positions", [...modes].map(([name, id]) => [name === mode ? first.id : id, name]), first.id);
  byId("good-about").textContent = first.about;
  showRows(asked, capacity);
}

// A row a policy that is the same in several questions, with its place in each.
function policies(asked, capacity) {
  const found = new Map();
  for (const question of asked) {
    const { rows } = question.budgets.find((budget) => budget.capacity === capacity);
    for (const row of rows) {
      const { twin } = sumsOf(question, row), entry = found.get(twin) ?? { row, question, cells: new Map() };
      entry.cells.set(question, { row, of: rows.length });
      found.set(twin, entry);
    }
  }
  const mean = ({ cells }) => [...cells.values()].reduce((sum, { row, of }) => sum + (row.rank ? (row.rank[0] + row.rank[1]) / 2 / of : 0.5), 0) / cells.size;
  return [...found.values()].map((entry) => ({ ...entry, mean: mean(entry), leads: [...entry.cells.values()].filter(({ row }) => row.rank?.[0] === 1).length })).sort((x, y) => y.leads - x.leads || x.mean - y.mean);
}

const EVICTED = { "once, after the prompt": "after the prompt" };
const subjectOf = (question) => `${question.subject.replace(/, \w+ positions$/, "")}${question.evict === "at every step" ? "" : `, ${EVICTED[question.evict] ?? question.evict}`}`;

const columnName = (question, all) => (all.some((other) => other !== question && subjectOf(other) === subjectOf(question)) ? `${subjectOf(question)} (${question.suite})` : subjectOf(question));

function showRows(asked, capacity) {
  const found = policies(asked, capacity), timed = found.some(({ question, row }) => stepTime(question, row) !== null);
  byId("good-caption").textContent = `At ${budgetName(capacity)}: % right, or % of perplexity lost. The darker, the better its rank among the policies of that question; bold where it may be the best (95 % confidence).`;
  const head = ["Policy", "May be best in", ...asked.map((question) => columnName(question, asked)), ...(timed ? ["ms/token"] : [])];
  byId("good-head").replaceChildren(...head.map((textContent, i) => el("th", { scope: "col", className: i ? "number" : "", textContent })));
  byId("good-body").replaceChildren(...found.map(({ row, question, cells, leads }) => el("tr", {},
    el("th", { scope: "row", className: "policy" }, swatch(row.policy), row.name),
    el("td", { className: "number", textContent: `${leads} of ${asked.length}` }),
    ...asked.map((other) => cell(other, cells.get(other))),
    ...(timed ? [el("td", { className: "number", textContent: number(stepTime(question, row)) })] : []))));
}

function cell(question, place) {
  if (!place) return el("td", {});
  const { row, of } = place, [answers] = row.answers, middle = row.rank ? (row.rank[0] + row.rank[1]) / 2 : null;
  const text = question.measure === "answers" ? (answers ? `${Math.round(100 * answers.share)}` : "") : row.loss ? signed(row.loss.value) : number(row.perplexity, 4);
  const node = el("td", { className: "number", title: row.rank ? `rank ${row.rank[0]} to ${row.rank[1]} of ${of}` : "not ranked" }, row.rank?.[0] === 1 ? el("strong", { textContent: text }) : text);
  if (middle !== null && of > 1) node.style.setProperty("--good", `${Math.round(45 * (1 - (middle - 1) / (of - 1)))}%`);
  return node;
}
