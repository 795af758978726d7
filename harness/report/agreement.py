"""Whether a cell that was measured again gives the submitted figures, in both directions. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import QuestionMetrics
from kvbench.harness.records.rules import PART_NATS
from kvbench.harness.report import gate, gate_times
from kvbench.harness.report.compare import MARGINS, differences

# The gate's checks of times, and those that notice a regression of the code, which is no fault of the record. Means are compared
# below, as closely as rounding allows.
_NOT_OF_FIGURES = {*gate_times.CHECKS, "method", "flags", "quality"}
_MEANS = ("nll", "accuracy", "score")
_ROUNDING = 1e-9


def disagreements(submitted: Record, again: Record, folders: tuple[Path, Path]) -> list[str]:
    """How a cell that was measured again differs from the submitted record; empty if they agree.

    On the same machine in float32, every figure and every token must agree up to the gate's tolerances for rounding, on another
    CPU nearly so. Elsewhere a policy that chooses by attention may keep another token, so only what rounding can't change must be
    equal. Everywhere the means must agree: NLL within 1e-4 nats in float32, else within the margins of `bench compare`, or by one
    question.

    Args:
        submitted: the record to check; its cell went well.
        again: the same cell, measured here.
        folders: of the two records and their traces.
    """
    if again.status != "ok":
        return [f"the cell failed: {again.error.kind if again.error else '?'}"]
    findings = gate.check(([submitted], folders[0]), ([again], folders[1]), {})
    unlike = [f for f in findings if f.state in ("regression", "could not compare") and f.check not in _NOT_OF_FIGURES]
    return [*_means(submitted, again), *(f"{f.check}: {f.says}" for f in unlike)]


def _means(submitted: Record, again: Record) -> list[str]:
    """The means that differ by more than their margin."""
    unlike = []
    for d in differences(submitted, again):
        if d.metric not in _MEANS or d.a is None or d.b is None:
            continue
        allowed = PART_NATS if d.metric == "nll" and submitted.cell.model.dtype == "float32" else MARGINS[d.metric]
        asked = again.measured(QuestionMetrics)
        if asked is not None and asked.questions:
            allowed = max(allowed, 1 / asked.questions)
        if abs(d.b - d.a) > allowed + _ROUNDING:
            unlike.append(f"{d.metric} {d.a:.6g} was submitted, {d.b:.6g} measured; {allowed:.3g} may lie between them")
    return unlike
