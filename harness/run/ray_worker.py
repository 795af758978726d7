"""The actors of a run on Ray: workers, and a board for their progress. They import torch only when they need it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvbench
from kvbench.harness.core import user_files
from kvbench.harness.core.errors import UserError, described

if TYPE_CHECKING:
    from kvbench.harness.records import Record
    from kvbench.harness.run.order import Answer
    from kvbench.harness.run.prepare import MachineFacts
    from kvbench.harness.run.worker import Worker


@dataclass(frozen=True)
class Shared:
    """What all workers of a run get.

    Attributes:
        files: reference of a list of `UserFile`, which are loaded before the order is read.
        order: reference of an `Order`.
        folder: that the run was started in; a worker that has it works there.
        board: actor that progress is reported to.
    """

    files: Any
    order: Any
    folder: str
    board: Any


@dataclass(frozen=True)
class Place:
    """Process that a worker is: machine, in Ray's words and for people, and number. Ray replaces one that dies."""

    node: str
    host: str
    process: int


class RayWorker:
    """Measures groups of cells."""

    def __init__(self, name: str) -> None:
        """Set up the worker, without knowing what to measure."""
        self._name = name
        self._worker: Worker | None = None

    def about(self, device: str, threads: int) -> tuple[Place, dict[str, str], MachineFacts]:
        """Return where this process is, the versions of its code, and facts about its machine.

        Raises:
            UserError: there is no such device.
        """
        import torch

        from kvbench.harness.models.load import device_of
        from kvbench.harness.run.prepare import MachineFacts

        torch.set_num_threads(threads)
        return _place(), versions(), MachineFacts.here(device_of(device))

    def check(self, shared: Shared) -> None:
        """Look for models, code and data on this machine.

        Raises:
            UserError: something is missing or different.
        """
        self._opened(shared).check()

    def measure(self, shared: Shared, number: int, references: Sequence[Record | None]) -> tuple[Place, Answer]:
        """Measure a group.

        Raises:
            UserError: a model can't be driven exactly, a cache doesn't fit, or something is missing or different here.
        """
        with tempfile.TemporaryDirectory(prefix="kv-bench-") as scratch:
            return _place(), self._opened(shared).measure(number, references, Path(scratch))

    def _opened(self, shared: Shared) -> Worker:
        import ray

        if self._worker is None:
            with contextlib.suppress(OSError):  # on another machine
                os.chdir(shared.folder)
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


def versions() -> dict[str, str]:
    """Return the versions of the code that decides figures. All workers must have the same."""
    digest = hashlib.sha256()
    for package in ("policies", "harness"):
        for file in sorted((Path(kvbench.__file__).parent / package).resolve().rglob("*.py"), key=str):
            digest.update(file.name.encode() + file.read_bytes())
    known = {"kv-bench": kvbench.__version__, "kv-bench's code": digest.hexdigest()[:12]}
    for package in ("torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            known[package] = version(package)
    return known


def _place() -> Place:
    import ray

    return Place(ray.get_runtime_context().get_node_id(), socket.gethostname(), os.getpid())
