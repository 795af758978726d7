"""Rows of the feed: a policy at one capacity, with everything that was measured of the policy for a question."""

from __future__ import annotations

import hashlib
import math
import re
import statistics
from dataclasses import dataclass, replace
from typing import Any

from kvbench.harness.core.intervals import median_interval
from kvbench.harness.core.packaged import PACKAGED
from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import QuestionMetrics
from kvbench.harness.report import sections
from kvbench.harness.report.compare import round_ratios
from kvbench.harness.report.doubts import faults
from kvbench.harness.report.feed.question import CONTROL, Loss, Question, is_reference, loss
from kvbench.harness.report.feed.words import origin, task
from kvbench.harness.report.markdown import task_name, title
from kvbench.harness.report.ranks import Rank
from kvbench.harness.report.rows import Row
from kvbench.harness.report.shares import answers
from kvbench.harness.report.verify import kv_bytes

_FOLDERS = {"pg19": "BOOKS", "wikitext": "WIKITEXT"}  # of texts that a command needs


@dataclass(frozen=True)
class Placed:
    """A row of a question, placed among the others.

    Attributes:
        row: its records.
        name: the shortest name that tells it from the others of its capacity.
        rank: among the caches of its capacity.
        loss: to the question's reference; None if it can't be paired with it.
    """

    row: Row
    name: str
    rank: Rank | None
    loss: Loss | None


def figure(value: float | None) -> float | None:
    """A number with six digits; None if there is none, or it is not finite."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def row_id(row: Row) -> str:
    """Identifies a row within its question: the first cell's id, shortened."""
    return row.records[0].cell_id[:8]


def row_json(question: Question, placed: Placed, names: dict[str, str]) -> dict[str, Any]:
    """The row as the feed has it.

    Args:
        question: that it answers.
        placed: the row.
        names: of all rows of the question, by id.
    """
    row, cell, whole = placed.row, placed.row.cell, dense_bytes(question)[0]
    dense_loss = None if placed.loss and placed.loss.to is question.dense else loss(question, row, question.dense)
    return {
        "id": row_id(row),
        "policy": visible(cell.policy),
        "name": placed.name,
        "kind": "reference" if is_reference(row.records[0]) else "control" if cell.policy == CONTROL else "cache",
        "capacity": cell.capacity,
        "rank": placed.rank and list(placed.rank),
        "loss": None if placed.loss is None else loss_json(row, placed.loss, names),
        "loss_to_dense": None if dense_loss is None else loss_json(row, dense_loss, names),
        "perplexity": figure(perplexity(question, row)),
        "stride": row.stride,
        "tokens_read": row.perplexity and row.perplexity.metrics.tokens_read,
        "answers": answers_json(row),
        "kv_bytes": row.kv_bytes,
        "kv_share": figure(row.kv_bytes / whole) if row.kv_bytes and whole else None,
        "ms": figure(row.step_ms),
        "times_dense": _times_dense(question, row),
        "code": visible(row.records[0].facts.code or origin(cell.policy).code),
        "status": visible("; ".join(faults(row, question.rows))) or "ok",
        "parameters": {visible(k): v for k, v in cell.settings.items()},
        "positions": visible(cell.positions),
        "evict": visible(cell.evicts),
        "seed": cell.seed,
        "cells": [record.cell_id[:12] for record in row.records],
    }


def loss_json(row: Row, lost: Loss, names: dict[str, str]) -> dict[str, Any]:
    """A loss: in % of perplexity or in percentage points, in nats per token, and the distance of the tokens that it is over."""
    nats = None if lost.nats is None else [figure(x) for x in lost.nats]
    capacity = lost.to.cell.capacity
    elsewhere = "" if capacity in (None, row.cell.capacity) else f" at {capacity:,}"
    return {
        "to": row_id(lost.to),
        "to_name": f"{names[row_id(lost.to)]}{elsewhere}",
        "value": figure(lost.value),
        "low": figure(lost.low),
        "high": figure(lost.high),
        "nats": nats,
        "verdict": lost.verdict,
        "stride": max(row.stride, lost.to.stride) if nats else 1,
    }


def dense_bytes(question: Question) -> tuple[int | None, bool]:
    """Bytes of K and V that dense holds at the end of the text, and whether that was measured.

    Without a measurement they follow from the shapes of the model's layers.
    """
    measured = None if question.dense is None else question.dense.kv_bytes
    if measured:
        return measured, True
    record = question.first
    whole = record.cell.model_copy(update={"policy": "dense", "capacity": None, "evict": "step", "kv": None})
    facts = record.facts.model_copy(update={"method": None, "budgets": None})
    return kv_bytes(replace(record, cell=whole, facts=facts)), False


def perplexity(question: Question, row: Row, capacity: int | None = None) -> float | None:
    """Over the tokens of a budget (`Question.figure`)."""
    nll = question.figure(row, capacity) if question.measure == "perplexity" else None
    return None if nll is None else math.exp(min(nll, 700))


def answers_json(row: Row) -> list[dict[str, Any]]:
    """Right answers by task, with the 95 % interval of their share; its ends are None if there are too few streams for one."""
    tasks: dict[str, list[Record]] = {}
    for record in row.records:
        metrics = record.measured(QuestionMetrics)
        if metrics is not None and metrics.right is not None:
            tasks.setdefault(task(record), []).append(record)
    result = []
    for name, records in tasks.items():
        total = answers(records)
        assert total is not None
        low, high = total.ends or (None, None)
        share, low, high = (None if x is None else round(x, 6) for x in (total.share, low, high))
        counts = {"right": total.right, "questions": total.questions, "streams": len(total.streams) or None}
        result.append({"task": name, **counts, "share": share, "low": low, "high": high})
    return result


def _times_dense(question: Question, row: Row) -> list[float | None] | None:
    """Step time over dense's, round by round: [median, low, high]; None unless both were timed in the same rounds."""
    dense = None if question.dense is None else question.dense.latency
    ratios = None if dense is None or row.latency is None else round_ratios(row.latency, dense)
    return None if not ratios else [figure(x) for x in (statistics.median(ratios), *median_interval(ratios))]


def cell_json(record: Record) -> dict[str, Any]:
    """A measured cell: its main figure, and the command that measures it again."""
    cell = record.cell
    folder = _FOLDERS.get(cell.options.get("data", ""))
    texts = "" if folder is None else f" --data {folder}"
    local = "" if re.search("[/:]", cell.model.id) or cell.model.id in PACKAGED else " --model FOLDER"
    failed = "" if record.status == "ok" else record.error.kind if record.error else "failed"
    return {
        "cell": record.cell_id[:12],
        "suite": cell.suite,
        "suite_version": cell.suite_version,
        "model": cell.model.id,
        "policy": title(record),
        "capacity": cell.capacity,
        "task": task_name(record),
        "figure": sections.headline(record),
        "status": failed or "; ".join(record.metrics.flags) or "ok",
        "measured": record.finished[:10],
        "command": f"bench run {record.cell_id[:8]} --fresh{texts}{local}",
        "provenance": hashlib.sha256(repr(provenance_json(record)).encode()).hexdigest()[:8],
    }


def provenance_json(record: Record) -> dict[str, Any]:
    """Return how a cell was measured. Many cells have this in common."""
    facts, data = record.facts, record.data
    return {
        "device": facts.device,
        "instructions": facts.instructions,
        "threads": facts.threads,
        "platform": facts.platform,
        "versions": dict(facts.versions),
        "data": data.source,
        "text_sha256": data.text_sha256[:12],
        "ids_sha256": data.ids_sha256[:12],
        "weights_sha256": facts.weights_sha256[:12],
        "data_seed": record.cell.options.get("data_seed"),
        "method": facts.method,
    }
