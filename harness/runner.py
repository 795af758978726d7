"""From cells to records: what is done is skipped, what fails is a record too, and the rest go on."""

from __future__ import annotations

import datetime
import gc
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from harness import __version__, registry
from harness.data.stream import TokenStream
from harness.engine.load import load_model, load_tokenizer
from harness.engine.loop import CacheConfig
from harness.engine.model import Model
from harness.engine.selfcheck import free_bytes
from harness.errors import UserError
from harness.hub import model_directory, weights_digest
from harness.records import NUMERICS_VERSION, Record, RecordStore, digest
from harness.suite import Cell
from harness.suite_file import ModelSpec
from harness.tasks.task import Job


@dataclass(frozen=True)
class RunOptions:
    """How a suite is run; none of it decides the numbers beyond rounding.

    Attributes:
        device: to run on.
        data: directory of the text; the task's own source when None.
        block: T, tokens that pass a layer at once.
        walk: token by token inside the layers, always.
        fresh: measure finished cells again.
    """

    device: torch.device
    data: Path | None = None
    block: int = 256
    walk: bool = False
    fresh: bool = False


class Watcher(Protocol):
    """Is told how a run goes."""

    def begin(self, cell: Cell, number: int, cells: int, total: int) -> None:
        """A cell starts, of `total` tokens."""

    def advance(self, tokens: int, nll: float) -> None:
        """So many tokens of the cell are done, with this mean NLL."""

    def end(self, cell: Cell, record: Record, skipped: bool) -> None:
        """A cell has its record; `skipped`: it had it before."""


@dataclass(frozen=True)
class _Prepared:
    """A cell with everything that decides its numbers."""

    cell: Cell
    stream: TokenStream
    directory: Path
    record: Record  # still without figures


def run(cells: Sequence[Cell], store: RecordStore, options: RunOptions, watcher: Watcher) -> list[Record]:
    """Measure every cell that is not finished.

    Returns:
        One record per cell, those of earlier runs included, in the order of the cells.

    Raises:
        UserError: a model's files, its tokenizer or the data can't be had: raised before anything is measured. Or a
            model can't be driven, or a cache can't fit: raised before any cell of that model is measured.
    """
    prepared = _prepare(cells, options)
    records: list[Record] = []
    loaded: tuple[ModelSpec, Model] | None = None
    for number, item in enumerate(prepared, 1):
        known = None if options.fresh else store.finished(item.record)
        if known is not None:
            watcher.end(item.cell, known, skipped=True)
            records.append(known)
            continue
        if loaded is None or loaded[0] != item.cell.model:
            loaded = None
            _release(options.device)
            spec = item.cell.model
            loaded = (spec, load_model(item.directory, spec.dtype, options.device, spec.rope_length, spec.pickle))
            _check_capacities([p.cell for p in prepared if p.cell.model == spec], loaded[1])
        watcher.begin(item.cell, number, len(cells), registry.task_class(item.cell.task.name).total(item.cell.task))
        record = _measure(item, loaded[1], store, options, watcher)
        watcher.end(item.cell, record, skipped=False)
        records.append(record)
    return records


def _prepare(cells: Sequence[Cell], options: RunOptions) -> list[_Prepared]:
    """Tokens, weights and keys of all cells, before any is measured."""
    directories = {c.model: model_directory(c.model.id, c.model.revision, c.model.pickle) for c in cells}
    streams: dict[tuple[ModelSpec, str], TokenStream] = {}
    prepared = []
    for cell in cells:
        directory, text = directories[cell.model], (cell.model, digest(cell.task.model_dump()))
        if text not in streams:
            task = registry.task_class(cell.task.name)
            streams[text] = task.data(cell.task, load_tokenizer(directory), options.data)
        weights, source = weights_digest(directory), registry.source_digest(type(cell.policy))
        key = digest([cell.id, streams[text].ids_sha256, weights, source, NUMERICS_VERSION])
        record = Record(cell.asked(), cell.id, key, "ok", data=streams[text].facts())
        record.facts = {"weights_sha256": weights, "policy_sha256": source}
        prepared.append(_Prepared(cell, streams[text], directory, record))
    return prepared


def _check_capacities(cells: Sequence[Cell], model: Model) -> None:
    """Refuse caches that can't be allocated, before anything is measured."""
    free = free_bytes(model.device)
    for cell in cells:
        if cell.capacity is None or not cell.policy.caches:
            continue
        needed = sum(s.kv_bytes_per_token(model.dtype) * ((s.kept(cell.capacity) or 0) + 1) for s in model.layers)
        if needed > free:
            raise UserError(
                f"{cell.label}: its K/V slots take {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free on "
                f"{model.device}: lower the capacity"
            )


def _measure(item: _Prepared, model: Model, store: RecordStore, options: RunOptions, watcher: Watcher) -> Record:
    """One cell, measured and written down."""
    cell, record = item.cell, item.record
    config = CacheConfig(cell.policy, cell.capacity, cell.positions, cell.limit, cell.seed)
    trace = store.trace_path(record)
    try:
        trace.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{trace.parent}: can't be made ({error.strerror})") from error
    partial = trace.with_name(trace.name + ".partial")
    job = Job(model, config, item.stream, options.block, options.walk, partial, watcher.advance)
    started = time.perf_counter()
    try:
        record.metrics = registry.task_class(cell.task.name).run(cell.task, job)
    except Exception as error:  # whatever a cell dies of, the others go on
        oom = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
        text = str(error).strip().splitlines() or [""]
        record.status, record.metrics = "failed", {}
        record.error = {"kind": "out of memory" if oom else type(error).__name__, "message": text[0][:300]}
    finally:
        if record.status == "failed" or not record.metrics:
            partial.unlink(missing_ok=True)
        del job
        _release(options.device)
    seconds = time.perf_counter() - started
    record.facts |= _facts(model, options, cell, seconds)
    record.finished = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        store.write(record, partial if record.status == "ok" and partial.exists() else None)
    except OSError as error:
        raise UserError(f"{store.path(record)}: can't be written ({error.strerror}); finished cells are kept") from error
    return record


def _facts(model: Model, options: RunOptions, cell: Cell, seconds: float) -> dict[str, Any]:
    """Where and how it was measured."""
    packages = ("torch", "transformers", "numpy")
    return {
        "device": device_name(options.device),
        "threads": torch.get_num_threads(),
        "block": options.block,
        "method": ("walk" if options.walk else "walk, filled at once where nothing is evicted")
        if cell.policy.caches else "windows run afresh",
        "seconds": round(seconds, 3),
        "tokens_per_second": round(registry.task_class(cell.task.name).total(cell.task) / seconds, 1),
        "model_type": str(model.hf.config.model_type),
        "training_length": model.training_length,
        "self_check": model.check,
        "versions": {"kv-bench": __version__, "python": platform.python_version(), **{p: version(p) for p in packages}},
        "platform": f"{platform.system()} {platform.machine()}",
    }  # fmt: skip


def device_name(device: torch.device) -> str:
    """What runs, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or device.type


def _release(device: torch.device) -> None:
    """Give memory of the last cell back before the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
