// The address holds all that a reader chose, so that every view can be shared.
import { feed, questions } from "./dom.js";

export const read = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

let show = () => {};
export function whenChanged(render) {
  show = render;
  addEventListener("hashchange", render);
}

export function address(changes, from = read()) {
  const kept = Object.entries({ ...from, ...changes }).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return kept.length ? `#${new URLSearchParams(kept)}` : location.pathname + location.search;
}

export function go(changes) {
  history.replaceState(null, "", address(changes));
  show();
}


export const chosenQuestion = (state) => questions.get(state.q) ?? questions.get(feed.default) ?? null;

// A budget in a unit: tokens, KiB, or % of dense's bytes.
export const UNITS = {
  tokens: { label: "tokens", of: (budget) => budget.capacity },
  kib: { label: "KiB", of: (budget) => (budget.kv_bytes === null ? null : budget.kv_bytes / 1024) },
  share: { label: "% of dense", of: (budget) => (budget.kv_share === null ? null : 100 * budget.kv_share) },
};

// The largest budget within what the reader has; the smallest if none fits. The middle one if the reader chose nothing.
export function chosenBudget(question, state) {
  const unit = UNITS[state.unit] ?? UNITS.tokens, most = Number(state.budget);
  const sized = question.budgets.filter((budget) => unit.of(budget) !== null);
  if (!sized.length || !(most > 0)) return { budget: question.budgets[Math.floor(question.budgets.length / 2)] ?? null, fits: true };
  const fitting = sized.filter((budget) => unit.of(budget) <= most * (1 + 1e-9));
  return { budget: fitting.at(-1) ?? sized[0], fits: fitting.length > 0 };
}
