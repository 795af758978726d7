"""One cell in a process of its own: what a process's peak memory says is then about that cell alone.

The request goes in as one line of JSON on stdin; progress, and at the end the figures, come back as lines of JSON. Stdin stays
open for as long as the parent lives: where it ends, the child ends, so that no killed run leaves one behind.
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
_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent dies


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """A cell, and all that a fresh process needs to measure it.

    Attributes:
        directory: of the model.
        random: the model has no weights: they are drawn.
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
        walk: token by token inside the layers.
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
        """Back from that line."""
        value = json.loads(line)
        paths = {name: Path(value[name]) for name in ("directory", "data", "trace") if value[name] is not None}
        return cls(**(value | paths))


@dataclass(frozen=True)
class CellResult:
    """What came of it.

    Attributes:
        metrics: the task's figures, as JSON.
        model: facts of the model.
        seconds: that the task's own work took.
    """

    metrics: dict[str, Any]
    model: dict[str, Any]
    seconds: float


def measure(cell: CellRun, progress: Callable[[int, str], None]) -> CellResult:
    """Run a cell in a fresh process, which does not outlive this one, nor this call.

    Args:
        cell: to measure.
        progress: is called with the tokens done and the figure so far, as in `Job`.

    Raises:
        UserError: of the child's; its model can't be driven, say.
        ApartError: the error it failed with.
        MemoryError: it was killed, as the system does with a process that takes too much memory.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        process_group=0,  # Ctrl-C reaches this process alone, which tells of it and ends the other
    ) as process:  # fmt: skip
        try:
            answer = _conversation(process, cell, progress)
            process.wait()
        finally:
            process.kill()  # nothing where it has ended
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
    if "mistake" in answer:
        raise (RefusedModelError if answer["refused"] else UserError)(answer["mistake"])
    if "failure" in answer:
        raise ApartError(answer["failure"])
    if process.returncode < 0:
        raise MemoryError(f"its process was killed by signal {-process.returncode}")
    if "metrics" not in answer:
        raise RuntimeError(f"its process ended with exit code {process.returncode} and said nothing")
    return CellResult(answer["metrics"], answer["model"], answer["seconds"])


def _conversation(process: subprocess.Popen[str], cell: CellRun, progress: Callable[[int, str], None]) -> dict[str, Any]:
    """The request, and the child's last word: of a child that died before it said one, nothing."""
    assert process.stdin
    assert process.stdout
    with contextlib.suppress(BrokenPipeError):  # a child that died at once is told of by its exit code
        process.stdin.write(cell.to_json() + "\n")
        process.stdin.flush()
    answer: dict[str, Any] = {}
    for line in process.stdout:
        said = json.loads(line)
        if "progress" in said:
            progress(*said["progress"])
        else:
            answer = said
    return answer


def child() -> None:
    """The other side."""
    line = sys.stdin.readline()
    if not line:  # the parent has gone already
        return
    _end_with_parent(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no line of ours
    try:
        answer = _answer(CellRun.from_json(line), out)
    except UserError as error:
        answer = {"mistake": str(error), "refused": isinstance(error, RefusedModelError)}
    except (Exception, SystemExit) as error:  # the parent tells of it
        answer = {"failure": failure(error)}
    with contextlib.suppress(BrokenPipeError):  # the parent has gone
        _say(out, answer)
    sys.stderr.flush()
    os._exit(0)  # an orderly exit would wait for the thread that reads stdin


def _end_with_parent(stdin: IO[str]) -> None:
    """End this process when its parent has ended: at once on Linux, elsewhere as soon as the closed pipe is seen."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _answer(cell: CellRun, out: IO[str]) -> dict[str, Any]:
    """The cell, measured."""
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
        lambda tokens, text: _say(out, {"progress": [tokens, text]}),
    )  # fmt: skip
    started = time.perf_counter()
    metrics = task.run(options, job)
    return {"metrics": metrics.as_json(), "model": model.facts(), "seconds": time.perf_counter() - started}


def _say(out: IO[str], value: dict[str, Any]) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()
