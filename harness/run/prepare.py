"""Collect everything that decides a cell's numbers before any cell is measured, so that mistakes are reported early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from kvbench.harness.core import plugins
from kvbench.harness.core.contestants import Contestant
from kvbench.harness.core.device import device_name, free_bytes
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.source_digests import source_digest, task_digest
from kvbench.harness.data.texts import check_folders
from kvbench.harness.models.config import read_config
from kvbench.harness.models.gguf_header import gguf_origin
from kvbench.harness.models.hub import model_directory, weights_digest
from kvbench.harness.models.layers import devices_for_layers
from kvbench.harness.models.load import LazyTokenizer, tokenizer_differs
from kvbench.harness.models.shape import shape_of
from kvbench.harness.records import NUMERICS_VERSION, Record, digest
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.records.run_facts import DataFacts
from kvbench.harness.records.types import BadRecordError
from kvbench.harness.report.task_report import OF_MACHINE
from kvbench.harness.rules.rules import refuse_if_broken
from kvbench.harness.suite import Cell
from kvbench.harness.suite.file import ModelSpec
from kvbench.harness.tasks.task import Data, Task


@dataclass(frozen=True)
class Prepared:
    """A cell with everything that decides its numbers."""

    cell: Cell
    task: type[Task]
    data: Data
    directory: Path
    record: Record  # without figures and facts
    facts: dict[str, Any]  # known before the cell is measured
    reference: Record | None = None  # record that the cell is compared with during its measurement; None before that, or without


@dataclass(frozen=True)
class MachineFacts:
    """Facts about the measuring machine that a run needs before it starts."""

    device: str
    threads: int
    free_bytes: int

    @classmethod
    def here(cls, device: torch.device) -> Self:
        """Return the facts about this process."""
        return cls(device_name(device), torch.get_num_threads(), free_bytes(device))


def prepare(
    cells: Sequence[Cell], device: torch.device, data: Path | None, measured_on: MachineFacts | None = None
) -> list[Prepared]:
    """Get the data, weights and record keys of all cells.

    Each cell must come after its reference. Policies are checked on `device`, which also measures the cells unless `measured_on`
    describes another machine.

    Raises:
        UserError: a user's policy breaks a rule; a model's files, its tokenizer or the data are not available; or a cache
            doesn't fit.
    """
    _refuse_rule_breakers(cells, device)
    _refuse_spread(cells, device, elsewhere=measured_on is not None)
    if data is not None:
        check_folders((getattr(cell.task, "data", "") for cell in cells), data)
    directories = {c.model: model_directory(c.model.id, c.model.revision, c.model.pickle, c.model.gguf_file) for c in cells}
    there = measured_on or MachineFacts.here(device)
    _check_caches(cells, directories, there.free_bytes, device)
    known_data: dict[tuple[ModelSpec, str], Data] = {}
    differs: dict[ModelSpec, str | None] = {}
    prepared, keys = [], dict[str, str]()

    for cell in cells:
        directory, data_key = directories[cell.model], (cell.model, digest(cell.task.model_dump()))
        task: type[Task] = plugins.task_class(cell.task.name)
        if data_key not in known_data:
            tokenizer = LazyTokenizer(directory)
            known_data[data_key] = task.data(cell.task, tokenizer, data)
            differs |= {} if tokenizer.loaded is None else {cell.model: tokenizer_differs(tokenizer.loaded, directory)}
        tokens = known_data[data_key]
        weights, source = weights_digest(directory), source_digest(cell.policy)
        quantised = gguf_origin(directory).get("quantised")  # format of the weights before they were dequantised
        task_source = {} if plugins.is_ours(task) else {"task_sha256": task_digest(task)}
        machine = [there.device, there.threads] if task.measures in OF_MACHINE else []
        reference = [] if cell.reference is None else [keys[cell.reference.id]]
        facts_of_data = _data_facts(task, tokens)
        version = [] if facts_of_data.task_version is None else [facts_of_data.task_version]
        others = [*machine, *task_source.values(), *reference, *version]
        key = digest([cell.id, tokens.ids_sha256, weights, source, NUMERICS_VERSION, *others])
        keys[cell.id] = key
        record = Record(CellSpec.from_json(cell.as_json()), cell.id, key, "ok", data=facts_of_data)
        facts = {
            "weights_sha256": weights,
            **({"dequantised_from": quantised} if quantised else {}),
            "policy_sha256": source,
            **({"code": cell.policy.code} if isinstance(cell.policy, Contestant) else {}),
            **task_source,
            "tokenizer_differs": differs.get(cell.model),
        }
        prepared.append(Prepared(cell, task, tokens, directory, record, facts))
    return prepared


def _data_facts(task: type[Task], data: Data) -> DataFacts:
    """Return the record's facts about the data.

    Raises:
        UserError: the task gives facts that a record can't hold.
    """
    try:
        return task.data_facts.from_json(data.facts())
    except BadRecordError as error:
        raise UserError(f"task {task.__name__}: the facts about its data can't be recorded ({error})") from error


def _check_caches(cells: Sequence[Cell], directories: dict[ModelSpec, Path], free: int, device: torch.device) -> None:
    """Refuse bounded caches that would not fit even without weights."""
    shapes = {spec: shape_of(read_config(directory)) for spec, directory in directories.items()}
    for cell in cells:
        shape = shapes[cell.model]
        if shape is not None and cell.most_kept is not None:
            refuse_if_too_large(cell, cell.kv_bytes(shape), free * (cell.model.devices if device.type == "cuda" else 1), device)


def refuse_if_too_large(cell: Cell, needed: int, free: int, device: torch.device) -> None:
    """Refuse a cache that can't be allocated. needed, free: bytes.

    Raises:
        UserError: the cache needs more bytes than are free.
    """
    if needed <= free:
        return
    streams = cell.workload.side_by_side
    side_by_side, instead = (f" for {streams:,} streams side by side", " or run fewer streams") if streams > 1 else ("", "")
    raise UserError(
        f"{cell.label}: its K/V slots take {needed / 2**30:,.1f} GiB{side_by_side}, but only {free / 2**30:,.1f} GiB are free on "
        f"{device}: lower the capacity{instead}"
    )


def _refuse_spread(cells: Sequence[Cell], device: torch.device, elsewhere: bool) -> None:
    """Refuse cells that a model on several devices can't serve.

    elsewhere: other machines measure, with their own devices.
    """
    for cell in cells:
        task, spec = plugins.task_class(cell.task.name), cell.model
        if spec.devices > 1 and task.measures == "attention":
            raise UserError(f"{cell.label}: task {cell.task.name} looks inside the model, which must be on one device for that")
        if spec.parallel == "layers" and not elsewhere:
            devices_for_layers(device, spec.devices)


def _refuse_rule_breakers(cells: Sequence[Cell], device: torch.device) -> None:
    """Refuse a user's policy that breaks a rule."""
    distinct = {(c.name, repr(c.policy), c.capacity): c for c in cells if not isinstance(c.policy, Contestant)}
    for cell in distinct.values():
        refuse_if_broken(cell.name, cell.policy, cell.capacity, device)
