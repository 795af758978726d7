// The page's data, elements, and numbers as text.
export const data = JSON.parse(document.getElementById("data").textContent);
export const { feed, sums, marks, maps, margins } = data;
export const questions = new Map(feed.questions.map((question) => [question.id, question]));
export const byId = (id) => document.getElementById(id);

// An element with properties; `data-` and `aria-` names, `role` and `for` are attributes. Children that are null are left out.
export function el(name, properties = {}, ...children) {
  return filled(document.createElement(name), properties, children);
}

export function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

function filled(node, properties, children) {
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (/^(data-|aria-|role$|for$|scope$|colspan$)/.test(key)) node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const rowsOf = (question) => [...question.references, ...question.budgets.flatMap((budget) => budget.rows)];

export function number(value, digits = 3) {
  return value === null || value === undefined ? "" : Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 12 });
}

export function short(value) {
  const size = Math.abs(value);
  return size >= 10 ? Math.round(size).toLocaleString("en") : number(size, 2);
}

export const signed = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${short(value)}`;

export function bytes(value) {
  if (!value) return "–";
  const power = Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${number(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export const share = (value) => (value === null ? "" : value < 0.0995 ? `${number(100 * value, 2)} %` : `${Math.round(100 * value)} %`);

export const budgetName = (capacity) => (capacity === null ? "as the prompt decides" : `${capacity.toLocaleString("en")} tokens`);

export const rowName = (row) => (row.capacity === null ? row.name : `${row.name} at ${row.capacity.toLocaleString("en")}`);

// Paths of marks around 0, 0; all have about the same area.
const SHAPES = {
  circle: "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0",
  square: "M-4,-4h8v8h-8z",
  "triangle-up": "M0,-5.2L5,4L-5,4z",
  "triangle-down": "M0,5.2L5,-4L-5,-4z",
  "triangle-right": "M5.2,0L-4,5L-4,-5z",
  "triangle-left": "M-5.2,0L4,5L4,-5z",
  diamond: "M0,-5.8L5,0L0,5.8L-5,0z",
  cross: "M-1.8,-5h3.6v3.2h3.2v3.6h-3.2v3.2h-3.6v-3.2h-3.2v-3.6h3.2z",
};

// variant: number of the row among those of the same policy with other parameters.
const markOf = (policy, variant = 0) => marks[policy][variant % marks[policy].length];

// A group whose colour is the policy's on this theme: its children draw with currentColor.
export function marked(policy, ...children) {
  const { light, dark } = markOf(policy);
  const group = svg("g", { class: "mark" }, ...children);
  group.style.setProperty("--light", light);
  group.style.setProperty("--dark", dark);
  return group;
}

export const point = (policy, x, y, variant) => svg("path", { d: SHAPES[markOf(policy, variant).shape], transform: `translate(${x},${y})`, fill: "currentColor" });

export function dashes(policy, variant) {
  const { dash } = markOf(policy, variant);
  return dash[1] === 0 ? "none" : dash.join(" ");
}

export function swatch(policy, variant) {
  const line = svg("line", { x1: 0, x2: 30, y1: 7, y2: 7, stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": dashes(policy, variant) });
  return svg("svg", { class: "swatch", width: 30, height: 14, "aria-hidden": "true" }, marked(policy, line, point(policy, 15, 7, variant)));
}
