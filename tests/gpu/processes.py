"""A command that ends when its time is over, with every process it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ABORT_SECONDS, TERM_SECONDS, KILL_SECONDS = 2.0, 3.0, 2.0  # to wait after each signal
ENDING_SECONDS = ABORT_SECONDS + TERM_SECONDS + KILL_SECONDS  # the longest that a command takes beyond its time
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02


def run(command: Sequence[str], seconds: float, environment: Mapping[str, str], folder: Path, log: Path) -> int | None:
    """Run a command in a session of its own, and end all processes that it leaves behind.

    The calling process must have no other children: on Linux it becomes the parent of every orphan, so that a process
    that left the command's session is found, too.

    Args:
        command: program and arguments.
        seconds: that it may take; ending it takes at most ENDING_SECONDS more.
        environment: its variables.
        folder: where it starts.
        log: file of all that it prints.

    Returns:
        The exit code; None if the time was over.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=dict(environment), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # with PYTHONFAULTHANDLER its log then says where it was
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ABORT_SECONDS)
        return None
    finally:
        for number, patience in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
            _end(process, number, time.monotonic() + patience)


def _end(process: subprocess.Popen[bytes], number: signal.Signals, deadline: float) -> None:
    """Signal the command and all that descends from it, and wait until all have ended or the deadline has passed."""
    signalled: set[int] = set()
    while True:
        running = _running(process)
        for pid in running - signalled:  # some appear while the others end
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        signalled |= running
        if not running or time.monotonic() > deadline:
            return
        time.sleep(_POLL_SECONDS)


def _running(process: subprocess.Popen[bytes]) -> set[int]:
    """The command and all processes that descend from it or were left to this process, those that have ended taken away."""
    leader = set() if process.poll() is not None else {process.pid}
    if sys.platform != "linux":
        return leader | _group(process.pid)
    children: dict[int, list[int]] = {}
    ended: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(path.parent.name))
            ended |= {int(path.parent.name)} if state == "Z" else set()
    found, waiting = leader, [os.getpid()]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            waiting.append(pid)
            found = found | {pid}
    for pid in ended & set(children.get(os.getpid(), [])) - {process.pid}:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return found - ended


def _group(leader: int) -> set[int]:
    """The leader's process group stands for its members where there is no /proc: empty once all have ended."""
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):
        return set()
    return {-leader}  # `kill` of a negative number signals a group
