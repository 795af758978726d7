"""Measure the cells of an order, in a child process on this machine or in a worker on Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.source_digests import source_digest
from kvbench.harness.models.hub import model_directory, weights_digest
from kvbench.harness.models.load import LazyTokenizer
from kvbench.harness.records import Record, RecordStore
from kvbench.harness.run.ledger import Outcome, RunWatcher
from kvbench.harness.run.machine import Machine
from kvbench.harness.run.order import GroupOutcomes, Order, UnsentData
from kvbench.harness.run.prepare import Prepared
from kvbench.harness.suite.file import ModelSpec
from kvbench.harness.tasks.task import Data

_DATA_KEPT = 4
_SECONDS_BETWEEN_REPORTS = 0.5

Report = Callable[[int, str], None]  # called with the tokens done and the figure so far


class Worker:
    """Measures groups of an order."""

    def __init__(self, order: Order, report: Report, own_process: bool = False) -> None:
        """Prepare the worker, without loading a model. own_process: this process measures a single group."""
        torch.set_num_threads(order.threads)
        with contextlib.suppress(OSError):  # on another machine
            os.chdir(order.folder)
        self._order, self._report = order, report
        self._machine = Machine(order.options, order.cells, own_process)
        self._directories: dict[ModelSpec, Path] = {}
        self._codes: set[str] = set()  # digests of policies whose code was checked
        self._data: dict[str, Data] = {}  # last data that this process has read, by fingerprint

    def check(self) -> None:
        """Check the models, the code and the data of all cells.

        Raises:
            UserError: a model, code or data are missing here, or differ from those of the process that started the run.
        """
        items = [item for group in self._order.groups for item in group]
        for item in {(item.cell.model, item.facts["policy_sha256"], id(item.data)): item for item in items}.values():
            self._here(item)

    def measure(self, number: int, references: Sequence[Record | None], scratch: Path) -> GroupOutcomes:
        """Measure the cells of a group.

        Args:
            references: `Prepared.reference` of each cell.
            scratch: empty folder to which files are written.

        Raises:
            UserError: a model can't be driven exactly, a cache doesn't fit, or models, code or data are missing or differ here.
        """
        watcher, outcomes = _Watcher(self._report), dict[str, Outcome]()

        def done(item: Prepared, outcome: Outcome) -> None:
            outcomes[item.cell.id] = outcome.with_contents()

        items = [self._here(item) for item in self._order.groups[number]]
        group = [dataclasses.replace(item, reference=record) for item, record in zip(items, references, strict=True)]
        self._machine.measure(group, RecordStore(scratch), watcher, done)
        return GroupOutcomes([outcomes[item.cell.id] for item in group], watcher.notes)

    def _here(self, item: Prepared) -> Prepared:
        """Return a cell with the directory and the data of this machine.

        Raises:
            UserError: a model, code or data are missing here, or differ from those of the process that started the run.
        """
        model, code = item.cell.model, item.facts["policy_sha256"]
        if model not in self._directories:
            self._directories[model] = _directory(item)
        if code not in self._codes and source_digest(item.cell.policy) != code:
            raise UserError(f"the code of the policy {item.cell.name} differs from that of the process that started the run")
        self._codes.add(code)
        directory = self._directories[model]
        data = self._read(item, directory) if isinstance(item.data, UnsentData) else item.data
        return dataclasses.replace(item, directory=directory, data=data)

    def _read(self, item: Prepared, directory: Path) -> Data:
        """Return the data of a cell, read by this process.

        Raises:
            UserError: the data are not here, or differ.
        """
        wanted = item.data.ids_sha256
        if wanted not in self._data:
            data: Data = item.task.data(item.cell.task, LazyTokenizer(directory), self._order.options.data)
            if data.ids_sha256 != wanted:
                raise UserError(f"task {item.cell.task.name}: its data differ from those of the process that started the run")
            if len(self._data) == _DATA_KEPT:
                del self._data[next(iter(self._data))]
            self._data[wanted] = data
        return self._data[wanted]


class _Watcher(RunWatcher):
    """Reports progress at intervals, and keeps the notes.

    Attributes:
        notes: (label, text) of each note.
    """

    def __init__(self, report: Report) -> None:
        self.notes: list[tuple[str, str]] = []
        self._report, self._last = report, 0.0

    def advance(self, tokens: int, text: str, worker: str = "") -> None:
        """Report the progress, unless the last report is very recent."""
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_REPORTS:
            self._last = now
            self._report(tokens, text)

    def note(self, label: str, text: str) -> None:
        """Keep a note for the answer."""
        self.notes.append((label, text))


def _directory(item: Prepared) -> Path:
    """Return the directory of a cell's model on this machine.

    Raises:
        UserError: the model is not available, or its files differ.
    """
    spec = item.cell.model
    directory = item.directory
    if not directory.is_dir():
        directory = model_directory(spec.id, spec.revision, spec.pickle, spec.gguf_file)
    if weights_digest(directory) != item.facts["weights_sha256"]:
        raise UserError(f"{spec.id}: its files differ from those of the process that started the run")
    return directory
