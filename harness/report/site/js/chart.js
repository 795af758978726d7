// Quality lost against the budget: a line a policy, or, with a single budget, an interval a policy.
import { budgetName, dashes, el, marked, number, point, rowName, signed, svg, swatch } from "./dom.js";
import { bent, bentTicks, horizontal, label, linear, logarithmic, ticks, vertical, withoutOutliers } from "./axes.js";
import { UNITS } from "./state.js";

const HEIGHT = 330, LINE_HEIGHT = 20, EDGE = 10, LETTER = 6.7;
const FAR_BEYOND = 8, SMALL = 0.05;  // times the median difference; from there on an axis is bent

// The loss of a row, or without a reference its figure.
function valueOf(question, row) {
  if (row.loss) return { value: row.loss.value, low: row.loss.low ?? row.loss.value, high: row.loss.high ?? row.loss.value };
  if (question.measure === "perplexity") return row.perplexity === null ? null : { value: row.perplexity, low: row.perplexity, high: row.perplexity };
  const [answers] = row.answers;
  return answers ? { value: 100 * answers.share, low: 100 * (answers.low ?? answers.share), high: 100 * (answers.high ?? answers.share) } : null;
}

// The rows to draw: if any has a loss, only those that have one, so that an axis has one meaning.
function drawable(question, control) {
  const shown = question.budgets.flatMap((budget) => budget.rows.map((row) => ({ row, budget, drawn: valueOf(question, row) })));
  const losses = shown.some(({ row }) => row.loss);
  return shown.filter(({ row, drawn }) => drawn && (!losses || row.loss) && (control || row.kind !== "control"));
}

function axisTitle(question, points) {
  const names = [...new Set(points.map(({ row }) => row.loss?.to_name.replace(/ at [\d,]+$/, "")).filter(Boolean))];
  const of = question.measure === "perplexity" ? "perplexity" : "right answers";
  if (!names.length) return question.measure === "perplexity" ? "perplexity" : "right answers, %";
  return `${of} lost to ${names.join(" or ")}, ${question.measure === "perplexity" ? "%" : "points"}`;
}

export function drawChart(question, chosen, { unit, control, width }) {
  const points = drawable(question, control);
  if (!points.length) return null;
  const budgets = new Set(points.map(({ budget }) => budget));
  const draw = budgets.size > 1 && UNITS[unit].of(points[0].budget) !== null ? overBudgets : atOneBudget;
  return draw(question, points, { chosen, unit, width, title: axisTitle(question, points) });
}

function domain(points) {
  const low = -withoutOutliers(points.map(({ drawn }) => Math.max(0, -drawn.low))), high = withoutOutliers(points.map(({ drawn }) => Math.max(0, drawn.high)));
  const ruled = points.some(({ row }) => row.loss) ? [low, high] : [Math.min(...points.map(({ drawn }) => drawn.low)), high];
  const room = 0.06 * (ruled[1] - ruled[0] || 1);
  return [ruled[0] - room, ruled[1] + room];
}

const said = (row, { value, low, high }) => `${rowName(row)}: ${row.loss ? signed(value) : number(value, 4)} [${row.loss ? signed(low) : number(low, 4)}, ${row.loss ? signed(high) : number(high, 4)}]`;
const titled = (node, text) => {
  const title = svg("title");
  title.textContent = text;
  node.prepend(title);
  return node;
};

function overBudgets(question, points, { chosen, unit, width, title }) {
  const left = 52, right = width - 16, top = 28, bottom = HEIGHT - 48;
  const sizes = [...new Set(points.map(({ budget }) => UNITS[unit].of(budget)))].sort((a, b) => a - b);
  const x = logarithmic([sizes[0], sizes.at(-1)], [left + 22, right - 22]), y = linear(domain(points), [bottom, top]);
  const lines = Map.groupBy ? Map.groupBy(points, ({ row }) => row.name) : grouped(points);
  const [low, high] = y.domain, inside = (value) => y(Math.min(Math.max(value, low), high));
  const anchor = (at) => (at > right - 60 ? "end" : at < left + 60 ? "start" : "middle");
  const root = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img" },
    vertical(y, ticks(y.domain), { left, right, title }),
    horizontal(x, sizes, { top, bottom, text: (value) => number(value, unit === "tokens" ? 9 : 2), title: `budget, ${unit === "tokens" ? "tokens per head" : unit === "kib" ? "KiB of K and V" : "% of dense's bytes"}` }),
    chosen && UNITS[unit].of(chosen) !== null ? svg("line", { x1: x(UNITS[unit].of(chosen)), x2: x(UNITS[unit].of(chosen)), y1: top, y2: bottom, class: "chosen" }) : null,
    ...references(question, points, { y, left, right }));
  const variants = new Map([...lines].map(([name, [{ row }]], i, all) => [name, all.slice(0, i).filter(([, [other]]) => other.row.policy === row.policy).length]));
  const above = new Map();  // values beyond the chart are told at its edge, one below the other
  const below = (at) => above.set(at, (above.get(at) ?? -1) + 1).get(at) * 14;
  for (const [name, line] of lines) {
    const variant = variants.get(name);
    const places = line.map(({ row, budget, drawn }) => ({ row, drawn, at: x(UNITS[unit].of(budget)) }));
    const path = svg("polyline", { points: places.map(({ at, drawn }) => `${at},${inside(drawn.value)}`).join(" "), fill: "none", stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": dashes(line[0].row.policy, variant) });
    const ends = places.map(({ row, drawn, at }) => titled(svg("g", { class: "point" },
      svg("line", { x1: at, x2: at, y1: inside(drawn.low), y2: inside(drawn.high), stroke: "currentColor", "stroke-width": 1.5 }),
      svg("circle", { cx: at, cy: inside(drawn.value), r: 11, fill: "transparent" }), point(row.policy, at, inside(drawn.value), variant),
      drawn.value > high ? label(at, top + 18 + below(at), `↑ ${signed(drawn.value)}`, { "text-anchor": anchor(at) }) : null,
      drawn.value < low ? label(at, bottom - 12, `↓ ${signed(drawn.value)}`, { "text-anchor": anchor(at) }) : null), said(row, drawn)));
    root.append(marked(line[0].row.policy, path, ...ends));
  }
  root.setAttribute("aria-label", `${title}, against the budget: ${[...lines.keys()].join(", ")}. The table below has the same figures.`);
  return { root, legend: legend([...lines].map(([name, line]) => [name, line[0].row.policy, variants.get(name)])) };
}

function grouped(points) {
  const lines = new Map();
  for (const entry of points) lines.set(entry.row.name, [...(lines.get(entry.row.name) ?? []), entry]);
  return lines;
}

// The reference is at 0; dense is a line of its own where it can be paired with the reference.
function references(question, points, { y, left, right }) {
  if (!points.some(({ row }) => row.loss)) return [];
  const to = points.find(({ row }) => row.loss).row.loss, dense = question.references.find((row) => row.policy === "dense");
  const lines = [[0, to.to_name.replace(/ at [\d,]+$/, "")]];
  if (dense?.loss && dense.loss.to_name.startsWith(lines[0][1])) lines.push([dense.loss.value, "dense"]);
  return lines.filter(([value]) => value >= y.domain[0] && value <= y.domain[1]).flatMap(([value, name]) => [
    svg("line", { x1: left, x2: right, y1: y(value), y2: y(value), class: "reference" }),
    label(left + 4, y(value) + 15, name, { class: "reference-name" }),
  ]);
}

// Above the intervals on a narrow page, where names have no room beside them.
function atOneBudget(question, points, { width, title }) {
  const longest = Math.max(...points.map(({ row }) => row.name.length)) * LETTER, narrow = longest > width * 0.4, step = narrow ? 2 * LINE_HEIGHT : LINE_HEIGHT;
  const left = narrow ? EDGE : longest + 16, right = width - 24, top = 10, height = top + points.length * step + 66, bottom = height - 62;
  const ends = points.flatMap(({ drawn }) => [drawn.low, drawn.high]), sizes = points.map(({ drawn }) => Math.abs(drawn.value)).sort((x, y) => x - y);
  const losses = points[0].row.loss, all = losses ? [0, ...ends] : ends, room = (x) => 0.06 * (x[1] - x[0] || 1), range = [left + EDGE, right - EDGE];
  const typical = Math.max(sizes[Math.floor(sizes.length / 2)], SMALL), lowest = Math.min(...all), highest = Math.max(...all), far = losses && sizes.at(-1) > FAR_BEYOND * typical;
  const extent = far ? [lowest, highest] : [lowest - room([lowest, highest]), highest + room([lowest, highest])];
  const bending = far ? `${width < 560 ? "\n" : " "}(logarithmic beyond ${number(typical, 1)})` : "";
  const x = far ? bent(extent, typical, range) : linear(extent, range);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" }, horizontal(x, far ? bentTicks(x, typical, 44) : ticks(x.domain, width < 500 ? 3 : 6), { top, bottom, title: `${title}${bending}` }));
  if (losses) root.append(svg("line", { x1: x(0), x2: x(0), y1: top, y2: bottom, class: "reference" }));
  points.forEach(({ row, drawn }, i) => {
    const y = top + (i + 0.5) * step + (narrow ? 8 : 0), name = narrow ? label(left, y - 14, row.name) : label(left - 8, y + 4, row.name, { "text-anchor": "end" });
    root.append(name, titled(marked(row.policy,
      svg("line", { x1: x(drawn.low), x2: x(drawn.high), y1: y, y2: y, stroke: "currentColor", "stroke-width": 2 }),
      svg("rect", { x: left, y: y - LINE_HEIGHT / 2, width: right - left, height: LINE_HEIGHT, fill: "transparent" }), point(row.policy, x(drawn.value), y)), said(row, drawn)));
  });
  root.setAttribute("aria-label", `${title}, at ${budgetName(points[0].row.capacity)}. The table below has the same figures.`);
  return { root, legend: null };
}

export const legend = (names) => el("ul", { className: "legend" }, ...names.map(([name, policy, variant]) => el("li", {}, swatch(policy, variant), name)));
