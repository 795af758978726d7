"""All records of a run in one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.report.common_tokens import common_tokens, on_common
from kvbench.harness.report.pairing import question
from kvbench.harness.report.sections import headline


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row per record. Models, tasks, options and parameters are shown where records differ in them."""
    models = {r.cell.model.id for r in records}
    tasks = _distinct_names(records, "task", lambda r: r.cell.task.name)
    policies = _distinct_names(records, "parameters", lambda r: r.cell.policy)
    return [
        {
            **({"model": r.cell.model.id} if len(models) > 1 else {}),
            **({"task": task} if len(set(tasks)) > 1 else {}),
            "policy": policy,
            "capacity": r.cell.capacity,
            "figure": headline(_on_common(r, records)),
            "kv_bytes": r.metrics.kv_bytes,
            "tokens/s": None if r.facts.tokens_per_second is None else round(r.facts.tokens_per_second),
            "status": _status(r),
            "cell": r.cell_id[:8],
        }
        for r, task, policy in zip(records, tasks, policies, strict=True)
    ]


def _on_common(record: Record, records: Sequence[Record]) -> Record:
    """The record over the tokens that all records of its question scored, so that a column is comparable."""
    rivals = [r for r in records if question(r) == question(record)]
    return on_common(record, common_tokens(rivals)) or record


def _distinct_names(records: Sequence[Record], part: str, name: Callable[[Record], str]) -> list[str]:
    """Names of tasks or policies, with the options in which those of one name and capacity differ."""
    texts = []
    for record in records:
        rivals = [r for r in records if name(r) == name(record)]
        if part == "parameters":
            rivals = [r for r in rivals if r.cell.capacity == record.cell.capacity]
        given = record.cell.as_json()[part]
        varying = [k for k in given if k != "name" and len({repr(r.cell.as_json()[part].get(k)) for r in rivals}) > 1]
        texts.append(" ".join([name(record), *(f"{k} {given[k]}" for k in varying)]))
    return texts


def _status(record: Record) -> str:
    if record.error:
        return f"{record.status}: {record.error.kind}"
    return "flagged" if record.metrics.flags else record.status
