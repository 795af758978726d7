"""Kills runs at random moments and resumes them: no finished cell is lost or damaged, and no process is left behind.

A run is a child forked from a process that has loaded everything. So a hundred kills take minutes, and most of them hit while
records are written, not while libraries are imported.
"""

import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from kvbench.harness.records import RecordStore
from kvbench.harness.report.verify import problems
from kvbench.harness.run.request import RunRequest

SUITE = """
suite: fire
version: 1
model: {id: "builtin:sink_1"}
task: {name: perplexity, data: prose, tokens: 300}
policies:
  - {name: window, capacity: [8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]}
  - {name: h2o, capacity: [8, 12, 16, 20]}
"""

APART = """
suite: fire
version: 1
model: {id: "random:stories-260k"}
task:
  - {name: memory, tokens: 3000, points: 10}
  - {name: latency, tokens: 300, prompt: 16, rounds: 6, sittings: 2, most_sittings: 2, steps: 1, policies: [window]}
policies:
  - {name: window, capacity: 8}
"""
MUST_NOT_BE = ("damaged", "lost", "failed", "without a trace", "left unfinished by the last run", "orphans")


def run(request: RunRequest, folder: Path) -> int:
    """Fork a child that measures. -> its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        request.measure(folder, request.cells())
        code = 0
    finally:
        os._exit(code)


def files_of(store: RecordStore) -> dict[str, bytes]:
    """The content of every finished record and trace, by path."""
    return {str(p): p.read_bytes() for p in store.folder.rglob("*") if p.suffix in (".json", ".npy")}


def kill(child: int, number: int) -> list[psutil.Process]:
    """End a run with a signal and wait for it. -> the processes that it had started."""
    process = psutil.Process(child)
    process.suspend()  # so that it starts none between these two lines
    started = process.children(recursive=True)
    os.kill(child, number)
    process.resume()
    return started


def wait_for_subprocess(child: int) -> None:
    """Wait until a run has started a process, or has ended."""
    process = psutil.Process(child)
    while process.status() != psutil.STATUS_ZOMBIE and not process.children(recursive=True):
        time.sleep(0.01)


def still_there(processes: list[psutil.Process], seconds: float = 5.0) -> int:
    """Return the number of processes that are still alive after some seconds. Returns early if all have ended."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    for process in alive:
        process.kill()
    return len(alive)


def fire(
    kills: int,
    seed: int = 0,
    most: float = 2.0,
    suite: str = SUITE,
    signals: Sequence[int] = (signal.SIGKILL,),
    in_subprocesses: bool = False,
) -> Counter[str]:
    """Kill runs and resume them.

    Args:
        kills: number of runs to kill.
        seed: seed of the times of killing.
        most: maximum seconds before a run is killed, from its start or that of its first subprocess.
        suite: text of the suite to run.
        signals: signals to end runs, chosen at random.
        in_subprocesses: wait for a subprocess of each run before the time of killing begins.

    Returns:
        Counts: kills, runs that ended before their kill, records finished at the kill, damaged, lost, failed,
        unfinished; subprocesses at the kill, and those still alive 5 s later.
    """
    draw, seen = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "fire.yaml"
        path.write_text(suite)
        request = RunRequest(str(path), threads=1, device="cpu")
        cells, number = len(request.cells()), 0
        store = RecordStore(Path(scratch) / "0")
        while seen["kills"] < kills:
            before = files_of(store) if store.folder.exists() else {}
            child = run(request, store.folder)
            if in_subprocesses:
                wait_for_subprocess(child)
            time.sleep(draw.uniform(0.05, most))
            started = kill(child, draw.choice(signals))
            _, status = os.waitpid(child, 0)
            seen["kills" if status else "had ended"] += 1
            seen["subprocesses when killed"] += len(started)
            seen["orphans"] += still_there(started)
            after, (records, unreadable) = files_of(store), store.read_all()
            seen["damaged"] += len(unreadable) + sum(bool(problems(r, store.path(r).parent)) for r in records)
            seen["without a trace"] += sum(problems(r, store.path(r).parent) is None for r in records)
            seen["lost"] += sum(after.get(name) != content for name, content in before.items() if name.endswith(".json"))
            seen["failed"] += sum(r.status == "failed" for r in records)
            seen["finished when killed"] += len(records)
            if len(records) == cells:
                number += 1
                store = RecordStore(Path(scratch) / str(number))
        child = run(request, store.folder)
        _, status = os.waitpid(child, 0)
        seen["left unfinished by the last run"] += cells - len(store.read_all()[0]) + (status != 0)
    return seen
