"""Two records beside each other: differences with intervals, and a verdict a metric.

Paired wherever both kept the same tokens or questions: the noise of the text cancels, and what is left is the policy's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from kvbench.harness.core.intervals import MIN_BLOCKS, clustered, median_interval, wilson
from kvbench.harness.records import Record
from kvbench.harness.report.pairing import paired

Verdict = Literal["better", "worse", "same", "can't tell"]
# Differences that nobody would act on: an interval inside them is "same".
MARGINS = {"nll": 0.001, "accuracy": 0.01, "score": 0.01, "step_ms": 0.03}


@dataclass(frozen=True)
class Difference:
    """One metric of two records.

    Attributes:
        metric: what is compared.
        a: the first record's figure; None where it has none.
        b: the second's.
        change: of b against a: a difference, for `step_ms` a ratio less 1; None where there is none.
        low: lower end of its 95 % interval; None where none can be given.
        high: upper end.
        verdict: on b.
        why: of a verdict that the figures alone don't explain.
    """

    metric: str
    a: float | None
    b: float | None
    change: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    why: str = ""


def differences(a: Record, b: Record, traces: tuple[Path | None, Path | None] = (None, None)) -> list[Difference]:
    """Everything that both have.

    Args:
        a: the record that is there.
        b: the record that is judged.
        traces: files of their per-token figures, where they are at hand.
    """
    if a.status != "ok" or b.status != "ok":
        verdict: Verdict = "same" if a.status == b.status else "worse" if a.status == "ok" else "better"
        kinds = [str((r.error or {}).get("kind", r.status)) if r.status != "ok" else "ok" for r in (a, b)]
        return [Difference("status", None, None, None, None, None, verdict, " -> ".join(kinds))]
    found = [*_nll(a, b, traces), *_accuracy(a, b), *_score(a, b), *_latency(a, b)]
    return [*found, *(_exactly(name, a, b) for name in ("kv_bytes", "state_bytes") if name in a.metrics and name in b.metrics)]


def judged(low: float | None, high: float | None, margin: float, more_is_better: bool = False) -> Verdict:
    """Whether an interval of a change is for better or worse, too small to matter, or too wide to tell."""
    if low is None or high is None:
        return "can't tell"
    if -margin <= low and high <= margin:
        return "same"
    if low > 0 or high < 0:
        return "better" if (low > 0) == more_is_better else "worse"
    return "can't tell"


def largest_difference(traces: tuple[Path | None, Path | None]) -> float | None:
    """The largest difference in NLL of a token that both scored, in nats; None without both traces of one length."""
    files = [path for path in traces if path is not None and path.exists()]
    if len(files) < 2:
        return None
    x, y = (np.load(path, mmap_mode="r").astype(np.float64) for path in files)  # mapped: no room for more than there is
    if x.shape != y.shape:
        return None
    off = np.abs(x - y)
    off[np.isnan(x) & np.isnan(y)] = 0.0  # scored by neither
    return float("inf") if np.isnan(off).any() else float(off.max(initial=0.0))


def moved(a: Record, b: Record, *packages: str) -> str:
    """In words, what of device, threads, instructions and these packages' versions is another; empty where nothing is."""
    facts = [r.facts | r.facts.get("versions", {}) for r in (a, b)]
    names = [n for n in ("device", "threads", "instructions", *packages) if n in facts[0] and n in facts[1]]  # older: not all
    return ", ".join(f"{n} {facts[0][n]} -> {facts[1][n]}" for n in names if facts[0][n] != facts[1][n])


def _nll(a: Record, b: Record, traces: tuple[Path | None, Path | None]) -> list[Difference]:
    if "nll" not in a.metrics or "nll" not in b.metrics:
        return []
    x, y = float(a.metrics["nll"]), float(b.metrics["nll"])
    if a.metrics == b.metrics:
        return [Difference("nll", x, y, 0.0, 0.0, 0.0, "same", "to the last digit")]
    difference = paired(b, a, trend=a.cell_id == b.cell_id)
    if difference is None:
        return [
            Difference("nll", x, y, None, None, None, "can't tell", "not the same tokens, or a trend past the training length")
        ]
    why = "" if difference.low is not None else "the text is too short for an interval"
    largest = largest_difference(traces) if a.cell_id == b.cell_id else None
    why += f"{'; ' if why else ''}largest of a token {largest:.2g}" if largest is not None else ""
    verdict = judged(difference.low, difference.high, MARGINS["nll"])
    return [Difference("nll", x, y, difference.mean, difference.low, difference.high, verdict, why)]


def _accuracy(a: Record, b: Record) -> list[Difference]:
    if "accuracy" not in a.metrics or "accuracy" not in b.metrics:
        return []
    x, y = a.metrics, b.metrics
    change = y["accuracy"] - x["accuracy"]
    same_questions = a.cell["task"] == b.cell["task"] and a.data.get("ids_sha256") == b.data.get("ids_sha256")
    if same_questions and a.cell_id == b.cell_id and x.get("outcomes") == y.get("outcomes"):
        return [Difference("accuracy", x["accuracy"], y["accuracy"], 0.0, 0.0, 0.0, "same", "the same answers are right")]
    if same_questions and len(x.get("outcomes", "")) == len(y.get("outcomes", "")) > 0:
        low, high = paired_shares(x["outcomes"], y["outcomes"])
        why = "question by question"
    else:
        low, high = shares((x["right"], x["questions"]), (y["right"], y["questions"]))
        why = "not the same questions"
    return [
        Difference("accuracy", x["accuracy"], y["accuracy"], change, low, high, judged(low, high, MARGINS["accuracy"], True), why)
    ]


def _score(a: Record, b: Record) -> list[Difference]:
    """Of questions whose score is no plain yes or no, paired question by question."""
    x, y = a.metrics, b.metrics
    if "scores" not in x or "scores" not in y:
        return []
    change = y["score"] - x["score"]
    if a.data.get("ids_sha256") != b.data.get("ids_sha256") or x.get("metric") != y.get("metric"):
        return [Difference("score", x["score"], y["score"], change, None, None, "can't tell", "not the same questions")]
    if a.cell_id == b.cell_id and x["scores"] == y["scores"]:
        return [Difference("score", x["score"], y["score"], 0.0, 0.0, 0.0, "same", "the same score for every question")]
    off, weights = np.array(y["scores"]) - np.array(x["scores"]), np.array(y.get("weights", np.ones(len(y["scores"]))))
    if len(off) < MIN_BLOCKS:
        return [
            Difference("score", x["score"], y["score"], change, None, None, "can't tell", f"{len(off)} questions are too few")
        ]
    found = clustered(off, weights)
    verdict = judged(found.low, found.high, MARGINS["score"], y.get("higher_is_better", True))
    return [Difference("score", x["score"], y["score"], change, found.low, found.high, verdict, "question by question")]


def paired_shares(a: str, b: str) -> tuple[float, float]:
    """Interval of the difference of two shares over the same questions, b's less a's.

    Args:
        a: outcomes, a "1" for every right answer.
        b: the other's, of the same length.

    Source: Newcombe 1998, Statistics in Medicine 17, 2635-2650, method 10: Wilson's intervals of each, and their correlation.
    """
    n, pairs = len(a), list(zip(a, b, strict=True))
    both, only_a, only_b, none = (pairs.count(kind) for kind in (("1", "1"), ("1", "0"), ("0", "1"), ("0", "0")))
    x, y = (both + only_a) / n, (both + only_b) / n
    (low_a, high_a), (low_b, high_b) = wilson(both + only_a, n), wilson(both + only_b, n)
    scale = math.sqrt((both + only_a) * (only_b + none) * (both + only_b) * (only_a + none))
    tied = both * none - only_a * only_b
    phi = (max(tied - n / 2, 0) if tied > 0 else tied) / scale if scale else 0.0

    def width(down: float, up: float) -> float:
        return math.sqrt(max(down * down - 2 * phi * down * up + up * up, 0.0))

    return y - x - width(y - low_b, high_a - x), y - x + width(high_b - y, x - low_a)


def shares(a: tuple[int, int], b: tuple[int, int]) -> tuple[float, float]:
    """Interval of the difference of two independent shares, (right, questions) each.

    Source: Newcombe 1998, Statistics in Medicine 17, method 10.
    """
    x, y = a[0] / a[1], b[0] / b[1]
    (low_a, high_a), (low_b, high_b) = wilson(*a), wilson(*b)
    return y - x - math.hypot(y - low_b, high_a - x), y - x + math.hypot(high_b - y, x - low_a)


def _latency(a: Record, b: Record) -> list[Difference]:
    if "rounds_ms" not in a.metrics or "rounds_ms" not in b.metrics:
        return []
    x, y = float(a.metrics["step_ms"]), float(b.metrics["step_ms"])
    elsewhere = moved(a, b)
    if elsewhere:
        return [Difference("step_ms", x, y, y / x - 1, None, None, "can't tell", elsewhere)]
    if a.metrics["together"] == b.metrics["together"]:  # one run: rounds were measured in turn
        low, high = median_interval([j / i - 1 for i, j in zip(a.metrics["rounds_ms"], b.metrics["rounds_ms"], strict=False)])
        why = "round by round"
    else:
        (low_a, high_a), (low_b, high_b) = (median_interval(r.metrics["rounds_ms"]) for r in (a, b))
        low, high, why = low_b / high_a - 1, high_b / low_a - 1, "two runs: what changes from run to run is not in the interval"
    if not (math.isfinite(low) and math.isfinite(high)):
        return [Difference("step_ms", x, y, y / x - 1, None, None, "can't tell", "too few rounds")]
    return [Difference("step_ms", x, y, y / x - 1, low, high, judged(low, high, MARGINS["step_ms"]), why)]


def _exactly(name: str, a: Record, b: Record) -> Difference:
    x, y = float(a.metrics[name]), float(b.metrics[name])
    return Difference(name, x, y, y - x, y - x, y - x, "same" if x == y else "worse" if y > x else "better")


def matched(a: Sequence[Record], b: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Records of the same cell; or, where each side has but one, those two. Empty where nothing fits."""
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    others = {r.cell_id: r for r in b}
    return [(r, others[r.cell_id]) for r in a if r.cell_id in others]
