// The intervals of harness/core/intervals.py and harness/report/compare.py, which describe them and name their sources.
const MAX_CORRELATION = 0.8, NEGLIGIBLE_SKEW = 1e-8, NEGLIGIBLE_ERROR = 1e-12, Z = 1.959963984540054;
const total = (values) => values.reduce((sum, value) => sum + value, 0);

// The mean per token of sums over blocks. grid: tokens of the blocks, Student's t for them, whether neighbours may be correlated.
export function meanOfBlocks(sums, grid) {
  const tokens = total(grid.tokens), count = sums.length, mean = total(sums) / tokens;
  if (grid.reach === null) return { mean, low: null, high: null };
  const influence = sums.map((sum, i) => (sum - mean * grid.tokens[i]) / (tokens - grid.tokens[i]));
  const variance = (total(influence.map((x) => x * x)) * (count - 1)) / count;
  const error = Math.sqrt(variance * (grid.neighbours ? inflation(influence) : 1));
  if (error <= NEGLIGIBLE_ERROR * Math.abs(mean)) return { mean, low: mean, high: mean };
  const skew = skewness(influence) / (6 * Math.sqrt(count));
  return { mean, low: mean - error * skewed(grid.reach, skew), high: mean - error * skewed(-grid.reach, skew) };
}

function inflation(influence) {
  const neighbours = total(influence.slice(1).map((x, i) => x * influence[i]));
  let correlation = neighbours / Math.max(total(influence.map((x) => x * x)), 1e-300);
  correlation += (1 + 3 * correlation) / influence.length;
  correlation = Math.min(Math.max(correlation, 0), MAX_CORRELATION);
  return (1 + correlation) / (1 - correlation);
}

function skewness(values) {
  const count = values.length, mean = total(values) / count, off = values.map((x) => x - mean);
  const cubes = total(off.map((x) => x ** 3)) / count, squares = total(off.map((x) => x * x)) / count;
  return ((cubes / squares ** 1.5) * Math.sqrt(count * (count - 1))) / (count - 2);
}

const skewed = (t, skew) => (Math.abs(skew) < NEGLIGIBLE_SKEW ? t : (Math.cbrt(1 + 6 * skew * (t - skew)) - 1) / (2 * skew));

export function wilson(hits, trials) {
  const part = hits / trials, weight = (Z * Z) / trials, middle = part + weight / 2;
  const half = Z * Math.sqrt((part * (1 - part)) / trials + weight / (4 * trials));
  return [Math.max(0, (middle - half) / (1 + weight)), Math.min(1, (middle + half) / (1 + weight))];
}

// How many questions both, only the first, only the second, or neither got right.
export function agreement(a, b) {
  const counts = { both: 0, a: 0, b: 0, neither: 0 };
  for (let i = 0; i < a.length; i++) counts[a[i] === "1" ? (b[i] === "1" ? "both" : "a") : b[i] === "1" ? "b" : "neither"]++;
  return counts;
}

// The interval of the difference of two shares of right answers to the same questions, the second minus the first.
export function pairedShares(a, b) {
  const n = a.length, { both, a: onlyA, b: onlyB, neither } = agreement(a, b);
  const x = (both + onlyA) / n, y = (both + onlyB) / n;
  const [lowA, highA] = wilson(both + onlyA, n), [lowB, highB] = wilson(both + onlyB, n);
  const scale = Math.sqrt((both + onlyA) * (onlyB + neither) * (both + onlyB) * (onlyA + neither));
  const covariance = both * neither - onlyA * onlyB;
  const phi = scale ? (covariance > 0 ? Math.max(covariance - n / 2, 0) : covariance) / scale : 0;
  const width = (down, up) => Math.sqrt(Math.max(down * down - 2 * phi * down * up + up * up, 0));
  return [y - x - width(y - lowB, highA - x), y - x + width(highB - y, x - lowA)];
}

// Likewise of two independent shares, each as [right, questions].
export function independentShares(a, b) {
  const x = a[0] / a[1], y = b[0] / b[1], [lowA, highA] = wilson(...a), [lowB, highB] = wilson(...b);
  return [y - x - Math.hypot(y - lowB, highA - x), y - x + Math.hypot(highB - y, x - lowA)];
}

export function medianInterval(values) {
  const ordered = [...values].sort((x, y) => x - y), n = ordered.length;
  let below = 0, rank = -1, ways = 1;
  for (let k = 0; k <= n && below + ways / 2 ** n <= 0.025; k++) {
    below += ways / 2 ** n;
    rank = k;
    ways = (ways * (n - k)) / (k + 1);
  }
  return rank < 0 ? [null, null] : [ordered[rank], ordered[n - 1 - rank]];
}

export function judged(low, high, margin, moreIsBetter = false) {
  if (low === null || high === null) return "can't tell";
  if (-margin <= low && high <= margin) return "same";
  if (low > 0 || high < 0) return low > 0 === moreIsBetter ? "better" : "worse";
  return "can't tell";
}
