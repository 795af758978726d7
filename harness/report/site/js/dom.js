// Elements, and numbers as text.
export const byId = (id) => document.getElementById(id);

// An element with properties; `data-` and `aria-` names and those listed are attributes. Children that are null are left out.
export function el(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (/^(data-|aria-|role$|scope$|colspan$|style$)/.test(key)) node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const number = (value, digits = 3) => (value === null || value === undefined ? ""
  : Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 12 }));
export const short = (value) => (Math.abs(value) >= 10 ? Math.round(Math.abs(value)).toLocaleString("en") : number(Math.abs(value), 2));
export const signed = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${short(value)}`;
export const plain = (value) => `${value < 0 ? "−" : ""}${short(value)}`;
export const share = (value) => (value < 0.0995 ? `${number(100 * value, 2)} %` : `${Math.round(100 * value)} %`);
export const tokens = (capacity) => (capacity === null ? "no fixed capacity" : `${capacity.toLocaleString("en")} tokens`);
export const parametersOf = (row) => Object.entries(row.parameters).filter(([, value]) => value !== null).map((pair) => pair.join(" ")).join(", ");

export function bytes(value) {
  if (!value) return value === 0 ? "no cache" : "";
  const power = Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${number(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export const interval = (low, high, text = plain) => (low === null ? "no interval" : `[${text(low)}, ${text(high)}]`);

// A table in a region that scrolls by itself. lines: rows of texts or elements; the first of each is its head.
export const table = (caption, heads, lines) => el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": caption },
  el("table", {}, el("caption", { textContent: caption }),
    el("thead", {}, el("tr", {}, heads.map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, lines.map(([first, ...rest]) => el("tr", {}, el("th", { scope: "row" }, first), rest.map((text) => el("td", {}, text)))))));
