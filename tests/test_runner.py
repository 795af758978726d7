"""A run's account of itself: its time, and the errors of failed cells."""

import json
import os
import time

import pytest
import torch
from children import in_this_process
from helpers import bench

from kvbench.harness.core.errors import UserError, failure, ran_out_of_memory
from kvbench.harness.kernels import captured
from kvbench.harness.models import load
from kvbench.harness.run import child, machine, request
from kvbench.harness.run.request import RunRequest

pytestmark = pytest.mark.fast


SUITE = """
suite: runner
version: 1
model: {id: "builtin:sink_1"}
task:
  - {name: perplexity, data: prose, tokens: 90}
  - {name: memory, tokens: 64, points: 4}
policies: [{name: window, capacity: 8}]
"""
BAD = """
from dataclasses import dataclass

from kvbench.policies import Policy


@dataclass(frozen=True)
class Bad(Policy):
    '''Divides by nothing.'''

    def importance(self, view):
        return self._divided(view.position.float(), 0)

    def _divided(self, x, y):
        return x * (1 // y)
"""


@pytest.fixture
def run_request(tmp_path):
    path = tmp_path / "runner.yaml"
    path.write_text(SUITE)
    return RunRequest(str(path), threads=1, device="cpu")


@pytest.mark.slow("processes of its own")
def test_only_the_work_of_the_task_is_timed_for_tokens_per_second(run_request, tmp_path, monkeypatch):
    """The time excludes loading and checking the model (slowed by a second here) and starting a subprocess."""
    plain = load.load_model
    monkeypatch.setattr(load, "load_model", lambda *args, **kwargs: (time.sleep(1), plain(*args, **kwargs))[1])
    records = run_request.measure(tmp_path / "results", run_request.cells())
    for record in records:
        facts = record.facts
        assert 0 < facts.measured_seconds < facts.seconds - 1
        assert record.data.tokens / facts.tokens_per_second == pytest.approx(facts.measured_seconds, abs=0.00051)  # in whole ms
    assert [r.cell.task.name for r in records] == ["perplexity", "memory"]


@pytest.mark.slow("processes of its own")
def test_a_crash_in_a_policy_shows_its_line_and_the_record_keeps_the_traceback(tmp_path, capsys, run_request, monkeypatch):
    """This holds in this process and in a subprocess, and later cells still run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(BAD)
    arguments = [
        "run",
        run_request.suite,
        "--policy",
        "bad.py:Bad",
        "--policy",
        "window",
        "--set",
        "capacity=8",
        "--results",
        "r",
    ]
    code, out, err = bench(capsys, *arguments, "--json", "--device", "cpu", "--threads", "1")  # a cell of memory takes a process
    assert code == 4
    failed = [r["error"] for r in json.loads(out) if r["status"] == "failed"]
    assert len(failed) == [r["status"] for r in json.loads(out)].count("ok") == 2
    for error in failed:
        assert error["where"] == "bad.py:15, in _divided"
        assert error["traceback"][0] == "Traceback (most recent call last):" or len(error["traceback"]) == 30
        assert error["traceback"][-1] == "ZeroDivisionError: integer division or modulo by zero"
        assert '  File "bad.py", line 15, in _divided' in error["traceback"]
        assert str(tmp_path) not in str(error)
    assert err.count("FAILED, ZeroDivisionError: integer division or modulo by zero (bad.py:15, in _divided)") == 2
    assert 'File "bad.py", line 15' not in err


BAD_BESIDE_GOOD = """
suite: s
version: 1
model: {id: "random:stories-260k"}
task: {name: latency, tokens: 40, prompt: 16, rounds: 6, sittings: 2, most_sittings: 2, steps: 1}
capacity: 8
policies: [bad.py:Bad, window]
"""


@pytest.mark.slow("measures suites")
def test_latency_goes_on_with_the_cells_whose_policy_does_not_crash(tmp_path, capsys, monkeypatch):
    """Cells that are measured together are first tried separately."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "s.yaml").write_text(BAD_BESIDE_GOOD)
    code, out, _ = bench(capsys, "run", "s.yaml", "--json", "--device", "cpu", "--threads", "1", "--results", "r")
    assert code == 4
    assert [(r["cell"]["policy"], r["status"]) for r in json.loads(out)] == [("bad.py:Bad", "failed"), ("window", "ok")]


def test_a_failure_is_bounded_and_in_one_line():

    def down(n: int) -> None:
        across(n - 1)

    def across(n: int) -> None:
        if n < 0:
            raise ValueError("x" * 5000 + "\nsecond line")
        down(n)

    with pytest.raises(ValueError, match="second line") as caught:
        down(200)
    told = failure(caught.value)
    assert told["message"] == "x" * 300
    assert len(told["traceback"]) == 30
    assert max(map(len, told["traceback"])) <= 300


def test_what_ran_out_of_memory_is_called_so():
    import torch

    errors = [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CPU: can't allocate memory")]
    for error in errors:
        assert ran_out_of_memory(error)
        assert failure(error)["kind"] == "out of memory"
    assert not ran_out_of_memory(UserError("x"))


TWO_CELLS = """
suite: two
version: 1
model: {id: "builtin:sink_1"}
task:
  - {name: perplexity, data: prose, tokens: 90}
policies:
  - {name: window, capacity: 8}
  - {name: h2o, capacity: 8}
"""


@pytest.mark.slow("processes of its own")
def test_cells_after_a_failed_capture_are_measured_in_a_new_process(tmp_path, monkeypatch):
    """With the same figures and methods. The capture fails while the first cell is measured."""
    (tmp_path / "two.yaml").write_text(TWO_CELLS)
    request = RunRequest(str(tmp_path / "two.yaml"), threads=1, device="cpu")
    expected = request.measure(tmp_path / "expected", request.cells(), progress=False)
    groups, here = [], []
    new_process, run_task = child.measure, machine._run_task

    def fails(attempts, *rest):
        here.append(len(attempts))
        yield from run_task(attempts, *rest)
        monkeypatch.setattr(captured.PROCESS, "failed", "the capture was invalidated")

    monkeypatch.setattr(machine, "_run_task", fails)
    monkeypatch.setattr(child, "measure", lambda order, *rest: groups.append(order) or new_process(order, *rest))
    records = request.measure(tmp_path / "results", request.cells(), progress=False)
    assert (len(here), len(groups)) == (1, 1)
    for record, other in zip(records, expected, strict=True):
        assert record.status == "ok"
        assert record.metrics == other.metrics
        facts, others = record.facts.as_json(), other.facts.as_json()
        assert facts.keys() == others.keys()
        for name in ("method", "step", "block", "self_check", "differs_from_walk", "kv_shapes", "weights_sha256"):
            assert facts.get(name) == others.get(name), name


@pytest.mark.slow("measures suites")
def test_cells_side_by_side_are_measured_in_one_new_process(tmp_path, monkeypatch, capsys):
    """Latency, whose cells are one group, without the process. A cell that crashes has its error in its record."""
    groups = []
    monkeypatch.setattr(captured.PROCESS, "failed", "the capture was invalidated")
    monkeypatch.setattr(child, "measure", lambda order, *rest: groups.append(order.groups[0]) or in_this_process(order, *rest))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "s.yaml").write_text(BAD_BESIDE_GOOD)
    code, out, _ = bench(capsys, "run", "s.yaml", "--json", "--device", "cpu", "--threads", "1", "--results", "r")
    assert code == 4
    records = json.loads(out)
    assert [len(cells) for cells in groups] == [2]
    assert [r["status"] for r in records] == ["failed", "ok"]
    assert records[0]["error"]["where"] == "bad.py:15, in _divided"
    assert records[1]["facts"]["step"] in ("compiled", "plain")


@pytest.mark.parametrize(
    ("threads", "load", "device", "warned"),
    [(2, 8.0, "cpu", True), (2, 0.5, "cpu", False), (1, 8.0, "cpu", False), (2, 8.0, "cuda", False)],
)
def test_more_threads_than_free_cores_are_said(threads, load, device, warned, monkeypatch):
    """Two threads beside a load of eight once did 9 of 107 cells in a quarter of an hour, and nothing said why."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    said = request._crowded(device)
    assert ("2 threads on 2 cores beside a load of 8.0" in said) == warned
    assert bool(said) == warned
