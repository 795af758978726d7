"""Whether records say what their traces say: every aggregate computed again. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from harness.aggregates import of_answers, of_nll, of_samples, of_steps
from harness.records import Record

_ROUNDING = 1e-6  # relative: traces of times are float32
_SUMS = 1e-4  # of a text's sum, in nats: rounded to five digits, run by run


def problems(record: Record, folder: Path) -> list[str] | None:
    """What does not hold, in words; None where the trace is not there, so that nothing can be said.

    Args:
        record: to verify.
        folder: where its file and its trace lie.
    """
    if record.trace is None:
        return []
    path = folder / Path(record.trace["file"]).name
    if not path.exists():
        return None
    if hashlib.sha256(path.read_bytes()).hexdigest() != record.trace["sha256"]:
        return ["the trace is not the one that was measured: another sha256"]
    kind = next((k for k in _KINDS if path.name.endswith(k)), None)
    if kind is None:
        return []
    try:
        again = _KINDS[kind](record, path)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        return [f"its figures can't be computed from the trace ({type(error).__name__}: {error})"]
    return [
        f"{name} is {_short(record.metrics.get(name))}, its trace gives {_short(value)}"
        for name, value in again.items()
        if not _alike(record.metrics.get(name), value)
    ]


def _nll(record: Record, path: Path) -> dict[str, Any]:
    """All but bits per byte and facts, which need the text."""
    nll = np.load(path)
    task, metrics = record.cell["task"], record.metrics
    streams = task.get("streams") or 1
    found = of_nll(nll, len(record.data.get("prefix", [])), [0], task.get("stride", 1), streams)
    texts = metrics["texts"]["tokens"]  # scored tokens of each: where they begin among the scored ones
    found["texts"] = _split(nll[np.isfinite(nll)], texts)
    if "on_stride" in found:
        del found["on_stride"]["texts"]
        own = metrics["on_stride"]
        found["on_stride"] |= {"texts": own["texts"]}
        if sum(own["texts"]["tokens"]) != sum(own["tokens"]):
            raise ValueError("texts and runs on the stride differ in tokens")
    return found


def _split(values: Any, counts: list[int]) -> dict[str, Any]:
    ends = np.cumsum(counts)
    if not len(ends) or ends[-1] != len(values):
        raise ValueError(f"{sum(counts)} scored tokens in the texts, {len(values)} in the trace")
    sums = [float(part.sum(dtype=np.float64)) for part in np.split(values, ends[:-1])]
    return {"nll_sum": [round(x, 5) for x in sums], "tokens": counts}


def _answers(_: Record, path: Path) -> dict[str, Any]:
    return of_answers([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])


def _samples(_: Record, path: Path) -> dict[str, Any]:
    return of_samples([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])


def _steps(record: Record, path: Path) -> dict[str, Any]:
    steps = np.load(path).astype(np.float64)
    found = of_steps(steps, record.cell["task"].get("batch", 1))
    return found | {"step_ms": float(np.median(np.median(steps, 1)))}


_KINDS: dict[str, Callable[[Record, Path], dict[str, Any]]] = {
    ".nll.npy": _nll, ".answers.jsonl": _answers, ".steps.npy": _steps, ".samples.jsonl": _samples,
}  # fmt: skip


def _alike(a: Any, b: Any) -> bool:
    """The same, numbers but for rounding."""
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(_alike(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=_ROUNDING, abs_tol=_SUMS if isinstance(b, float) and abs(b) > 1 else 1e-5)
    return bool(a == b)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
