"""One policy at one capacity with all its records of a suite and model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvbench.harness.records import Record


@dataclass(frozen=True)
class Row:
    """One policy at one capacity, with all its records of a suite and model on one machine."""

    records: Sequence[Record]

    @cached_property
    def perplexity(self) -> Record | None:
        """The record of its first text."""
        return next((r for r in self.records if r.cell["task"].get("name") == "perplexity"), None)

    @cached_property
    def latency(self) -> Record | None:
        """The record of its step."""
        return next((r for r in self.records if r.cell["task"].get("name") == "latency"), None)

    @property
    def cell(self) -> dict[str, Any]:
        """What was asked, but for the task."""
        return self.records[0].cell

    @property
    def nll(self) -> float | None:
        """Nats a token of the first text, over all tokens it scored; None where that failed or was not asked."""
        record = self.perplexity
        return float(record.metrics["nll"]) if record is not None and record.status == "ok" and "nll" in record.metrics else None

    @property
    def answers(self) -> tuple[int, int] | None:
        """Right answers, and of how many, over all tasks with questions."""
        asked = [r.metrics for r in self.records if r.status == "ok" and r.metrics.get("questions") and "right" in r.metrics]
        return (sum(m["right"] for m in asked), sum(m["questions"] for m in asked)) if asked else None

    @property
    def kv_bytes(self) -> int | None:
        """Of K and V where quality was measured, or wherever it was. 0 for what keeps no cache."""
        first = [self.perplexity] if self.perplexity is not None else []
        return next(
            (r.metrics["kv_bytes"] for r in [*first, *self.records] if r.status == "ok" and "kv_bytes" in r.metrics), None
        )

    @property
    def step_ms(self) -> float | None:
        """Of a decode step."""
        record = self.latency
        return float(record.metrics["step_ms"]) if record is not None and record.status == "ok" else None


def rows(records: Sequence[Record]) -> list[Row]:
    """One a policy and capacity, in the order of the records.

    Args:
        records: of one suite and model, measured on one machine.
    """
    found: dict[str, list[Record]] = {}
    for record in records:
        cell = record.cell
        asked = [cell[k] for k in ("policy", "parameters", "capacity", "positions", "limit", "seed")]
        found.setdefault(repr(asked), []).append(record)
    return [Row(group) for group in found.values()]
