"""Actors of a run on Ray: workers, and a board for their progress. torch is imported only when it is needed."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.harness.core import user_files
from kvbench.harness.core.errors import UserError, described
from kvbench.harness.core.source_digests import code_versions

if TYPE_CHECKING:
    from kvbench.harness.records import Record
    from kvbench.harness.run.order import GroupOutcomes
    from kvbench.harness.run.prepare import MachineFacts
    from kvbench.harness.run.worker import Worker


@dataclass(frozen=True)
class Shared:
    """Ray references to the objects that all workers share: user files, the order and the board.

    The user files, a list of `UserFile`, must be loaded before the `Order` is read.
    """

    files: Any
    order: Any
    board: Any


@dataclass(frozen=True)
class Place:
    """Process of a worker: Ray's id of its machine, the host name, and the process id. Ray replaces a process that dies."""

    node: str
    host: str
    process: int


class RayWorker:
    """Measures groups of cells."""

    def __init__(self, name: str) -> None:
        """Create the worker without an order."""
        self._name = name
        self._worker: Worker | None = None

    def about(self, device: str, threads: int) -> tuple[Place, dict[str, str], MachineFacts]:
        """Return the process, the versions of its code, and facts about its machine. A missing device is an error."""
        import torch

        from kvbench.harness.models.load import device_of
        from kvbench.harness.run.prepare import MachineFacts

        torch.set_num_threads(threads)
        return _place(), code_versions(), MachineFacts.here(device_of(device))

    def check(self, shared: Shared) -> None:
        """Check the models, code and data on this machine; see `Worker.check`."""
        self._opened(shared).check()

    def measure(self, shared: Shared, number: int, references: Sequence[Record | None]) -> tuple[Place, GroupOutcomes]:
        """Measure a group; see `Worker.measure`."""
        with tempfile.TemporaryDirectory(prefix="kv-bench-") as scratch:
            return _place(), self._opened(shared).measure(number, references, Path(scratch))

    def _opened(self, shared: Shared) -> Worker:
        import ray

        if self._worker is None:
            try:
                user_files.receive(ray.get(shared.files))
                order = ray.get(shared.order)
            except Exception as error:  # a user's code may raise anything
                raise UserError(f"the cells can't be read: {described(error)}") from None
            from kvbench.harness.run.worker import Worker

            self._worker = Worker(order, partial(shared.board.put.remote, self._name))
        return self._worker


class Board:
    """Holds the latest progress of every worker: tokens done, and the figure so far."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[int, str]] = {}

    def put(self, name: str, tokens: int, text: str) -> None:
        """Note the progress of a worker."""
        self._latest[name] = (tokens, text)

    def read(self) -> dict[str, tuple[int, str]]:
        """Return the progress since the last call, by worker."""
        latest, self._latest = self._latest, {}
        return latest


def _place() -> Place:
    import ray

    return Place(ray.get_runtime_context().get_node_id(), socket.gethostname(), os.getpid())
