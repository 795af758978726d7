"""What the page needs to compare any two rows itself: sums of NLL over blocks, outcomes of questions, times of rounds.

The page computes the same intervals as `report/compare.py`; a test holds it to that.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvbench.harness.core.intervals import MIN_BLOCKS, batches, long_enough, reach
from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics, QuestionMetrics, StepMetrics, StrideBlocks
from kvbench.harness.report.common_tokens import Common, on_common
from kvbench.harness.report.feed import labels
from kvbench.harness.report.feed.question import Question
from kvbench.harness.report.feed.row import row_id
from kvbench.harness.report.pairing import on_all_tokens, past_training, task_version, units
from kvbench.harness.report.rows import Row
from kvbench.harness.report.shares import streams_of
from kvbench.harness.report.task import task_of


def sums(questions: Sequence[Question]) -> dict[str, Any]:
    """By question and row: see `_row`. `grids` are the tokens of blocks, which the rows of a question share."""
    result = {}
    for question in questions:
        grids = _Grids()
        capacities = sorted({row.cell.capacity or 0 for row in question.rows})
        rows = {row_id(row): _row(row, capacities, question.common, grids) for row in question.rows}
        result[labels.identifier(question)] = {"grids": grids.grids, "rows": rows}
    return result


class _Grids:
    """Tokens of blocks, each kept once."""

    def __init__(self) -> None:
        self.grids: list[dict[str, Any]] = []
        self._places: dict[str, int] = {}

    def place(self, key: str, grid: dict[str, Any]) -> int:
        """The index of a grid. Two rows are compared only on the same grid."""
        if key not in self._places:
            self._places[key] = len(self.grids)
            self.grids.append(grid)
        return self._places[key]


def _row(row: Row, capacities: Sequence[int], common: Common, grids: _Grids) -> dict[str, Any]:
    """What is compared of a row.

    `twin` is the same for the same policy in other questions. `nll` and `strided` have, for all tokens and for those of the
    stride, [grid, sums] by capacity, and the mean NLL by position. `answers` has [task, text, outcomes, streams]. `rounds` has
    the step times in milliseconds and which records were timed together.
    """
    cell = row.cell
    twin = repr([cell.policy, cell.parameters, cell.capacity, cell.positions, cell.limit, cell.seed])
    made: dict[str, Any] = {"twin": hashlib.sha256(twin.encode()).hexdigest()[:8]}
    record = row.perplexity
    metrics = None if record is None else record.measured(NllMetrics)
    if record is not None and metrics is not None:
        made["nll"] = _scored(record, on_all_tokens(metrics), capacities, grids, record)
        thinned = on_common(record, common) if common.stride > 1 else None
        if thinned is not None and metrics.on_stride is not None:
            made["strided"] = _scored(record, metrics.on_stride, capacities, grids, thinned)
        made["trend"] = past_training(record)
    answered = [(r, m) for r in row.records if (m := r.measured(QuestionMetrics)) and m.outcomes]
    if answered:
        made["answers"] = [
            [_asked(r), "".join([r.data.ids_sha256[:12], *task_version(r)]), m.outcomes, _streams(r)] for r, m in answered
        ]
    timed = None if row.latency is None else row.latency.measured(StepMetrics)
    if timed is not None:
        made["rounds"] = {"together": timed.together[:24], "ms": [float(f"{ms:.6g}") for ms in timed.rounds_ms]}
    return made


def _streams(record: Record) -> dict[str, Any] | None:
    """Questions of each stream, in order, and Student's t for them; None if every question has a cache of its own."""
    streams = streams_of(record)
    if streams is None:
        return None
    asked = list(Counter(streams).values())
    return {"tokens": asked, "reach": reach(np.array(asked, np.float64)) if len(asked) >= MIN_BLOCKS else None}


def _asked(record: Record) -> str:
    """The task, and where on its axes."""
    axes = [name for name in task_of(record).axes if name in record.cell.options and name != "tasks"]
    return visible(", ".join([labels.task(record), *(f"{name} {record.cell.options[name]}" for name in axes)]))


def _scored(
    record: Record, blocks: StrideBlocks, capacities: Sequence[int], grids: _Grids, by_position: Record
) -> dict[str, Any]:
    """[grid, sums] by the larger capacity of a pair, and [from, to, mean NLL] of each bucket."""
    own = record.cell.capacity or 0
    metrics = by_position.measured(NllMetrics)
    assert metrics is not None
    return {
        "sums": {str(c): _batched(record, blocks, c, grids) for c in capacities if c >= own},
        "buckets": [[b.from_, b.to, float(f"{b.nll:.6g}")] for b in metrics.buckets],
    }


def _batched(record: Record, blocks: StrideBlocks, capacity: int, grids: _Grids) -> list[Any] | None:
    """The grid and the sums of blocks after a cache of this capacity has filled; None if no token is left."""
    metrics = record.measured(NllMetrics)
    assert metrics is not None
    nll, tokens, independent = units(blocks, capacity, metrics.stream_tokens, len(record.data.prefix))
    if tokens.sum() == 0:
        return None
    key = hashlib.sha256(np.ascontiguousarray(tokens).tobytes()).hexdigest()
    enough = independent or long_enough(len(tokens), blocks.size, capacity)
    if not independent:
        nll, tokens = (batches(nll), batches(tokens)) if enough else (nll.sum(keepdims=True), tokens.sum(keepdims=True))
    grid = {
        "tokens": [int(n) for n in tokens], "neighbours": not independent, "reach": reach(tokens) if enough else None,
        "start": 0 if len(blocks.texts.tokens) > MIN_BLOCKS else capacity + 1,
    }  # fmt: skip
    return [grids.place(f"{key} {capacity} {blocks.size}", grid), [float(f"{x:.9g}") for x in nll]]
