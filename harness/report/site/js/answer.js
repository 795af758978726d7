// The first view: one question with its answer in a sentence, and what each policy loses at each budget.
import { byId, el, share, tokens } from "./dom.js";
import { chosenBudget, chosenQuestion, go } from "./state.js";
import { fillMatrix } from "./matrix.js";

const byName = (budget) => new Map(budget.rows.map((row) => [row.name, row]));

export function showAnswer(data, suite, state) {
  const question = chosenQuestion(data, state);
  byId("answer-view").classList.toggle("empty", !question);
  if (!question) {
    byId("sentence").textContent = "No record of this suite has a perplexity or right answers. “All cells” shows what was measured.";
    return;
  }
  const budget = chosenBudget(question, state), references = new Map(question.references.map((row) => [`${row.name} ${row.capacity}`, row]));
  const columns = question.budgets.map((other) => ({
    title: tokens(other.capacity), note: other.kv_share === null ? null : `${share(other.kv_share)} of dense`, question, budget: other,
    rows: new Map([...byName(other), ...references]), chosen: other === budget, pick: () => go({ budget: String(other.capacity), open: "" }),
  }));
  const names = new Set([budget, ...question.budgets].flatMap((other) => [...byName(other).keys()]));
  byId("sentence").textContent = `At ${tokens(budget.capacity)}, evicting ${question.evict}: ${budget.finding}`;
  byId("about").textContent = `${question.about} Measured on ${question.machine}.`;
  byId("policies-caption").textContent = `${meaning(question)}, [95 % interval]. Bold: no other policy is better at that budget.`;
  fillMatrix("policies", columns, [...names, ...references.keys()], data, state.open);
  showAgain(data, suite, budget);
  const sizes = data.equal_bytes.filter(({ questions }) => questions.includes(question.id)).flatMap((formats) => formats.sizes);
  byId("formats").hidden = sizes.length === 0;
  byId("equal-bytes").replaceChildren(...sizes.map((size) => el("li", { textContent: `At 1/${Math.round(1 / size.share)} of dense's bytes: ${size.finding}` })));
}

function meaning({ measure, budgets }) {
  const to = [...new Set(budgets.flatMap(({ rows }) => rows.map((row) => row.loss?.to_name.replace(/ at [\d,]+$/, ""))).filter(Boolean))];
  const of = measure === "perplexity" ? "Perplexity" : "Right answers";
  return to.length ? `${of} lost to ${to.join(" or ")}, ${measure === "perplexity" ? "%" : "points"}` : of;
}

function showAgain(data, suite, budget) {
  const best = budget.rows[0], [id] = best.cells, { command } = data.cells.find(({ cell }) => cell === id);
  const line = (text, code) => el("p", {}, `${text}: `, el("code", { textContent: code }));
  byId("again").replaceChildren(line(`Measure ${best.policy} again`, command), line("All of this suite", `bench run ${suite.suite}`),
    line("Another model, another budget", `bench run ${suite.suite} --model FOLDER_OR_HUB_ID --set capacity=[192]`));
}

// The second view: policies against the questions of the suite that one model was asked, at one budget.
export function showQuestions(data, suite, state) {
  const first = chosenQuestion(data, state), { capacity } = first ? chosenBudget(first, state) : {};
  const asked = data.questions.filter((other) => other.model === first.model && other.machine === first.machine && at(other));
  function at(question) { return question.budgets.find((budget) => budget.capacity === capacity); }
  const key = (row) => JSON.stringify([row.policy, row.parameters, row.seed]);
  const columns = asked.map((question) => ({
    title: question.subject, note: `evicting ${question.evict}`, question, budget: at(question),
    rows: new Map(at(question).rows.map((row) => [key(row), row])), pick: () => go({ q: question.id, tab: "", open: "" }),
  }));
  const keys = [...new Set(columns.flatMap(({ rows }) => [...rows.keys()]))], leads = (name) => columns.filter(({ rows }) => rows.get(name)?.rank?.[0] === 1).length;
  byId("questions-caption").textContent = first ? `${first.model} at ${tokens(capacity)}: % of perplexity or points of right answers lost, [95 % interval]. Bold: no other policy is better at that question.` : "No question.";
  fillMatrix("questions", columns, keys.sort((x, y) => leads(y) - leads(x)), data, state.open);
}
