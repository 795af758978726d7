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
from pathlib import Path
from typing import IO, Any

from kvbench.harness.core.errors import RefusedModelError, UserError
from kvbench.harness.core.failure import ApartError, failure

_CHILD = "from kvbench.harness.run.apart import child; child()"
_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent dies


def measure(request: dict[str, Any], progress: Callable[[int, str], None]) -> dict[str, Any]:
    """Run a cell in a fresh process, which does not outlive this one, nor this call.

    Args:
        request: `directory`, `random`, `dtype`, `rope_length`, `pickle`: the model; `task` with its `name`; `data`;
            `policy`, `parameters`, `capacity`, `positions`, `limit`, `seed`; `block`, `walk`, `threads`, `trace`.
        progress: as in `Job`.

    Returns:
        {"metrics", "model", "seconds"}: the figures, the model's facts, and how long the task's own work took.

    Raises:
        UserError: of the child's; its model can't be driven, say.
        ApartError: what it died of.
        MemoryError: it was killed, as the system does with a process that takes too much memory.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        process_group=0,  # Ctrl-C reaches this process alone, which tells of it and ends the other
    ) as process:  # fmt: skip
        try:
            answer = _conversation(process, request, progress)
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
    return answer


def _conversation(
    process: subprocess.Popen[str], request: dict[str, Any], progress: Callable[[int, str], None]
) -> dict[str, Any]:
    """The request, and the child's last word: of a child that died before it said one, nothing."""
    assert process.stdin
    assert process.stdout
    with contextlib.suppress(BrokenPipeError):  # a child that died at once is told of by its exit code
        process.stdin.write(json.dumps(request) + "\n")
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
        answer = _answer(json.loads(line), out)
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


def _answer(request: dict[str, Any], out: IO[str]) -> dict[str, Any]:
    """The cell, measured."""
    import torch

    from kvbench.harness.core import plugins
    from kvbench.harness.engine.decoder import CacheConfig
    from kvbench.harness.engine.method import EAGER, TOKEN_BY_TOKEN
    from kvbench.harness.models.load import load_model, load_tokenizer
    from kvbench.harness.tasks.task import Job

    torch.set_num_threads(request["threads"])
    directory = Path(request["directory"])
    task = plugins.task_class(request["task"]["name"])
    options = task.options(**request["task"])
    policy = plugins.policy_class(request["policy"])(**request["parameters"])
    config = CacheConfig(policy, request["capacity"], request["positions"], request["limit"], request["seed"])
    data = task.data(options, lambda: load_tokenizer(directory), Path(request["data"]) if request["data"] else None)
    model = load_model(
        directory, request["dtype"], torch.device("cpu"), request["rope_length"], request["pickle"], random=request["random"]
    )
    job = Job(
        model, config, data, request["block"], TOKEN_BY_TOKEN if request["walk"] else EAGER, Path(request["trace"]),
        lambda tokens, text: _say(out, {"progress": [tokens, text]}),
    )  # fmt: skip
    started = time.perf_counter()
    metrics = task.run(options, job)
    return {"metrics": metrics, "model": model.facts(), "seconds": time.perf_counter() - started}


def _say(out: IO[str], value: dict[str, Any]) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()
