"""A worker of a run, on Ray or at the other end of a pipe: makes the cells of an order, and measures groups of them."""

from __future__ import annotations

import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvbench.harness.core import plugins
from kvbench.harness.core.codec import Codec
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.parameters import policy_from
from kvbench.harness.core.sources import source_digest
from kvbench.harness.models.hub import model_directory, weights_digest
from kvbench.harness.models.load import device_of, load_tokenizer
from kvbench.harness.records import Record, RecordStore
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.run.executor import Outcome, RunWatcher
from kvbench.harness.run.machine import Machine
from kvbench.harness.run.messages import CellAnswer, CellOrder, GroupAnswer, RunOrder, data_from_json
from kvbench.harness.run.options import RunOptions
from kvbench.harness.run.prepare import Prepared
from kvbench.harness.suite import Cell
from kvbench.harness.suite.axes import evict_from
from kvbench.harness.suite.file import ModelSpec
from kvbench.harness.tasks.task import Data

_TEXTS_KEPT = 4
_SECONDS_BETWEEN_REPORTS = 0.5

Report = Callable[[int, str], None]


class _Progress(RunWatcher):
    """Reports the tokens now and then, and keeps the notes."""

    def __init__(self, report: Report) -> None:
        self.notes: list[tuple[str, str]] = []
        self._report, self._last = report, 0.0

    def advance(self, tokens: int, text: str, worker: str = "") -> None:
        """Report it, unless that was done just now."""
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_REPORTS:
            self._last = now
            self._report(tokens, text)

    def note(self, label: str, text: str) -> None:
        """Keep it for the answer."""
        self.notes.append((label, text))


class Worker:
    """Measures groups of the cells of one run."""

    def __init__(
        self, order: RunOrder, text: Callable[[int], str], report: Report, scratch: Path, own_process: bool = False
    ) -> None:
        """Make the cells.

        `text` gives some data as JSON, by number; `report` gets the tokens done and the figure so far. Copies of a user's files
        and what is being measured go to `scratch`, an empty folder. `own_process`: this one is there for one group.

        Raises:
            UserError: a cell is another one here.
        """
        torch.set_num_threads(order.threads)
        with contextlib.suppress(OSError):
            os.chdir(order.folder)
        self._order, self._text, self._report = order, text, report
        self._own = _written(order.files, scratch / "files")
        self._cells = [self._cell(one) for one in order.cells]
        self._opened: OrderedDict[int | str, Data] = OrderedDict()
        options = RunOptions(device_of(order.device), order.data, order.block, order.walk, True, order.keep)
        self._folder = RecordStore(scratch / "records")
        self._machine = Machine(options, self._cells, self._folder, own_process)

    def check(self, numbers: Sequence[int]) -> str:
        """Look for the models, the code and the data of cells. Returns what is wrong; empty if nothing is."""
        checked = set[Any]()
        try:
            for number in numbers:
                cell, order = self._cells[number], self._order.cells[number]
                if cell.model not in checked:
                    weights = weights_digest(self._directory(cell))
                    if weights != order.facts["weights_sha256"]:
                        return f"{order.model['id']}: its files differ from those of the process that started the run"
                if (code := order.facts["policy_sha256"]) not in checked and source_digest(cell.policy) != code:
                    return f"the code of the policy {cell.name} differs from that of the process that started the run"
                if order.data is None and order.data_sha256 not in checked:
                    self._data(number)
                checked |= {cell.model, code, order.data_sha256}
        except UserError as error:
            return str(error)
        return ""

    def measure(self, numbers: Sequence[int], references: Sequence[dict[str, Any] | None]) -> GroupAnswer:
        """Measure the cells of a group.

        `numbers` are those of the order; `references` has the JSON of a record for each cell that is compared with one.
        """
        progress, answers, places = _Progress(self._report), dict[int, CellAnswer](), dict[str, int]()

        def done(item: Prepared, outcome: Outcome) -> None:
            answers[places[item.cell.id]] = self._answer(item, outcome)

        try:
            items = [self._prepared(number) for number in numbers]
            places.update((item.cell.id, number) for item, number in zip(items, numbers, strict=True))
            known = [None if value is None else Record.from_json(value) for value in references]
            self._machine.measure(items, known, progress, done)
        except UserError as error:
            return GroupAnswer.from_mistake(error, progress.notes)
        return GroupAnswer(answers, progress.notes)

    def _answer(self, item: Prepared, outcome: Outcome) -> CellAnswer:
        trace, kept = None, None
        if outcome.trace is not None and outcome.trace.stat().st_size:
            trace = outcome.trace.read_bytes()
        if outcome.keep_map is not None:
            path = self._folder.trace_path(item.record, ".map")
            steps = outcome.keep_map.put_in_place(path)["steps"]
            kept = (path.read_bytes(), steps)
            path.unlink()
        metrics = None if outcome.metrics is None else outcome.metrics.as_json()
        return CellAnswer(outcome.facts, metrics, None if outcome.failure is None else outcome.failure.as_json(), trace, kept)

    def _cell(self, order: CellOrder) -> Cell:
        """The cell of an order.

        Raises:
            UserError: it has another id here, because the code differs, or it can't be made.
        """
        coded, evict = order.cell["kv"], evict_from(order.cell["evict"])
        axes = {"evict": evict, "kv": None if coded is None else Codec.from_json(coded)}
        fields = order.cell | {"name": self._here(order.cell["name"])} | axes
        task = order.task | {"name": self._here(order.task["name"])}
        try:
            policy = policy_from(fields["name"], self._here(order.parameters))
            options = plugins.task_class(task["name"]).options(**task)
            return Cell(**fields, model=ModelSpec(**order.model), task=options, policy=policy)
        except (ValueError, TypeError) as error:
            raise UserError(f"{order.cell['name']}: can't be made here: {str(error).splitlines()[0]}") from error

    def _here(self, value: Any) -> Any:
        """The value with names of a user's files replaced by those of their copies."""
        if isinstance(value, dict):
            return {k: self._here(v) for k, v in value.items()}
        if isinstance(value, str):
            module, colon, attribute = value.rpartition(":")
            return f"{self._own[module]}:{attribute}" if colon and module in self._own else value
        return value

    def _directory(self, cell: Cell) -> Path:
        return model_directory(cell.model.id, cell.model.revision, cell.model.pickle, cell.model.gguf_file)

    def _prepared(self, number: int) -> Prepared:
        cell, order = self._cells[number], self._order.cells[number]
        record = Record(CellSpec.from_json(cell.as_json()), order.id, order.key, "ok")
        task = plugins.task_class(cell.task.name)
        return Prepared(cell, task, self._data(number), self._directory(cell), record, order.facts)

    def _data(self, number: int) -> Data:
        """The data of a cell: those that were sent, or the same from here; the last few are kept.

        Raises:
            UserError: they are not here, or others.
        """
        order = self._order.cells[number]
        name = order.data if order.data is not None else order.data_sha256
        if name not in self._opened:
            self._opened[name] = self._loaded(number) if order.data is None else self._received(number, order.data)
        self._opened.move_to_end(name)
        while len(self._opened) > _TEXTS_KEPT:
            self._opened.popitem(last=False)
        return self._opened[name]

    def _received(self, number: int, text: int) -> Data:
        return data_from_json(self._text(text), partial(load_tokenizer, self._directory(self._cells[number])))

    def _loaded(self, number: int) -> Data:
        """The data of a cell from here.

        Raises:
            UserError: they are not here, or others.
        """
        order, cell = self._order.cells[number], self._cells[number]
        task = plugins.task_class(cell.task.name)
        load: Any = task.data_reader(cell.task) or load_tokenizer
        data: Data = task.data(cell.task, partial(load, self._directory(cell)), self._order.data)
        if data.ids_sha256 != order.data_sha256:
            raise UserError(f"task {cell.task.name}: its data differ from those of the process that started the run")
        return data


def _written(files: Mapping[str, bytes], folder: Path) -> dict[str, Path]:
    """Write a user's files, each into a folder of its own. Returns where they are."""
    copies = {}
    for number, (path, content) in enumerate(files.items()):
        copy = folder / str(number) / Path(path).name
        copy.parent.mkdir(parents=True)
        copy.write_bytes(content)
        copies[path] = copy
    return copies
