"""Verification of records: recompute figures from the trace or from the rest of the record. Imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvbench.harness.core.evict import at_once
from kvbench.harness.core.shown import visible
from kvbench.harness.records import Problem, Record
from kvbench.harness.records.beside import TraceFile, file_problem, open_trace
from kvbench.harness.report.task_report import task_of

_RELATIVE_TOLERANCE = 1e-6  # traces of times are float32 (6e-8); sums may be taken in another order
_ROUNDING_STEP = 1e-5  # rounding of sums and rounds in a record; near a boundary, two roundings differ by a whole step
_TOLERANCES = {"nll_sum": 1.5 * _ROUNDING_STEP, "rounds_ms": 1.5 * _ROUNDING_STEP, "error": 1e-6}  # absolute
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BUCKET_SLOTS = 256  # slots by which an unbounded cache grows
_SECONDS_ROUNDING, _SPEED_ROUNDING = 0.0005, 0.05  # seconds are recorded to 0.001, a speed to 0.1
CACHELESS = ("recompute_window", "recompute_sink_window")
Recomputed = Iterator[tuple[str, Any, float]]  # dotted name of a figure, its value, and an absolute tolerance


def problems(record: Record, folder: Path) -> list[str] | None:
    """Recompute a record's figures, and return a sentence per fault; None if only the trace in `folder` is missing.

    A failed record has no figures and no faults.
    """
    if record.status != "ok":
        return []
    trace = open_trace(record, folder)
    missing = trace is None and record.trace is not None
    wrong = [*([] if missing else _trace_problems(record, trace)), *_keep_map_problems(record, folder)]
    sound_trace = trace if isinstance(trace, TraceFile) and not wrong else None
    wrong += record.metrics.impossible()
    recorded = record.metrics.as_json() | {"facts": {"tokens_per_second": record.facts.tokens_per_second}}
    expected: dict[str, tuple[Any, float]] = {}
    try:
        expected.update((name, (value, tolerance)) for name, value, tolerance in _recomputed(record, sound_trace))
    except Exception as error:  # traces and figures may contain anything
        wrong.append(f"its figures can't be recomputed ({type(error).__name__}: {error})")
    for name, (value, tolerance) in expected.items():
        figure: Any = recorded
        for part in name.split("."):
            figure = figure.get(part) if isinstance(figure, dict) else None
        if not equal(figure, value, tolerance):
            wrong.append(f"{name} is {short(figure)}, but should be {short(value)}")
    return wrong or (None if missing else [])


def _trace_problems(record: Record, trace: TraceFile | Problem | None) -> list[str]:
    """Return the problems of the trace's file itself."""
    task, suffix = record.cell.task.name, task_of(record).trace
    if trace is None or record.trace is None:
        return [f"it has no trace; every record of {task} needs one (*{suffix})"] if suffix else []
    if suffix and not trace.path.name.endswith(suffix):
        return [f"its trace is {trace.path.name}; the name of a trace of {task} ends in {suffix}"]
    reason = trace.reason if isinstance(trace, Problem) else trace.problem(record.trace.sha256)
    return [f"its trace {trace.path.name} {reason}"] if reason else []


def _keep_map_problems(record: Record, folder: Path) -> list[str]:
    """Return the problems of the keep map's file. The file may be missing, because no figure follows from it."""
    kept = record.facts.keep_map
    if kept is None:
        return []
    path = folder / Path(kept.file).name
    problem = file_problem(path, kept.sha256) if os.path.lexists(path) else ""
    return [f"its keep map {path.name} {problem}"] if problem else []


def _recomputed(record: Record, trace: TraceFile | None) -> Recomputed:
    """Yield all figures that need no trace, then those that follow from the trace if there is one."""
    yield from ((name, value, 0.0) for name, value in record.metrics.derived(record.cell))
    size, names = kv_bytes(record), record.metrics.as_json()
    if size is not None:
        yield from ((name, size, 0.0) for name in ("kv_bytes", "expected_kv_bytes") if name in names)
    seconds, tokens, recorded = record.facts.measured_seconds, record.tokens_read, record.facts.tokens_per_second
    if seconds and tokens and recorded is not None and seconds > _SECONDS_ROUNDING:
        speed = tokens / seconds
        rounding = _SPEED_ROUNDING + tokens / (seconds - _SECONDS_ROUNDING) - speed
        yield "facts.tokens_per_second", speed, 1.01 * rounding
    figures = {} if trace is None else task_of(record).from_trace(record, trace)
    yield from ((name, value, _TOLERANCES.get(name, 0.0)) for name, value in figures.items())


def kv_bytes(record: Record, held: bool = False) -> int | None:
    """Return the bytes allocated for K and V, from the shapes of the model's layers; None if the record lacks them.

    A bounded cache has one slot more than its capacity. An unbounded cache has whole buckets of slots for the tokens it read.
    A sliding-window layer keeps no more than its window. If a prompt was cut, or budgets differ, the number of slots is unknown.
    With `held`, only the slots of an unbounded cache that hold a token are counted.
    """
    cell, shapes, codec = record.cell, record.facts.kv_shapes, record.cell.codec
    if record.facts.budgets or record.facts.code:  # heads hold different numbers of tokens, or only its code knows how many
        return None
    if cell.policy in CACHELESS or record.facts.method == "windows run afresh":
        return 0
    item, tokens = ITEM_BYTES.get(cell.model.dtype), task_of(record).cached_tokens(record)
    if shapes is None or item is None or tokens is None:
        return None
    whole_buckets = max(1, -(-tokens // _BUCKET_SLOTS)) * _BUCKET_SLOTS
    slots = tokens + 1 if cell.capacity is not None else tokens if held else whole_buckets
    spare = at_once(cell.moment) - 1
    total = 0
    for s in shapes:
        each = min(slots, (s.sliding_window or slots) + spare)
        plain = each * (s.key_dim + s.value_dim) * item
        total += s.layers * s.heads * (plain if codec is None else codec.allocated(each, s.key_dim, s.value_dim, item))
    return task_of(record).workload(cell.task).kv_streams * total


def equal(a: Any, b: Any, absolute: float = 0.0, relative: float = _RELATIVE_TOLERANCE) -> bool:
    """Return whether counts and texts are equal, and floats are equal up to a tolerance, which is larger for some names."""
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(equal(a[k], b[k], _TOLERANCES.get(k, absolute), relative) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(equal(x, y, absolute, relative) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) or isinstance(b, float):
        numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
        return numbers and math.isclose(a, b, rel_tol=relative, abs_tol=absolute)
    return type(a) is type(b) and bool(a == b)


def short(value: Any) -> str:
    """Return a value as a short text."""
    text = f"{value:.7g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
    return visible(text if len(text) <= 60 else f"{text[:57]}...")
