"""The page in a browser: it answers, compares, sorts and links; it is accessible, and never treats a record as markup."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from factories import EVIL, changed, edit, record
from test_feed import answered, everything, of_budgets

from kvbench.harness.report import compare, keep_map, site
from kvbench.harness.report import feed as feeds
from kvbench.harness.report.feed.question import percent, questions
from kvbench.harness.report.feed.words import signed

NAMES = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1440, "height": 900}
EXPOSED = """window.kv = { questions, rowsOf, nllMetric, answerMetrics, timeMetric, matching, csv, go };
window.ready = performance.now();"""
IN_BROWSER = pytest.mark.browser
ALL_PAIRS = """() => [...kv.questions.values()].flatMap((question) => {
  const rows = kv.rowsOf(question), pairs = rows.flatMap((x) => rows.map((y) => [x, y]));
  return pairs.map(([x, y]) => {
    const a = { question, row: x }, b = { question, row: y };
    return { a: x.id, b: y.id, q: question.id, nll: kv.nllMetric(a, b), answers: kv.answerMetrics(a, b) };
  });
})"""


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.fail(
            f"no browser: install one of {', '.join(NAMES)}, or deselect these tests with -m 'not browser'", pytrace=False
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, tmp_path):
    """Opens the page of records; at the end, nothing was logged and no script of a record ran."""
    contexts, logged = [], []

    def open_page(records=None, address="", size=SIZE, theme="light", html=None, motion="no-preference"):
        text = html or site.render(everything() if records is None else records)
        (tmp_path / "page.html").write_text(exposed(text), encoding="utf-8")
        contexts.append(chromium.new_context(viewport=size, color_scheme=theme, reduced_motion=motion, accept_downloads=True))
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: logged.append(message.text))
        page.on("pageerror", lambda error: logged.append(str(error)))
        page.goto(f"file://{tmp_path / 'page.html'}{address}")
        page.wait_for_function("window.ready")
        return page

    yield open_page
    fired = [page.evaluate("window.fired") for context in contexts for page in context.pages]
    for context in contexts:
        context.close()
    assert logged == []
    assert not any(fired)


def exposed(html):
    """The page with the functions that tests call."""
    end = "</script>\n</body>"
    assert html.count(end) == 1
    return html.replace(end, f"{EXPOSED}\n{end}")


def data_of(html):
    return json.loads(re.search(r'application/json">(.*?)</script>', html, re.S)[1])


def column(page, name):
    """The texts of a column of all cells."""
    heads = page.locator("#cells-head th").evaluate_all("heads => heads.map((th) => th.dataset.key)")
    return page.locator(f"#cells-body tr > :nth-child({heads.index(name) + 1})").all_inner_texts()


@IN_BROWSER
def test_it_opens_with_the_answer_of_the_default_question(opened):
    made = feeds.feed(everything())
    question = next(q for q in made["questions"] if q["id"] == made["default"])
    page = opened()
    assert page.inner_text("#sentence") == question["budgets"][1]["answer"]
    half = question["budgets"][0]["answer"].replace(", m, perplexity, 32,768 tokens:", ":")
    assert page.inner_text("#half") == f"With half of that? {half}"
    assert page.locator("#policies-body tr").count() == len(question["budgets"][1]["rows"]) + len(question["references"])
    assert page.get_attribute("#sentence", "aria-live") == "polite"


@IN_BROWSER
def test_a_budget_is_chosen_in_tokens_bytes_or_as_a_share_and_the_address_keeps_it(opened):
    page = opened()
    page.click("#budgets button >> text='8'")
    assert "At 8 tokens" in page.inner_text("#sentence")
    assert "budget=8" in page.url
    page.select_option("#unit", "share")
    assert "50 % of dense's bytes" in page.inner_text("#fit")
    assert "At 16 tokens" in page.inner_text("#sentence")
    page.fill("#most", "0.01")
    page.press("#most", "Tab")
    assert page.inner_text("#fit").startswith("No cache measured here is within")
    assert "At 8 tokens" in page.inner_text("#sentence")
    page.select_option("#unit", "kib")
    assert "unit=kib" in page.url
    again = opened(address=f"#{page.url.partition('#')[2]}")
    assert again.inner_text("#sentence") == page.inner_text("#sentence")
    assert again.input_value("#unit") == "kib"


@IN_BROWSER
def test_a_text_or_task_is_chosen_and_addresses_that_mean_nothing_do_no_harm(opened):
    page = opened()
    asks = page.locator("#question option").evaluate_all("all => all.find((o) => o.textContent.includes('StreamEval')).value")
    page.select_option("#question", asks)
    assert "StreamEval" in page.inner_text("#sentence")
    assert "% right" in page.inner_text("#policies-head")
    page.go_back()
    nonsense = (
        "#q=nope&budget=x&unit=miles&x=1",
        "#tab=nowhere",
        "#tab=compare&a=~&b=%3Cb%3E",
        "#tab=cells&sort=no&page=99&hide=x",
    )
    for address in nonsense:
        assert opened(address=address).locator("main section:visible").count() == 1


@IN_BROWSER
def test_what_one_costs_over_another_is_their_paired_difference(opened):
    page = opened(of_budgets())
    (question,) = questions(of_budgets())
    rows = {row.cell.policy: row for row in question.at(16)}
    for x, y in (("window", "h2o"), ("random", "window")):
        page.select_option("#cost-x", feeds.row_id(rows[x]))
        page.select_option("#cost-y", feeds.row_id(rows[y]))
        lost = question.change(rows[x], rows[y])
        value, low, high = (signed(percent(part)) for part in (lost.value, lost.low, lost.high))
        cost = f"{value} % of perplexity [{low}, {high}]"
        sizes = ", ".join(sorted(part.lstrip("+−") for part in (low, high)))
        sure = f"{'It loses' if lost.sign > 0 else 'It gains'} {value.lstrip('+−')} % of perplexity [{sizes}]."
        said = sure if lost.sign else f"The difference is within the noise: {cost}."
        assert page.inner_text("#cost") == said
    page.click("#cost-more")
    assert "tab=compare" in page.url
    assert page.locator("#compared .verdict").first.inner_text() == "worse"


@IN_BROWSER
def test_the_page_shows_the_intervals_that_ranks_follow_from(opened):
    """Every pair of a question: a policy beats another exactly if the interval that the page shows of the two excludes 0."""
    asks = [r for r in everything() if r.cell.suite == "asks"]
    in_streams = [changed(r, cell={"suite": f"asks {n}"}, data={"streams": n}) for n in (4, 20) for r in asks]
    asked = questions([*everything(), *in_streams])
    page = opened([*everything(), *in_streams])
    compared = page.evaluate(ALL_PAIRS)
    found = {(c["q"], c["a"], c["b"]): c for c in compared}
    checked = 0
    for question, made in zip(asked, feeds.of_questions(asked)["questions"], strict=True):
        beats = {(row["id"], worse) for budget in made["budgets"] for row in budget["rows"] for worse in row["beats"]}
        for a, b in itertools.permutations(question.rows, 2):
            ids = feeds.row_id(a), feeds.row_id(b)
            compared, change = found[made["id"], *ids], question.change(b, a)
            if question.measure == "answers":
                (metric,) = compared["answers"]
                theirs = change and [None if x is None else -x for x in (change.value, change.high, change.low)]
                checked += same(metric, ("change", "low", "high"), theirs, ids, beats if same_budget(a, b) else None)
            elif a.nll is not None and b.nll is not None:
                theirs = change and [change.value, change.low, change.high]
                metric = dict(zip(("change", "low", "high"), compared["nll"].get("nats") or [None] * 3, strict=True))
                checked += same(metric, ("change", "low", "high"), theirs, ids, beats if same_budget(a, b) else None, -1)
    assert checked > 30


def same_budget(a, b):
    return a.cell.capacity == b.cell.capacity and "dense" not in (a.cell.policy, b.cell.policy) and not any(
        row.cell.policy.startswith("recompute") for row in (a, b)
    )  # fmt: skip


def same(metric, names, theirs, ids, beats, better=1):
    """The page's interval is Python's, and says who beats whom; `better` is the sign of a change for the better."""
    for name, value in zip(names, theirs or [None] * 3, strict=True):
        assert metric[name] == (None if value is None else pytest.approx(value, rel=1e-4, abs=1e-9))
    if beats is not None:
        excludes = 0 if metric["low"] is None else (metric["low"] > 0) - (metric["high"] < 0)
        assert (ids[::-1] in beats, ids in beats) == (excludes * better > 0, excludes * better < 0)
    return 1


@IN_BROWSER
def test_step_times_are_compared_round_by_round_as_python_does(opened):
    def timed(policy, times, together="t"):
        step = {"step_ms": float(np.median(times)), "rounds_ms": times, "together": together}
        return changed(record(policy), cell={"task": {"name": "latency"}}, metrics=step, without=("blocks", "texts"))

    times = {"window": [1.0 + i / 50 for i in range(12)], "h2o": [1.5 + (i % 5) / 40 for i in range(12)]}
    together = [timed(policy, rounds) for policy, rounds in times.items()]
    records = [*(record(policy, 8, 2.0) for policy in times), *together]
    page = opened(records)
    ours = page.evaluate("""() => { const [question] = kv.questions.values(), rows = kv.rowsOf(question);
      const [a, b] = ["window", "h2o"].map((name) => ({ question, row: rows.find((row) => row.policy === name) }));
      return kv.timeMetric(a, b); }""")
    (theirs,) = compare.step_time(*together)
    assert [ours[k] for k in ("change", "low", "high")] == pytest.approx([theirs.change, theirs.low, theirs.high], rel=1e-4)
    assert ours["verdict"] == theirs.verdict == "worse"


@IN_BROWSER
def test_cells_sort_both_ways_with_what_is_missing_last(opened):
    page = opened(address="#tab=cells")
    button = "#cells-head [data-key=perplexity] button"
    page.click(button)
    values = [float(x.replace(",", "")) for x in column(page, "perplexity") if x]
    assert values == sorted(values)
    assert column(page, "perplexity")[-1] == ""
    assert page.get_attribute("#cells-head [data-key=perplexity]", "aria-sort") == "ascending"
    page.click(button)
    down = [float(x.replace(",", "")) for x in column(page, "perplexity") if x]
    assert down == sorted(down, reverse=True)
    assert column(page, "perplexity")[-1] == ""
    assert "sort=-perplexity" in page.url
    page.click(button)
    assert "sort" not in page.url.partition("#")[2]


@IN_BROWSER
def test_cells_are_searched_hidden_and_taken_along_as_csv(opened):
    page = opened(address="#tab=cells")
    page.fill("#cells-find", "window perplexity")
    assert set(column(page, "policy")) == {"window", "recompute_window"}
    page.click("#cells-form summary")
    page.uncheck("#cells-hide input[value=device]")
    assert "hide=device" in page.url
    with page.expect_download() as download:
        page.click("#cells-csv")
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8"))))
    assert [row["policy"] for row in rows] == column(page, "policy")
    assert "device" not in rows[0]
    page.fill("#cells-find", "nothing like it")
    assert page.inner_text("#cells-body").startswith("No cell matches.")
    page.click("button[type=reset]")
    assert len(column(page, "policy")) == len(everything())
    assert page.url.endswith("#tab=cells")


@IN_BROWSER
def test_what_a_spreadsheet_would_run_is_text_in_the_csv(opened):
    page = opened([record("=1+1", 8), record("h2o", 8)])
    assert '"\'=1+1"' in page.evaluate("kv.csv({})")


@IN_BROWSER
@pytest.mark.parametrize("tab", ["", "#tab=cells"])
def test_on_a_phone_rows_are_cards_and_nothing_scrolls_sideways(tab, opened):
    page = opened(address=tab, size={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    line = page.locator("table.cards:visible tbody tr").first
    assert line.evaluate("tr => getComputedStyle(tr).display") == "flex"
    labels = line.locator("td[data-label]").evaluate_all("all => all.map((td) => getComputedStyle(td, '::before').content)")
    assert labels
    assert all(len(label) > 2 for label in labels)


@IN_BROWSER
@pytest.mark.parametrize(
    ("theme", "tab"),
    [
        ("light", ""), ("dark", "#tab=good"), ("light", "#tab=compare"), ("dark", "#tab=cells&sort=policy"),
    ],
)  # fmt: skip
def test_axe_finds_no_violation(tab, theme, opened):
    from axe_playwright_python.sync_playwright import Axe

    page = opened(address=tab, theme=theme)
    if not tab:
        page.locator("#policies-body button").first.click()
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


@IN_BROWSER
def test_what_a_row_keeps_and_attends_to_is_part_of_the_page(opened, tmp_path, monkeypatch):
    made = record("h2o", 8)
    kept = keep_map.Map(*(np.array(x) for x in ([0] * 3, [0, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 1])))
    edit(made, facts={"keep_map": {"file": "x.kept.parquet", "sha256": "0" * 64, "steps": ""}})
    monkeypatch.setattr(keep_map, "map_file", lambda record, folder: folder)
    monkeypatch.setattr(keep_map.Map, "read", lambda path: kept)
    logits = np.where(np.tri(4, dtype=bool), np.arange(16.0).reshape(4, 4) - 8, -np.inf)
    np.savez(tmp_path / f"{made.stem}.attention.npz", logits=logits[None, None])
    files = {id(made): tmp_path / "h2o.json"}
    html = site.render([made, record("window", 8)], files)
    assert [m["kind"] for m in data_of(html)["maps"][made.cell_id]] == ["kept"], "the task of this record keeps no logits"
    page = opened(html=html, address=f"#open={made.cell_id[:8]}")
    assert page.locator(".maps img").evaluate_all("all => all.map((x) => x.naturalWidth)") == [2]
    cells = opened(html=html, address="#tab=cells")
    assert cells.locator("#cells-body button").all_inner_texts() == ["h2o\nshow its pictures"]
    for shown in (1, 0):
        cells.click("#cells-body button")
        assert cells.locator(".maps img").count() == shown
        assert cells.get_attribute("#cells-body button", "aria-expanded") == str(bool(shown)).lower()
        assert cells.evaluate("document.activeElement.id") == f"cell-{made.cell_id[:8]}", "the focus stays where it was"
    monkeypatch.undo()
    assert data_of(site.render([made], files))["maps"] == {}, "a file that is missing is no error"


@IN_BROWSER
def test_nothing_of_a_record_becomes_markup(opened):
    evil = '</script><img src=x onerror="window.fired=true"><script>window.fired=true</script>'
    records = [record(evil, 8), record(EVIL, 8), record("h2o", 8, facts={"device": evil})]
    for tab in ("", "#tab=compare", "#tab=cells"):
        page = opened(records, address=tab)
        assert page.locator("img").count() == 0
    assert evil in column(page, "policy")


@pytest.mark.parametrize("place", ["/*css*/", "/*data*/", "/*js*/"])
def test_a_mark_of_the_frame_in_a_record_is_text(place):
    """The page once went blank because its script was put into the data."""
    page = site.render([record(place), record("failed", status="failed", error={"kind": place, "message": ""}, metrics={})])
    cells = data_of(page)["cells"]
    assert {row[0] for row in cells} == {place, "failed"}
    assert any(place in row[1:-1] for row in cells)
    assert page.endswith(f"{site.script()}</script>\n</body>\n</html>\n")


def test_nothing_in_its_data_is_invisible():
    data = data_of(site.render([record("a\x1b\u202e\u200bb", facts={"device": "\x9bc\u2066"})]))
    assert data["cells"][0][0] == "ab"
    assert "c" in data["cells"][0]


def test_the_page_needs_nothing_from_elsewhere_and_is_the_same_for_the_same_records():
    page = site.render(everything())
    assert page == site.render(everything()[::-1])
    frame = page.split('<script id="data"')[0]
    assert not re.search(r'(src|href)="(?!README\.md|paper\.md|feed\.json|data:|#)', frame)
    assert "default-src 'none'" in frame
    assert "unsafe-eval" not in frame
    assert len(data_of(page)["cells"]) == len(everything())


def test_the_page_shows_the_feed():
    assert data_of(site.render(everything()))["feed"] == feeds.feed(everything())


def test_no_two_scripts_define_the_same_name():
    """They are joined to one module, which has one name space."""
    names = re.findall(r"^(?:const|let|function|class) (\w+)", site.script(), re.M)
    assert len(names) == len(set(names))
    assert not re.search(r"^(import|export) ", site.script(), re.M)


def test_answers_of_a_task_are_told_apart_by_its_axes():
    asked = [{"name": "streameval", "distance": distance, "lines": 60} for distance in (2, 50)]
    records = [changed(answered("h2o", "1010"), cell={"task": task}) for task in asked]
    (rows,) = (part["rows"] for part in data_of(site.render(records))["sums"].values())
    names = [name for name, *_ in next(iter(rows.values()))["answers"]]
    assert names == ["StreamEval, 60 lines, distance 2", "StreamEval, 60 lines, distance 50"]
