"""The process at the other end of `apart.py`'s pipe. It imports what it measures with only once it will end with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1  # Linux's prctl: set the signal that this process gets when its parent dies


def child() -> None:
    """Read an order and references, measure, answer. The process's argument is an empty folder to work in."""
    order, references = sys.stdin.readline(), sys.stdin.readline()
    if not references:  # the parent has gone already
        return
    _end_with_parent(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # what a library prints must not mix with the answer
    with contextlib.suppress(BrokenPipeError):  # the parent has gone
        _send(out, _answer(order, references, out))
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


def _answer(order_line: str, references_line: str, out: IO[str]) -> str:
    from kvbench.harness.core.errors import UserError
    from kvbench.harness.run.messages import GroupAnswer, RunOrder
    from kvbench.harness.run.worker import Worker

    def report(tokens: int, text: str) -> None:
        _send(out, json.dumps({"progress": [tokens, text]}))

    try:
        order = RunOrder.from_json(order_line)
        worker = Worker(order, [].__getitem__, report, Path(sys.argv[1]), own_process=True)
        answer = worker.measure(range(len(order.cells)), json.loads(references_line))
    except UserError as error:
        answer = GroupAnswer.from_mistake(error, [])
    except (Exception, SystemExit) as error:  # the parent reports it
        answer = GroupAnswer.from_error(error, [cell.facts for cell in order.cells])
    return answer.to_json()


def _send(out: IO[str], line: str) -> None:
    out.write(line + "\n")
    out.flush()
