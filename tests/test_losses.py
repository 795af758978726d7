"""From Python to a paper: frames, LaTeX and figures have the numbers of the feed, and of the page's comparison."""

from __future__ import annotations

import itertools
import math
import re
import shutil
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from conftest import bench
from test_closing import measured

from kvbench import UserError, compare, figures, load_records, losses
from kvbench.harness.report import chart, feed
from kvbench.harness.report.doubts import with_doubts
from kvbench.harness.report.feed import words
from kvbench.harness.report.feed.question import questions
from kvbench.harness.report.feed.row import row_id
from kvbench.harness.report.rows import short_names
from kvbench.harness.report.site.sums import sums

ROOT = Path(__file__).parents[1]
LOST = {"value": "loss", "low": "low", "high": "high", "to_name": "reference"}


@cache
def published():
    return feed.feed(load_records(ROOT / "leaderboard/results/budget"))["questions"]


@pytest.fixture(scope="module")
def records():
    return load_records(ROOT / "leaderboard/results/budget")


@pytest.fixture(scope="module")
def frame(records):
    return losses(records)


@pytest.mark.slow("draws pictures")
def test_the_page_on_papers_runs_as_it_stands_and_its_numbers_are_those_of_the_feed(tmp_path, monkeypatch):
    (tmp_path / "leaderboard").symlink_to(ROOT / "leaderboard")
    monkeypatch.chdir(tmp_path)
    drawn = []
    draw = chart.picture
    monkeypatch.setattr(chart, "picture", lambda spec, path: (drawn.append(spec), draw(spec, path)))
    section = (ROOT / "docs/python.md").read_text(encoding="utf-8").split("## Tables and figures for a paper")[1]
    exec("\n".join(re.findall(r"```python\n(.*?)```", section, re.S)), {})
    (budget,) = (b for q in published() if "cache positions" in q["subject"] for b in q["budgets"] if b["capacity"] == 64)
    latex = Path("losses.tex").read_text(encoding="utf-8")
    assert r"\toprule" in latex
    lines = re.findall(r"^(.*) & (\S+) \[(\S+), (\S+)\] & (\S+) \\\\$", latex, re.M)
    assert [line[0].replace(r"\_", "_") for line in lines] == [row["name"] for row in budget["rows"]]
    for line, row in zip(lines, budget["rows"], strict=True):
        written = [float(x.replace(",", "")) for x in line[1:]]
        exact = [row["loss"]["value"], row["loss"]["low"], row["loss"]["high"], row["perplexity"]]
        assert all(math.isclose(x, y, rel_tol=0.05) for x, y in zip(written, exact, strict=True)), "two digits or more"
    pictures = sorted(Path("figures").iterdir())
    assert {path.stem for path in pictures} <= {q["id"] for q in published()}
    assert all(path.read_bytes().startswith(b"%PDF-") for path in pictures)
    rows = [[r["name"], r["capacity"], *(r["loss"][x] for x in ("value", "low", "high"))] for r in all_rows() if r["loss"]]
    values = [[v[x] for x in ("policy", "capacity", "loss", "low", "high")] for spec in drawn for v in spec["data"]["values"]]
    assert len(values) > 50
    assert [value for value in values if value not in rows] == []


def all_rows():
    return [
        row
        for question in published()
        for row in [*(row for budget in question["budgets"] for row in budget["rows"]), *question["references"]]
    ]


def test_the_frame_has_every_row_of_the_feed_with_its_figures(frame):
    assert len(frame) == len(all_rows())
    for (_, made), row in zip(frame.iterrows(), all_rows(), strict=True):
        assert [made.policy, made.kind, made.status] == [row["name"], row["kind"], row["status"]]
        for name in ("perplexity", "kv_bytes", "kv_share", "ms"):
            assert same(made[name], row[name]), name
        assert same(made.capacity, row["capacity"])
        assert all(map(same, (made.best_rank, made.worst_rank), row["rank"] or (None, None)))
        assert all(same(made[column], (row["loss"] or {}).get(key)) for key, column in LOST.items())
        right = row["answers"][0]["share"] if row["answers"] and made.unit == "points" else None
        assert same(made.right, None if right is None else 100 * right)


def same(value, other) -> bool:
    return pd.isna(value) if other is None else value == other


def test_a_comparison_has_the_intervals_of_the_page(records):
    """Which are corrected for all pairs of the budget."""
    at_64 = [r for r in records if r.cell.capacity == 64 and r.cell.task.name == "perplexity"]
    compared = 0
    for question in questions(with_doubts(at_64)):
        page = sums([question])[words.identifier(question)]
        pairs = dict(zip(itertools.combinations(page["order"], 2), page["pairs"], strict=True))
        names = dict(zip(map(row_id, question.rows), short_names(question.rows), strict=True))
        for (first, second), ends in pairs.items():
            if names[second] == "h2o":
                made = compare(at_64, "h2o", names[first])
                (made,) = made[made.subject == words.subject(question)][["loss", "low", "high"]].to_numpy()
                assert list(made) == pytest.approx([100 * math.expm1(x) for x in ends], rel=1e-3, abs=1e-3)
                assert len(ends) == 3
                compared += 1
    assert compared > 1


def test_a_name_is_that_of_a_row_or_of_a_policy():
    seeds = [measured("random", 2.0 + seed / 10, parameters={"sinks": seed}) for seed in (1, 2)]
    both = [measured("dense", 1.9, None), *seeds, measured("h2o", 2.05)]
    every = compare(both, "random", "h2o")
    assert [*every.policy] == ["random (sinks 1)", "random (sinks 2)"]
    one = compare(both, "random (sinks 2)", "h2o")
    assert [*one.policy] == ["random (sinks 2)"]
    assert [*one.verdict] == ["worse"]
    back = compare(both, "h2o", "random (sinks 2)")
    assert [*back.verdict] == ["better"]
    assert back.interval[0].startswith("-")
    assert back.interval[0].isascii(), "pdfLaTeX has no minus sign"
    assert (1 + one.loss[0] / 100) * (1 + back.loss[0] / 100) == pytest.approx(1)
    other = measured("h2o", 2.1, parameters={"window": 4})
    assert {*compare([*both, other], "h2o", "dense").policy} == {"h2o"}, "where a row has exactly that name"
    assert [*compare(both, "dense", "h2o").capacity] == [8], "of the cache, for a reference has none"


def test_a_wrong_name_is_told_in_one_line():
    both = [measured("dense", 1.9, None), measured("h2o", 2.0), measured("window", 2.0, 16)]
    with pytest.raises(UserError, match=r"no policy is called 'h20', did you mean 'h2o'\?"):
        compare(both, "dense", "h20")
    with pytest.raises(UserError, match="'h2o' and 'window' were not measured for the same question at the same capacity"):
        compare(both, "h2o", "window")
    assert losses([]).empty


@pytest.mark.slow("writes pages and draws pictures")
def test_the_command_draws_the_figures_that_python_does(tmp_path, capsys):
    shutil.copytree(ROOT / "leaderboard/results/quickstart", tmp_path / "results/quickstart")
    options = ("--results", tmp_path / "results", "--figures", tmp_path / "figures", "--format", "svg")
    code, out, _ = bench(capsys, "leaderboard", *options)
    assert code == 0
    drawn = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert f"{len(drawn)} pictures -> {tmp_path / 'figures'}" in out
    again = figures(load_records(tmp_path / "results"), tmp_path / "again", format="svg")
    assert len(drawn) >= 4, "one for each question of the quickstart"
    assert sorted(path.name for path in again) == drawn
    assert all(path.read_bytes() == (tmp_path / "figures" / path.name).read_bytes() for path in again)


def test_a_format_is_one_that_can_be_drawn(tmp_path, capsys):
    both = [measured("dense", 1.9, None), measured("h2o", 2.0), measured("window", 2.1)]
    (file,) = figures(both, tmp_path, format="png")
    assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"\.png, \.svg or \.pdf"):
        figures(both, tmp_path, format="eps")
    code, _, err = bench(capsys, "leaderboard", "--results", tmp_path, "--format", "pdf")
    assert (code, "--figures" in err) == (2, True)
