"""`bench which`: its choice of cells to measure, its stopping, and its answer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import yaml
from factories import edit
from helpers import bench
from test_progress import answered, measured

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.intervals import MIN_BLOCKS
from kvbench.harness.report.best_policy import best_policy
from kvbench.harness.run import which_suite as choosing
from kvbench.harness.run.estimate import Estimate, Estimator
from kvbench.harness.run.which_suite import Deadline, ordered, suite_for
from kvbench.harness.suite import Cell, ModelSpec, load

RECALL = ModelSpec(id="builtin:recall")
UNREAD = SimpleNamespace(measured=lambda metrics: None)  # a record without answers


@dataclass
class Scripted:
    """A machine whose estimates are a number of seconds for each token, and whose clock a test moves."""

    seconds_per_token: float
    now: float = 0.0
    load_seconds: float = 0.0

    def estimates(self, cells: Sequence[Cell]) -> list[Estimate]:
        return [Estimate(c, self.seconds_per_token * getattr(c.task, "tokens", 1000), None, None) for c in cells]

    def speeds(self, spec: object) -> SimpleNamespace:
        return SimpleNamespace(training_length=528)


def chosen(machine: Scripted, tmp_path) -> tuple[list[Cell], list[str]]:
    """Cells of ten minutes in order, and notes."""
    content, notes = suite_for(RECALL, 96, None, machine, 600.0)
    (tmp_path / "which.yaml").write_text(content)
    return ordered(load(tmp_path / "which.yaml")[1]), notes


def run(cells: Sequence[Cell], machine: Scripted, until: float, slowdown: float = 1.0) -> tuple[list[Cell], Deadline]:
    """The cells measured by a run on a machine where each takes its estimate times a factor."""
    deadline, done = Deadline(cells, until, machine, lambda: machine.now), []
    for cell in cells:
        if deadline.wants([cell], {cell.id: UNREAD for cell in done}):
            done.append(cell)
            machine.now += slowdown * machine.estimates([cell])[0].seconds
    return done, deadline


def text_streams(cells: Sequence[Cell]) -> int:
    return cells[0].task.streams


@pytest.mark.slow("builds questions")
def test_the_first_cells_take_half_of_the_time_and_have_an_interval(tmp_path):
    """A faster machine reads more streams; one that is too slow for an interval says so, and asks no questions."""
    fast, medium, slow = (chosen(Scripted(speed), tmp_path) for speed in (1e-6, 5e-3, 1e-1))
    assert text_streams(fast[0]) == 100
    assert MIN_BLOCKS < text_streams(medium[0]) < 100
    core = sum(row.seconds for row in Scripted(5e-3).estimates(medium[0][:4]))
    assert 0.45 * 600 < core <= 300
    assert 1 <= text_streams(slow[0]) < MIN_BLOCKS
    assert any("An interval needs 20" in note for note in slow[1])
    assert {c.task.name for c in slow[0]} == {"perplexity"}
    assert {c.task.name for c in fast[0]} == {"perplexity", "lm_eval"}
    assert {c.capacity for c in fast[0] if c.policy.evicts} == {96}
    assert {(c.evict, c.positions) for c in fast[0] if c.policy.evicts} == {(1, "cache"), ("prompt", "stream")}


@pytest.fixture
def cells(tmp_path):
    return chosen(Scripted(0.02), tmp_path)[0]


@pytest.mark.parametrize("slowdown", [0.3, 1.0, 5.0])
def test_it_ends_in_time_on_a_slow_machine_and_measures_more_on_a_fast_one(cells, slowdown):
    until = 600.0
    done, deadline = run(cells, Scripted(0.02), until, slowdown)
    plain, _ = run(cells, Scripted(0.02), until)
    machine = Scripted(0.02)
    run(cells, machine, until, slowdown)
    assert machine.now <= 1.1 * until
    assert (len(done) > len(plain)) == (slowdown < 1)
    assert (len(done) < len(plain)) == (slowdown > 1)
    assert done == cells[: len(done)]
    assert bool(deadline.notes) == (len(done) < len(cells))


def test_the_most_telling_cells_come_first(cells):
    assert {cell.name for cell in cells[:4]} == {"dense", "sink_window", "random", "h2o"}
    assert cells[0].name == "dense"
    assert {(cell.task.name, cell.evict, cell.task.prompt) for cell in cells[:4]} == {("perplexity", 1, None)}


def test_no_policy_is_measured_where_dense_did_not_fit(cells):
    """Loading counts for the first cell, dense's: a later one alone would fit, but has nothing to be compared with."""
    seconds = Scripted(0.02).estimates(cells[:1])[0].seconds
    done, deadline = run(cells, Scripted(0.02, load_seconds=seconds), 1.5 * seconds)
    assert not [cell for cell in done if cell.task.name == "perplexity" and cell.task.prompt is None]
    assert deadline.notes


@pytest.mark.parametrize(("accuracy", "expected"), [(0.49, False), (0.5, True), (None, True)])
def test_questions_that_dense_can_not_answer_are_left_out(cells, accuracy, expected):
    asked = next(cell for cell in cells if cell.name != "dense")
    dense = next(cell for cell in cells if cell.task == asked.task and cell.name == "dense")
    record = SimpleNamespace(measured=lambda metrics: SimpleNamespace(accuracy=accuracy))
    deadline = Deadline(cells, 600.0, Scripted(1e-9), lambda: 0.0)
    assert deadline.wants([asked], {dense.id: record}) == expected
    assert any("dense answers less than 50 % of their questions right" in note for note in deadline.notes) != expected


def test_without_time_nothing_is_measured_and_there_is_an_answer(tmp_path, capsys, monkeypatch):
    slow = Scripted(1e9)
    monkeypatch.setattr(Estimator, "estimates", lambda self, cells: slow.estimates(cells))
    code, out, _ = bench(capsys, "which", "builtin:recall", "--budget", 96, "--minutes", 0.1, "--results", tmp_path)
    assert code == 0
    assert out.strip().startswith("builtin:recall, 96 tokens: no policy was measured in this time.")


@pytest.fixture
def small(monkeypatch):
    """Three policies, and a few tokens of each, on a machine with time for all."""
    monkeypatch.setattr(choosing, "_TIERS", (("dense", "sink_window"), ("snapkv",)))
    monkeypatch.setattr(choosing, "_MOST_STREAMS", MIN_BLOCKS)
    monkeypatch.setattr(Estimator, "estimates", lambda self, cells: Scripted(1e-9).estimates(cells))


@pytest.mark.slow("measures suites")
@pytest.mark.filterwarnings("ignore")  # lm-eval and its packages have opinions of their own
def test_it_ends_in_an_answer_tables_and_a_page_and_resumes(small, tmp_path, capsys):
    command = ["which", "builtin:recall", "--budget", 96, "--minutes", 10, "--results", tmp_path, "--device", "cpu"]
    code, out, err = bench(capsys, *command)
    assert code == 0, err
    answer, *tables = out.split("\nwhich, builtin:recall, 96 tokens cached")
    assert answer.startswith("builtin:recall, 96 tokens: choose snapkv")
    assert all(table.count("\nsnapkv ") >= 1 and table.count("\nsink_window ") >= 1 for table in tables), out
    assert len(tables) >= 3, "text, prompts, and questions"
    assert (tmp_path / "index.html").exists()
    measured_at = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.json") if file.name != "feed.json"}
    (suite,) = tmp_path.rglob("*.yaml")
    kept = suite.read_text()
    code, out, err = bench(capsys, *command, "--json")
    assert code == 0
    told = json.loads(out)
    assert told["sentence"].startswith("builtin:recall, 96 tokens: choose snapkv")
    heads = {finding.partition(":")[0] for finding in told["findings"]}
    kinds = {f"{kind}, question {when}" for kind in ("once", "needle") for when in ("seen", "unseen")}
    assert heads - kinds == {"text", f"prompts of {_prompt(kept)} tokens"}
    assert kinds < heads
    assert "trying policies" not in err
    assert {file: file.stat().st_mtime_ns for file in measured_at} == measured_at
    assert suite.read_text() == kept


def _prompt(suite: str) -> int:
    (prompt,) = {task["prompt"] for task in yaml.safe_load(suite)["task"] if "prompt" in task}
    return prompt


def test_a_policy_that_leads_everywhere_is_the_answer():
    text = [measured("dense", 1.9, None), measured("h2o", 2.0), measured("window", 3.0)]
    sentence, (finding,) = best_policy(text, "m", 8)
    assert sentence.startswith("m, 8 tokens: choose h2o: no policy has better quality (95 % confidence).")
    assert "No questions were measured" in sentence
    assert finding.startswith("text: h2o is the best of 2 policies (95 % confidence). h2o has a perplexity 11 % [")


def test_where_none_leads_everywhere_each_has_its_own():
    text = [measured("dense", 1.9, None), measured("h2o", 2.0), measured("window", 3.0)]
    asked = [answered("dense", "1" * 200, None), answered("h2o", "0" * 200), answered("window", "10" * 100)]
    questions = [edit(r, cell={"evict": "prompt"}) if r.cell.capacity else r for r in asked]
    assert best_policy([*text, *questions], "m", 8)[0] == (
        "m, 8 tokens: no policy leads everywhere. Leaders (95 % confidence): text: h2o; StreamEval: window."
    )


def test_policies_that_can_not_be_told_apart_are_named_with_the_random_choice_among_them():
    tied = [measured(name, 2.0) for name in ("h2o", "snapkv", "random", "window")]
    sentence, _ = best_policy([measured("dense", 1.9, None), *tied], "m", 8)
    assert sentence.startswith(
        "m, 8 tokens: choose h2o. h2o, snapkv and window can't be told apart, nor from a random choice, and no policy has "
        "better quality (95 % confidence)."
    )
    sentence, _ = best_policy([measured("dense", 1.9, None), measured("random", 1.95), measured("h2o", 2.5)], "m", 8)
    assert sentence.startswith("m, 8 tokens: no policy is shown to beat a random choice (95 % confidence).")
    sentence, _ = best_policy([measured("dense", 1.9, None), *(measured(name, 2.0) for name in ("random", "h2o"))], "m", 8)
    assert sentence.startswith("m, 8 tokens: choose h2o. It can't be told from a random choice, and no policy has better")


def test_of_many_leaders_the_best_is_named_and_the_random_choice_not_hidden():
    tied = [measured(name, 2.0) for name in ("random", "h2o", "snapkv", "window")]
    tova = measured("tova", 2.0)  # of the lowest mean, within noise
    blocks = tova.metrics.as_json()["blocks"]
    sums = [x + (5.0 if number % 2 else -5.1) for number, x in enumerate(blocks["nll_sum"])]
    tied.append(edit(tova, metrics={"blocks": blocks | {"nll_sum": sums}}))
    cut = [edit(answered(name, right), cell={"evict": "prompt"}) for name, right in (("rkv", "10" * 100), ("window", "0" * 200))]
    asked = [answered("dense", "1" * 200, None), *cut]
    sentence, _ = best_policy([measured("dense", 1.9, None), *tied, *asked], "m", 8)
    leaders = "text: tova or 4 others (a random choice among them); StreamEval: rkv."
    assert sentence.startswith(
        f"m, 8 tokens: no policy leads everywhere. Leaders among the policies measured (95 % confidence): {leaders}"
    )


def test_what_can_not_be_answered_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--budget 480: builtin:recall was trained on 528 tokens, .*; give at most 464"):
        suite_for(RECALL, 480, None, Scripted(1e-3), 600.0)
    (tmp_path / "short.txt").write_text("A short text.\n" * 10)
    with pytest.raises(UserError, match=r"leave out --data"):
        suite_for(RECALL, 96, str(tmp_path), Scripted(1e-3), 600.0)


def test_without_intervals_nothing_is_claimed():
    short = [measured(p, n, tokens=1024) for p, n in (("h2o", 2.0), ("window", 3.0))]
    sentence, (finding,) = best_policy(short, "m", 8)
    assert "choose" not in sentence
    assert "too short to rank policies" in finding
