"""The rows of the tab with all cells: one per measured cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.harness.records import Record, Submitted, standing
from kvbench.harness.records.metrics import QuestionMetrics, StepMetrics
from kvbench.harness.report.common_tokens import Common, common_perplexity, common_tokens
from kvbench.harness.report.markdown import title
from kvbench.harness.report.pairing import question
from kvbench.harness.report.task import task_of

COLUMNS = (
    "policy", "capacity", "perplexity", "right", "ms", "kib", "model", "suite", "task", "status", "device", "measured", "cell",
    "standing", "name",
)  # fmt: skip
_FIGURES = [COLUMNS.index(name) for name in ("perplexity", "right", "ms")]


def cells(groups: Sequence[Sequence[Record]], submitted: Mapping[str, Submitted]) -> list[list[Any]]:
    """A row per record, its figures in the order of `COLUMNS`; missing figures are None. submitted: from `read_submitted`."""
    rows = []
    for group in groups:
        rivals: dict[str, list[Record]] = {}
        for record in group:
            rivals.setdefault(question(record), []).append(record)
        of = {id(record): common for same in rivals.values() for common in [common_tokens(same)] for record in same}
        rows += [_row(record, of[id(record)], submitted) for record in group]
    return sorted(rows, key=lambda row: not any(row[place] is not None for place in _FIGURES))  # those with a figure first


def _row(record: Record, common: Common, submitted: Mapping[str, Submitted]) -> list[Any]:
    """Perplexity is over the `common` tokens of all rivals. `name` is the policy's, without parameters, for its mark."""
    cell, metrics = record.cell, record.metrics
    options, shown = cell.options, task_of(record).shown_options
    task_options = [f"{k} {options[k]}" for k in (options if shown is None else shown) if k in options and k != "name"]
    answers, steps = record.measured(QuestionMetrics), record.measured(StepMetrics)
    return [
        title(record), cell.capacity, _finite(common_perplexity(record, common)),
        _finite(answers.accuracy if answers else None, 100), _finite(steps.step_ms if steps else None),
        _finite(metrics.kv_bytes or None, 1 / 1024) if record.status == "ok" else None,
        cell.model.id, cell.suite, " ".join([cell.task.name, *task_options]), _status(record), record.facts.device,
        record.finished[:10], record.cell_id[:8], standing(record, submitted), cell.policy,
    ]  # fmt: skip


def _status(record: Record) -> str:
    if record.status != "ok":
        return record.error.kind if record.error else "failed"
    return "; ".join(record.metrics.flags) or "ok"


def _finite(value: Any, scale: float = 1) -> float | None:
    return float(f"{value * scale:.6g}") if isinstance(value, (int, float)) and math.isfinite(value) else None
