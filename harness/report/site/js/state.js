// The address, which holds all that a reader chose, and the data of suites, which are loaded when they are shown.
export const read = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

export function address(changes) {
  const kept = Object.entries({ ...read(), ...changes }).filter(([, value]) => value !== "");
  return kept.length ? `#${new URLSearchParams(kept)}` : location.pathname + location.search;
}

let show = () => {};
export function whenChanged(render) {
  show = render;
  addEventListener("hashchange", render);
}

export function go(changes) {
  history.replaceState(null, "", address(changes));
  show();
}

// The suite of the question or suite that the address names; the first one if it names none.
export const chosenSuite = ({ q, suite }) => index.suites.find((other) => other.questions.includes(q))
  ?? index.suites.find((other) => other.file === suite) ?? index.suites[0];

// Calls back with the data of a suite: at once if it is here, else as soon as its file has loaded; with null if it can't be.
export function withData({ file }, use) {
  if (loaded.has(file)) return use(loaded.get(file));
  const script = document.createElement("script");
  script.src = `${index.folder}/${file}.js`;
  script.onload = script.onerror = () => use(loaded.get(file) ?? null);
  document.head.append(script);
  return undefined;
}

export const chosenQuestion = (data, { q }) => data.questions.find(({ id }) => id === q)
  ?? data.questions.find(({ id }) => id === index.default) ?? data.questions[0];

// The budget of the address; if it names none, the middle one of those in tokens.
export function chosenBudget({ budgets }, { budget }) {
  const sized = budgets.filter(({ capacity }) => capacity !== null);
  return budgets.find(({ capacity }) => String(capacity) === budget) ?? sized[sized.length >> 1] ?? budgets[0];
}
