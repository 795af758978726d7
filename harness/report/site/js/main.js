// Shows the view that the address names, of the suite that it names.
import { byId, el } from "./dom.js";
import { address, chosenQuestion, chosenSuite, go, read, whenChanged, withData } from "./state.js";
import { showAnswer, showQuestions } from "./answer.js";
import { setUpCells, showCells } from "./cells.js";

const VIEWS = { answer: showAnswer, questions: showQuestions, cells: showCells };

function render() {
  const state = read(), suite = chosenSuite(state), view = state.tab in VIEWS ? state.tab : "answer";
  for (const name of Object.keys(VIEWS)) {
    byId(`to-${name}`).href = address({ tab: name === "answer" ? "" : name, open: "" });
    if (name === view) byId(`to-${name}`).setAttribute("aria-current", "page");
    else byId(`to-${name}`).removeAttribute("aria-current");
  }
  if (!suite) return;
  byId("loading").textContent = loaded.has(suite.file) ? "" : `Loading ${suite.suite} ...`;
  withData(suite, (data) => {
    if (chosenSuite(read()) !== suite) return;
    byId("loading").textContent = data ? "" : `${index.folder}/${suite.file}.js is missing: keep the folder ${index.folder} beside this page.`;
    for (const name of Object.keys(VIEWS)) byId(`${name}-view`).hidden = name !== view || !data;
    if (!data) return;
    byId("suite").value = suite.file;
    byId("question").replaceChildren(...data.questions.map((question) => new Option(nameOf(question, data), question.id, false, question === chosenQuestion(data, state))));
    byId("question").parentElement.hidden = view === "cells" || !data.questions.length;
    VIEWS[view](data, suite, state);
  });
}

function nameOf(question, data) {
  const several = (key) => new Set(data.questions.map((other) => other[key])).size > 1;
  const extra = [several("evict") ? `evicting ${question.evict}` : "", several("machine") ? `on ${question.machine}` : "", several("dtype") ? question.dtype : ""];
  return [question.model, question.subject, ...extra].filter(Boolean).join(", ");
}

const named = ({ suite, version, models }) => `${suite} v${version}: ${models.length > 3 ? `${models.length} models` : models.join(", ")}`;
byId("suite").append(...index.suites.map((suite) => new Option(named(suite), suite.file)));
byId("suite").addEventListener("change", (event) => go({ suite: event.target.value, q: "", budget: "", open: "" }));
byId("question").addEventListener("change", (event) => go({ q: event.target.value, suite: "", budget: "", open: "" }));
byId("ask").addEventListener("submit", (event) => event.preventDefault());
byId("measured").textContent = index.measured;
byId("loading").replaceChildren(index.suites.length ? "" : el("span", { textContent: "No record yet: bench run smoke." }));
setUpCells();
whenChanged(render);
render();
