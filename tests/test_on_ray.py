"""Runs on Ray: the same numbers, workers that die, and nothing left behind. One Ray serves most of this module."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvbench.harness.core.errors import Exit
from kvbench.harness.records import RecordStore
from kvbench.harness.run import on_ray as module
from kvbench.harness.run.request import RunRequest

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.slow("starts Ray")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    """Workers start late on a machine with other work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "START_S", 600.0)
        yield


SMALL = """
suite: small
version: 1
model: {id: "builtin:sink_1"}
task:
  - {name: perplexity, data: prose, tokens: [200, 300]}
  - {name: memory, tokens: 64, points: 4, policies: [window]}
  - {name: lm_eval, tasks: [kvbench_once], limit: 4, batch: 4, policies: [h2o]}  # a worker loads its own
capacity: 16
policies: [dense, window, h2o]
"""
LONG = """
suite: long
version: 1
model: {id: "builtin:sink_1"}
task: {name: perplexity, data: prose, tokens: 10000}
capacity: [8, 9, 10, 11, 12, 13, 14, 15]
policies: [window, sink_window, h2o]
"""
DEADLY = """
import os
import signal
from dataclasses import dataclass
from math import inf
from pathlib import Path

from kvbench.policies import Policy


@dataclass(frozen=True)
class Deadly(Policy):
    '''Kills the process that uses it, but for the one that started the run; once, if it finds a file to remove.'''

    file: str = ""

    def importance(self, view):
        if os.getpid() != int(os.environ["TEST_DRIVER"]) and (not self.file or Path(self.file).exists()):
            if self.file:
                Path(self.file).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return view.position.float().masked_fill(view.age < 1, inf)
"""


@pytest.fixture(scope="module")
def local_ray():
    """Ray on this machine, for runs of this process."""
    os.environ["TEST_DRIVER"] = str(os.getpid())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        ray.init(
            "local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error", object_store_memory=2**27
        )
        yield
        ray.shutdown()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("small.yaml", SMALL), ("long.yaml", LONG), ("deadly.py", DEADLY)):
        Path(name).write_text(text)
    return tmp_path


def on_ray(suite="small.yaml", **changes):
    return RunRequest(suite, **({"threads": 1, "device": "cpu", "ray": "local", "workers": 2} | changes))


def test_two_workers_give_what_this_process_gives(local_ray, folder):
    here, there = RunRequest("small.yaml", threads=1, device="cpu"), on_ray()
    expected = here.measure(folder / "here", here.cells(), progress=False)
    records = there.measure(folder / "there", there.cells(), progress=False)
    assert [r.cell_id for r in records] == [r.cell_id for r in expected]
    assert [r.key for r in records] == [r.key for r in expected]
    assert {r.status for r in records} == {"ok"}
    for record, other in zip(records, expected, strict=True):
        assert record.facts.threads == 1
        if record.cell.task.name == "perplexity":
            assert record.metrics.nll == pytest.approx(other.metrics.nll, abs=1e-4)
            assert record.facts.instructions == other.facts.instructions
            assert record.trace == other.trace, "same machine, same threads: the same digits"
    stored, problems = RecordStore(folder / "there").read_all()
    assert (len(stored), problems) == (len(records), [])
    again = there.measure(folder / "there", there.cells(), progress=False)
    assert [r.finished for r in again] == [r.finished for r in records], "finished cells are skipped"


def test_a_worker_that_dies_takes_its_cell_with_it_and_nothing_else(local_ray, folder, monkeypatch):
    monkeypatch.setattr("kvbench.harness.run.on_ray.TRIES", 2)  # each starts a process
    (folder / "once").touch()
    request = on_ray(
        policies=[f"{{name: 'deadly.py:Deadly', file: {folder / 'once'}}}", "deadly.py:Deadly", "window"],
        settings=["tokens=100"],
        model="builtin:sink_1",
    )
    cells = [cell for cell in request.cells() if cell.task.name == "perplexity"]
    once, always, window = request.measure(folder / "r", cells, progress=False)
    assert once.status == window.status == "ok"
    assert once.metrics.nll == pytest.approx(window.metrics.nll, abs=1e-6)
    assert (always.status, always.error.kind) == ("failed", "WorkerDied")
    assert always.error.message == "its worker died 2 times"
    assert not (folder / "once").exists()


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_leaves_no_worker_and_keeps_its_records(folder, how):
    """Ctrl-C reaches the whole group of processes, so it is sent to all of them; `kill -9` reaches one.

    After that, two agents of Ray without work of ours report for a minute to a control service that has ended, and end.
    """
    command = [sys.executable, "-m", "kvbench", "run", "long.yaml", "--ray", "--workers", "2", "--results", "r"]
    run = subprocess.Popen(command, env=environment(), start_new_session=True, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not list(Path("r").rglob("*.json")):
        assert run.poll() is None, run.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    children = psutil.Process(run.pid).children(recursive=True)
    assert sum("ray::" in " ".join(child.cmdline()) for child in children) >= 2
    os.kill(run.pid, how) if how == signal.SIGKILL else os.killpg(run.pid, how)
    _, err = run.communicate(timeout=300)
    if how == signal.SIGINT:
        assert run.returncode == Exit.STOPPED
        assert "bench: stopped; finished cells are kept" in err
        assert "Traceback" not in err
    agents = [child for child in children if child.is_running() and child.name().endswith("Agent")]
    alive = psutil.wait_procs(set(children) - set(agents), timeout=120)[1]
    for agent in agents:
        agent.kill()
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    records, problems = RecordStore(Path("r")).read_all()
    assert records
    assert not problems
