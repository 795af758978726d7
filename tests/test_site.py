"""The page in a browser: it sorts, filters, links and draws, logs nothing, and never treats a record as markup."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from factories import EVIL, cell_record, changed, drawn, record

from kvbench.harness.report import site
from kvbench.harness.report.leaderboard import render

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run",
    "--virtual-time-budget=20000", "--dump-dom",
]  # fmt: skip
LISTENS = """<script>
window.errors = []; window.fired = false;
addEventListener("error", (e) => errors.push(String(e.message)));
addEventListener("unhandledrejection", (e) => errors.push(String(e.reason)));
for (const kind of ["error", "warn"]) console[kind] = (...args) => errors.push(args.join(" "));
</script>"""
ASKS = """<script type="module">
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const said = {ready: performance.now()};
const $ = (what) => document.querySelector(what), all = (what) => [...document.querySelectorAll(what)];
const column = (name) => { const at = all("th").findIndex((th) => th.dataset.key === name);
  return all("#cells tbody tr").map((tr) => tr.children[at].textContent); };
ASKED
await wait(3000);
said.errors = window.errors; said.fired = window.fired;
const out = document.createElement("pre"); out.id = "said"; out.textContent = JSON.stringify(said); document.body.append(out);
</script>"""
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium")


def rendered(records):
    return site.render(records, render(records).charts)


def asked(records, tmp_path, questions, address="", size="1280,900", real_time=False):
    """Run a script on the page and return its result. Time is virtual unless it is measured."""
    page = rendered(records).replace("<head>", f"<head>{LISTENS}", 1)
    asks = ASKS.replace("ASKED", questions).replace("await wait(3000);", "" if real_time else "await wait(3000);")
    page = page.removesuffix("</body>\n</html>\n") + asks + "</body></html>"
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    flags = [f for f in FLAGS if not (real_time and f.startswith("--virtual"))]
    command = [BROWSER, *flags, f"--window-size={size}", f"--user-data-dir={tmp_path / 'profile'}", f"file://{file}{address}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'<pre id="said">(.*?)</pre>', dom, re.S)
    assert found, "the script ended early"
    said = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert said["errors"] == []
    assert said["fired"] is False
    return said


def some():
    other = cell_record({"x": 1}, suite="other", model="another", task={"name": "unheard_of"})
    failed = record("broken", 8, status="failed", error={"kind": "out of memory", "message": ""}, metrics={})
    return [*drawn(), other, failed]


@needs_browser
def test_it_sorts_by_a_column_both_ways_with_what_is_missing_last(tmp_path):
    said = asked(some(), tmp_path, """
      const button = $('th[data-key=perplexity] button');
      button.click(); said.up = column("perplexity"); said.aria = $('th[data-key=perplexity]').getAttribute("aria-sort");
      button.click(); said.down = column("perplexity"); said.hash = location.hash;
      button.click(); said.none = location.hash;
    """)  # fmt: skip
    assert said["up"] == [*sorted(x for x in said["up"] if x), "", ""]
    assert said["down"] == [*sorted((x for x in said["down"] if x), reverse=True), "", ""]
    assert said["aria"] == "ascending"
    assert said["hash"] == "#sort=-perplexity"
    assert said["none"] == ""


@needs_browser
def test_it_filters_and_says_how_many_are_left(tmp_path):
    said = asked(some(), tmp_path, """
      const q = $("#q"); q.value = "window m"; q.dispatchEvent(new Event("input"));
      said.q = column("policy"); said.count = $("#count").textContent;
      $("button[type=reset]").click(); said.all = column("policy").length;
      const s = $("#suite"); s.value = "other"; s.dispatchEvent(new Event("change")); said.suite = column("suite");
      said.hidden = all("#charts > section").map((x) => x.hidden); said.hash = location.hash;
    """)  # fmt: skip
    assert said["q"] == ["window"]
    assert said["count"] == "1 of 5 cells"
    assert said["all"] == 5
    assert said["suite"] == ["other"]
    assert said["hidden"] == [True]
    assert said["hash"] == "#suite=other"


@needs_browser
def test_an_address_shows_what_its_sender_saw(tmp_path):
    address = "#suite=s&q=dense&sort=-policy"
    said = asked(some(), tmp_path, """said.policies = column("policy"); said.q = $("#q").value; said.suite = $("#suite").value;
      location.hash = "#status=out+of+memory"; await wait(200); said.then = column("policy");""", address)  # fmt: skip
    assert said["policies"] == ["dense"]
    assert (said["q"], said["suite"]) == ("dense", "s")
    assert said["then"] == ["broken"]
    nonsense = asked(some(), tmp_path, 'said.n = column("policy").length;', "#sort=nope&suite=&x=%3Cb%3E")
    assert nonsense["n"] == 5


@needs_browser
def test_charts_are_drawn_and_described(tmp_path):
    said = asked(some(), tmp_path, """
      await wait(3000); said.sizes = all("figure svg").map((x) => +x.getAttribute("width"));
      said.lines = all("figure svg path").length; said.label = $("figure [aria-label]").ariaLabel;""")  # fmt: skip
    assert said["sizes"]
    assert min(said["sizes"]) > 300
    assert said["lines"] > 5
    assert "Perplexity" in said["label"]


@needs_browser
def test_nothing_of_a_record_becomes_markup(tmp_path):
    evil = '</script><img src=x onerror="window.fired=true"><script>window.fired=true</script>'
    records = [record(evil, 8), record(EVIL, 8), record("h2o", 8, facts={"device": evil})]
    said = asked(records, tmp_path, 'said.policies = column("policy"); said.images = all("img").length;')
    assert evil in said["policies"]
    assert said["images"] == 0


@pytest.mark.parametrize("mark", ["/*css*/", "/*data*/", "/*library*/", "/*js*/"])
def test_a_mark_of_the_frame_in_a_record_is_text(mark):
    """The page once went blank because its script was put into the data."""
    page = rendered([record(mark), record("failed", status="failed", error={"kind": mark, "message": ""}, metrics={})])
    data = json.loads(re.search(r'application/json">(.*?)</script>', page, re.S)[1])
    assert {row["policy"] for row in data["rows"]} == {mark, "failed"}
    assert mark in {row["status"] for row in data["rows"]}
    assert page.endswith(f"{(Path(site.__file__).parent / 'page.js').read_text(encoding='utf-8')}</script>\n</body>\n</html>\n")


def test_nothing_in_its_data_is_invisible():
    page = rendered([record("a\x1b\u202e\u200bb", facts={"device": "\x9bc\u2066"})])
    data = json.loads(re.search(r'application/json">(.*?)</script>', page, re.S)[1])
    assert (data["rows"][0]["policy"], data["rows"][0]["device"]) == ("ab", "c")


@needs_browser
def test_it_is_used_by_keyboard_and_on_a_phone(tmp_path):
    said = asked(some(), tmp_path, """
      said.order = all("input, select, button, [tabindex]").map((x) => x.tabIndex);
      said.heads = all("th").every((th) => th.querySelector("button[type=button]") && th.scope === "col");
      said.labelled = all("input, select").every((x) => x.labels.length === 1);
      said.wide = document.documentElement.scrollWidth - innerWidth; said.width = innerWidth;
    """, size="500,900")  # fmt: skip
    assert min(said["order"]) == 0
    assert said["heads"]
    assert said["labelled"]
    assert said["wide"] <= 0, "the table scrolls in its own box, not the page"


@needs_browser
@pytest.mark.alone
def test_two_thousand_records_open_in_under_two_seconds(tmp_path):
    records = [record(f"policy{i % 7}", 8 + i, 2.0) for i in range(20)]
    records = [r for n in range(100) for r in renamed(records, n)]
    assert len({r.cell_id for r in records}) == 2000
    said = asked(records, tmp_path, 'said.rows = all("#cells tbody tr").length;', real_time=True)
    assert said["rows"] == 2000
    assert said["ready"] < 2000


def renamed(records, number):
    return [changed(r, cell={"suite": f"suite{number}"}) for r in records]


def test_the_page_needs_nothing_from_elsewhere_and_is_the_same_for_the_same_records():
    page = rendered(some())
    assert page == rendered(some()[::-1])
    frame = page.split('<script id="data"')[0]
    assert not re.search(r'(src|href)="(?!README\.md|paper\.md|data:)', frame)
    assert "default-src 'none'" in frame
    data = json.loads(re.search(r'application/json">(.*?)</script>', page, re.S)[1])
    assert len(data["rows"]) == 5
    assert {r["status"] for r in data["rows"]} == {"ok", "out of memory"}
