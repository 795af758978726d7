"""Comparison of many policies with one control: the control's mean over seeds, and p-values adjusted for their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics, Sums
from kvbench.harness.report.pairing import question


def mean_of(records: Sequence[Record]) -> Record:
    """Return the first of several records of a control with sums of NLL averaged over the seeds, run by run.

    The records must have the same text.
    """
    parts = [m for r in records if (m := r.measured(NllMetrics))]
    assert len(parts) == len(records)
    assert len({question(r) for r in records}) == 1

    def mean(sums: Sequence[Sums]) -> list[float]:
        values: list[float] = np.mean([x.nll_sum for x in sums], 0).tolist()
        return values

    first = parts[0]
    changed = {
        "blocks": first.blocks.model_dump() | {"nll_sum": mean([m.blocks for m in parts])},
        "texts": first.texts.model_dump() | {"nll_sum": mean([m.texts for m in parts])},
        "on_stride": None,
        "nll": float(np.mean([m.nll for m in parts])),
    }
    return replace(records[0], metrics=type(first).model_validate(first.as_json() | changed))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return adjusted p-values, to be compared with the family-wise error rate; valid under any dependence.

    Source: Holm 1979, Scandinavian Journal of Statistics 6(2), 65-70.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
