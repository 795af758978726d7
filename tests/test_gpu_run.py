"""`make gpu`: it ends in time whatever a stage does, leaves no process behind, and goes on where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

GPU = Path(__file__).parent / "gpu"
ARGUMENTS = {"results": "r", "model": None, "data": None, "rehearse": False}
ENDING = 7.0  # seconds that stopping a stage may take

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
def stand_ins(arguments):
    python = [sys.executable, "-c"]
    count = "import sys; open(sys.argv[1], 'a').write('x')"
    return [Stage("first", 60, [*python, count, "first"]), Stage("hangs", HANG_SECONDS, [*python, HANGS, "pids"]),
            Stage("fails", 60, [*python, "raise SystemExit(3)"]), Stage("last", 60, [*python, count, "last"])]
run.all_stages, processes.TERM_SECONDS, run.ROOT = stand_ins, 0.5, run.Path.cwd()
sys.exit(run.main())
"""


@pytest.fixture
def gpu(monkeypatch):
    """The modules of tests/gpu."""
    monkeypatch.syspath_prepend(str(GPU))
    import run
    import stages

    yield SimpleNamespace(run=run, stages=stages)
    for name in ("run", "stages", "processes"):
        sys.modules.pop(name, None)


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
    stages = gpu.run.all_stages(SimpleNamespace(**ARGUMENTS))
    ran, states, now = call(gpu, {stage.name: seconds for stage in stages}, tmp_path / "s", stages=stages)
    assert now <= 570
    assert len(ran) >= 4
    assert set(states) == {stage.name for stage in stages}
    assert all((state == "not begun") == (name not in ran) for name, state in states.items())
    assert (set(states.values()) == {"ok"}) == (seconds == 10)


def test_three_calls_give_every_stage_its_cap(gpu, tmp_path):
    """Even if every stage takes all but a second of it."""
    arguments = SimpleNamespace(**ARGUMENTS | {"model": "m", "data": "d"})
    stages = gpu.run.all_stages(arguments)
    for _ in range(3):
        _, states, now = call(gpu, {stage.name: stage.cap - 1 for stage in stages}, tmp_path / "s", stages=stages)
        assert now <= 570
    assert set(states.values()) <= {"ok", "ok before"}


def test_every_stage_has_a_name_and_a_cap_and_the_short_ones_come_first(gpu):
    stages = gpu.run.all_stages(SimpleNamespace(**ARGUMENTS))
    assert len({stage.name for stage in stages}) == len(stages)
    caps = [stage.cap for stage in stages]
    assert caps == sorted(caps)
    assert all(0 < cap < 570 for cap in caps)
    for stage in stages:
        words = " ".join(stage.command)
        assert not ("sink_window" in words and "h2o" in words), f"{stage.name} measures both"
        assert (stage.variables.get("TORCHINDUCTOR_COMPILE_THREADS") == "1") == ("pytest" in words)


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


def test_an_outcome_is_kept_before_the_next_stage_begins(gpu, tmp_path):
    class Killed(FakeMachine):
        def execute(self, stage, seconds):
            if stage.name == "b":
                raise KeyboardInterrupt
            return super().execute(stage, seconds)

    stages = [gpu.stages.Stage(name, 100, [name]) for name in ("a", "b")]
    machine = Killed({"a": 5})
    with pytest.raises(KeyboardInterrupt):
        gpu.stages.run_all(stages, 570, ENDING, gpu.stages.State(tmp_path / "s", {}), machine.execute, False, machine.clock)
    assert gpu.stages.State(tmp_path / "s", {}).outcome(stages[0]).state == "ok"
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


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
    command = [sys.executable, str(driver), str(GPU), "--rehearse", "--state", "state", *arguments]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)


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


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_stage_that_hangs_is_ended_with_all_its_processes_and_the_others_run(tmp_path, pids):
    run = driven(tmp_path, 3)
    out = run.communicate(timeout=60)[0]
    assert run.returncode == 1
    assert [pid for pid in pids() if alive(pid)] == []
    told = json.loads(out[out.index("{") : out.rindex("}") + 1])
    assert [(x["stage"], x["state"], x["cap"]) for x in told["stages"]] == [
        ("first", "ok", 60), ("hangs", "out of time", 3), ("fails", "exit code 3", 60), ("last", "ok", 60),
    ]  # fmt: skip
    assert [line.split("  ")[-1] for line in out.splitlines()[-4:]] == ["first", "hangs", "fails", "last"]
    kept = json.loads((tmp_path / "state" / "gpu-run.state").read_text())["outcomes"]
    assert [kept[name]["state"] for name in ("first", "hangs", "fails", "last")] == ["ok", "out of time", "exit code 3", "ok"]


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_the_time_of_all_ends_a_stage_whose_cap_is_longer_and_the_next_call_goes_on(tmp_path, pids):
    started = time.monotonic()
    run = driven(tmp_path, 60, "--seconds", "12")
    out = run.communicate(timeout=60)[0]
    assert time.monotonic() - started < 12 + 1
    assert run.returncode == 1
    assert [pid for pid in pids() if alive(pid)] == []
    assert [line.split(" s ")[0].rsplit(None, 1)[0] for line in out.splitlines()[-4:]] == [
        "ok",
        "cut off",
        "not begun",
        "not begun",
    ]
    again = driven(tmp_path, 1).communicate(timeout=60)[0]
    assert "== first" not in again
    assert (tmp_path / "first").read_text() == (tmp_path / "last").read_text() == "x"


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_run_that_is_ended_ends_its_stage(tmp_path, pids):
    run = driven(tmp_path, 60)
    started = pids()
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM
    assert [pid for pid in started if alive(pid)] == []
    assert json.loads((tmp_path / "state" / "gpu-run.state").read_text())["outcomes"].keys() == {"first"}
