"""Whether records hold: what follows from a trace, or from the rest of the record, is computed again. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record
from kvbench.harness.records.aggregates import of_answers, of_nll, of_samples, of_steps, timing
from kvbench.harness.report.recomputed import Figure, of_record

TRACES = {
    "perplexity": ".nll.npy", "streameval": ".answers.jsonl", "arc_stream": ".answers.jsonl", "latency": ".steps.npy",
    "lm_eval": ".samples.jsonl",
}  # fmt: skip
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
    path = None if record.trace is None else folder / Path(record.trace["file"]).name
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
    names = [n for n in record.metrics if n not in _WORDS]
    names += ["facts.tokens_per_second"] if "tokens_per_second" in record.facts else []
    return Verdict(said, [n for n in names if n not in figures])


def _of_file(record: Record, path: Path | None) -> list[str]:
    """What is wrong with the trace's file."""
    task = str(record.cell["task"].get("name"))
    suffix = TRACES.get(task)
    if path is None:
        return [f"it has no trace, and every record of {task} has one (*{suffix})"] if suffix else []
    if suffix and not path.name.endswith(suffix):
        return [f"its trace is {path.name}, and one of {task} ends in {suffix}"]
    if not path.is_file():
        return [f"its trace {path.name} is no file"]
    with path.open("rb") as file:
        same = record.trace is not None and hashlib.file_digest(file, "sha256").hexdigest() == record.trace["sha256"]
    return [] if same else ["the trace is not the one that was measured: another sha256"]


def _follows(record: Record, _: Path | None) -> Iterator[Figure]:
    return of_record(record)


def _measured(record: Record, path: Path | None) -> Iterator[Figure]:
    """All that follows from the trace."""
    suffix = TRACES.get(str(record.cell["task"].get("name")), "")
    if path is not None and suffix:
        for name, again in _KINDS[suffix](record, path).items():
            yield Figure(name, record.metrics.get(name), again, _WITHIN.get(name, 0.0))


def _nll(record: Record, path: Path) -> dict[str, Any]:
    """All but what needs the text: bytes and the costs of facts."""
    nll = np.load(path, mmap_mode="r")
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
    """Whether an answer is right is looked at again, too."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return of_answers([a | ({"right": a["said"] == a["gold"]} if {"said", "gold"} <= set(a) else {}) for a in lines])


def _samples(_: Record, path: Path) -> dict[str, Any]:
    return of_samples([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])


def _steps(record: Record, path: Path) -> dict[str, Any]:
    steps, task = np.load(path, mmap_mode="r").astype(np.float64), record.cell["task"]
    found = of_steps(steps, task.get("batch", 1)) | {"step_ms": float(np.median(np.median(steps, 1)))}
    if "sittings" in record.metrics:
        sittings = np.split(steps, record.metrics["sittings"])
        found["error"] = timing([list(rounds) for rounds in sittings])[1]
        found["settled"] = record.metrics["error"] <= task["precision"]
    return found


_KINDS: dict[str, Callable[[Record, Path], dict[str, Any]]] = {
    ".nll.npy": _nll, ".answers.jsonl": _answers, ".steps.npy": _steps, ".samples.jsonl": _samples,
}  # fmt: skip


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
