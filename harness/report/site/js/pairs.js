// Two rows, metric by metric: the difference, its interval, and the verdict on the second. Every interval is read, none computed.
import { feed, margins, rowsOf, sums } from "./dom.js";

export const sumsOf = (question, row) => sums[question.id].rows[row.id];
const orders = new Map();

// The numbers of a question's rows among its pairs.
function numbers(question) {
  if (!orders.has(question)) orders.set(question, new Map(sums[question.id].order.map((id, place) => [id, place])));
  return orders.get(question);
}

// What y loses to x, in nats per token or as a share of right answers, with its ends; null if they can't be paired.
export function loss(question, x, y) {
  if (x === y) return { value: 0, low: 0, high: 0 };
  const { pairs, order } = sums[question.id], [i, j] = [x, y].map((row) => numbers(question).get(row.id));
  if (i > j) {
    const found = loss(question, y, x);
    return found && { value: -found.value, low: found.high === null ? null : -found.high, high: found.low === null ? null : -found.low };
  }
  const found = pairs[i * order.length - (i * (i + 1)) / 2 + j - i - 1];
  return found ? { value: found[0], low: found[1] ?? null, high: found[2] ?? null } : null;
}

// How a pair's interval was corrected, in words.
function correction({ question }, x, y) {
  const budget = question.budgets.find(({ rows }) => rows.includes(x) && rows.includes(y));
  return budget && budget.rows.length > 2 ? `corrected for all pairs of ${budget.rows.length} policies` : "";
}

const percent = (nats) => (nats === null ? null : 100 * Math.expm1(Math.min(nats, 700)));

// The perplexity of a row; of a reference, over the tokens of the other's budget.
const perplexity = ({ question, row }, other) => question.budgets.find(({ capacity }) => capacity === other.row.capacity)?.references[row.id] ?? row.perplexity;

export function nllMetric(a, b) {
  const x = sumsOf(a.question, a.row), y = sumsOf(b.question, b.row);
  if (a.question.measure !== "perplexity" || b.question.measure !== "perplexity" || !x.nll || !y.nll) return null;
  const value = { metric: "perplexity", a: perplexity(a, b), b: perplexity(b, a), low: null, high: null, change: null };
  const found = a.question === b.question ? loss(a.question, a.row, b.row) : null;
  if (!found) return { ...value, verdict: "can't tell", why: x.trend || y.trend ? "dense was read past its training length: see by position" : "different tokens" };
  const { value: mean, low, high } = found;
  return {
    ...value, nats: [mean, low, high], change: percent(mean), low: percent(low), high: percent(high), verdict: judged(low, high, margins.nll),
    why: low === null ? "the text is too short for an interval" : correction(a, a.row, b.row),
  };
}

// The difference in each block of tokens that both scored after the larger cache had filled; null if there are none.
export function blocksOf(a, b) {
  if (a.question !== b.question) return null;
  const x = sumsOf(a.question, a.row), y = sumsOf(b.question, b.row), at = String(Math.max(a.row.capacity ?? 0, b.row.capacity ?? 0));
  for (const [first, second] of [[x.nll, y.nll], [x.strided, y.strided]]) {
    const [gridA, sumsA] = first?.sums[at] ?? [], [gridB, sumsB] = second?.sums[at] ?? [];
    if (gridA !== undefined && gridA === gridB) return { grid: sums[a.question.id].grids[gridA], differences: sumsB.map((sum, i) => sum - sumsA[i]) };
  }
  return null;
}

// [from, to, NLL of a, NLL of b] of each stretch of the stream for which both have a mean over the same tokens.
export function byPosition(a, b) {
  const x = sumsOf(a.question, a.row), y = sumsOf(b.question, b.row);
  if (a.question !== b.question || !x.nll || !y.nll) return [];
  const strided = x.strided && y.strided;
  const [first, second] = strided ? [x.strided, y.strided] : [x.nll, y.nll];
  const theirs = new Map(second.buckets.map(([from, to, nll]) => [`${from} ${to}`, nll]));
  return first.buckets.filter(([from, to]) => theirs.has(`${from} ${to}`)).map(([from, to, nll]) => [from, to, nll, theirs.get(`${from} ${to}`)]);
}

// Right answers, a figure a task: of the question itself and of its siblings, where the same two policies answered them.
export function answerMetrics(a, b) {
  const [mine, theirs] = [a, b].map(asked), taskOf = ({ row }) => row.answers[0].task;
  return [...new Set(mine.map(taskOf))].flatMap((task) => {
    const [xs, ys] = [mine, theirs].map((all) => all.filter((one) => taskOf(one) === task));
    const x = xs.find(({ question }) => ys.some((y) => y.question === question)) ?? xs[0];
    const y = ys.find(({ question }) => question === x.question) ?? ys[0];
    return y ? [answerMetric(x, y)] : [];
  });
}

// The questions judged by answers in which a row's policy has a row.
function asked({ question, row }) {
  const { twin } = sumsOf(question, row);
  const kin = feed.questions.filter((q) => q !== question && q.suite === question.suite && q.model === question.model && q.machine === question.machine && q.evict === question.evict);
  return [question, ...kin].filter(({ measure }) => measure === "answers").flatMap((q) => {
    const id = Object.keys(sums[q.id].rows).find((other) => sums[q.id].rows[other].twin === twin);
    const found = id && rowsOf(q).find((other) => other.id === id);
    return found?.answers.length ? [{ question: q, row: found }] : [];
  });
}

export function answerMetric(a, b) {
  const [x, y] = [a, b].map(({ row }) => row.answers[0]), value = { metric: x.task, a: x.share, b: y.share, low: null, high: null };
  const outcomes = sumsOf(a.question, a.row).answers?.map(([task, text, first]) => {
    const [, , second] = sumsOf(b.question, b.row).answers?.find((other) => other[0] === task && other[1] === text) ?? [];
    return { task, pair: [first, second] };
  }).filter(({ pair: [first, second] }) => first.length === second?.length) ?? [];
  const found = a.question === b.question ? loss(a.question, a.row, b.row) : null;
  if (!found) return { ...value, change: y.share - x.share, verdict: "can't tell", why: a.question === b.question ? "different questions" : repeated(a, b), outcomes };
  const [low, high] = found.low === null ? [null, null] : [-found.high, -found.low];
  const why = low === null ? `too few streams for an interval: ${y.streams}` : [y.streams ? `${y.streams} streams` : `${y.questions} questions`, correction(a, a.row, b.row)].filter(Boolean).join(", ");
  return { ...value, change: -found.value, low, high, verdict: judged(low, high, margins.accuracy, true), why, outcomes };
}

// Where the interval of two rows is that the page does not hold.
const repeated = (a, b) => `of two questions: bench compare judges the records of cells ${a.row.cells[0].cell.slice(0, 8)} and ${b.row.cells[0].cell.slice(0, 8)}`;

// Milliseconds a token, of any suite that timed the same policy of this model on this machine.
let times = null;
export function stepTime(question, row) {
  const key = (q, r) => [q.model, q.dtype, q.machine, sumsOf(q, r).twin].join("\n");
  times ??= new Map(feed.questions.flatMap((q) => rowsOf(q).filter((r) => r.ms !== null).map((r) => [key(q, r), r.ms])));
  return row.ms ?? times.get(key(question, row)) ?? null;
}

export function timeMetric(a, b) {
  if (a.row.ms === null || b.row.ms === null) return null;
  const value = { metric: "ms/token", a: a.row.ms, b: b.row.ms, change: b.row.ms / a.row.ms - 1, low: null, high: null, verdict: "can't tell" };
  if (a.row === b.row) return { ...value, verdict: "same", why: "" };
  const [, , change, low, high, verdict, why] = (a.question === b.question && sums[a.question.id].times.find(([x, y]) => x === a.row.id && y === b.row.id)) || [];
  return verdict === undefined ? { ...value, why: repeated(a, b) } : { ...value, change, low, high, verdict, why };
}

export function bytesMetric(a, b) {
  const [x, y] = [a.row.kv_bytes, b.row.kv_bytes];
  if (x === null || y === null) return null;
  return { metric: "K/V bytes", a: x, b: y, change: y - x, low: y - x, high: y - x, verdict: x === y ? "same" : y > x ? "worse" : "better", why: "" };
}

function judged(low, high, margin, moreIsBetter = false) {
  if (low === null || high === null) return "can't tell";
  if (-margin <= low && high <= margin) return "same";
  if (low > 0 || high < 0) return low > 0 === moreIsBetter ? "better" : "worse";
  return "can't tell";
}
