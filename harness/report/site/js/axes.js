// Scales and axes of charts.
import { number, svg } from "./dom.js";

export function linear([low, high], [from, to]) {
  const scale = (value) => from + ((value - low) / (high - low || 1)) * (to - from);
  return Object.assign(scale, { domain: [low, high] });
}

export const logarithmic = ([low, high], range) => {
  const scale = linear([Math.log2(low), Math.log2(high === low ? 2 * low : high)], range);
  return (value) => scale(Math.log2(value));
};

export function ticks([low, high], count = 5) {
  const rough = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((x) => x * power).find((x) => x >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

// Almost linear around 0 and logarithmic beyond `bend`, so that small and large values of either sign are legible.
export function bent([low, high], bend, range) {
  const scale = linear([Math.asinh(low / bend), Math.asinh(high / bend)], range);
  return Object.assign((value) => scale(Math.asinh(value / bend)), { domain: [low, high] });
}

// Ticks of a bent scale: 0 and powers of ten that are `room` apart.
export function bentTicks(scale, bend, room) {
  const found = [0], [low, high] = scale.domain;
  for (let power = Math.floor(Math.log10(bend)); 10 ** power <= Math.max(-low, high); power++) {
    for (const value of [10 ** power, -(10 ** power)]) {
      if (value >= low && value <= high && found.every((other) => Math.abs(scale(other) - scale(value)) >= room)) found.push(Number(value.toPrecision(12)));
    }
  }
  return found.sort((x, y) => x - y);
}

// Where an axis ends. A value far beyond the others would flatten them, so it is left to be drawn at the edge.
const FAR = 8, NEAR_ZERO = 0.05;
export function withoutOutliers(values) {
  const sizes = [...values].sort((x, y) => x - y);
  const typical = Math.max(Math.abs(sizes[Math.floor(sizes.length / 2)] ?? 0), NEAR_ZERO);
  for (let i = Math.ceil(sizes.length / 2); i < sizes.length; i++) {
    if (sizes[i] > FAR * Math.max(sizes[i - 1], typical)) return sizes[i - 1];
  }
  return sizes.at(-1) ?? 1;
}

export function label(x, y, text, attributes = {}) {
  const node = svg("text", { x, y, ...attributes });
  node.textContent = text;
  return node;
}

export function horizontal(scale, values, { top, bottom, title, text = (value) => number(value, 4) }) {
  const middle = (scale(values[0]) + scale(values.at(-1))) / 2;
  return svg("g", { class: "axis" },
    ...values.map((value) => svg("line", { x1: scale(value), x2: scale(value), y1: top, y2: bottom, class: "grid" })),
    ...values.map((value) => label(scale(value), bottom + 18, text(value), { "text-anchor": "middle" })),
    ...title.split("\n").map((line, i) => label(middle, bottom + 38 + 14 * i, line, { "text-anchor": "middle", class: "title" })));
}

export function vertical(scale, values, { left, right, title }) {
  return svg("g", { class: "axis" },
    ...values.map((value) => svg("line", { x1: left, x2: right, y1: scale(value), y2: scale(value), class: "grid" })),
    ...values.map((value) => label(left - 8, scale(value) + 4, number(value, 4), { "text-anchor": "end" })),
    label(0, 12, title, { class: "title" }));
}
