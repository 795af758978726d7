"""Verifies records: recomputes what follows from the trace or from the rest of the record. Imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.harness.core.packed import stored
from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record
from kvbench.harness.records.beside import file_problem
from kvbench.harness.report.recomputed import Figure, figures_from_record
from kvbench.harness.report.task import task_of

_RELATIVE_TOLERANCE = 1e-6  # traces of times are float32 (6e-8); sums may be taken in another order
_ROUNDING_STEP = 1e-5  # of sums and rounds in a record; near a boundary, two roundings differ by a whole step
_TOLERANCES = {"nll_sum": 1.5 * _ROUNDING_STEP, "rounds_ms": 1.5 * _ROUNDING_STEP, "error": 1e-6}  # absolute
_NOT_FIGURES = {"metric", "higher_is_better", "how", "together"}  # among metrics


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a record.

    Attributes:
        problems: sentences; None if the trace is missing and no other figure is wrong.
        unverifiable: names of figures that can't be recomputed from the record and its trace.
    """

    problems: list[str] | None
    unverifiable: list[str]


def problems(record: Record, folder: Path) -> list[str] | None:
    """Sentences on what is wrong with a record; None if its trace is missing and nothing else is wrong.

    Args:
        record: to verify.
        folder: of the record's file and its trace.
    """
    return verify(record, folder).problems


def verify(record: Record, folder: Path) -> Verdict:
    """Recompute a record's figures.

    Args:
        record: to verify; a failed one has no figures.
        folder: of the record's file and its trace.
    """
    if record.status != "ok":
        return Verdict([], [])
    path = None if record.trace is None else folder / Path(record.trace.file).name
    missing = path is not None and not os.path.lexists(stored(path))
    wrong = [*([] if missing else _trace_problems(record, path)), *_keep_map_problems(record, folder)]
    sources = (_from_record, *([] if wrong or missing else [_from_trace]))
    wrong += record.metrics.impossible()
    figures: dict[str, Figure] = {}
    for source in sources:
        try:
            figures |= {f.name: f for f in source(record, path)}
        except Exception as error:  # traces and figures may contain anything
            wrong.append(f"its figures can't be recomputed ({type(error).__name__}: {error})")
    wrong += [
        f"{f.name} is {_short(f.recorded)}, but should be {_short(f.expected)}"
        for f in figures.values()
        if not _equal(f.recorded, f.expected, f.tolerance)
    ]
    if missing:
        return Verdict(wrong or None, [])
    names = [n for n in record.metrics.as_json() if n not in _NOT_FIGURES]
    names += ["facts.tokens_per_second"] if record.facts.tokens_per_second is not None else []
    return Verdict(wrong, [n for n in names if n not in figures])


def _trace_problems(record: Record, path: Path | None) -> list[str]:
    """Problems of the trace's file itself."""
    task, suffix = record.cell.task.name, task_of(record).trace
    if path is None:
        return [f"it has no trace; every record of {task} needs one (*{suffix})"] if suffix else []
    if suffix and not path.name.endswith(suffix):
        return [f"its trace is {path.name}; the name of a trace of {task} ends in {suffix}"]
    found = file_problem(path, record.trace.sha256) if record.trace is not None else ""
    return [f"its trace {path.name} {found}"] if found else []


def _keep_map_problems(record: Record, folder: Path) -> list[str]:
    """Problems of the keep map's file, which may be missing: no figure follows from it."""
    kept = record.facts.keep_map
    path = None if kept is None else folder / Path(kept.file).name
    if kept is None or path is None or not os.path.lexists(stored(path)):
        return []
    found = file_problem(path, kept.sha256)
    return [f"its keep map {path.name} {found}"] if found else []


def _from_record(record: Record, _: Path | None) -> Iterator[Figure]:
    return figures_from_record(record)


def _from_trace(record: Record, path: Path | None) -> Iterator[Figure]:
    if path is not None:
        recorded = record.metrics.as_json()
        for name, expected in task_of(record).from_trace(record, path).items():
            yield Figure(name, recorded.get(name), expected, _TOLERANCES.get(name, 0.0))


def _equal(a: Any, b: Any, tolerance: float) -> bool:
    """Counts and texts exactly; floats up to rounding, with the absolute tolerance of their name if they have one."""
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(_equal(a[k], b[k], _TOLERANCES.get(k, tolerance)) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) or isinstance(b, float):
        numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
        return numbers and math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE, abs_tol=tolerance)
    return type(a) is type(b) and bool(a == b)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return visible(text if len(text) <= 60 else f"{text[:57]}...")
