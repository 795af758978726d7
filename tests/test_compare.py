"""Comparisons are paired where possible, say so where not, and give no verdict without an interval."""

import json
import subprocess

import numpy as np
import pytest
from factories import cell_record, changed, edit, record
from helpers import bench

from kvbench.harness.records import RecordStore, read
from kvbench.harness.records.beside import TraceFile
from kvbench.harness.report.compare import differences, judge_all, markdown, token_differences
from kvbench.harness.report.pairing import judge_interval
from kvbench.harness.report.ranks import shared_outcomes
from kvbench.harness.report.rows import Row
from kvbench.harness.report.sections import section_key
from kvbench.harness.report.shares import paired_shares, shares

pytestmark = pytest.mark.fast


def shifted(nll: float, by: float):
    """Return a record with equal noise and a slightly higher mean."""
    return record("h2o", 8, nll + by)


def only(found, metric):
    (one,) = [d for d in found if d.metric == metric]
    return one


@pytest.mark.parametrize(
    ("low", "high", "margin", "expected"),
    [
        (0.1, 0.2, 0.01, "worse"),
        (-0.2, -0.1, 0.01, "better"),
        (-0.001, 0.002, 0.01, "same"),
        (0.001, 0.002, 0.01, "same"),
        (-0.1, 0.2, 0.01, "can't tell"),
        (0.005, 0.02, 0.01, "worse"),
        (None, None, 0.01, "can't tell"),
    ],
)
def test_verdicts_follow_the_interval_and_the_margin(low, high, margin, expected):
    assert judge_interval(low, high, margin) == expected
    flipped = {"worse": "better", "better": "worse"}.get(expected, expected)
    assert judge_interval(low, high, margin, more_is_better=True) == flipped


def test_a_difference_in_nll_is_paired_so_that_the_texts_noise_cancels():
    found = only(differences(shifted(2.0, 0.0), shifted(2.0, 0.005)), "nll")
    assert found.change == pytest.approx(0.005)
    assert found.low == pytest.approx(0.005)
    assert found.high == pytest.approx(0.005)
    assert found.verdict == "worse"
    assert only(differences(shifted(2.0, 0.005), shifted(2.0, 0.0)), "nll").verdict == "better"
    assert only(differences(shifted(2.0, 0.0), shifted(2.0, 0.0005)), "nll").verdict == "same"
    assert only(differences(record(), record()), "nll").why == "identical to the last digit"


def test_two_records_of_dense_past_its_training_length_have_the_same_trend():
    a, b = (record("dense", None, nll, facts={"training_length": 512}) for nll in (2.0, 2.1))
    assert only(differences(a, b), "nll").verdict == "worse"
    other = record("window", 8, 2.0, facts={"training_length": 512})
    assert only(differences(a, other), "nll").verdict == "can't tell"


def test_answers_that_were_judged_by_other_rules_are_not_compared():
    """They share no section of a page and no pair of policies, either."""
    outcomes = {"questions": 40, "right": 20, "accuracy": 0.5, "score": 0.5, "outcomes": "01" * 20, "metric": "exact_match"}
    figures = outcomes | {"over_capacity": 0, "requests": 40, "kv_bytes": 1, "state_bytes": 0}
    old = cell_record(figures, task={"name": "lm_eval", "tasks": "kvbench_once"})
    new = changed(old, data={"task_version": "2.0"})
    assert only(differences(old, old), "accuracy").verdict == "same"
    found = only(differences(old, new), "accuracy")
    assert (found.low, found.verdict, found.why) == (None, "can't tell", "answers were judged by different rules")
    assert section_key(old) != section_key(new)
    assert shared_outcomes(Row([old]), Row([old])) is not None
    assert shared_outcomes(Row([old]), Row([new])) is None


def test_another_text_is_not_paired():
    other = record()
    edit(other, data={"ids_sha256": "y", "tokens": 32768})
    edit(other, metrics={"nll": 3.0})
    assert only(differences(record(), other), "nll").verdict == "can't tell"


def quiz(outcomes: str, **changes):
    right = outcomes.count("1")
    metrics = {"questions": len(outcomes), "right": right, "accuracy": right / len(outcomes), "outcomes": outcomes}
    independent = {"data": record().data.as_json() | {"streams": len(outcomes)}}
    return cell_record(metrics, task={"name": "streameval", "distance": 5}, **(independent | changes))


def test_answers_are_compared_question_by_question():
    a, b = quiz("1" * 50 + "0" * 50), quiz("1" * 50 + "1" * 20 + "0" * 30, policy="h2o")
    found = only(differences(a, b), "accuracy")
    assert (found.change, found.verdict) == (pytest.approx(0.2), "better")
    assert 0.1 < found.low < 0.2 < found.high < 0.3
    assert only(differences(b, a), "accuracy").verdict == "worse"
    mixed = quiz("0" * 5 + "1" * 45 + "1" * 6 + "0" * 44, policy="h2o")
    assert only(differences(a, mixed), "accuracy").verdict == "can't tell"
    assert only(differences(a, quiz("1" * 50 + "0" * 50)), "accuracy").verdict == "same"


@pytest.mark.parametrize("shares", [[0.3, 0.25, 0.15, 0.3], [0.4, 0.3, 0.0, 0.3], [0.02, 0.03, 0.01, 0.94]])
def test_the_interval_of_paired_shares_covers_what_it_should(shares):
    """The interval contains the true difference in 95 % of simulated texts."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        both = rng.choice(4, size=200, p=shares)  # neither, only a, only b, both
        a, b = ("".join("01"[x in (k, 3)] for x in both) for k in (1, 2))
        low, high = paired_shares(a, b)
        hits += low <= shares[2] - shares[1] <= high
    assert 0.92 <= hits / 400 <= 0.99


def test_the_interval_of_paired_shares_is_the_same_both_ways_round_and_wide_for_few_questions():
    low, high = paired_shares("0101", "0101")
    assert low == -high
    assert -1 < low < -0.3
    one, other = paired_shares("1" * 40 + "0" * 10, "1" * 30 + "0" * 20), paired_shares("1" * 30 + "0" * 20, "1" * 40 + "0" * 10)
    assert one == (pytest.approx(-other[1]), pytest.approx(-other[0]))
    assert one[0] < -0.2 < one[1] < 0, "also where all that differ do so in one direction"


def test_newcombes_interval_is_that_of_his_paper():
    low, high = shares((48, 80), (56, 70))  # 56/70 against 48/80 in Table II, row (a): 0.0524, 0.3339
    assert (low, high) == (pytest.approx(0.0524, abs=5e-5), pytest.approx(0.3339, abs=5e-5))


def timed(ms: float, together: str, **facts):
    rounds = [ms * (1 + 0.004 * (i % 5)) for i in range(24)]
    metrics = {"step_ms": float(np.median(rounds)), "rounds_ms": rounds, "together": together, "kv_bytes": 640, "state_bytes": 10}
    made = cell_record(metrics, task={"name": "latency", "batch": 1})
    edit(made, facts={"device": "a device", "threads": 2} | facts)
    return made


def test_latency_is_told_with_what_its_interval_leaves_out():
    found = only(differences(timed(1.0, "x"), timed(1.3, "y")), "step_ms")
    assert found.verdict == "worse"
    assert "two runs" in found.why
    assert only(differences(timed(1.0, "x"), timed(1.0, "x")), "step_ms").verdict == "same"
    assert only(differences(timed(1.0, "x"), timed(2.0, "y", device="another")), "step_ms").verdict == "can't tell"


def test_bytes_are_compared_exactly_and_a_failure_is_worse():
    a, b = timed(1.0, "x"), timed(1.0, "x")
    edit(b, metrics={"kv_bytes": 641})
    assert only(differences(a, b), "kv_bytes").verdict == "worse"
    failed = record(status="failed", error={"kind": "out of memory", "message": ""}, metrics={})
    (found,) = differences(record(), failed)
    assert (found.verdict, found.why) == ("worse", "ok -> out of memory")


def test_the_largest_difference_of_a_token_is_found_and_a_hole_on_one_side_is_infinite(tmp_path):
    x = np.array([np.nan, 1.0, 2.0, np.nan])
    for name, value in (
        ("a", x),
        ("b", x + np.array([0, 0, 0.25, 0])),
        ("c", np.array([np.nan, 1.0, np.nan, np.nan])),
        ("d", x[:3]),
    ):
        np.save(tmp_path / f"{name}.npy", value)
    path = lambda name: TraceFile((tmp_path / f"{name}.npy").read_bytes(), tmp_path, tmp_path)  # noqa: E731
    assert token_differences((path("a"), path("b"))).max() == 0.25
    assert token_differences((path("a"), path("c"))).max() == float("inf")
    assert token_differences((path("a"), path("d"))) is None
    assert token_differences((path("a"), None)) is None


@pytest.fixture
def folders(tmp_path):
    for name, by in (("before", 0.0), ("after", 0.01)):
        store = RecordStore(tmp_path / name)
        for made in (record("h2o", 8, 2.0 + by), record("window", 8, 2.1), record("<b>|evil", 8, 2.1 + by)):
            store.write(made)
    return tmp_path


def test_folders_are_compared_cell_by_cell_the_worst_first(folders, capsys):
    code, out, err = bench(capsys, "compare", folders / "before", folders / "after")
    assert code == 0
    assert [line.split("\t")[6] for line in out.splitlines()[1:3]] == ["worse", "worse"]
    assert "2 worse" in err
    code, out, _ = bench(capsys, "compare", folders / "before", folders / "after", "--json")
    found = [x for x in json.loads(out) if x["metric"] == "nll" and "h2o" in x["cell"]]
    assert found[0]["change"] == pytest.approx(0.01)
    assert found[0]["verdict"] == "worse"


def test_a_comment_has_what_changed_and_no_markup_of_a_record(folders, capsys):
    _, out, _ = bench(capsys, "compare", folders / "before", folders / "after", "--markdown")
    assert "<b>" not in out
    assert out.index("worse") < out.index("<details>")
    assert markdown([], "a", "b").count("Nothing changed") == 1


@pytest.mark.parametrize("name", ["file", "cell id"])
def test_two_cells_are_compared_whatever_they_are_of(folders, capsys, name):
    cells = [next((folders / "before").rglob(f"{p}-*.json")) for p in ("h2o", "window")]
    cells = cells if name == "file" else [read(path).cell_id[:8] for path in cells]
    code, out, _ = bench(capsys, "compare", *cells, "--results", folders / "before")
    assert code == 0
    assert "h2o at 8 -> window at 8" in out


def test_a_git_revision_is_a_source(folders, capsys, monkeypatch):
    monkeypatch.chdir(folders)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x"]
    for command in (["init", "-q"], ["add", "before"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    code, out, _ = bench(capsys, "compare", "HEAD:before", "after")
    assert code == 0
    assert "worse" in out


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ("gone", "after", "not a file, folder"),
        ("after", "empty", "no records"),
        ("before", "other", "no cell in common"),
    ],
)
def test_mistakes_are_one_line(folders, capsys, monkeypatch, a, b, says):
    monkeypatch.chdir(folders)
    (folders / "empty").mkdir()
    RecordStore(folders / "other").write(record("x", 8))
    RecordStore(folders / "other").write(record("y", 8))
    code, _, err = bench(capsys, "compare", a, b)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1


def test_of_pairs_only_the_same_cells(folders):
    a, b = ([record("h2o", 8), record("window", 8)], [record("window", 8), record("random", 8)])
    assert {j.a.cell.policy for j in judge_all((a, folders), (b, folders))} == {"window"}
