"""One policy at one capacity with all its records of a suite and model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvbench.harness.records import Record
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.records.metrics import NllMetrics, QuestionMetrics, StepMetrics


@dataclass(frozen=True)
class Row:
    """One policy at one capacity, with all its records of a suite and model on one machine."""

    records: Sequence[Record]

    @cached_property
    def perplexity(self) -> Record | None:
        """The record of its first text."""
        return next((r for r in self.records if r.measures(NllMetrics)), None)

    @cached_property
    def latency(self) -> Record | None:
        """The record of its step."""
        return next((r for r in self.records if r.measures(StepMetrics)), None)

    @property
    def cell(self) -> CellSpec:
        """What was asked, but for the task."""
        return self.records[0].cell

    @property
    def nll(self) -> float | None:
        """Nats a token of the first text, over all tokens it scored; None where that failed or was not asked."""
        metrics = self.perplexity.measured(NllMetrics) if self.perplexity is not None else None
        return None if metrics is None else metrics.nll

    @property
    def answers(self) -> tuple[int, int] | None:
        """Right answers, and of how many, over all tasks with questions."""
        asked = [m for r in self.records if (m := r.measured(QuestionMetrics)) and m.right is not None]
        return (sum(m.right or 0 for m in asked), sum(m.questions for m in asked)) if asked else None

    @property
    def kv_bytes(self) -> int | None:
        """Of K and V where quality was measured, or wherever it was. 0 for what keeps no cache."""
        first = [self.perplexity] if self.perplexity is not None else []
        held = (r.metrics.kv_bytes for r in [*first, *self.records] if r.status == "ok")
        return next((size for size in held if size is not None), None)

    @property
    def step_ms(self) -> float | None:
        """Of a decode step."""
        metrics = self.latency.measured(StepMetrics) if self.latency is not None else None
        return None if metrics is None else metrics.step_ms


def rows(records: Sequence[Record]) -> list[Row]:
    """One a policy and capacity, in the order of the records.

    Args:
        records: of one suite and model, measured on one machine.
    """
    found: dict[str, list[Record]] = {}
    for record in records:
        cell = record.cell
        asked = [cell.policy, cell.parameters, cell.capacity, cell.positions, cell.limit, cell.seed]
        found.setdefault(repr(asked), []).append(record)
    return [Row(group) for group in found.values()]
