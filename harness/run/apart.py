"""Measures a group of cells in a process of its own: a worker at the other end of a pipe (`child.py`).

On a CPU, a task may ask for it for each cell, so that the process's peak memory is that of the cell. After a failed capture of a
CUDA graph, the groups of cells that follow are measured so, because the capture may have harmed the run's own process.

The parent sends a `RunOrder` with the cells of the group, and their references, as two lines on stdin. The child answers with
lines of JSON: its progress and, at the end, a `GroupAnswer`. Stdin stays open while the parent lives. When it closes, the child
ends, so that a killed run leaves no process behind.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

import torch

from kvbench.harness.records import Record
from kvbench.harness.run.executor import Group
from kvbench.harness.run.messages import GroupAnswer, RunOrder, pack
from kvbench.harness.run.options import RunOptions
from kvbench.harness.tasks.task import MeasurementError

_CHILD = "from kvbench.harness.run.child import child; child()"


def order_of(group: Group, options: RunOptions) -> RunOrder:
    """The order for a process on this machine.

    Raises:
        MeasurementError: a policy is a class that another process can't import.
    """
    for item in group:
        if type(item.cell.policy).__module__ == "__main__":
            name = type(item.cell.policy).__name__
            raise MeasurementError(
                f"this task runs in another process, which can't import {name}: write it to a file, and give file.py:{name}"
            )
    prepared = {item.cell.id: item for item in group}
    cells = [item.cell for item in group]
    return pack(cells, prepared, options, str(options.device), torch.get_num_threads(), here=True)[0]


def measure(order: RunOrder, references: Sequence[Record | None], progress: Callable[[int, str], None]) -> GroupAnswer:
    """Measure the cells of an order in a fresh process, which does not outlive this one, nor this call.

    `references` has a record for each cell that is compared with one; `progress` gets the tokens done and the figure so far.

    Raises:
        UserError: the child raised one; its model can't be driven exactly, for example.
        MemoryError: the child was killed, as the system does with a process that takes too much memory.
        RuntimeError: the child ended without an answer.
    """
    compared = json.dumps([None if record is None else record.as_json() for record in references])
    with (
        tempfile.TemporaryDirectory(prefix="kv-bench-") as scratch,
        subprocess.Popen(
            [sys.executable, "-c", _CHILD, scratch], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            process_group=0,  # so that Ctrl-C reaches only this process, which ends the child
        ) as process,
    ):  # fmt: skip
        try:
            answer = _conversation(process, f"{order.to_json()}\n{compared}\n", progress)
            process.wait()
        finally:
            process.kill()  # no effect if it has ended
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
    if answer is not None:
        return answer
    if process.returncode < 0:
        raise MemoryError(f"its process was killed by signal {-process.returncode}")
    raise RuntimeError(f"its process ended with exit code {process.returncode} and without an answer")


def _conversation(process: subprocess.Popen[str], request: str, progress: Callable[[int, str], None]) -> GroupAnswer | None:
    """Send the request and pass on progress. Returns the child's answer; None if it died before it gave one."""
    assert process.stdin
    assert process.stdout
    with contextlib.suppress(BrokenPipeError):  # a child that died at once is reported by its exit code
        process.stdin.write(request)
        process.stdin.flush()
    for line in process.stdout:
        message = json.loads(line)
        if "progress" not in message:
            return GroupAnswer.from_json(line)
        progress(*message["progress"])
    return None
