// Two rows, metric by metric: the difference, its interval, and the verdict on the second.
import { feed, margins, minStreams, sums } from "./dom.js";
import { independentShares, judged, meanOfBlocks, medianInterval, pairedShares } from "./statistics.js";

export const sumsOf = (question, row) => sums[question.id].rows[row.id];
const rightOf = (outcomes) => outcomes.split("1").length - 1;

// NLL of b minus that of a, on tokens that both scored after the larger cache had filled; `why` says why there is none.
export function pairedNll(a, b) {
  const x = sumsOf(a.question, a.row), y = sumsOf(b.question, b.row);
  if (!x.nll || !y.nll) return null;
  if (a.question !== b.question) return { why: "different tokens" };
  if (x.trend || y.trend) return { why: "dense was read past its training length: see by position" };
  const at = String(Math.max(a.row.capacity ?? 0, b.row.capacity ?? 0)), { grids } = sums[a.question.id];
  for (const [first, second] of [[x.nll, y.nll], [x.strided, y.strided]]) {
    const [gridA, sumsA] = first?.sums[at] ?? [], [gridB, sumsB] = second?.sums[at] ?? [];
    if (gridA === undefined || gridA !== gridB) continue;
    const grid = grids[gridA], differences = sumsB.map((sum, i) => sum - sumsA[i]);
    return { ...meanOfBlocks(differences, grid), grid, differences, why: grid.reach === null ? "the text is too short for an interval" : "" };
  }
  return { why: "different tokens" };
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

export function nllMetric(a, b) {
  const paired = pairedNll(a, b);
  if (!paired) return null;
  const value = { metric: "perplexity", a: a.row.perplexity, b: b.row.perplexity, low: null, high: null, change: null, why: paired.why };
  if (paired.mean === undefined) return { ...value, verdict: "can't tell" };
  const percent = (nats) => (nats === null ? null : 100 * Math.expm1(Math.min(nats, 700)));
  const { mean, low, high } = paired;
  return { ...value, nats: [mean, low, high], change: percent(mean), low: percent(low), high: percent(high), verdict: judged(low, high, margins.nll) };
}

// Right answers by task. Tasks of sibling questions count too, where the same policy answered them.
export function answerMetrics(a, b) {
  const [first, second] = [a, b].map(({ question, row }) => answersOf(question, row));
  return [...first].filter(([key]) => second.has(key)).map(([key, x]) => {
    const y = second.get(key), same = x.text === y.text && x.outcomes.length === y.outcomes.length;
    const [right, wrong] = [rightOf(x.outcomes), rightOf(y.outcomes)], questions = [x.outcomes.length, y.outcomes.length];
    const { low, high, why } = shareDifference(x, y, same);
    const shares = [right / questions[0], wrong / questions[1]];
    return {
      metric: x.task, a: shares[0], b: shares[1], change: shares[1] - shares[0], low, high, verdict: judged(low, high, margins.accuracy, true),
      why, outcomes: same ? [x.outcomes, y.outcomes] : null,
    };
  });
}

// The interval of y's share of right answers minus x's; over streams, where questions share one.
function shareDifference(x, y, same) {
  const size = ({ outcomes }) => [rightOf(outcomes), outcomes.length];
  if (!x.streams && !y.streams) {
    const [low, high] = same ? pairedShares(x.outcomes, y.outcomes) : independentShares(size(x), size(y));
    return { low, high, why: same ? `${x.outcomes.length} questions` : "different questions" };
  }
  if (!same) return { low: null, high: null, why: "different questions in streams" };
  const { tokens, reach } = y.streams;
  if (reach === null) return { low: null, high: null, why: `too few streams for an interval: ${tokens.length} of ${minStreams}` };
  let end = 0;
  const sums = tokens.map((asked) => rightOf(y.outcomes.slice(end, end + asked)) - rightOf(x.outcomes.slice(end, (end += asked))));
  return { ...meanOfBlocks(sums, { tokens, reach, neighbours: false }), why: `${tokens.length} streams` };
}

function answersOf(question, row) {
  const { twin } = sumsOf(question, row), answers = new Map();
  const kin = feed.questions.filter((q) => q.suite === question.suite && q.model === question.model && q.machine === question.machine && q.evict === question.evict);
  for (const sibling of [question, ...kin]) {
    for (const other of Object.values(sums[sibling.id].rows)) {
      if (other.twin !== twin) continue;
      for (const [task, text, outcomes, streams] of other.answers ?? []) if (!answers.has(task)) answers.set(task, { task, text, outcomes, streams });
    }
  }
  return answers;
}

export function timeMetric(a, b) {
  const x = sumsOf(a.question, a.row).rounds, y = sumsOf(b.question, b.row).rounds;
  if (!x || !y) return null;
  const value = { metric: "ms/token", a: a.row.ms, b: b.row.ms, change: b.row.ms / a.row.ms - 1, low: null, high: null };
  const elsewhere = ["device", "threads", "instructions"].filter((name) => setUp(a.row)[name] !== setUp(b.row)[name]);
  if (elsewhere.length) return { ...value, verdict: "can't tell", why: `another ${elsewhere.join(", ")}` };
  let low, high;
  if (x.together === y.together) [low, high] = medianInterval(y.ms.map((ms, i) => ms / x.ms[i] - 1));
  else {
    const [lowA, highA] = medianInterval(x.ms), [lowB, highB] = medianInterval(y.ms);
    [low, high] = lowA === null || lowB === null ? [null, null] : [lowB / highA - 1, highB / lowA - 1];
  }
  const why = low === null ? "too few rounds" : x.together === y.together ? "round by round" : "two runs: the interval leaves out variation between runs";
  return { ...value, low, high, verdict: judged(low, high, margins.step_ms), why };
}

const setUp = (row) => feed.provenance[(row.cells.find((cell) => cell.task === "latency") ?? row.cells[0]).provenance];

export function bytesMetric(a, b) {
  const [x, y] = [a.row.kv_bytes, b.row.kv_bytes];
  if (x === null || y === null) return null;
  return { metric: "K/V bytes", a: x, b: y, change: y - x, low: y - x, high: y - x, verdict: x === y ? "same" : y > x ? "worse" : "better", why: "" };
}

