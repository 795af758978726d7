"""Measures cells in a process of their own.

On a CPU, a task may ask for it for each cell, so that the process's peak memory is that of the cell. After a failed capture of a
CUDA graph, the groups of cells that follow are measured so, because the capture may have harmed the run's own process.

The parent sends a `CellRun`, or a list of them, as one line of JSON on stdin. The child answers with lines of JSON: its progress
and, at the end, the figures. Stdin stays open while the parent lives. When it closes, the child ends, so that a killed run leaves
no process behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from kvbench.harness.core.errors import RefusedModelError, UserError
from kvbench.harness.core.failure import ApartError, failure

if TYPE_CHECKING:
    from kvbench.harness.engine.decoder import Evict
    from kvbench.policies import PositionMode

_CHILD = "from kvbench.harness.run.apart import child; child()"
_PR_SET_PDEATHSIG = 1  # Linux's prctl: set the signal that this process gets when its parent dies


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """Everything that a fresh process needs to measure a cell.

    Attributes:
        directory: of the model.
        random: draw random weights instead of loading them.
        dtype: of weights and cache.
        rope_length: longest position, for RoPE types that depend on it; tokens.
        pickle: accept weights that are not safetensors.
        task: its name and options.
        data: directory of the text.
        policy: its name, or file.py:Class.
        parameters: of the policy.
        capacity: tokens per KV head kept between steps.
        positions: where RoPE puts a cached token.
        limit: largest distance of positions clamped.
        seed: of the policy's randomness.
        evict: tokens evicted at once, or "prompt".
        block: tokens that pass a layer at once; chosen by method and free memory when None.
        walk: always read token by token inside the layers.
        threads: of the CPU.
        device: to measure on.
        devices: that the model is spread over.
        trace: file of per-token figures.
        reference: record of the cell that it is compared with while it is measured, as JSON; None if there is none.
    """

    directory: Path
    random: bool
    dtype: str
    rope_length: int | None
    pickle: bool
    task: dict[str, Any]
    data: Path | None
    policy: str
    parameters: dict[str, Any]
    capacity: int | None
    positions: PositionMode
    limit: int | None
    seed: int
    evict: Evict = 1
    block: int | None
    walk: bool
    threads: int
    trace: Path
    device: str = "cpu"
    devices: int = 1
    reference: dict[str, Any] | None = None

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Parse that line."""
        return cls.from_value(json.loads(line))

    @classmethod
    def from_value(cls, value: dict[str, Any]) -> Self:
        """The request, from what that line holds."""
        paths = {name: Path(value[name]) for name in ("directory", "data", "trace") if value[name] is not None}
        return cls(**(value | paths))


@dataclass(frozen=True)
class CellResult:
    """The child's measurement.

    Attributes:
        metrics: the task's figures, as JSON.
        model: facts about the model.
        seconds: of the task's own work.
    """

    metrics: dict[str, Any]
    model: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class GroupResult:
    """The child's measurement of a group.

    Attributes:
        cells: for each, facts of its record, and its `metrics` as JSON or its `failure`.
        model: facts about the model.
        seconds: of the task's own work.
    """

    cells: list[dict[str, Any]]
    model: dict[str, Any]
    seconds: float


def measure(cell: CellRun, progress: Callable[[int, str], None]) -> CellResult:
    """Run a cell in a fresh process, token by token or as its policy allows in plain PyTorch.

    Args:
        cell: to measure.
        progress: called with the tokens done and the figure so far.

    Raises:
        UserError, ApartError, MemoryError: as `_answer` does.
    """
    answer = _answer(cell.to_json(), progress)
    return CellResult(answer["metrics"], answer["model"], answer["seconds"])


def measure_group(cells: Sequence[CellRun], progress: Callable[[int, str], None]) -> GroupResult:
    """Run the cells of a group side by side in a fresh process, by the fastest methods, as the run's own process would.

    Args:
        cells: of one model and task.
        progress: called with the tokens done and the figure so far.

    Raises:
        UserError, ApartError, MemoryError: as `_answer` does.
    """
    answer = _answer(f"[{', '.join(cell.to_json() for cell in cells)}]", progress)
    return GroupResult(answer["cells"], answer["model"], answer["seconds"])


def _answer(request: str, progress: Callable[[int, str], None]) -> dict[str, Any]:
    """The answer of a fresh process to a request. The process does not outlive this one, nor this call.

    Raises:
        UserError: the child raised one; its model can't be driven exactly, for example.
        ApartError: the child failed with another error.
        MemoryError: the child was killed, as the system does with a process that takes too much memory.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        process_group=0,  # so that Ctrl-C reaches only this process, which ends the child
    ) as process:  # fmt: skip
        try:
            answer = _conversation(process, request, progress)
            process.wait()
        finally:
            process.kill()  # no effect if it has ended
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
    if "mistake" in answer:
        raise (RefusedModelError if answer["refused"] else UserError)(answer["mistake"])
    if "failure" in answer:
        raise ApartError(answer["failure"])
    if process.returncode < 0:
        raise MemoryError(f"its process was killed by signal {-process.returncode}")
    if not answer:
        raise RuntimeError(f"its process ended with exit code {process.returncode} and without an answer")
    return answer


def _conversation(process: subprocess.Popen[str], request: str, progress: Callable[[int, str], None]) -> dict[str, Any]:
    """Send the request and pass on progress. Returns the child's answer, which is empty if it died before it gave one."""
    assert process.stdin
    assert process.stdout
    with contextlib.suppress(BrokenPipeError):  # a child that died at once is reported by its exit code
        process.stdin.write(request + "\n")
        process.stdin.flush()
    answer: dict[str, Any] = {}
    for line in process.stdout:
        message = json.loads(line)
        if "progress" in message:
            progress(*message["progress"])
        else:
            answer = message
    return answer


def child() -> None:
    """Run the child process: read a request, measure, answer."""
    line = sys.stdin.readline()
    if not line:  # the parent has gone already
        return
    _end_with_parent(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # what a library prints must not mix with the answer
    try:
        answer = _measure_here(json.loads(line), out)
    except UserError as error:
        answer = {"mistake": str(error), "refused": isinstance(error, RefusedModelError)}
    except (Exception, SystemExit) as error:  # the parent reports it
        answer = {"failure": failure(error)}
    with contextlib.suppress(BrokenPipeError):  # the parent has gone
        _send(out, answer)
    sys.stderr.flush()
    os._exit(0)  # an orderly exit would wait for the thread that reads stdin


def _end_with_parent(stdin: IO[str]) -> None:
    """End this process when its parent has ended: at once on Linux, elsewhere when the pipe closes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _measure_here(request: Any, out: IO[str]) -> dict[str, Any]:
    from kvbench.harness.run import in_child

    def progress(tokens: int, text: str) -> None:
        _send(out, {"progress": [tokens, text]})

    if isinstance(request, list):
        return in_child.measure_group([CellRun.from_value(value) for value in request], progress)
    return in_child.measure_cell(CellRun.from_value(request), progress)


def _send(out: IO[str], value: dict[str, Any]) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()
