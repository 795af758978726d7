"""`make gpu`: it ends in time whatever a stage does, leaves no process behind, and goes on where it stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

GPU = Path(__file__).parent / "gpu"
ENDING = 7.0  # seconds that stopping a stage may take
SAFELY = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python before 3.11.4 has none

# Ignores SIGTERM, has a child that does, too, and another in a session of its own whose parent has ended; writes their ids.
HANGS = '''
import os, signal, subprocess, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
leaver = f"""import subprocess, sys
left = subprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True, stdout=subprocess.DEVNULL)
print(left.pid)"""
child = subprocess.Popen([sys.executable, "-c", sleeper])
orphan = subprocess.run([sys.executable, "-c", leaver], stdout=subprocess.PIPE, text=True).stdout
Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid} {orphan}")
time.sleep(300)
'''
DRIVER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import processes, run
from stages import Stage
def stand_ins(*arguments):
    count = "import sys; open(sys.argv[1], 'a').write('x')"
    return [Stage("first", 60, ["-c", count, "first"]), Stage("hangs", HANG_SECONDS, ["-c", HANGS, "pids"]),
            Stage("fails", 60, ["-c", "raise SystemExit('the reason')"]), Stage("last", 60, ["-c", count, "last"])]
run.all_stages, processes.TERM_SECONDS, run.ROOT = stand_ins, 0.5, run.Path.cwd()
sys.exit(run.main())
"""


class FakeMachine:
    """A clock, and stages that take the seconds they are said to; those that hang also take all the time to be ended."""

    def __init__(self, seconds):
        self.seconds, self.now, self.ran = seconds, 0.0, []

    def clock(self):
        return self.now

    def execute(self, stage, seconds):
        self.ran.append(stage.name)
        needed = self.seconds[stage.name]
        self.now += needed if needed <= seconds else seconds + ENDING
        return 0 if needed <= seconds else None


def call(gpu, seconds, path, budget=570.0, again=False, key="a", stages=None):
    """One call of a run -> (stages that ran, {name: state}, seconds on the clock)."""
    machine = FakeMachine(seconds)
    stages = stages or [gpu.stages.Stage(name, 100, [name]) for name in seconds]
    state = gpu.stages.State(path, {"sources": key})
    outcomes = gpu.stages.run_all(stages, budget, ENDING, state, machine.execute, again, machine.clock)
    return machine.ran, {x.stage: x.state for x in outcomes}, machine.now


@pytest.mark.parametrize("seconds", [10, 99, 1e9])
def test_a_run_of_the_real_stages_is_over_in_its_time(gpu, tmp_path, seconds):
    """Also if every stage hangs and takes all the time it may to be ended."""
    stages = gpu.plan.all_stages(False)
    ran, states, now = call(gpu, {stage.name: seconds for stage in stages}, tmp_path / "s", stages=stages)
    assert now <= 570
    assert len(ran) >= 3
    assert set(states) == {stage.name for stage in stages}
    assert all((state == "not begun") == (name not in ran) for name, state in states.items())
    assert (set(states.values()) == {"ok"}) == (seconds == 10)


@pytest.mark.parametrize(("share", "calls"), [(1.0, 5), (0.5, 2)])
def test_calls_that_all_stages_take(gpu, tmp_path, share, calls):
    """If every stage takes all of its cap but a second, as many as the program's help says; and if each takes half of it."""
    stages = gpu.plan.all_stages(False, "m", "d")
    for number in range(1, calls + 1):
        seconds = {stage.name: share * stage.cap - 1 for stage in stages}
        _, states, now = call(gpu, seconds, tmp_path / "s", stages=stages)
        assert now <= 570
        assert (set(states.values()) <= {"ok", "ok before"}) == (number == calls)
    assert share < 1 or f"{['', 'one', 'two', 'three', 'four', 'five', 'six'][calls]} calls run them all" in gpu.run.__doc__


def test_what_would_be_missed_most_comes_first(gpu):
    stages = gpu.plan.all_stages(False, "m", "d")
    names = [stage.name for stage in stages]
    assert len({stage.log for stage in stages}) == len(stages)
    assert "proof" in names[0]
    assert all("7B" in name for name in names[1:3])
    figures = [names.index(name) for name in names if "Figure 10" in name]
    assert max(figures) < names.index("scoring, 8B, H2O") < names.index("decode step, 7B, H2O") < names.index("memory")
    assert all(0 < stage.least < stage.cap < 570 for stage in stages)
    for stage in stages:
        words = " ".join(stage.command)
        assert not ("sink_window" in words and "h2o" in words), f"{stage.name} measures both"
        assert str(gpu.run.ROOT) not in words, "another checkout would find another command"
    assert [stage.name for stage in gpu.plan.all_stages(True, "m", "d")] == names


def test_a_stage_waits_for_the_next_call_if_too_little_is_left_and_a_shorter_one_runs(gpu, tmp_path):
    stages = [gpu.stages.Stage(name, 100, [name], least) for name, least in (("a", 1), ("long", 60), ("short", 5))]
    seconds = {"a": 50, "long": 90, "short": 10}
    first = call(gpu, seconds, tmp_path / "s", budget=110, stages=stages)
    assert first[:2] == (["a", "short"], {"a": "ok", "long": "not begun", "short": "ok"})
    assert call(gpu, seconds, tmp_path / "s", budget=110, stages=stages)[0] == ["long"]


def test_a_second_call_goes_on_where_the_first_stopped(gpu, tmp_path):
    """First what never ended by its own doing, then what exceeded its cap; what was ok is not repeated."""
    seconds = {"a": 50, "hangs": 1e9, "b": 90, "cut": 80, "never": 10}
    first = call(gpu, seconds, tmp_path / "s", budget=300)
    assert first[:2] == (
        ["a", "hangs", "b", "cut"],
        {"a": "ok", "hangs": "out of time", "b": "ok", "cut": "cut off", "never": "not begun"},
    )
    assert first[2] <= 300
    second = call(gpu, seconds, tmp_path / "s", budget=300)
    assert second[0] == ["cut", "never", "hangs"]
    assert second[1] == {"a": "ok before", "hangs": "out of time", "b": "ok before", "cut": "ok", "never": "ok"}
    assert call(gpu, seconds | {"hangs": 9}, tmp_path / "s")[0] == ["hangs"]
    assert call(gpu, seconds, tmp_path / "s")[0] == []


def test_what_holds_no_longer_is_run_again(gpu, tmp_path):
    seconds, path = {"a": 5, "b": 5}, tmp_path / "s"
    assert call(gpu, seconds, path)[0] == ["a", "b"]
    assert call(gpu, seconds, path, again=True)[0] == ["a", "b"]
    changed = [gpu.stages.Stage("a", 100, ["a", "--another"]), gpu.stages.Stage("b", 100, ["b"])]
    assert call(gpu, seconds, path, stages=changed)[0] == ["a"]
    assert call(gpu, seconds, path, key="b")[0] == ["a", "b"], "other sources, device or torch"
    path.write_text("{")
    assert call(gpu, seconds, path)[0] == ["a", "b"]
    assert call(gpu, seconds, None)[0] == call(gpu, seconds, None)[0] == ["a", "b"], "nothing is kept without a file"


@pytest.mark.parametrize("state", ["cut off", "killed"])
def test_an_outcome_is_kept_before_the_next_stage_begins(gpu, tmp_path, state):
    """A stage that takes the whole run with it comes last in the next call."""

    class Killed(FakeMachine):
        def execute(self, stage, seconds):
            if stage.name != "b":
                return super().execute(stage, seconds)
            saved.append((tmp_path / "s").read_bytes())
            raise SystemExit

    saved = []
    stages = [gpu.stages.Stage(name, 100, [name]) for name in ("a", "b", "c")]
    machine = Killed({"a": 5})
    with pytest.raises(SystemExit):
        gpu.stages.run_all(
            stages, 570, ENDING, gpu.stages.State(tmp_path / "s", {"sources": "a"}), machine.execute, False, machine.clock
        )
    if state == "killed":  # nothing was written after the stage began
        (tmp_path / "s").write_bytes(saved[0])
    found = gpu.stages.State(tmp_path / "s", {"sources": "a"})
    assert [getattr(found.outcome(stage), "state", None) for stage in stages] == ["ok", state, None]
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    ran = call(gpu, {"a": 5, "b": 5, "c": 5}, tmp_path / "s")[0]
    assert ran == (["c", "b"] if state == "killed" else ["b", "c"])


def test_the_digest_is_of_the_sources(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.run, "ROOT", tmp_path)
    (tmp_path / "harness" / "deep").mkdir(parents=True)
    source = tmp_path / "harness" / "deep" / "kernel.py"
    digests = []
    for text in ("a", "b", "a"):
        source.write_text(text)
        digests.append(gpu.run.sources_digest())
    source.rename(source.with_name("other.py"))
    digests.append(gpu.run.sources_digest())
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "record.json").write_text("{}")
    digests.append(gpu.run.sources_digest())
    assert digests[0] == digests[2]
    assert len(set(digests[:2] + digests[3:])) == 3
    assert digests[3] == digests[4], "a record is no source"


def driven(tmp_path, hang_seconds, *arguments):
    """`make gpu` with stand-ins for its stages, in a process of its own."""
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.replace("HANG_SECONDS", str(hang_seconds)).replace("HANGS", repr(HANGS)))
    command = [sys.executable, str(driver), str(GPU), "--rehearse", "--results", "r", *arguments]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=os.environ | {"OUT": "out"})


def states(folder):
    """States of all stages, by name."""
    outcomes = json.loads((folder / "gpu-rehearsal.state").read_text())["outcomes"]
    return {name: outcome["state"] for name, outcome in outcomes.items()}


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def pids(tmp_path):
    """The ids of the processes of a stand-in that hangs, once it has written them. All are killed at the end."""
    path = tmp_path / "pids"

    def read():
        for _ in range(500):
            if path.exists() and len(path.read_text().split()) == 3:
                return [int(pid) for pid in path.read_text().split()]
            time.sleep(0.02)
        raise AssertionError("the stand-in has not started")

    yield read
    for pid in filter(alive, read()):
        os.kill(pid, signal.SIGKILL)


def test_the_log_of_a_stage_that_hangs_says_where_it_was(tmp_path):
    stuck = "import time\ndef waiting():\n    time.sleep(60)\nwaiting()"
    call = "import os, sys\nfrom pathlib import Path\nfrom processes import run\n"
    call += "print(run(sys.argv[1:], 5, os.environ, Path(), Path('log')))"
    environment = os.environ | {"PYTHONPATH": str(GPU), "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, "-c", call, sys.executable, "-c", stuck]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "None", done.stderr
    assert "in waiting" in (tmp_path / "log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_stage_that_hangs_is_ended_with_all_its_processes_and_the_others_run(tmp_path, pids):
    run = driven(tmp_path, 3)
    out = run.communicate(timeout=300)[0]
    assert run.returncode == 1
    assert [pid for pid in pids() if alive(pid)] == []
    assert [line.split("  ")[-1] for line in out.splitlines()[-6:-2]] == ["first", "hangs", "fails", "last"]
    assert states(tmp_path / "r") == {"first": "ok", "hangs": "out of time", "fails": "exit code 1", "last": "ok"}
    page = (tmp_path / "r" / "gpu.md").read_text()
    assert "2 of 4 stages ok, 2 failed or cut off, 0 not begun" in page
    assert "### fails: exit code 1" in page
    assert "the reason" in page
    assert page in out


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_the_time_of_all_ends_a_stage_whose_cap_is_longer_and_the_next_call_goes_on(tmp_path, pids):
    started = time.monotonic()
    run = driven(tmp_path, 60, "--seconds", "12")
    out = run.communicate(timeout=300)[0]
    assert time.monotonic() - started < 60  # the cap of its stage
    assert run.returncode == 1
    assert [pid for pid in pids() if alive(pid)] == []
    assert [line.split(" s ")[0].rsplit(None, 1)[0] for line in out.splitlines()[-6:-2]] == [
        "ok",
        "cut off",
        "not begun",
        "not begun",
    ]
    os.rename(tmp_path / "out" / "gpu.tar.gz", tmp_path / "before")
    shutil.rmtree(tmp_path / "r")  # as on a machine that has only the archive
    again = driven(tmp_path, 1, "--from", "before").communicate(timeout=300)[0]
    assert "== first" not in again
    assert (tmp_path / "first").read_text() == (tmp_path / "last").read_text() == "x"


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_run_that_is_ended_ends_its_stage(tmp_path, pids):
    run = driven(tmp_path, 60)
    started = pids()
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=300)
    assert run.returncode == 128 + signal.SIGTERM
    assert [pid for pid in started if alive(pid)] == []
    with tarfile.open(tmp_path / "out" / "gpu.tar.gz") as tar:
        tar.extractall(tmp_path / "home", **SAFELY)
    assert states(tmp_path / "home") == {"first": "ok", "hangs": "cut off"}
    assert "### hangs: cut off" in (tmp_path / "home" / "gpu.md").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_run_that_is_killed_has_left_an_archive(tmp_path, pids):
    """Also if a record is none, and no page can be made of it."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "strange.json").write_text('{"cell": {}}')
    run = driven(tmp_path, 60)
    pids()
    run.kill()
    run.communicate(timeout=300)
    with tarfile.open(tmp_path / "out" / "gpu.tar.gz") as tar:
        tar.extractall(tmp_path / "home", **SAFELY)
    assert states(tmp_path / "home") == {"first": "ok", "hangs": "killed"}
    assert (tmp_path / "home" / "gpu-logs" / "first.log").exists()
    assert (tmp_path / "home" / "gpu.md").read_text() == "No page: KeyError: 'task'\n"
