// The third view: every measured cell of a suite, to search. One page of rows is in the document.
import { byId, el, table } from "./dom.js";
import { mapOf } from "./details.js";
import { go } from "./state.js";

const MOST = 100;

export function setUpCells() {
  byId("find").addEventListener("input", (event) => go({ find: event.target.value }));
  byId("cells-form").addEventListener("submit", (event) => event.preventDefault());
}

export function matching(data, find) {
  const words = (find ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const text = ({ policy, model, task, status, figure }) => [policy, model, task, status, figure].join(" ").toLowerCase();
  return data.cells.filter((cell) => words.every((word) => text(cell).includes(word)));
}

export function showCells(data, suite, { find }) {
  if (byId("find").value !== (find ?? "")) byId("find").value = find ?? "";
  const found = matching(data, find), shown = found.slice(0, MOST), heads = ["Policy", "Capacity", "Task", "Model", "Figure", "Measured", "Measure it again"];
  byId("cells-count").textContent = found.length > MOST ? `The first ${MOST} of ${found.length.toLocaleString("en")} cells; search for others.` : `${found.length} of ${data.cells.length} cells.`;
  byId("cells").replaceChildren(table(`Cells of ${suite.suite}`, heads, shown.map((cell) => [
    cell.policy, cell.capacity === null ? "" : cell.capacity.toLocaleString("en"), cell.task, cell.model,
    cell.status === "ok" ? cell.figure : el("span", { className: "bad", textContent: cell.status }), cell.measured,
    el("code", { textContent: cell.command }),
  ])), ...shown.flatMap((cell) => (data.pictures[cell.cell] ?? []).map((map) => el("details", {}, el("summary", { textContent: `Picture of ${cell.policy}, ${cell.task}` }), mapOf(map)))));
}
