"""Messages between a run and its workers: a `CellOrder` out, a `CellAnswer` back, through a pipe or through Ray.

Every message is JSON with the version of the record format, and a receiver of another version refuses it in one line. Models come
from the worker's own disk or the hub. A user's own files and the data are sent to other machines, and read again on this one.
"""

from __future__ import annotations

import importlib
import json
import os
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvbench.harness.core.errors import RefusedModelError, UserError, failure
from kvbench.harness.core.evict import evict_as_json
from kvbench.harness.core.files import new_partial
from kvbench.harness.core.parameters import names_inside, parameters_of
from kvbench.harness.records import RECORD_VERSION, RecordStore
from kvbench.harness.records.facts import Failure
from kvbench.harness.run.executor import Done, Outcome, trace_suffix
from kvbench.harness.run.keep_map import ReceivedMap
from kvbench.harness.run.options import KeepSteps, RunOptions
from kvbench.harness.run.prepare import Prepared
from kvbench.harness.suite import Cell

if TYPE_CHECKING:
    from kvbench.harness.tasks.task import Data

_PLAIN = ("suite", "suite_version", "name", "capacity", "positions", "limit", "seed", "place")  # fields of a cell
_OURS = "kvbench.harness."  # modules whose dataclasses may be sent


@dataclass(frozen=True)
class CellOrder:
    """A cell as it is sent to a worker.

    Attributes:
        cell: fields of the cell that are plain already.
        model: fields of its `ModelSpec`.
        task: options of its task.
        parameters: of its policy.
        id: of the cell.
        key: of its record.
        facts: of its record that are known before it is measured.
        data: number of its data among those that were sent; None if the worker reads them itself.
        data_sha256: fingerprint of the data.
    """

    cell: dict[str, Any]
    model: dict[str, Any]
    task: dict[str, Any]
    parameters: dict[str, Any]
    id: str
    key: str
    facts: dict[str, Any]
    data: int | None
    data_sha256: str


@dataclass(frozen=True)
class RunOrder:
    """Message that every worker of a run receives once.

    Attributes:
        cells: all cells that it may measure.
        files: content of a user's own policies and tasks, by the path that names them.
        folder: that the run was started in; a worker that has it works there.
        data: directory of the text, for data that a worker reads itself.
        device: to measure on.
        threads: of the CPU.
        block: tokens that pass a layer at once; chosen by method and free memory when None.
        walk: always read token by token inside the layers.
        keep: write keep maps of these steps.
    """

    cells: list[CellOrder]
    files: dict[str, bytes]
    folder: str
    data: Path | None
    device: str
    threads: int
    block: int | None
    walk: bool
    keep: KeepSteps | None

    def to_json(self) -> str:
        """The message as one line of JSON."""
        return _message(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Parse a line that the other side wrote.

        Raises:
            UserError: the sender writes another version.
        """
        value = _content(line)
        return cls(**value | {
            "cells": [CellOrder(**cell) for cell in value["cells"]],
            "files": {path: b64decode(content) for path, content in value["files"].items()},
            "data": None if value["data"] is None else Path(value["data"]),
            "keep": None if value["keep"] is None else KeepSteps(**value["keep"]),
        })  # fmt: skip


@dataclass(frozen=True)
class CellAnswer:
    """An `Outcome` as it is sent back.

    Attributes:
        facts: of the record.
        metrics: its figures as JSON; None if it failed.
        failure: why it failed, as JSON; None if it went well.
        trace: content of its trace; None if it has none.
        keep_map: content and steps of its keep map; None if it has none.
    """

    facts: dict[str, Any]
    metrics: dict[str, Any] | None
    failure: dict[str, Any] | None
    trace: bytes | None = None
    keep_map: tuple[bytes, str] | None = None

    @classmethod
    def from_value(cls, value: dict[str, Any]) -> Self:
        """Build the answer from the parsed JSON of a message."""
        trace, kept = value["trace"], value["keep_map"]
        files = {"trace": trace and b64decode(trace), "keep_map": kept and (b64decode(kept[0]), kept[1])}
        return cls(**value | files)

    def deliver(self, item: Prepared, store: RecordStore, done: Done) -> None:
        """Hand the outcome over, with its trace in a partial file, which goes unless `done` moves it.

        Raises:
            UserError: the trace can't be written.
        """
        if self.metrics is None:
            failed = Failure.from_json(self.failure or {})
            done(item, Outcome(self.facts, None, failed, None, None))
            return
        trace = store.trace_path(item.record, trace_suffix(item))
        try:
            trace.parent.mkdir(parents=True, exist_ok=True)
            trace = new_partial(trace)
            trace.write_bytes(self.trace or b"")
        except OSError as error:
            raise UserError(f"{trace.parent}: can't be written to ({error.strerror}); finished cells are kept") from error
        kept = None if self.keep_map is None else ReceivedMap(*self.keep_map)
        try:
            done(item, Outcome(self.facts, item.task.metrics.from_json(self.metrics), None, trace, kept))
        finally:
            trace.unlink(missing_ok=True)


@dataclass(frozen=True)
class GroupAnswer:
    """Answer of a worker to a group of cells.

    Attributes:
        cells: by number; empty after a mistake.
        notes: (label, text) of everything worth knowing about policies.
        mistake: a user's mistake, which ends the run; empty if there is none.
        refused: the mistake is a model that can't be driven exactly.
    """

    cells: dict[int, CellAnswer]
    notes: list[tuple[str, str]]
    mistake: str = ""
    refused: bool = False

    @classmethod
    def from_mistake(cls, error: UserError, notes: list[tuple[str, str]]) -> Self:
        """The answer of a worker that found a user's mistake."""
        return cls({}, notes, str(error), isinstance(error, RefusedModelError))

    @classmethod
    def from_error(cls, error: BaseException, facts: Sequence[dict[str, Any]]) -> Self:
        """The answer about cells with these facts that all failed with an error."""
        return cls({number: CellAnswer(of_cell, None, failure(error)) for number, of_cell in enumerate(facts)}, [])

    def to_json(self) -> str:
        """The message as one line of JSON."""
        return _message(asdict(self))

    @classmethod
    def from_json(cls, line: str, worker: str = "") -> Self:
        """Parse a line that the other side wrote.

        `worker` is who sent it, for messages.

        Raises:
            UserError: the worker found a user's mistake, or writes another version.
        """
        value = _content(line, worker)
        if value["mistake"]:
            raise (RefusedModelError if value["refused"] else UserError)(f"{worker and worker + ': '}{value['mistake']}")
        cells = {int(number): CellAnswer.from_value(cell) for number, cell in value["cells"].items()}
        return cls(cells, [(label, text) for label, text in value["notes"]])


def pack(
    cells: Sequence[Cell], prepared: Mapping[str, Prepared], options: RunOptions, device: str, threads: int, *, here: bool = False
) -> tuple[RunOrder, list[str]]:
    """The order of a run, and the data that go with it as JSON.

    `prepared` has, by cell id, the cells that are to be measured; the others are only known to exist. A worker that is `here`, on
    this machine, reads files and data itself.

    Raises:
        UserError: a policy is defined where no other process can import it, or its file can't be read.
    """
    texts: list[str] = []
    numbers: dict[int, int | None] = {}
    for item in prepared.values():
        if id(item.data) not in numbers:
            content = None if here else data_to_json(item.data)
            numbers[id(item.data)] = None if content is None else len(texts)
            texts += [] if content is None else [content]
    orders, files = [], dict[str, bytes]()
    for cell in cells:
        wanted, parameters = prepared.get(cell.id), parameters_of(cell.policy)
        for name in () if here else (cell.name, cell.task.name, *names_inside(parameters)):
            _add_file(name, files)
        local = Path(cell.model.id).expanduser()
        model = cell.model.model_dump() | ({"id": str(local.resolve())} if local.exists() else {})
        axes = {"evict": evict_as_json(cell.evict), "kv": None if cell.kv is None else cell.kv.as_json()}
        plain = {name: getattr(cell, name) for name in _PLAIN} | axes
        task = cell.task.model_dump(exclude_none=True)
        text_number = None if wanted is None else numbers[id(wanted.data)]
        sha256 = "" if wanted is None else wanted.data.ids_sha256
        key, facts = ("", {}) if wanted is None else (wanted.record.key, wanted.facts)
        orders.append(CellOrder(plain, model, task, parameters, cell.id, key, facts, text_number, sha256))
    order = RunOrder(orders, files, os.getcwd(), options.data, device, threads, options.block, options.walk, options.keep)
    return order, texts


def _add_file(name: str, files: dict[str, bytes]) -> None:
    module, colon, attribute = name.rpartition(":")
    if module == "__main__":
        raise UserError(f"{name}: a worker can't import {attribute}: write it to a file, and give file.py:{attribute}")
    if colon and module.endswith(".py") and module not in files:
        try:
            files[module] = Path(module).expanduser().read_bytes()
        except OSError as error:
            raise UserError(f"{module}: can't be read ({error.strerror})") from error


def data_to_json(data: Data) -> str | None:
    """The data of a task; None if they hold something that can't be sent."""
    try:
        return _message(_tree(data))
    except TypeError:  # a user's task may hold anything
        return None


def data_from_json(line: str, tokenizer: Callable[[], PreTrainedTokenizerBase]) -> Data:
    """Parse a line that the other side wrote.

    `tokenizer` loads the model's, which stands for any tokenizer in the data.

    Raises:
        UserError: the sender writes another version.
    """
    data: Data = _value(_content(line), tokenizer)
    return data


def _tree(value: Any) -> Any:
    """JSON for a value. What JSON has no form for is an object with one key that names its kind."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.ndarray():
            return {"array": [value.dtype.str, value.shape, b64encode(value.tobytes()).decode()]}
        case list():
            return [_tree(one) for one in value]
        case tuple():
            return {"tuple": [_tree(one) for one in value]}
        case dict():
            return {"dict": [[_tree(key), _tree(one)] for key, one in value.items()]}
        case PreTrainedTokenizerBase():
            return {"tokenizer": None}
    kind = type(value)
    if not is_dataclass(kind) or not kind.__module__.startswith(_OURS):
        raise TypeError(f"{kind} can't be sent")
    values = {field.name: _tree(getattr(value, field.name)) for field in fields(kind)}
    return {"dataclass": [kind.__module__, kind.__qualname__, values]}


def _value(tree: Any, tokenizer: Callable[[], PreTrainedTokenizerBase]) -> Any:
    """The inverse of `_tree`."""
    if isinstance(tree, list):
        return [_value(one, tokenizer) for one in tree]
    if not isinstance(tree, dict):
        return tree
    ((name, content),) = tree.items()
    if name == "array":
        return np.frombuffer(bytearray(b64decode(content[2])), content[0]).reshape(content[1])
    if name == "tuple":
        return tuple(_value(one, tokenizer) for one in content)
    if name == "dict":
        return {_value(key, tokenizer): _value(one, tokenizer) for key, one in content}
    if name == "tokenizer":
        return tokenizer()
    module, kind, values = content
    assert module.startswith(_OURS), module
    return getattr(importlib.import_module(module), kind)(**{k: _value(one, tokenizer) for k, one in values.items()})


def _message(content: Any) -> str:
    """A line of JSON; bytes are in base64."""
    return json.dumps({"version": RECORD_VERSION, "content": content}, default=_plain)


def _plain(value: Any) -> str:
    return b64encode(value).decode() if isinstance(value, bytes) else os.fspath(value)


def _content(line: str, sender: str = "") -> Any:
    """Return the content of a message, after checking its version.

    Raises:
        UserError: it has another version.
    """
    message = json.loads(line)
    if message["version"] != RECORD_VERSION:
        raise UserError(
            f"{sender or 'the run'}: its messages have record version {message['version']}, here it is {RECORD_VERSION}: "
            "install the same on both"
        )
    return message["content"]
