"""Whether records hold: what follows from a trace, or from the rest of the record, is computed again. Imports no torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record
from kvbench.harness.report.recomputed import Figure, figures_from_record
from kvbench.harness.report.task import task_of

_RELATIVE = 1e-6  # traces of times are float32 (6e-8); sums may be taken in another order
_STEP = 1e-5  # to which sums and rounds are rounded in the record; of two sides of a boundary they may be a whole step apart
_WITHIN = {"nll_sum": 1.5 * _STEP, "rounds_ms": 1.5 * _STEP, "error": 1e-6}  # absolute; `error` is a difference of times
_WORDS = {"metric", "higher_is_better", "how", "together"}  # of metrics: no figures


@dataclass(frozen=True)
class Verdict:
    """What came of verifying a record.

    Attributes:
        problems: what does not hold, in words; None where the trace is elsewhere, so that nothing can be said.
        unverifiable: names of figures that follow from nothing in the record and its trace.
    """

    problems: list[str] | None
    unverifiable: list[str]


def problems(record: Record, folder: Path) -> list[str] | None:
    """What does not hold, in words; None where the trace is not there, so that nothing can be said.

    Args:
        record: to verify.
        folder: where its file and its trace lie.
    """
    return verify(record, folder).problems


def verify(record: Record, folder: Path) -> Verdict:
    """Compute a record's figures again.

    Args:
        record: to verify. A failed one has no figures.
        folder: where its file and its trace lie.
    """
    if record.status != "ok":
        return Verdict([], [])
    path = None if record.trace is None else folder / Path(record.trace.file).name
    elsewhere = path is not None and not path.exists()
    said = [] if elsewhere else _of_file(record, path)
    figures: dict[str, Figure] = {}
    for source in (_follows, *([_measured] if not said and not elsewhere else [])):
        try:
            figures |= {f.name: f for f in source(record, path)}
        except Exception as error:  # whatever is in the trace, and however the figures contradict each other
            said.append(f"its figures can't be computed again ({type(error).__name__}: {error})")
    said += [f"{f.name} is {_short(f.recorded)}, and should be {_short(f.again)}" for f in figures.values() if not _holds(f)]
    if elsewhere:
        return Verdict(said or None, [])
    names = [n for n in record.metrics.as_json() if n not in _WORDS]
    names += ["facts.tokens_per_second"] if record.facts.tokens_per_second is not None else []
    return Verdict(said, [n for n in names if n not in figures])


def _of_file(record: Record, path: Path | None) -> list[str]:
    """What is wrong with the trace's file."""
    task, suffix = record.cell.task.name, task_of(record).trace
    if path is None:
        return [f"it has no trace, and every record of {task} has one (*{suffix})"] if suffix else []
    if suffix and not path.name.endswith(suffix):
        return [f"its trace is {path.name}, and one of {task} ends in {suffix}"]
    if not path.is_file():
        return [f"its trace {path.name} is no file"]
    with path.open("rb") as file:
        same = record.trace is not None and hashlib.file_digest(file, "sha256").hexdigest() == record.trace.sha256
    return [] if same else ["the trace is not the one that was measured: another sha256"]


def _follows(record: Record, _: Path | None) -> Iterator[Figure]:
    return figures_from_record(record)


def _measured(record: Record, path: Path | None) -> Iterator[Figure]:
    """All that follows from the trace."""
    if path is not None:
        recorded = record.metrics.as_json()
        for name, again in task_of(record).from_trace(record, path).items():
            yield Figure(name, recorded.get(name), again, _WITHIN.get(name, 0.0))


def _holds(figure: Figure) -> bool:
    return _alike(figure.recorded, figure.again, figure.within)


def _alike(a: Any, b: Any, within: float) -> bool:
    """The same: counts and texts exactly, other numbers but for rounding (absolute: `within`, or by the name)."""
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(_alike(a[k], b[k], _WITHIN.get(k, within)) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_alike(x, y, within) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) or isinstance(b, float):
        numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
        return numbers and math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=within)
    return type(a) is type(b) and bool(a == b)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return visible(text if len(text) <= 60 else f"{text[:57]}...")
