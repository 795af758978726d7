"""Subprocess side: measures the cells it is sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvbench.harness.core import plugins
from kvbench.harness.core.device import wait_for
from kvbench.harness.core.failure import failure
from kvbench.harness.core.parameters import policy_from
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.method import EAGER, TOKEN_BY_TOKEN
from kvbench.harness.models.load import load_model, load_tokenizer
from kvbench.harness.records import Record
from kvbench.harness.run.apart import CellRun
from kvbench.harness.run.choose_reading import choose_reading
from kvbench.harness.run.side_by_side import Reading, choose_side_by_side
from kvbench.harness.tasks.task import Job, Task


class _Opened:
    """A request with its task, data and model loaded.

    Attributes:
        task: that measures.
        options: of the task.
        data: that it reads.
        model: that reads.
    """

    def __init__(self, cell: CellRun) -> None:
        torch.set_num_threads(cell.threads)
        self.task: type[Task] = plugins.task_class(cell.task["name"])
        self.options: Any = self.task.options(**cell.task)
        self.data = self.task.data(self.options, lambda: load_tokenizer(cell.directory), cell.data)
        device = torch.device(cell.device)
        self.model = load_model(
            cell.directory, cell.dtype, device, cell.rope_length, cell.pickle, random=cell.random, devices=cell.devices,
        )  # fmt: skip


def _config(cell: CellRun) -> CacheConfig:
    policy = policy_from(cell.policy, cell.parameters)
    return CacheConfig(policy, cell.capacity, cell.positions, cell.limit, cell.seed, cell.evict)


def _reference(cell: CellRun) -> Record | None:
    return None if cell.reference is None else Record.from_json(cell.reference)


def measure_cell(cell: CellRun, progress: Callable[[int, str], None]) -> dict[str, Any]:
    """Measure one cell, token by token or as its policy allows in plain PyTorch.

    Returns:
        The fields of `CellResult`.
    """
    config, opened = _config(cell), _Opened(cell)
    assert cell.block is not None
    method = TOKEN_BY_TOKEN if cell.walk else EAGER
    job = Job(opened.model, config, opened.data, cell.block, method, cell.trace, progress, reference=_reference(cell))
    started = time.perf_counter()
    metrics = opened.task.run(opened.options, job)
    return {"metrics": metrics.as_json(), "model": opened.model.facts(), "seconds": time.perf_counter() - started}


def measure_group(cells: Sequence[CellRun], progress: Callable[[int, str], None]) -> dict[str, Any]:
    """Measure the cells of a group side by side, by the fastest methods.

    Returns:
        The fields of `GroupResult`.
    """
    opened = _Opened(cells[0])
    task, model = opened.task, opened.model
    answers: list[dict[str, Any]] = [{"facts": {}} for _ in cells]
    jobs: list[tuple[dict[str, Any], Job]] = []
    for cell, answer in zip(cells, answers, strict=True):
        try:
            config = _config(cell)
            method, block, facts, _ = choose_reading(model, config, task, opened.options, cell.block, cell.walk)
            reading = Reading(model, config, method, block, cell.block is not None, task.block_of_all)
            side = choose_side_by_side(reading, task.independent(opened.options, opened.data))
            answer["facts"] = facts | side.facts
            job = Job(
                model, config, opened.data, side.block, method, cell.trace, progress, reference=_reference(cell),
                at_once=side.streams,
            )  # fmt: skip
            jobs.append((answer, job))
        except (Exception, SystemExit) as error:  # a user's policy may crash when its method is checked
            answer["failure"] = failure(error)
    started = time.perf_counter()
    for number, result in task.run_together(opened.options, [job for _, job in jobs]) if jobs else ():
        jobs[number][0].update({"failure": failure(result)} if isinstance(result, Exception) else {"metrics": result.as_json()})
    wait_for(model.device)
    seconds = time.perf_counter() - started
    return {"cells": answers, "model": model.facts(), "seconds": seconds}
