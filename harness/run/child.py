"""Measure a group of cells in a child process.

On a CPU, a task may request a child process for each cell, so that the peak memory of the process is that of the cell. After a
failed capture of a CUDA graph, all later groups are measured in child processes, because the capture may have damaged the state
of the run's own process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvbench.harness.core import user_files
from kvbench.harness.core.errors import UserError, failure

if TYPE_CHECKING:
    from kvbench.harness.run.order import GroupOutcomes, Order


class ChildError(RuntimeError):
    """An error that a child process could not attribute to a cell."""

    def __init__(self, failure: dict[str, Any]) -> None:
        super().__init__(failure)
        self.failure = failure


def measure(order: Order, progress: Callable[[int, str], None]) -> GroupOutcomes:
    """Measure the only group of an order in a new process, which ends before this call returns.

    progress: called with the number of tokens done and the figure so far.

    Raises:
        UserError: the child raised a `UserError`, e.g. because the model can't be driven exactly.
        ChildError: the child failed.
        MemoryError: the child was killed, as the system does with a process that takes too much memory.
        RuntimeError: the child ended without an answer.
    """
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory(prefix="kv-bench-") as scratch, ours:
        process = multiprocessing.get_context("spawn").Process(target=run_child, args=(theirs, scratch))
        try:
            with theirs, _unnoticed():
                process.start()
            return _conversation(ours, order, progress)
        except (EOFError, ConnectionError):
            process.join()
        finally:
            if process.pid is not None:
                process.kill()  # no effect if it has ended
                process.join()
    if (code := process.exitcode or 0) < 0:
        raise MemoryError(f"its process was killed by signal {-code}")
    raise RuntimeError(f"its process ended with exit code {code} and without an answer")


def _conversation(connection: Connection, order: Order, progress: Callable[[int, str], None]) -> GroupOutcomes:
    """Send the order, pass on progress, and return the answer."""
    connection.send(user_files.loaded_files())
    connection.send(order)
    while isinstance(message := connection.recv(), tuple):
        progress(*message)
    if isinstance(message, Exception):
        raise message
    answer: GroupOutcomes = message
    return answer


@contextlib.contextmanager
def _unnoticed() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach and that do not run the user's script again, in this context.

    The run ends such processes itself. If they ran the script again, every script would need `if __name__ == "__main__"`.
    """
    resource_tracker.ensure_running()  # starting it later would unblock SIGINT
    main, blocked = sys.modules["__main__"], signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def run_child(connection: Connection, scratch: str) -> None:
    """Run the child process: receive an order, measure it, and send the outcomes.

    The thread that ends the child with its parent starts before torch is imported.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # stdout is for the records of the run
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has gone
        try:
            user_files.receive(connection.recv())
            order: Order = connection.recv()
            from kvbench.harness.run.worker import Worker

            worker = Worker(order, lambda *progress: connection.send(progress), own_process=True)
            connection.send(worker.measure(0, [item.reference for item in order.groups[0]], Path(scratch)))
        except (UserError, EOFError, ConnectionError) as error:
            connection.send(error)
        except (Exception, SystemExit) as error:  # a user's code may raise what can't be pickled
            connection.send(ChildError(failure(error)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
