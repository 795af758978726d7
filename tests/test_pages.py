"""Pages replace only our own, and leave out a record that breaks them. Charts are the same for the same records."""

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from factories import RECORDS, cell_record, changed, drawn, edit, record, working_copy
from helpers import bench

from kvbench.harness.cli.pages import make_without_broken
from kvbench.harness.core import plugins
from kvbench.harness.core.errors import Exit
from kvbench.harness.records import RecordStore, digest, publish
from kvbench.harness.report import chart, site, verify
from kvbench.harness.report.chart import drawing_files
from kvbench.harness.report.feed import row
from kvbench.harness.report.markdown import title
from kvbench.harness.report.rows import short_titles
from kvbench.harness.report.sections import section
from kvbench.harness.report.task_charts import over_the_stream
from kvbench.harness.tasks.streameval import over_distance

ROOT = Path(__file__).parents[1]


@pytest.fixture
def results(tmp_path):
    """Records that were measured, with pictures."""
    return publish(RECORDS / "attention_builtin.jsonl", tmp_path / "results", arrays=True) and tmp_path / "results"


def contents(folder):
    """Files by name, without unfinished ones."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.name[0] != "." and p.is_file()}


def test_without_records_nothing_is_touched(results, tmp_path, capsys):
    """A typo in --results once emptied the leaderboard and deleted its charts."""
    out = tmp_path / "board" / "README.md"
    assert bench(capsys, "leaderboard", "--results", results, "--out", out)[0] == 0
    before = contents(out.parent)
    assert sum(name.startswith("charts/") for name in before) >= 2
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.json").write_text("{")
    for wrong in ("nowhere", "empty", "broken"):
        code, _, err = bench(capsys, "leaderboard", "--results", tmp_path / wrong, "--out", out)
        assert (code, "no records there" in err) == (2, True)
    assert contents(out.parent) == before


def test_only_charts_that_the_page_before_named_are_deleted(results, tmp_path, capsys):
    out = tmp_path / "board" / "README.md"
    publish(RECORDS / "first_book.jsonl", results)
    assert bench(capsys, "leaderboard", "--results", results, "--out", out)[0] == 0
    first = set(contents(out.parent / "charts"))
    (out.parent / "charts" / "mine.svg").write_text("mine")
    (results / "first_book.jsonl").unlink()
    assert bench(capsys, "leaderboard", "--results", results, "--out", out)[0] == 0
    left = set(contents(out.parent / "charts"))
    shown = {file for page in ("README.md", "paper.md") for file in drawing_files((out.parent / page).read_text())}
    assert left == {"mine.svg"} | shown
    assert first - left


@pytest.mark.slow("processes of its own")
def test_two_renderings_at_once_leave_whole_pages(results, tmp_path, capsys):
    out = tmp_path / "board" / "README.md"
    assert bench(capsys, "leaderboard", "--results", results, "--out", out)[0] == 0
    whole = contents(out.parent)
    command = [sys.executable, "-m", "kvbench", "leaderboard", "--results", str(results), "--out", str(out)]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    while any(p.poll() is None for p in both):
        assert contents(out.parent) == whole, "whoever reads meanwhile sees whole files"
    assert [(p.communicate()[1], p.returncode) for p in both] == [(b"", 0)] * 2
    assert contents(out.parent) == whole
    assert not list(out.parent.rglob("*.partial"))


@pytest.mark.parametrize("file", ["README.md", "paper.md", "index.html", "feed.json"])
@pytest.mark.parametrize("kind", ["text", "folder", "pipe"])
def test_a_file_that_is_not_ours_is_not_overwritten(file, kind, results, tmp_path, capsys):
    folder = tmp_path / "project"
    folder.mkdir()
    if kind == "text":
        (folder / file).write_text("# My project\n\nSee `bench leaderboard`; written by me.\n<title>Mine</title>\n")
    else:
        (folder / file).mkdir() if kind == "folder" else os.mkfifo(folder / file)
    before = sorted(p.name for p in folder.rglob("*"))
    code, _, err = bench(capsys, "leaderboard", "--results", results, "--out", folder / "README.md")
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert ("--paper" if file == "paper.md" else "--out") in err
    assert sorted(p.name for p in folder.rglob("*")) == before
    if kind == "text":
        assert (folder / file).read_text().startswith("# My project")


def test_a_forged_record_is_named_and_left_out_and_the_exit_code_says_so(results, tmp_path, capsys):
    """A perplexity of 1.01 was on the page once."""
    out = tmp_path / "board" / "README.md"
    store = RecordStore(results)
    path = store.write(record("h2o", 16, nll=2.0))
    code, _, err = bench(capsys, "leaderboard", "--results", results, "--out", out)
    assert code == Exit.NO
    first, last = err.splitlines()
    assert first.startswith(f"bench: {path}: left out, because it is not correct: it has no trace")
    assert last.endswith("records are not correct: see bench records verify")
    assert "perplexity lost" not in out.read_text(), "only records of attention are left, which have none"
    path.unlink()
    assert bench(capsys, "leaderboard", "--results", results, "--out", out)[0] == Exit.OK


def test_a_record_that_breaks_a_section_is_named_and_left_out(results, tmp_path, capsys, monkeypatch):
    def overflowing(record):
        if record.cell.policy == "keydiff":
            raise OverflowError("math range error")
        return title(record)

    publish(RECORDS / "first_book.jsonl", results)
    monkeypatch.setattr(verify, "problems", lambda record, folder: [])
    monkeypatch.setattr(row, "title", overflowing)
    path = RecordStore(results).write(record("keydiff", 16))
    out = tmp_path / "board" / "README.md"
    code, _, err = bench(capsys, "leaderboard", "--results", results, "--out", out)
    assert code == 0
    assert [str(path) in line for line in err.splitlines()] == [True]
    assert "OverflowError" in err
    page = (out.parent / "index.html").read_text()
    assert "window" in page
    assert "keydiff" not in page


@pytest.mark.parametrize(
    ("policies", "breaks", "left_out"),
    [
        ("odd a b c d e f odd2", lambda names: len({name.startswith("odd") for name in names}) > 1, "odd odd2"),
        ("a b c d e f g", lambda names: bool({"c", "f"} & {*names}), "c f"),
    ],
    ids=["records that do not go together", "broken records"],
)
def test_as_few_records_as_possible_are_left_out_each_with_its_error(policies, breaks, left_out):
    def make(part):
        names = [r.cell.policy for r in part]
        if breaks(names):
            raise TypeError("broken")
        return names

    made, broken = make_without_broken([record(name) for name in policies.split()], make)
    assert made == [name for name in policies.split() if name not in left_out.split()]
    assert [(r.cell.policy, str(error)) for r, error in broken] == [(name, "broken") for name in left_out.split()]


def test_data_that_do_not_fit_go_to_a_folder_and_those_of_gone_suites_are_deleted(results, tmp_path, capsys, monkeypatch):
    def rendered():
        code = bench(capsys, "leaderboard", "--results", results, "--out", tmp_path / "board" / "README.md")[0]
        return code, sorted(path.name.split("-v1")[0] for path in folder.iterdir())

    monkeypatch.setattr(verify, "problems", lambda record, folder: [])
    monkeypatch.setattr(site.render, "__defaults__", (None, 0))
    folder, path = tmp_path / "board" / site.FOLDER, RecordStore(results).write(record("h2o", 16))
    assert rendered() == (0, ["attention-builtin", "s"])
    (folder / "mine.js").write_text("mine")
    path.unlink()
    assert rendered() == (0, ["attention-builtin", "mine.js"])
    next(folder.glob("attention*")).write_text("mine")
    before = contents(folder.parent)
    assert rendered()[0] == 2
    assert contents(folder.parent) == before


BASELINE = ROOT / "leaderboard/baselines/quickstart"
NUMBERS: list[Any] = [True, 0, -1, 2**53 + 1, 10**400, 0.5, 1e300, float("nan"), float("-inf")]
TEXTS = [
    "",
    "\x00",
    "\x1b[2J",
    "\u202egnp.exe",
    "\ud800",
    "=1+1",
    "</script><script>1</script>",
    "| a |\n# b",
    "../../passwd",
    "ok",
]
VALUES = [None, *NUMBERS, *TEXTS, [], [None], ["x"], {}, {"": {}}, {"x": [1, {"y": None}]}]


def parts_of(value: Any) -> list[tuple[Any, Any]]:
    """Every part of a JSON value, as what holds it and its key; in long lists, only the ends."""
    keys = list(value) if isinstance(value, dict) else {0, len(value) - 1} if isinstance(value, list) and value else ()
    return [part for key in keys for part in [(value, key), *parts_of(value[key])]]


def mutate(value: dict[str, Any], draw: random.Random) -> None:
    """Replace, drop, scale or repeat a part of a record; its cell's id does not give that away."""
    group = draw.choice([value, *(value[name] for name in ("cell", "metrics", "metrics", "data", "facts"))])
    holder, key = draw.choice(parts_of(group))
    old, how = holder[key], draw.random()
    if how < 0.2:
        del holder[key]
    elif how < 0.4 and isinstance(old, (int, float, list)):
        holder[key] = old * draw.choice([0, 2, 10**6] if not isinstance(old, list) else [0, 2])
    else:
        holder[key] = draw.choice(VALUES)
    with contextlib.suppress(KeyError, ValueError):  # of a cell that is gone, or that holds a NaN
        value["cell_id"] = digest(value["cell"])


@pytest.mark.slow("takes seconds")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_mutated_record_breaks_a_verb(tmp_path, capsys):
    """Whatever is in a record of any task, every command that reads records goes on."""
    draw, results = random.Random(3), tmp_path / "results"
    for number, source in enumerate((BASELINE, RECORDS)):
        working_copy(source, tmp_path / f"{number}")
    of_task: dict[str, list[Path]] = {}
    for path, made in sorted(RecordStore(tmp_path / "0").files()) + sorted(RecordStore(tmp_path / "1").files()):
        of_task.setdefault(made.cell.task.name, []).append(path)
    sound = list(itertools.chain(*(paths[:2] for paths in of_task.values())))
    for path in sound:
        (results / path.parent.name).mkdir(parents=True, exist_ok=True)
        for file in path.parent.glob(f"{path.stem}.*"):
            (results / path.parent.name / file.name).write_bytes(file.read_bytes())
    for number in range(100):
        value = json.loads(draw.choice(sound).read_text())
        mutate(value, draw)
        (results / f"mutated{number}.json").write_text(json.dumps(value))
    for verb in (
        ("leaderboard", "--results", results, "--out", tmp_path / "page/README.md"),
        ("compare", BASELINE, results),
        ("compare", results, BASELINE, "--markdown"),
        ("check", "--baseline", BASELINE, "--results", results),
        ("records", "verify", results),
        ("records", "export", tmp_path / "all.csv", "--results", results, "--all"),
        ("records", "export", tmp_path / "all.parquet", "--results", results),
        ("run", value["cell_id"][:8], "--dry-run", "--results", results),
    ):
        code, _, err = bench(capsys, *verb)
        assert code != Exit.CRASH, (verb, err)
        assert "Traceback" not in err, verb
    assert (tmp_path / "page/README.md").exists()


def test_a_row_in_the_models_dtype_beside_a_coded_row_has_a_whole_name():
    kv = {"codec": "int8", "group": 32, "exempt": {"sinks": 0, "recent": 0}}
    assert short_titles([record(), changed(record(), cell={"kv": kv})]) == ["h2o", "h2o (kv int8)"]


def test_a_policy_has_one_name_at_all_capacities():
    def titles(policy: str, *cells: tuple[int, dict]) -> list[str]:
        return short_titles([edit(record(policy, capacity), cell={"parameters": given}) for capacity, given in cells])

    kernels = titles(
        "snapkv", (8, {"window": 4, "kernel": 7}), (16, {"window": 8, "kernel": 7}), (16, {"window": 8, "kernel": 1})
    )
    assert kernels == ["snapkv (kernel 7)", "snapkv (kernel 7)", "snapkv (kernel 1)"]
    assert titles("h2o", (8, {"window": 4}), (16, {"window": 8})) == ["h2o", "h2o"]
    control = titles("random", (8, {"sinks": 2, "window": 4}), (16, {"sinks": 2, "window": 8}))
    assert control == ["random (sinks 2, window half)"] * 2


def test_the_same_records_give_the_same_drawing_in_any_order_of_pages():
    one, two = (section(drawn()[0], records) for records in (drawn(), drawn()[::-1]))
    assert one.charts == two.charts
    assert one.charts[0].svg("light") == two.charts[0].svg("light")
    assert one.charts[0].svg("light") != one.charts[0].svg("dark")


def test_a_drawing_does_not_depend_on_those_before_it():
    """Vega numbers the gradients of a process."""
    scale = {"values": [{"x": 1, "y": 2}, {"x": 2, "y": 5}]}
    colour = {"field": "y", "type": "quantitative", "legend": {"type": "gradient"}}
    made = chart.Chart("x", "x", {"data": scale, "mark": "point", "encoding": {"x": {"field": "x"}, "color": colour}})
    drawings = []
    for _ in range(2):
        chart._svg.cache_clear()
        drawings.append(made.svg("light"))
    assert drawings[0] == drawings[1]
    assert 'id="gradient_0"' in drawings[0]
    assert "url(#gradient_0)" in drawings[0]


def test_what_is_drawn_is_what_was_measured():
    (made,) = over_the_stream(drawn())
    *marks, lines = made.spec["layer"]
    assert marks[0]["data"]["values"] == [{"at": 8, "what": "cache full"}, {"at": 512, "what": "training length"}]
    found = [v["perplexity"] for v in lines["data"]["values"] if v["policy"] == "dense"]
    tokens = [v["token"] for v in lines["data"]["values"] if v["policy"] == "dense"]
    assert tokens == sorted(tokens)
    assert len(found) == 1 + 18, "two points a doubling from 64 to 32,768"
    assert found[-1] == pytest.approx(6.69, rel=0.02), "e to the 1.9, of thousands of tokens"
    blocks = drawn()[0].metrics.blocks
    assert found[0] == pytest.approx(2.718281828 ** (sum(blocks.nll_sum[:2]) / 64), rel=1e-4), "the first point is 64 tokens"


def test_a_drawing_has_no_markup_of_a_record_and_needs_nothing_from_elsewhere():
    page = section(drawn()[0], drawn())
    assert "<script" not in page.text
    for theme in ("light", "dark"):
        svg = page.charts[0].svg(theme)
        tags = {e.tag.rpartition("}")[2] for e in ET.fromstring(svg).iter()}
        assert tags <= {"svg", "g", "path", "text", "rect", "line", "defs", "clipPath", "title"}
        assert "script" in svg, "the name is there, as text"
        assert not any(word in svg.lower() for word in ("href=", "url(http", "@import"))


def test_answers_over_distance_have_their_intervals():
    def asked(distance: int, right: int):
        task = {"name": "streameval", "distance": distance}
        made = cell_record({"right": right, "questions": 40, "accuracy": right / 40}, task=task, capacity=128)
        edit(made, data={"line_tokens": 16.0, "streams": 40})
        return made

    (made,) = over_distance([asked(20, 0), asked(2, 40)])
    *marks, errors, line = made.spec["layer"]
    assert marks[0]["data"]["values"][0]["at"] == 8, "lines that 128 tokens hold"
    near, far = line["data"]["values"]
    assert (near["lines back"], near["right"], near["high"]) == (2, 100, 100)
    assert far["right"] == far["low"] == 0 < far["high"] < 15
    assert errors["data"] == line["data"]
    assert over_distance([asked(2, 40)]) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_two_shipped_policies_share_colour_and_dash(theme):
    marks = [chart.mark(policy) for policy in plugins.working_policies()]
    assert len({(getattr(mark, theme), mark.dash) for mark in marks}) == len(marks)
