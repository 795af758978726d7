"""Runs on Ray: the same numbers, workers that die, and nothing left behind. One Ray serves most of this module."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from children import in_this_process

from kvbench.harness.cli import main
from kvbench.harness.core.errors import Exit
from kvbench.harness.records import RecordStore
from kvbench.harness.run import child
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
  - {name: perplexity, data: prose, tokens: [200, 300], policies: [dense, window, h2o]}
  - {name: memory, tokens: 64, points: 4, policies: [window]}
  - {name: lm_eval, tasks: [kvbench_once], limit: 4, batch: 4, policies: [h2o]}  # a worker loads its own
  - {name: perplexity, data: prose, tokens: 100, policies: ["deadly.py:Deadly"]}
capacity: 16
policies: [dense, window, h2o, {name: "deadly.py:Deadly", file: [once, ""]}]
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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("long.yaml").write_text(LONG)
    return tmp_path


def run_in_a_session(error: Path) -> int:
    """Fork a process that runs the command in a session of its own: a new one would import for ten seconds. -> its id."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    os.dup2(os.open(error, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w")
    sys.argv = ["bench", "run", "long.yaml", "--ray", "--workers", "2", "--results", "r"]
    code = 1
    try:
        main()
    except SystemExit as left:
        code = left.code
    finally:
        sys.stderr.flush()
        os._exit(code)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_leaves_no_worker_and_keeps_its_records(folder, how, monkeypatch):
    """Ctrl-C reaches the whole group of processes, so it is sent to all of them; `kill -9` reaches one.

    After that, two agents of Ray without work of ours report for a minute to a control service that has ended, and end.
    """
    for name, value in (("PYTHONPATH", str(ROOT)), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    run, error = psutil.Process(run_in_a_session(folder / "stderr")), folder / "stderr"
    deadline = time.monotonic() + 300
    while not list(Path("r").rglob("*.json")):
        assert run.status() != psutil.STATUS_ZOMBIE, error.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    children = run.children(recursive=True)
    assert sum("ray::" in " ".join(child.cmdline()) for child in children) >= 2
    os.kill(run.pid, how) if how == signal.SIGKILL else os.killpg(run.pid, how)
    _, status = os.waitpid(run.pid, 0)
    if how == signal.SIGINT:
        assert os.waitstatus_to_exitcode(status) == Exit.STOPPED
        assert "bench: stopped; finished cells are kept" in error.read_text()
        assert "Traceback" not in error.read_text()
    agents = [child for child in children if child.is_running() and child.name().endswith("Agent")]
    alive = psutil.wait_procs(set(children) - set(agents), timeout=120)[1]
    for agent in agents:
        agent.kill()
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    records, problems = RecordStore(Path("r")).read_all()
    assert records
    assert not problems


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder with the records of this process, and those of two workers of a Ray on this machine. -> both, and the folder."""
    folder = tmp_path_factory.mktemp("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, text in (("small.yaml", SMALL), ("deadly.py", DEADLY), ("once", "")):
            Path(name).write_text(text)
        for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")):
            patch.setenv(name, value)
        patch.setenv("TEST_DRIVER", str(os.getpid()))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setattr(module, "TRIES", 2)  # each starts a process
        here = RunRequest("small.yaml", threads=1, device="cpu")
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(child, "measure", in_this_process)
            expected = here.measure(folder / "here", here.cells(), progress=False)
        there = RunRequest("small.yaml", threads=1, device="cpu", ray="local", workers=2)
        local = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error", "object_store_memory": 2**27}
        ray.init("local", num_cpus=2, **local)
        records = there.measure(folder / "there", there.cells(), progress=False)
        again = there.measure(folder / "there", [cell for cell in there.cells() if "deadly" not in cell.name], progress=False)
        ray.shutdown()
    return expected, records, again, folder


def test_two_workers_give_what_this_process_gives(measured):
    expected, records, again, folder = measured
    assert [r.cell_id for r in records] == [r.cell_id for r in expected]
    assert [r.key for r in records] == [r.key for r in expected]
    pairs = [(r, other) for r, other in zip(records, expected, strict=True) if "deadly" not in r.cell.policy]
    assert len(pairs) == 8
    for record, other in pairs:
        assert (record.status, other.status, record.facts.threads) == ("ok", "ok", 1)
        if record.cell.task.name == "perplexity":
            assert record.metrics.nll == pytest.approx(other.metrics.nll, abs=1e-4)
            assert record.facts.instructions == other.facts.instructions
            assert record.trace == other.trace, "same machine, same threads: the same digits"
    stored, problems = RecordStore(folder / "there").read_all()
    assert (len(stored), problems) == (len(records), [])
    assert [r.finished for r in again] == [r.finished for r, _ in pairs], "finished cells are skipped"


def test_a_worker_that_dies_takes_its_cell_with_it_and_nothing_else(measured):
    expected, records, _, folder = measured
    (once, other), (always, _) = [pair for pair in zip(records, expected, strict=True) if "deadly" in pair[0].cell.policy]
    assert once.status == "ok"
    assert once.metrics.nll == pytest.approx(other.metrics.nll, abs=1e-6)
    assert (always.status, always.error.kind) == ("failed", "WorkerDied")
    assert always.error.message == "its worker died 2 times"
    assert not (folder / "once").exists()
