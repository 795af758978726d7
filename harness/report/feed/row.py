"""Rows of the feed: a policy at one capacity, with all its figures for a question."""

from __future__ import annotations

import hashlib
import math
import re
import statistics
from typing import Any

from kvbench.harness.core.grouped import grouped
from kvbench.harness.core.intervals import median_interval
from kvbench.harness.core.packaged import PACKAGED
from kvbench.harness.core.perplexity import percent_lost
from kvbench.harness.core.shown import visible
from kvbench.harness.records import Record
from kvbench.harness.report import sections
from kvbench.harness.report.compare import MARKS, round_ratios
from kvbench.harness.report.doubts import faults
from kvbench.harness.report.feed.question import Question, is_reference
from kvbench.harness.report.feed.words import origin, task
from kvbench.harness.report.markdown import task_name, title
from kvbench.harness.report.pairing import judge_interval
from kvbench.harness.report.ranks import Rank
from kvbench.harness.report.rows import CONTROL, Row
from kvbench.harness.report.shares import answers, is_answered

_FOLDERS = {"pg19": "BOOKS", "wikitext": "WIKITEXT"}  # placeholder for the folder of a text in commands


def figure(value: float | None) -> float | None:
    """Round a number to six digits; None if the number is missing or not finite."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def row_json(question: Question, row: Row, rank: Rank | None, base: Row | None) -> dict[str, Any]:
    """Return the feed's entry of a row.

    rank: rank among the caches of the row's capacity. base: row with which `row` is compared; None without one.
    """
    cell, whole = row.cell, question.dense_bytes
    return {
        "id": row.id,
        "policy": visible(cell.policy),
        "name": question.names[row.id],
        "kind": "reference" if is_reference(row.records[0]) else "control" if cell.policy == CONTROL else "cache",
        "capacity": cell.capacity,
        "rank": rank and list(rank),
        "loss": loss_to(question, row, base),
        "loss_to_dense": None if base is question.dense else loss_to(question, row, question.dense),
        "perplexity": figure(question.perplexity(row)),
        "stride": row.stride,
        "tokens_read": row.perplexity and row.perplexity.metrics.tokens_read,
        "answers": answers_json(row),
        "kv_bytes": row.kv_bytes,
        "kv_read_bytes": row.kv_read_bytes,
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


def loss_to(question: Question, row: Row, base: Row | None) -> dict[str, Any] | None:
    """Return the feed's entry of a row's loss to another row; None if the two can't be paired.

    The loss is in % of perplexity and in nats per token, or in percentage points of right answers.
    """
    change = None if base is None or row is base else question.change(row, base)
    if base is None or change is None:
        return None
    of_text, ends = question.measure == "perplexity", (change.mean, change.low, change.high)
    value, low, high = (None if x is None else figure(percent_lost(x) if of_text else 100 * x) for x in ends)
    name, capacity = question.names[base.id], base.cell.capacity
    return {
        "to": base.id,
        "to_name": name if capacity in (None, row.cell.capacity) else f"{name} at {capacity:,}",
        "value": value,
        "low": low,
        "high": high,
        "nats": [figure(x) for x in ends] if of_text else None,
        "verdict": judge_interval(change.low, change.high, MARKS["nll" if of_text else "accuracy"].margin),
        "stride": max(row.stride, base.stride) if of_text else 1,
    }


def answers_json(row: Row) -> list[dict[str, Any]]:
    """Return right answers by task, with the 95 % interval of their share. The ends are None if there are too few streams."""
    result = []
    for name, records in grouped(filter(is_answered, row.records), task).items():
        total = answers(records)
        assert total is not None
        low, high = total.ends or (None, None)
        share, low, high = (None if x is None else round(x, 6) for x in (total.share, low, high))
        counts = {"right": total.right, "questions": total.questions, "streams": len(total.streams) or None}
        result.append({"task": name, **counts, "share": share, "low": low, "high": high})
    return result


def _times_dense(question: Question, row: Row) -> list[float | None] | None:
    """Return the ratio of the step time to dense's, as [median, low, high]; None unless both were timed in the same rounds."""
    ratios = None if question.dense is None else round_ratios(row.latency, question.dense.latency)
    return None if not ratios else [figure(x) for x in (statistics.median(ratios), *median_interval(ratios))]


def cell_json(record: Record) -> dict[str, Any]:
    """Return the feed's entry of a measured cell: its main figure, and the command that measures it again."""
    cell = record.cell
    folder = _FOLDERS.get(cell.options.get("data", ""))
    texts = "" if folder is None else f" --data {folder}"
    local = "" if re.search("[/:]", cell.model.id) or cell.model.id in PACKAGED else " --model FOLDER"
    allowed = f" --policy {cell.policy}" if ":" in cell.policy and not cell.policy.startswith("hf:") else ""
    return {
        "cell": record.cell_id[:12],
        "suite": cell.suite,
        "suite_version": cell.suite_version,
        "model": cell.model.id,
        "policy": title(record),
        "capacity": cell.capacity,
        "task": task_name(record),
        "figure": sections.headline(record),
        "status": record.failure or "; ".join(record.metrics.flags) or "ok",
        "measured": record.finished[:10],
        "command": f"bench run {record.cell_id[:8]} --fresh{texts}{local}{allowed}",
        "provenance": hashlib.sha256(repr(provenance_json(record)).encode()).hexdigest()[:8],
    }


def provenance_json(record: Record) -> dict[str, Any]:
    """Return the machine, versions, data and method of a cell. Many cells share these."""
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
