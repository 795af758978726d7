"""Published figures are quoted as printed and shown beside our result for the same cell, if there is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from factories import cell_record, edit

from kvbench.harness import suite
from kvbench.harness.core import plugins
from kvbench.harness.report import paper
from kvbench.harness.report.export import summary_rows
from kvbench.harness.report.sections import headline, section, section_key
from kvbench.harness.report.task import TaskReport

TABLES = sorted((Path(paper.__file__).parent / "published").glob("*.yaml"))
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_a_published_table_is_whole_and_names_suites_that_measure_it(path):
    table = yaml.safe_load(path.read_text())
    assert all(len(row["paper"]) == len(table["columns"]) for row in table["rows"])
    assert table["source"]
    assert table["differs"].strip().endswith(".")
    cells = [c for name in paper._suites(table) for c in suite.load(ROOT / f"suites/{name}.yaml")[1]]
    records = [cell_record({}, **{k: v for k, v in c.as_json().items() if k != "model"}, model=c.model.id) for c in cells]
    flat = [(record, paper._flat(record)) for record in records]
    fixed = table["where"] | ({"model": table["model"]} if "model" in table else {})
    found = {
        id(hit)
        for row in table["rows"]
        for column in table["columns"]
        if (hit := paper._find(flat, fixed | row["match"] | column.get("match", {})))
    }
    assert found, "at least some of its cells are those of the suite"
    assert found <= {id(r) for r in records}


def test_every_published_figure_is_on_the_page_as_printed():
    page = paper.render([]).text
    for figure in ("5,158.07", "5.40", "3,359.95", "12.12", "1,411", "2,355", "22.22", "71.25", "OOM", "85.80", "38.45", "13.61"):
        assert f"*{figure}*" in page, figure
    assert "**" not in re.sub(r"→ \*\*ours\*\*", "", page)
    assert page.count("Not measured: ") == len(TABLES)
    assert "Not measured: 20 of 20 cells. `bench run latency`" in page, "the ratios of rows are no cells"


def sink(sinks: int, perplexity: float, **changes):
    what = {
        "suite": "sinks-pythia", "model": "EleutherAI/pythia-12b", "policy": "sink_window", "capacity": 2048,
        "parameters": {"sinks": sinks, "window": 2048 - sinks}, "task": {"name": "perplexity", "tokens": 400000},
    }  # fmt: skip
    return cell_record({"perplexity": perplexity}, **(what | changes))


def test_ours_stands_in_its_cell_with_the_difference():
    page = paper.render([sink(0, 22.702), sink(4, 12.09)]).text
    row = next(line for line in page.splitlines() if line.startswith("| Pythia-12B (2048)"))
    assert "*21.62* → **22.7** (+5.0 %)" in row
    assert "*12.09* → **12.09** (+0.0 %)" in row
    assert row.count("**") == 4
    assert "Not measured: 18 of 20 cells. `bench run sinks`; `bench run sinks-pythia`" in page
    assert "Ours: a device." in page


@pytest.mark.parametrize(
    "changes",
    [{"capacity": 1024}, {"positions": "stream"}, {"seed": 1}, {"task": {"name": "perplexity", "tokens": 4000}},
     {"task": {"name": "perplexity", "tokens": 400000, "newlines": 4}}, {"policy": "window"}],
    ids=str,
)  # fmt: skip
def test_another_cell_is_not_taken_for_the_papers(changes):
    page = paper.render([sink(4, 1.2345, **changes)]).text
    row = next(line for line in page.splitlines() if line.startswith("| Pythia-12B (2048)"))
    assert "1.23" not in row


def test_a_failed_cell_and_other_models_are_shown_as_such():
    failed = sink(4, 1.0)
    failed = edit(failed, status="failed", error={"kind": "out of memory", "message": "x"}, without=["perplexity"])
    page = paper.render([failed, sink(1, 58.25, model="<b>mine</b>")]).text
    assert "**failed**: out of memory" in page
    assert "58.25" in page
    assert "<b>" not in page


def test_latency_ratios_are_of_ours_and_never_against_dense():
    what = {"suite": "latency", "model": "random:llama-2-13b", "capacity": 4096, "task": {"name": "latency", "batch": 1}}
    slow = cell_record({"step_ms": 200.0}, policy="recompute_window", parameters={}, **what)
    fast = cell_record({"step_ms": 10.0}, policy="sink_window", parameters={"sinks": 4}, **what)
    page = paper.render([slow, fast]).text
    row = next(line for line in page.splitlines() if "Llama-2-13B: recompute / sink + window" in line)
    assert "*22.22* → **20** (-10.0 %)" in row


def test_a_task_without_a_section_of_its_own_shows_its_plain_numbers():
    made = cell_record({"widgets": 12345, "ratio": 0.123456, "curve": []}, task={"name": "unheard_of", "size": 3})
    page = section(made, []).text
    assert "| widgets | ratio |" in page
    assert "| 12,345 | 0.1235 |" in page
    assert "unheard\\_of" in page
    assert headline(made) == "widgets 12,345"


def test_distances_of_streameval_share_a_section_and_other_tasks_do_not():
    a, b = (cell_record({}, task={"name": "streameval", "distance": d, "lines": 100}, suite="streameval-cpu") for d in (2, 5))
    other = cell_record({}, task={"name": "streameval", "distance": 2, "lines": 200}, suite="streameval-cpu")
    assert section_key(a) == section_key(b) != section_key(other)


def test_a_summary_shows_what_differs_between_cells():
    shown = summary_rows([cell_record({"perplexity": 2.0}, task={"name": "perplexity", "tokens": n}) for n in (10, 20)])
    assert [r["task"] for r in shown] == ["perplexity tokens 10", "perplexity tokens 20"]
    assert [r["figure"] for r in shown] == ["perplexity 2"] * 2
    assert "model" not in shown[0]


def test_every_task_has_a_section_of_its_own():
    for task in plugins.working_tasks().values():
        assert task.body.__func__ is not TaskReport.body.__func__
