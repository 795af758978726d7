"""The page in a browser: it answers, opens, searches and links; it is accessible, and never treats a record as markup."""

import itertools
import json
import re
import shutil

import numpy as np
import pytest
from factories import EVIL, changed, edit, record
from playwright.sync_api import expect
from test_feed import answered, everything, noisy, of_budgets

from kvbench.harness.core.perplexity import percent_lost
from kvbench.harness.report import feed as feeds
from kvbench.harness.report import keep_map, site
from kvbench.harness.report.feed.question import questions
from kvbench.harness.report.feed.words import signed
from kvbench.harness.report.site.maps import maps

NAMES = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1440, "height": 900}
IN_BROWSER = pytest.mark.browser
VIEWS = ("", "#tab=questions", "#tab=cells")


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
    """Opens the page of records as a file; at the end, nothing was logged and no script of a record ran."""
    contexts, logged = [], []

    def open_page(
        records=None, address="", size=SIZE, theme="light", motion="no-preference", embedded=site.EMBEDDED_BYTES, pictures=None
    ):
        text, beside = site.render(feeds.feed(everything() if records is None else records), pictures, embedded)
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        (tmp_path / site.FOLDER).mkdir(exist_ok=True)
        for name, script in beside.items():
            (tmp_path / site.FOLDER / name).write_text(script, encoding="utf-8")
        contexts.append(chromium.new_context(viewport=size, color_scheme=theme, reduced_motion=motion))
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: logged.append(message.text))
        page.on("pageerror", lambda error: logged.append(str(error)))
        page.goto(f"file://{tmp_path / 'page.html'}{address}")
        page.wait_for_selector("main section:not([hidden])")
        return page

    open_page.logged = logged
    yield open_page
    fired = [page.evaluate("window.fired") for context in contexts for page in context.pages]
    for context in contexts:
        context.close()
    assert logged == []
    assert not any(fired)


def data_of(text):
    """The data of each suite of a page, or of a script beside it, by suite."""
    scripts = re.findall(r'^kvbench\("[a-z0-9-]+", (.*)\);$', text, re.M)
    return {data["cells"][0]["suite"]: data for data in map(json.loads, scripts)}


def texts(page, selector):
    return page.locator(selector).evaluate_all("all => all.map((x) => x.innerText)")


@IN_BROWSER
def test_it_opens_with_the_answer_of_the_default_question(opened):
    made = feeds.feed(everything())
    question = next(q for q in made["questions"] if q["id"] == made["default"])
    page = opened()
    assert page.inner_text("#sentence") == f"At 16 tokens, evicting {question['evict']}: {question['budgets'][1]['finding']}"
    assert page.get_attribute("#sentence", "aria-live") == "polite"
    names = {row["policy"] for budget in question["budgets"] for row in budget["rows"]}
    assert set(texts(page, "#policies-body tr:not(.reference) th button")) == names
    assert [text.split("\n")[0] for text in texts(page, "#policies-head button")] == ["8 tokens", "16 tokens"]
    best = next(c for c in made["cells"] if c["cell"] == question["budgets"][1]["rows"][0]["cells"][0])
    assert page.locator("#again code").first.inner_text() == best["command"]


@IN_BROWSER
def test_cells_of_the_table_are_the_losses_of_the_feed_at_every_budget(opened):
    page = opened(of_budgets())
    (question,) = feeds.feed(of_budgets())["questions"]
    for place, budget in enumerate(question["budgets"]):
        for row in budget["rows"]:
            line = page.locator(f"#policies-body tr:has-text('{row['policy']}'):not(.reference)")
            shown = line.locator("td").nth(place).inner_text().split("\n")
            low, high = (signed(row["loss"][end]).lstrip("+") for end in ("low", "high"))
            assert next(filter(None, shown)).split(" (")[0] == signed(row["loss"]["value"])
            assert f"[{low}, {high}]" in shown
            assert line.locator("td").nth(place).locator("strong").count() == (row["rank"][0] == 1)


@IN_BROWSER
def test_a_budget_is_chosen_in_its_head_and_the_address_keeps_it(opened):
    page = opened()
    page.click("#policies-head button >> nth=0")
    assert "At 8 tokens" in page.inner_text("#sentence")
    assert "budget=8" in page.url
    assert page.get_attribute("#policies-head button >> nth=0", "aria-pressed") == "true"
    again = opened(address=f"#{page.url.partition('#')[2]}")
    assert again.inner_text("#sentence") == page.inner_text("#sentence")


@IN_BROWSER
def test_a_suite_is_loaded_when_it_is_chosen_and_a_missing_file_is_named(opened, tmp_path):
    page = opened()
    asks, other = (
        page.locator("#suite option").evaluate_all("(all, name) => all.find((o) => o.textContent.startsWith(name)).value", name)
        for name in ("asks", "other")
    )
    first = next(data for data in data_of(site.render(feeds.feed(everything()))[0]).values() if data["cells"][0]["suite"] == "s")
    room = len(json.dumps(first, ensure_ascii=False, separators=(",", ":"))) + 100
    page = opened(embedded=room)
    assert sorted(path.stem for path in (tmp_path / site.FOLDER).iterdir()) == sorted([asks, other])
    page.select_option("#suite", asks)
    expect(page.locator("#sentence")).to_contain_text("h2o")
    assert "answers 50 % [35, 65] right" in page.inner_text("#sentence")
    assert page.inner_text("#loading") == ""
    page.select_option("#suite", other)
    expect(page.locator("#sentence")).to_contain_text("No record of this suite")
    (tmp_path / site.FOLDER / f"{asks}.js").unlink()
    page.reload()
    page.evaluate("suite => { location.hash = `suite=${suite}`; }", asks)
    expect(page.locator("#loading")).to_contain_text("is missing")
    assert page.locator("main section:visible").count() == 0
    opened.logged.clear()  # the browser reports the missing file


@IN_BROWSER
def test_policies_stand_against_the_questions_of_a_suite(opened):
    asks = [changed(r, cell={"suite": "s"}) for r in everything() if r.cell.suite == "asks"]
    asks = [changed(r, cell={"capacity": r.cell.capacity and 16}) for r in asks]
    page = opened([changed(r, facts={"device": "a device"}) for r in (*of_budgets(), *asks)], address="#tab=questions")
    heads = [f"{subject}\nevicting at every step" for subject in ("perplexity, 32,768 tokens", "StreamEval, 60 lines")]
    assert texts(page, "#questions-head th") == ["Policy", *heads]
    rows = {name.split("\n")[0] for name in texts(page, "#questions-body th")}
    assert rows == {"window", "h2o", "random"}
    page.click("#questions-head button >> nth=1")
    assert "% right" not in page.inner_text("#policies-caption")
    assert page.locator("#policies:visible").count() == 1


@IN_BROWSER
def test_small_differences_are_legible_beside_large_ones_of_either_sign(opened):
    losses = {"a": -60, "b": -0.2, "c": -0.1, "d": 0.1, "e": 0.2, "f": 60}
    records = [noisy("recompute_window", 16, 2.0, 9), *(noisy(name, 16, 2.0 + x / 100, 9) for name, x in losses.items())]
    page = opened(records)
    points = page.locator("#policies-body tr").evaluate_all(
        """all => Object.fromEntries(all.map((tr) =>
            [tr.querySelector('button').innerText, tr.querySelector('.dot')?.getBoundingClientRect().x]))"""
    )
    places = [points[name] for name in losses]
    assert places == sorted(places)
    assert min(b - a for a, b in itertools.pairwise(places)) > 5


@IN_BROWSER
def test_columns_that_say_the_same_of_all_policies_are_left_out(opened):
    assert "K/V of dense" not in texts(opened(of_budgets()), "#policies-head th")
    records = [edit(r, metrics={"tokens_read": 2048 if r.cell.policy == "h2o" else 4096}) for r in of_budgets()]
    page = opened(records)
    assert "Tokens read" in texts(page, "#policies-head th")
    assert "2,048" in page.inner_text("#policies-body tr:has-text('h2o')")


@IN_BROWSER
def test_cells_are_searched_and_a_failure_is_named(opened):
    page = opened(address="#tab=cells")
    page.fill("#find", "window perplexity")
    assert {name.split(" ")[0] for name in texts(page, "#cells tbody th")} == {"window", "recompute_window"}
    page.fill("#find", "nothing like it")
    assert page.inner_text("#cells-count").startswith("0 of ")
    page.fill("#find", "broken")
    assert page.inner_text("#cells tbody .bad") == "out of memory"


@IN_BROWSER
def test_addresses_that_mean_nothing_do_no_harm(opened):
    for address in ("#q=nope&budget=x", "#tab=nowhere", "#suite=%3Cb%3E&open=~", "#tab=cells&find=%3Cb%3E"):
        assert opened(address=address).locator("main section:visible").count() == 1


@IN_BROWSER
def test_a_row_opens_to_its_rivals_and_to_what_repeats_it(opened):
    page = opened(of_budgets())
    (question,) = questions(of_budgets())
    rows = {row.cell.policy: row for row in question.at(16)}
    page.focus("#policies-body tr:has-text('h2o') button")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true", "the focus stays where it was"
    lines = [line.split("\t") for line in texts(page, ".opened tr") if "bench run" not in line]
    shown = {name: rest for name, *rest in lines}
    for rival in ("window", "random"):
        lost = question.change(rows["h2o"], rows[rival])
        value, low, high = (signed(percent_lost(part)) for part in (lost.mean, lost.low, lost.high))
        verdict = {1: "worse", -1: "better", 0: "can't tell"}[lost.sign]
        assert shown[rival] == [value, f"[{low.lstrip('+')}, {high.lstrip('+')}]", verdict]
    assert re.search(r"bench run [0-9a-f]{8} --fresh", page.inner_text(".opened"))
    page.keyboard.press("Enter")
    assert page.locator(".opened").count() == 0


@IN_BROWSER
def test_what_a_row_keeps_and_attends_to_is_part_of_the_page(opened, tmp_path, monkeypatch):
    made = record("h2o", 8)
    kept = keep_map.keep_map(*(np.array(x) for x in ([0] * 3, [0, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 1])))
    edit(made, facts={"keep_map": {"file": "x.kept.parquet", "sha256": "0" * 64, "steps": ""}})
    monkeypatch.setattr(keep_map, "map_file", lambda record, folder: folder)
    monkeypatch.setattr(keep_map, "read_map", lambda path: kept)
    logits = np.where(np.tri(4, dtype=bool), np.arange(16.0).reshape(4, 4) - 8, -np.inf)
    np.savez(tmp_path / f"{made.stem}.attention.npz", logits=logits[None, None])
    files = {id(made): tmp_path / "h2o.json"}
    pictures = maps([made], files)
    assert [m["kind"] for m in pictures[made.cell_id[:12]]] == ["kept"], "the task of this record keeps no logits"
    page = opened([made, record("window", 8)], address=f"#open={made.cell_id[:8]}", pictures=pictures)
    assert page.locator(".maps img").evaluate_all("all => all.map((x) => x.naturalWidth)") == [2]
    cells = opened([made, record("window", 8)], address="#tab=cells", pictures=pictures)
    cells.click("#cells summary")
    assert cells.locator(".maps img:visible").count() == 1
    monkeypatch.undo()
    assert maps([made], files) == {}, "a file that is missing is no error"


@IN_BROWSER
@pytest.mark.parametrize(("theme", "tab"), [*itertools.product(["light", "dark"], VIEWS)])
def test_axe_finds_no_violation(tab, theme, opened):
    from axe_playwright_python.sync_playwright import Axe

    page = opened(address=tab, theme=theme)
    if not tab:
        page.locator("#policies-body button").first.click()
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


@IN_BROWSER
@pytest.mark.parametrize(("width", "tab"), [*itertools.product([390, 1024, 1440], VIEWS)])
def test_no_page_scrolls_sideways_and_no_text_is_tiny(width, tab, opened):
    page = opened(of_budgets(), address=tab, size={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    sizes = page.evaluate("[...document.querySelectorAll('main *')].map((x) => parseFloat(getComputedStyle(x).fontSize))")
    assert min(sizes) >= 11
    if not tab:
        assert page.locator(".scroll:visible").evaluate("x => x.scrollWidth - x.clientWidth") <= 0


@IN_BROWSER
def test_every_control_is_reached_and_named(opened):
    for tab in VIEWS:
        page = opened(address=tab)
        controls = page.locator("a:visible, button:visible:enabled, select:visible, input:visible, summary:visible")
        wanted = set(controls.evaluate_all("all => all.map((x) => [...document.querySelectorAll('*')].indexOf(x))"))
        reached = set()
        for _ in range(len(wanted) + 20):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
        assert wanted <= reached


@IN_BROWSER
def test_nothing_of_a_record_becomes_markup(opened):
    evil = '</script><img src=x onerror="window.fired=true"><script>window.fired=true</script>'
    records = [record(evil, 8), record(EVIL, 8), record("h2o", 8, facts={"device": evil})]
    for tab in VIEWS:
        page = opened(records, address=tab)
        assert page.locator("img").count() == 0
    assert evil in texts(page, "#cells tbody th")


@pytest.mark.parametrize("place", ["/*css*/", "/*data*/", "/*js*/"])
def test_a_mark_of_the_frame_in_a_record_is_text(place):
    """The page once went blank because its script was put into the data."""
    failed = record("failed", status="failed", error={"kind": place, "message": ""}, metrics={})
    page, _ = site.render(feeds.feed([record(place), failed]))
    cells = data_of(page)["s"]["cells"]
    assert {cell["policy"] for cell in cells} == {place, "failed"}
    assert place in {cell["status"] for cell in cells}
    assert page.endswith(f"{site.program()}</script>\n</body>\n</html>\n")


def test_the_page_needs_nothing_from_elsewhere_and_is_the_same_for_the_same_records():
    page, beside = site.render(feeds.feed(everything()))
    assert (page, beside) == site.render(feeds.feed(everything()[::-1]))
    assert beside == {}
    frame = page.split("<script>")[0]
    assert not re.search(r'(src|href)="(?!README\.md|paper\.md|feed\.json|data:|#)', frame)
    assert "default-src 'none'" in frame
    assert "unsafe-eval" not in frame


@pytest.mark.parametrize("embedded", [0, site.EMBEDDED_BYTES])
def test_the_data_of_all_suites_are_the_feed(embedded):
    made = feeds.feed(everything())
    page, beside = site.render(made, embedded_bytes=embedded)
    suites = {name: data for text in (page, *beside.values()) for name, data in data_of(text).items()}
    assert len(beside) == (3 if embedded == 0 else 0)
    for name in ("questions", "equal_bytes", "cells"):
        parts = [part for data in suites.values() for part in data[name]]
        assert sorted(map(json.dumps, parts)) == sorted(map(json.dumps, made[name]))
    for name in ("papers", "provenance"):
        assert {key: part for data in suites.values() for key, part in data[name].items()} == made[name]


def test_the_suite_of_the_default_question_comes_first_and_then_those_of_its_model():
    shapes = [{"layers": 30, "heads": 3, "key_dim": 64, "value_dim": 64}]
    model = of_budgets()[0].cell.as_json()["model"] | {"id": "large"}
    large = [changed(r, cell={"suite": name, "model": model}, facts={"kv_shapes": shapes}) for name in "yz" for r in of_budgets()]
    page, _ = site.render(feeds.feed([*everything(), *large]))
    assert list(data_of(page))[:2] in (["y", "z"], ["z", "y"])


def test_cells_of_a_task_are_told_apart_by_its_axes():
    asked = [{"name": "streameval", "distance": distance, "lines": 60} for distance in (2, 50)]
    made = feeds.feed([changed(answered("h2o", "1010"), cell={"task": task}) for task in asked])
    assert [cell["task"].count(f"distance {distance}") for cell, distance in zip(made["cells"], (2, 50), strict=True)] == [1, 1]
