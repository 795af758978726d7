"""What the page shows of any two rows of a question: their difference with its interval, and what it can draw of it.

The page computes no interval: those of `pairs` are the ones that the feed's sentences and ranks follow from.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvbench.harness.core.intervals import MIN_BLOCKS, batches, long_enough
from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics, QuestionMetrics, StrideBlocks
from kvbench.harness.report.compare import step_time
from kvbench.harness.report.feed import words
from kvbench.harness.report.feed.question import Question
from kvbench.harness.report.feed.row import row_id
from kvbench.harness.report.pairing import (
    Common,
    on_all_tokens,
    on_common,
    past_training,
    strided_tokens,
    sums_of_texts,
    task_version,
    units,
)
from kvbench.harness.report.rows import Row
from kvbench.harness.report.task import task_of


def sums(questions: Sequence[Question]) -> dict[str, Any]:
    """By question: what the page knows of its rows (`_row`) and of their pairs.

    `grids` are the tokens of blocks, which the rows share. `pairs` has an entry for each two of `order` (0 1, 0 2, ..., 1 2,
    ...): [value, low, high] of what the second loses to the first, in nats per token or as a share of right answers; only the
    value if there is no interval, and 0 if the two can't be paired. `times` are those of `_times`.
    """
    result = {}
    for question in questions:
        grids = _Grids()
        capacities = sorted({row.cell.capacity or 0 for row in question.rows})
        rows = {row_id(row): _row(row, capacities, strided_tokens(question.records), grids) for row in question.rows}
        result[words.identifier(question)] = {
            "grids": grids.grids, "rows": rows, "order": list(rows), "pairs": _pairs(question), "times": _times(question.rows),
        }  # fmt: skip
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
    stride, [grid, sums] by capacity, and the mean NLL by position. `answers` has [task, text, outcomes].
    """
    cell = row.cell
    twin = repr(
        [
            cell.policy,
            cell.parameters,
            cell.capacity,
            cell.positions,
            cell.limit,
            cell.seed,
            *([cell.stored] if cell.stored else []),
        ]
    )
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
        made["answers"] = [[_asked(r), "".join([r.data.ids_sha256[:12], *task_version(r)]), m.outcomes] for r, m in answered]
    return made


def _pairs(question: Question) -> list[Any]:
    changes = (question.changes.get(pair) for pair in itertools.combinations(range(len(question.rows)), 2))
    ends = (None if change is None else (change.value, change.low, change.high) for change in changes)
    return [0 if parts is None else [float(f"{x:.5g}") for x in parts if x is not None] for parts in ends]


def _times(rows: Sequence[Row]) -> list[list[Any]]:
    """[first row, second row, change, low, high, verdict, why] of each two that were timed, as `bench compare` has it."""
    timed = [row for row in rows if row.latency is not None and row.step_ms is not None]
    return [
        [row_id(a), row_id(b), *(None if x is None else float(f"{x:.5g}") for x in (d.change, d.low, d.high)), d.verdict, d.why]
        for a, b in itertools.permutations(timed, 2)
        if a.latency is not None and b.latency is not None
        for d in step_time(a.latency, b.latency)
    ]


def _asked(record: Record) -> str:
    """The task, and where on its axes."""
    axes = [name for name in task_of(record).axes if name in record.cell.options and name != "tasks"]
    return visible(", ".join([words.task(record), *(f"{name} {record.cell.options[name]}" for name in axes)]))


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
        "tokens": [int(n) for n in tokens],
        "start": 0 if len(sums_of_texts(blocks.texts)[1]) > MIN_BLOCKS else capacity + 1,
    }
    return [grids.place(f"{key} {capacity} {blocks.size}", grid), [float(f"{x:.9g}") for x in nll]]
