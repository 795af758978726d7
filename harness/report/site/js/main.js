// Shows the view that the address names.
import { byId, feed } from "./dom.js";
import { address, read, whenChanged } from "./state.js";
import { setUpAnswer, showAnswer } from "./answer.js";
import { setUpGood, showGood } from "./good.js";
import { setUpCompare, showCompare } from "./compare.js";
import { setUpCells, showCells } from "./cells.js";

const VIEWS = { answer: showAnswer, good: showGood, compare: showCompare, cells: showCells };

function render() {
  const { tab } = read(), view = tab in VIEWS ? tab : "answer";
  for (const name of Object.keys(VIEWS)) {
    byId(`${name}-view`).hidden = name !== view;
    const link = byId(`to-${name}`);
    link.href = address({ tab: name === "answer" ? "" : name });
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  VIEWS[view]();
}

setUpAnswer();
setUpGood();
setUpCompare();
setUpCells();
whenChanged(render);
byId("measured").textContent = feed.measured;
render();

let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  render();
});
