"""Measures one cell in its own process, so that the process's peak memory is that of the cell.

The parent sends a `CellRun` as one line of JSON on stdin. The child answers with lines of JSON: its progress and, at the end, the
figures. Stdin stays open while the parent lives. When it closes, the child ends, so that a killed run leaves no process behind.
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
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from kvbench.harness.core.errors import RefusedModelError, UserError
from kvbench.harness.core.failure import ApartError, failure

if TYPE_CHECKING:
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
        block: tokens that pass a layer at once.
        walk: always read token by token inside the layers.
        threads: of the CPU.
        trace: file of per-token figures.
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
    block: int
    walk: bool
    threads: int
    trace: Path

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Parse that line."""
        value = json.loads(line)
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


def measure(cell: CellRun, progress: Callable[[int, str], None]) -> CellResult:
    """Run a cell in a fresh process, which does not outlive this one, nor this call.

    Args:
        cell: to measure.
        progress: called with the tokens done and the figure so far.

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
            answer = _conversation(process, cell, progress)
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
    if "metrics" not in answer:
        raise RuntimeError(f"its process ended with exit code {process.returncode} and without an answer")
    return CellResult(answer["metrics"], answer["model"], answer["seconds"])


def _conversation(process: subprocess.Popen[str], cell: CellRun, progress: Callable[[int, str], None]) -> dict[str, Any]:
    """Send the request and pass on progress. Returns the child's answer, which is empty if it died before it gave one."""
    assert process.stdin
    assert process.stdout
    with contextlib.suppress(BrokenPipeError):  # a child that died at once is reported by its exit code
        process.stdin.write(cell.to_json() + "\n")
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
        answer = _measure_here(CellRun.from_json(line), out)
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


def _measure_here(cell: CellRun, out: IO[str]) -> dict[str, Any]:
    import torch

    from kvbench.harness.core import plugins
    from kvbench.harness.engine.decoder import CacheConfig
    from kvbench.harness.engine.method import EAGER, TOKEN_BY_TOKEN
    from kvbench.harness.models.load import load_model, load_tokenizer
    from kvbench.harness.tasks.task import Job, Task

    torch.set_num_threads(cell.threads)
    task: type[Task] = plugins.task_class(cell.task["name"])
    options = task.options(**cell.task)
    policy = plugins.policy_class(cell.policy)(**cell.parameters)
    config = CacheConfig(policy, cell.capacity, cell.positions, cell.limit, cell.seed)
    data = task.data(options, lambda: load_tokenizer(cell.directory), cell.data)
    model = load_model(cell.directory, cell.dtype, torch.device("cpu"), cell.rope_length, cell.pickle, random=cell.random)
    job = Job(
        model, config, data, cell.block, TOKEN_BY_TOKEN if cell.walk else EAGER, cell.trace,
        lambda tokens, text: _send(out, {"progress": [tokens, text]}),
    )  # fmt: skip
    started = time.perf_counter()
    metrics = task.run(options, job)
    return {"metrics": metrics.as_json(), "model": model.facts(), "seconds": time.perf_counter() - started}


def _send(out: IO[str], value: dict[str, Any]) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()
