"""Measure a group of cells on this machine: load the model, run the task, and turn errors into results."""

from __future__ import annotations

import atexit
import gc
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from kvbench import __version__
from kvbench.harness.core import plugins
from kvbench.harness.core.device import allows_tf32, calibration_ms, device_name, free_bytes, instructions, wait_for
from kvbench.harness.core.errors import DISK_ERRNOS, UserError, described, failure
from kvbench.harness.core.files import new_partial
from kvbench.harness.core.resets import holds_kv
from kvbench.harness.engine.budgets import floor_of, static_table
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.kernel_interface import capture_failure
from kvbench.harness.engine.method import EAGER, TOKEN_BY_TOKEN
from kvbench.harness.engine.model import Model
from kvbench.harness.models.hub import is_random
from kvbench.harness.records import RecordStore
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.records.run_facts import Failure
from kvbench.harness.report.task_report import OF_MACHINE
from kvbench.harness.run import child
from kvbench.harness.run.keep_map_writer import open_map
from kvbench.harness.run.ledger import Done, Group, Outcome, RunWatcher, trace_suffix
from kvbench.harness.run.order import GroupOutcomes, Order
from kvbench.harness.run.prepare import Prepared, refuse_if_too_large
from kvbench.harness.run.reading_plan import PLAIN_BLOCK_TOKENS, choose_reading
from kvbench.harness.run.request import RunOptions
from kvbench.harness.suite import Cell
from kvbench.harness.suite.file import ModelSpec
from kvbench.harness.tasks.task import Job, MeasurementError


class Machine:
    """Measures groups of cells on this machine, one after another. The last model stays loaded."""

    def __init__(self, options: RunOptions, cells: Sequence[Cell], own_process: bool = False) -> None:
        """Prepare, without loading a model.

        Args:
            cells: all cells that may be measured. A cache that does not fit is reported when its model is loaded.
            own_process: this process measures a single group.
        """
        self._options, self._cells, self._own_process = options, cells, own_process
        self._spec: ModelSpec | None = None
        self._model: Model | None = None
        atexit.register(gc.unfreeze)  # otherwise libraries complain about objects left at exit

    def close(self) -> None:
        """Free the model's memory."""
        gc.unfreeze()
        self._model = None
        _release_memory(self._options.device)

    def measure(self, group: Group, folder: RecordStore, watcher: RunWatcher, done: Done) -> None:
        """Measure the cells of a group.

        Args:
            folder: folder of traces and keep maps.
            done: called with each cell's outcome as soon as it is known. It may move files; remaining files are removed.

        Raises:
            UserError: the model can't be driven exactly, a cache doesn't fit, or the folder can't be written to.
        """
        options = self._options
        if not self._own_process and (capture_failure() or _plainly(group[0], options)):
            self._measure_in_child(group, watcher, done)
            return
        attempts = [_Attempt(item, folder, options) for item in group]
        started = time.perf_counter()
        try:
            for attempt, task_seconds in self._results(attempts, watcher):
                seconds = time.perf_counter() - started
                attempt.facts |= _machine_facts(options.device, seconds, attempt.speed(task_seconds))
                done(attempt.item, attempt.outcome())
        finally:
            for attempt in attempts:
                attempt.discard_files()

    def _measure_in_child(self, group: Group, watcher: RunWatcher, done: Done) -> None:
        """Measure the cells of a group in a child process, which also collects the facts."""
        if capture_failure():
            self.close()
        started = time.perf_counter()
        try:
            order = Order.from_groups([group], [item.cell for item in group], self._options, torch.get_num_threads())
            answer = child.measure(order, watcher.advance)
        except UserError:
            raise
        except Exception as error:  # the process died, and the other groups must still run
            why = Failure.from_json(error.failure if isinstance(error, child.ChildError) else failure(error))
            here = _machine_facts(self._options.device, 0.0, {})
            answer = GroupOutcomes([Outcome(item.facts | here, failure=why) for item in group], [])
        seconds = round(time.perf_counter() - started, 3)
        for label, text in answer.notes:
            watcher.note(label, text)
        for item, outcome in zip(group, answer.outcomes, strict=True):
            outcome.facts["seconds"] = seconds
            done(item, outcome)

    def _results(self, attempts: Sequence[_Attempt], watcher: RunWatcher) -> Iterator[tuple[_Attempt, float]]:
        """Run the task. An error other than `UserError` becomes the result of every cell that has no result.

        Yields:
            Each cell as soon as it has a result, and the seconds of the task's own work so far.
        """
        unfinished, first = list(attempts), attempts[0]
        try:
            for attempt, seconds in _run_task(attempts, self._loaded(first.item), self._options, watcher):
                unfinished.remove(attempt)
                yield attempt, seconds
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # plug-ins may raise anything, and the other cells must still run
            if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
                folder = first.trace.parent
                raise UserError(f"{folder}: can't be written to ({error.strerror}); finished cells are kept") from error
            for attempt in unfinished:
                attempt.result = error
        finally:
            _release_memory(self._options.device)
        yield from ((attempt, 0.0) for attempt in unfinished)

    def _loaded(self, item: Prepared) -> Model:
        """Return the model of a cell.

        Raises:
            UserError: the model can't be driven exactly, or one of its caches can't be allocated.
            MemoryError: the model does not fit into memory.
        """
        spec, task = item.cell.model, item.task
        if self._model is None or self._spec != spec or not (task.measures == "attention" or self._model.layers):
            self.close()
            device, random = self._options.device, is_random(spec.id)
            self._model = task.load_model(
                item.directory, spec.dtype, device, spec.rope_length, spec.pickle, random=random, devices=spec.devices
            )
            self._spec = spec
            gc.collect()
            gc.freeze()  # otherwise a collection scans all of torch, in a quarter of a second
            _check_capacities([cell for cell in self._cells if cell.model == spec], self._model)
        return self._model


def _plainly(item: Prepared, options: RunOptions) -> bool:
    """Return whether a cell is measured in plain PyTorch, in a child process."""
    return item.task.measures == "memory" and options.device.type == "cpu"


def _check_capacities(cells: Sequence[Cell], model: Model) -> None:
    """Refuse caches that can't be allocated in addition to the weights, before any measurement with this model."""
    free = sum(map(free_bytes, model.devices))
    for cell in cells:
        task, work = plugins.task_class(cell.task.name), cell.workload
        if task.measures in OF_MACHINE:
            continue
        if not model.layers:  # the model is only watched
            if cell.policy.evicts:
                name = cell.model.id
                raise UserError(f"{cell.label}: {name} can be looked at, but the loop can't drive it, so only dense has figures")
            continue
        if cell.most_kept is not None and holds_kv(cell.policy):
            refuse_if_too_large(cell, model.kv_bytes(cell.most_kept, work.side_by_side, cell.kv), free, model.device)
        _refuse_unfit_policy(cell, work.prompt or None, model)


def _refuse_unfit_policy(cell: Cell, prompt: int | None, model: Model) -> None:
    """Refuse a policy whose table of budgets does not fit the model, or that can't use the cache, before anything is measured.

    prompt: length of the cell's prompts, in tokens; None without prompts.

    Raises:
        UserError: the table has another shape, its budgets don't add up, the minimum per head exceeds the mean, or the policy
            needs another position mode.
    """
    if cell.capacity is None:
        return
    try:
        config = CacheConfig(cell.policy, cell.capacity, cell.positions, cell.limit, evict=cell.evict)
        static_table(model, config, prompt if cell.evict == "prompt" else None)
        floor_of(cell.policy.bind(cell.capacity), cell.capacity)
    except Exception as error:  # a user's policy may raise anything
        why = str(error) if isinstance(error, ValueError) else described(error)
        raise UserError(f"{cell.place}{': ' if cell.place else ''}{cell.label}: {why}") from error


class _Attempt:
    """State of a cell during its measurement.

    Attributes:
        trace: file of the trace.
        keep_map: writer of the keep map; None if it was not requested, or the task has no keep maps.
        result: figures of the cell, or its error.
    """

    def __init__(self, item: Prepared, folder: RecordStore, options: RunOptions) -> None:
        """Create the files.

        Raises:
            UserError: the folder can't be written to.
        """
        self.item, self.facts = item, dict(item.facts)
        self.result: Metrics | Exception | SystemExit = RuntimeError("not measured")
        trace = folder.trace_path(item.record, trace_suffix(item))
        try:
            trace.parent.mkdir(parents=True, exist_ok=True)
            self.trace = new_partial(trace)
        except OSError as error:
            raise UserError(f"{trace.parent}: can't be written to ({error.strerror}); finished cells are kept") from error
        self.keep_map = None if options.keep is None else open_map(item, folder, options.keep)

    def check(self) -> None:
        """Turn figures that are not of the task's metrics class, or contradict its options, into an error."""
        task, result = self.item.task, self.result
        if isinstance(result, (Exception, SystemExit)):
            return
        try:
            if not isinstance(result, task.metrics):
                raise TypeError(f"{task.__name__}.run returned {type(result).__name__}, not {task.metrics.__name__}")
            result.check(self.item.cell.task)
            impossible = [*result.impossible()]
            if impossible:
                raise MeasurementError(f"better than is possible: {'; '.join(impossible)}")
        except Exception as error:  # a user's task may return anything
            self.result = error

    def speed(self, task_seconds: float) -> dict[str, float]:
        """Return the seconds of the task's own work, and the speed unless the task measures time; nothing if the cell failed."""
        if not isinstance(self.result, Metrics):
            return {}
        tokens, seconds = self.result.tokens_read or self.item.data.tokens, {"measured_seconds": round(task_seconds, 3)}
        return seconds if self.item.task.measures == "time" else seconds | {"tokens_per_second": round(tokens / task_seconds, 1)}

    def outcome(self) -> Outcome:
        """Return facts, figures or failure, and files for the record."""
        if not isinstance(self.result, Metrics):
            return Outcome(self.facts, failure=Failure.from_json(failure(self.result)))
        kept = None if self.keep_map is None else self.keep_map.finished()
        return Outcome(self.facts, self.result, trace=self.trace if self.trace.stat().st_size else None, keep_map=kept)

    def discard_files(self) -> None:
        """Remove the files that were not moved to their place."""
        self.trace.unlink(missing_ok=True)
        if self.keep_map is not None:
            self.keep_map.discard()


def _run_task(
    attempts: Sequence[_Attempt], model: Model, options: RunOptions, watcher: RunWatcher
) -> Iterator[tuple[_Attempt, float]]:
    """Measure the cells of a group.

    Yields:
        A cell as soon as it has a result, and the seconds of the task's own work, without loading and checking the model. A
        cell that can't be prepared is left out, with its error as the result.
    """
    ready: list[tuple[_Attempt, Job]] = []
    for attempt in attempts:
        attempt.facts.update(model.facts())
        try:
            ready.append((attempt, _job(attempt, model, options, watcher)))
        except (Exception, SystemExit) as error:  # a user's policy may crash when its method is checked
            attempt.result = error
    first = attempts[0].item
    started = time.perf_counter()
    for number, result in first.task.run_together(first.cell.task, [job for _, job in ready]) if ready else ():
        wait_for(options.device)
        attempt, seconds = ready[number][0], time.perf_counter() - started
        attempt.result = result
        attempt.check()
        yield attempt, seconds


def _job(attempt: _Attempt, model: Model, options: RunOptions, watcher: RunWatcher) -> Job:
    """Create the job of a cell."""
    item, cell = attempt.item, attempt.item.cell
    config = CacheConfig(cell.policy, cell.capacity, cell.positions, cell.limit, cell.seed, cell.evict, cell.kv)
    if _plainly(item, options):  # a check would use memory itself
        method, block = TOKEN_BY_TOKEN if options.walk else EAGER, options.block or PLAIN_BLOCK_TOKENS
        attempt.facts.update({"block": block, "method": "walk" if options.walk else "as the policy allows"})
    else:
        method, block, facts, slow = choose_reading(model, config, item.task, cell.task, options.block, options.walk)
        watcher.note(cell.label, slow)
        attempt.facts.update(facts)
    job = Job(
        model,
        config,
        item.data,
        block,
        method,
        attempt.trace,
        watcher.advance,
        reference=item.reference,
        all_at_once=attempt.keep_map is not None,
    )
    return job if attempt.keep_map is None else attempt.keep_map.recorded(job)


def _machine_facts(device: torch.device, seconds: float, speed: Mapping[str, float]) -> dict[str, Any]:
    """Return facts about the machine, the seconds of a cell, and the speed of the task's own work."""
    packages = ("torch", "transformers", "numpy")
    tf32 = allows_tf32(device)
    return {
        "device": device_name(device),
        "instructions": instructions(device),
        **({} if tf32 is None else {"tf32": tf32}),
        "threads": torch.get_num_threads(),
        "seconds": round(seconds, 3),
        "calibration_ms": calibration_ms(device),
        **speed,
        "versions": {"kv-bench": __version__, "python": platform.python_version(), **{p: version(p) for p in packages}},
        "platform": f"{platform.system()} {platform.machine()}",
    }


def _release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
