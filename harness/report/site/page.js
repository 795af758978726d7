const { rows, charts, themes } = JSON.parse(document.getElementById("data").textContent);
const columns = [
  ["policy", "Policy"], ["capacity", "Capacity", 0], ["perplexity", "Perplexity", 4], ["right", "Right, %", 3],
  ["ms", "ms/token", 3], ["kib", "K/V, KiB", 4], ["model", "Model"], ["suite", "Suite"], ["task", "Task"], ["status", "Status"],
  ["device", "Device"], ["measured", "Measured"], ["cell", "Repeat"],
];
const selects = ["suite", "model", "status"];
const byId = (id) => document.getElementById(id);
const form = byId("filters"), body = document.querySelector("#cells tbody");

// The address holds filters and order, so that a view can be shared: #suite=pg19&q=h2o&sort=-perplexity
const state = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
function go(changes) {
  const next = Object.entries({ ...state(), ...changes }).filter(([, value]) => value);
  history.replaceState(null, "", next.length ? "#" + new URLSearchParams(next) : location.pathname + location.search);
  show();
}

const digits = (value, count) =>
  value === null ? "" : count ? Number(value.toPrecision(count)).toLocaleString("en") : value.toLocaleString("en");
function element(name, text, className) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

for (const [key, label, count] of columns) {
  const head = element("th"), button = element("button", label);
  head.scope = "col";
  head.dataset.key = key;
  if (count !== undefined) head.className = "number";
  button.type = "button";
  button.addEventListener("click", () => {
    const now = state().sort;
    go({ sort: now === key ? "-" + key : now === "-" + key ? "" : key });
  });
  head.append(button);
  document.querySelector("#cells thead tr").append(head);
}
for (const key of selects) {
  const values = [...new Set(rows.map((row) => row[key]))].sort();
  byId(key).append(new Option("all", ""), ...values.map((value) => new Option(value, value)));
  byId(key).addEventListener("change", (event) => go({ [key]: event.target.value }));
}
byId("q").addEventListener("input", (event) => go({ q: event.target.value }));
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", (event) => {
  event.preventDefault();
  history.replaceState(null, "", location.pathname + location.search);
  show();
});
addEventListener("hashchange", show);

const lines = rows.map((row) => {
  const line = element("tr");
  for (const [key, , count] of columns) {
    const bad = key === "status" && row.status !== "ok";
    const cell = element("td", undefined, count !== undefined ? "number" : bad ? "bad" : "");
    if (key === "cell") cell.append(element("code", "bench run " + row.cell));
    else cell.textContent = count !== undefined ? digits(row[key], count) : row[key];
    line.append(cell);
  }
  return { row, line, text: Object.values(row).join(" ").toLowerCase() };
});

function compare(key, down) {
  return (a, b) => {
    const x = a.row[key], y = b.row[key];
    if (x === null || y === null) return (x === null) - (y === null); // missing figures come last in either order
    const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return down ? -order : order;
  };
}

function show() {
  const { q = "", sort = "", ...chosen } = state();
  const words = q.toLowerCase().split(/\s+/).filter(Boolean);
  const key = sort.replace(/^-/, "");
  let matches = lines.filter(({ row, text }) =>
    words.every((word) => text.includes(word)) && selects.every((name) => !chosen[name] || row[name] === chosen[name]));
  if (columns.some(([name]) => name === key)) matches = [...matches].sort(compare(key, sort.startsWith("-")));
  body.replaceChildren(...matches.map(({ line }) => line));
  byId("count").textContent = `${matches.length} of ${rows.length} cells`;
  if (byId("q").value !== q) byId("q").value = q;
  for (const name of selects) byId(name).value = chosen[name] ?? "";
  for (const head of document.querySelectorAll("#cells th")) {
    if (head.dataset.key === key) head.setAttribute("aria-sort", sort.startsWith("-") ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
  const visible = new Set(matches.map(({ row }) => row.suite + "\n" + row.model));
  for (const figure of figures) figure.section.hidden = !visible.has(figure.key);
}

// Draw a chart when it scrolls into view.
const dark = matchMedia("(prefers-color-scheme: dark)");
const sections = new Map();
const figures = charts.map(({ suite, model, alt, spec }) => {
  const key = suite + "\n" + model;
  if (!sections.has(key)) {
    const section = element("section");
    section.append(element("h2", `${suite}: ${model}`));
    byId("charts").append(section);
    sections.set(key, section);
  }
  const figure = element("figure"), place = element("div");
  place.style.minHeight = "300px";
  figure.append(place, element("figcaption", alt));
  sections.get(key).append(figure);
  return { key, section: sections.get(key), place, spec, alt };
});
const draw = ({ place, spec, alt }) =>
  vegaEmbed(place, { ...spec, description: alt }, {
    actions: false, renderer: "svg", config: { ...themes[dark.matches ? "dark" : "light"], mark: { tooltip: true } },
  });
const observer = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    observer.unobserve(target);
    draw(figures.find((figure) => figure.place === target));
  }
}, { rootMargin: "200px" });
for (const figure of figures) observer.observe(figure.place);
dark.addEventListener("change", () => figures.filter(({ place }) => place.firstChild).forEach(draw));
show();
