"""From cells to records: what is done is skipped, what fails is a record too, and the rest go on."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import math
import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from kvbench import __version__
from kvbench.harness.core.calibration import calibration_ms
from kvbench.harness.core.device import device_name, free_bytes, instructions, wait_for
from kvbench.harness.core.errors import DISK_ERRNOS, UserError
from kvbench.harness.core.failure import failure
from kvbench.harness.core.files import new_partial
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.fastcheck import FastCheck, fast_method
from kvbench.harness.engine.method import TOKEN_BY_TOKEN
from kvbench.harness.engine.model import Model
from kvbench.harness.models.hub import is_random
from kvbench.harness.models.load import load_model
from kvbench.harness.records import Record, RecordStore, digest
from kvbench.harness.records.facts import Facts, Failure
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.run import apart
from kvbench.harness.run.prepare import Prepared, prepare, refuse_if_too_large
from kvbench.harness.suite import Cell, labels
from kvbench.harness.suite.file import ModelSpec
from kvbench.harness.tasks.task import Job, MeasurementError

_BLOCK = 256  # tokens that pass a layer at once where they are walked plainly
_WIDE_BLOCK = 2048  # and where they are not, at most
_LOGITS = 1 / 16  # of the free memory that the logits of a block may take


@dataclass(frozen=True)
class RunOptions:
    """How a suite is run; none of it decides the numbers beyond rounding.

    Attributes:
        device: to run on.
        data: directory of the text; the task's own source when None.
        block: T, tokens that pass a layer at once; chosen by what they pass through when None.
        walk: token by token inside the layers, always.
        fresh: measure finished cells again.
    """

    device: torch.device
    data: Path | None = None
    block: int | None = None
    walk: bool = False
    fresh: bool = False


class Watcher(Protocol):
    """Is told how a run goes."""

    def begin(self, label: str, number: int, cells: int, total: int) -> None:
        """A cell, or several side by side, starts, of `total` tokens; 0 where tokens don't tell how far it is."""

    def advance(self, tokens: int, text: str) -> None:
        """So many tokens of it are done, with this figure so far."""

    def end(self, label: str, record: Record, skipped: bool) -> None:
        """A cell has its record; `skipped`: it had it before."""


def run(cells: Sequence[Cell], store: RecordStore, options: RunOptions, watcher: Watcher) -> list[Record]:
    """Measure every cell that is not finished.

    Returns:
        One record per cell, those of earlier runs included, in the order of the cells.

    Raises:
        UserError: a model's files, its tokenizer or the data can't be had: raised before anything is measured. Or a
            model can't be driven, or a cache can't fit: raised before any cell of that model is measured.
    """
    prepared, names = prepare(cells, options.device, options.data), labels(cells)
    with ExitStack() as locks:
        for suite in sorted({cell.suite for cell in cells}):
            locks.enter_context(store.locked(suite))
        return _run(cells, prepared, names, store, options, watcher)


def _run(
    cells: Sequence[Cell], prepared: Sequence[Prepared], names: dict[str, str], store: RecordStore, options: RunOptions,
    watcher: Watcher,
) -> list[Record]:  # fmt: skip
    """As `run`, with the store to itself."""
    loaded = _Loaded(options.device, prepared)
    records: dict[str, Record] = {}
    for group in _groups(prepared):
        known = [None if options.fresh else store.finished(item.record) for item in group]
        if all(known):
            for item, record in zip(group, known, strict=True):
                assert record is not None
                watcher.end(names[item.cell.id], record, skipped=True)
                records[item.cell.id] = record
            continue
        for item in group:
            store.stamp(item.record, datetime.datetime.now(datetime.UTC))  # a wrong clock is told now, not when all is measured
        label = names[group[0].cell.id] if len(group) == 1 else f"{len(group)} cells side by side"
        watcher.begin(label, len(records) + 1, len(cells), 0 if group[0].task.together else group[0].data.tokens)
        for item, record in zip(group, _measure(group, loaded, store, options, watcher), strict=True):
            watcher.end(names[item.cell.id], record, skipped=False)
            records[item.cell.id] = record
    return [records[cell.id] for cell in cells]


def _groups(prepared: Sequence[Prepared]) -> list[list[Prepared]]:
    """What is measured at once: a cell, or the cells of one model and task that are measured side by side."""
    groups: dict[str, list[Prepared]] = {}
    for item in prepared:
        cell = item.cell
        alone = "" if item.task.together else cell.id
        groups.setdefault(digest([cell.model.model_dump(), cell.task.model_dump(), cell.seed, alone]), []).append(item)
    return list(groups.values())


class _Loaded:
    """The model at hand: one at a time."""

    def __init__(self, device: torch.device, prepared: Sequence[Prepared]) -> None:
        self._device, self._prepared = device, prepared
        self._spec: ModelSpec | None = None
        self._model: Model | None = None

    def of(self, item: Prepared) -> Model:
        """The model of a cell, loaded if it is not the last one.

        Raises:
            UserError: it can't be driven, or one of its caches can't be allocated.
            MemoryError: it does not fit.
        """
        spec = item.cell.model
        if self._model is None or self._spec != spec:
            self._model = None
            _release(self._device)
            self._model = load_model(
                item.directory, spec.dtype, self._device, spec.rope_length, spec.pickle, random=is_random(spec.id)
            )
            self._spec = spec
            _check_capacities([p for p in self._prepared if p.cell.model == spec and not p.task.of_device], self._model)
        return self._model


def _check_capacities(items: Sequence[Prepared], model: Model) -> None:
    """Refuse caches that can't be allocated beside the weights, before anything is measured with this model."""
    free = free_bytes(model.device)
    for item in items:
        cell = item.cell
        if cell.capacity is not None and cell.policy.caches:
            refuse_if_too_large(cell, model.kv_bytes(cell.capacity, item.streams), free, model.device)


def _measure(
    group: Sequence[Prepared], loaded: _Loaded, store: RecordStore, options: RunOptions, watcher: Watcher
) -> list[Record]:
    """The cells of a group, measured and written down."""
    traces = [_partial_trace(item, store) for item in group]
    try:
        return _measured(group, traces, loaded, store, options, watcher)
    finally:
        for trace in traces:  # what is whole has been moved
            trace.unlink(missing_ok=True)


def _measured(
    group: Sequence[Prepared], traces: Sequence[Path], loaded: _Loaded, store: RecordStore, options: RunOptions,
    watcher: Watcher,
) -> list[Record]:  # fmt: skip
    """As `_measure`, with a file for each trace."""
    started = time.perf_counter()
    results: Sequence[Metrics | Exception | SystemExit]
    worked: float | None = None
    try:
        results, worked = _outcome(group, traces, loaded, options, watcher)
    except UserError:
        raise
    except OSError as error:
        if error.errno not in DISK_ERRNOS:
            results = [error] * len(group)
        else:
            raise UserError(f"{traces[0].parent}: can't be written to ({error.strerror}); finished cells are kept") from error
    except (Exception, SystemExit) as error:  # whatever cells die of, the others go on
        results = [error] * len(group)
    finally:
        _release(options.device)
    seconds = time.perf_counter() - started
    records = []
    for item, trace, result in zip(group, traces, results, strict=True):
        result = _of_its_task(item, result)
        item.facts.update(_facts(options, item, seconds, None if isinstance(result, (Exception, SystemExit)) else worked))
        records.append(_written(item, trace, result, store))
    return records


def _of_its_task(item: Prepared, result: Metrics | Exception | SystemExit) -> Metrics | Exception | SystemExit:
    """Figures that are of the task's own model and agree with what was asked, or why they are not."""
    if isinstance(result, (Exception, SystemExit)):
        return result
    try:
        if not isinstance(result, item.task.metrics):
            raise TypeError(f"{item.task.__name__}.run returned {type(result).__name__}, not {item.task.metrics.__name__}")
        item.task.check_figures(item.cell.task, result)
    except Exception as error:  # a task of a user's may return anything
        return error
    return result


def _outcome(
    group: Sequence[Prepared], traces: Sequence[Path], loaded: _Loaded, options: RunOptions, watcher: Watcher
) -> tuple[Sequence[Metrics | Exception | SystemExit], float]:
    """What came of each cell, and the seconds that the task's own work took: without loading and checking the model."""
    first = group[0]
    if first.task.apart and options.device.type == "cpu":
        method = "walk" if options.walk else "as the policy allows"
        first.facts.update({"block": options.block or _BLOCK, "method": method})
        result = apart.measure(_request(first, options, traces[0]), watcher.advance)
        first.facts.update(result.model)
        return [first.task.metrics.from_json(result.metrics)], result.seconds
    model = loaded.of(first)
    jobs: list[Job | Exception | SystemExit] = []
    for item, trace in zip(group, traces, strict=True):
        item.facts.update(model.facts())
        try:
            jobs.append(_job(item, model, options, trace, watcher))
        except (Exception, SystemExit) as error:  # a policy may crash as soon as it is tried
            jobs.append(error)
    ready = [job for job in jobs if isinstance(job, Job)]
    started = time.perf_counter()
    done = iter(first.task.run_together(first.cell.task, ready) if ready else [])
    wait_for(options.device)
    worked = time.perf_counter() - started
    return [next(done) if isinstance(job, Job) else job for job in jobs], worked


def _partial_trace(item: Prepared, store: RecordStore) -> Path:
    """Where a cell's trace is written while it is measured."""
    trace = store.trace_path(item.record, _suffix(item))
    try:
        trace.parent.mkdir(parents=True, exist_ok=True)
        return new_partial(trace)
    except OSError as error:
        raise UserError(f"{trace.parent}: can't be written to ({error.strerror}); finished cells are kept") from error


def _job(item: Prepared, model: Model, options: RunOptions, trace: Path, watcher: Watcher) -> Job:
    """A cell as its task takes it; what is faster than the plain walk only where it was found to agree with it."""
    cell = item.cell
    config = CacheConfig(cell.policy, cell.capacity, cell.positions, cell.limit, cell.seed)
    check = FastCheck(TOKEN_BY_TOKEN, "windows run afresh", "windows run afresh", 0.0)
    if cell.policy.caches:
        check = FastCheck(TOKEN_BY_TOKEN, "walk", "plain", 0.0) if options.walk else fast_method(model, config)
        item.facts["differs_from_walk"] = round(check.differs, 4) if math.isfinite(check.differs) else None
        item.facts.update({"refused": check.refused} if check.refused else {})
        item.facts.update({"plain_because": check.plain_because} if check.plain_because else {})
    wide = check.blocks in ("closed form", "compiled walk") and not item.task.of_device
    counted = 1 if item.task.block_of_all else item.streams
    block = options.block or (_block_that_fits(model, counted) if wide else _BLOCK)
    item.facts.update({"block": block, "method": check.blocks, "step": check.step})
    return Job(model, config, item.data, block, check.method, trace, watcher.advance)


def _block_that_fits(model: Model, streams: int) -> int:
    """Tokens that pass a layer at once where they are not walked plainly: many, if their logits are a small part of memory."""
    vocabulary = model.hf.config.get_text_config().vocab_size
    logits = streams * 3 * 4 * vocabulary  # bytes a token: float32, and two copies in the loss
    fitting = int(_LOGITS * free_bytes(model.device) / logits)
    return max(_BLOCK, min(_WIDE_BLOCK, 2 ** max(0, fitting.bit_length() - 1)))


def _request(item: Prepared, options: RunOptions, trace: Path) -> apart.CellRun:
    """A cell, to be measured in a process of its own.

    Raises:
        MeasurementError: its policy is a class that another process can't import.
    """
    cell, spec = item.cell, item.cell.model
    if type(cell.policy).__module__ == "__main__":
        name = type(cell.policy).__name__
        raise MeasurementError(
            f"measured in another process, which can't import {name}: write it to a file, and give file.py:{name}"
        )
    return apart.CellRun(
        directory=item.directory, random=is_random(spec.id), dtype=spec.dtype, rope_length=spec.rope_length, pickle=spec.pickle,
        task=cell.task.model_dump(exclude_none=True), data=options.data, policy=cell.name,
        parameters=dataclasses.asdict(cell.policy), capacity=cell.capacity, positions=cell.positions, limit=cell.limit,
        seed=cell.seed, block=options.block or _BLOCK, walk=options.walk, threads=torch.get_num_threads(), trace=trace,
    )  # fmt: skip


def _written(item: Prepared, trace: Path, result: Metrics | Exception | SystemExit, store: RecordStore) -> Record:
    """A record with what came out, in its place."""
    if isinstance(result, (Exception, SystemExit)):
        outcome: dict[str, Any] = {"status": "failed", "error": Failure.from_json(failure(result))}
    else:
        outcome = {"metrics": result}
    finished = store.stamp(item.record, datetime.datetime.now(datetime.UTC))
    record = dataclasses.replace(item.record, **outcome, facts=Facts.from_json(item.facts), finished=finished)
    try:
        store.write(record, trace if record.status == "ok" and trace.stat().st_size else None, _suffix(item))
    except OSError as error:
        raise UserError(f"{store.path(record)}: can't be written ({error.strerror}); finished cells are kept") from error
    return record


def _suffix(item: Prepared) -> str:
    """Of a cell's trace; a task that keeps none leaves the file empty."""
    return item.task.trace or ".trace"


def _facts(options: RunOptions, item: Prepared, seconds: float, worked: float | None) -> dict[str, Any]:
    """Where and how it was measured. `seconds` from beginning to end; `worked` of the task's own work, if it came to its end."""
    packages = ("torch", "transformers", "numpy")
    speed = {} if worked is None else {"measured_seconds": round(worked, 3)}
    speed |= {} if worked is None or item.task.together else {"tokens_per_second": round(item.data.tokens / worked, 1)}
    return {
        "device": device_name(options.device),
        "instructions": instructions(options.device),
        "threads": torch.get_num_threads(),
        "seconds": round(seconds, 3),
        "calibration_ms": calibration_ms(options.device),
        **speed,
        "versions": {"kv-bench": __version__, "python": platform.python_version(), **{p: version(p) for p in packages}},
        "platform": f"{platform.system()} {platform.machine()}",
    }  # fmt: skip


def _release(device: torch.device) -> None:
    """Give memory of the last cell back before the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
