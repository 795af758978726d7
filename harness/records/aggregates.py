"""From a trace to a record's figures: of tokens, of answers, of timed steps. Imports no torch."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.intervals import median_interval

_BLOCKS = 4096  # blocks whose sums the record keeps, at most
_SMALLEST_BLOCK = 32  # tokens
_FIRST_BUCKET = 256  # tokens; every further bucket of positions ends at the double


def of_nll(nll: NDArray[np.float32], prefix: int, starts: Sequence[int], stride: int = 1, streams: int = 1) -> dict[str, Any]:
    """Of per-token NLLs.

    Args:
        nll: nats per token, NaN where not scored. [N].
        prefix: tokens that open the stream.
        starts: index of every text's first token.
        stride: tokens between those that recompute-window scores.
        streams: that the text was cut in.

    Returns:
        tokens, nll (mean, nats), perplexity; `buckets` of positions in a stream; `blocks`: sums over short runs of positions,
        from which intervals and paired differences are computed; `on_stride`: the same on the tokens that every cell of
        the task scored, if those are fewer, runs and texts; `texts`: sums per text; `stream_tokens`: of text in each of
        several streams.
    """
    values, done = np.asarray(nll), np.isfinite(nll)
    mean = float(values[done].mean(dtype=np.float64))
    size = max(_SMALLEST_BLOCK, 2 ** math.ceil(math.log2(len(values) / _BLOCKS)))
    texts, runs = np.array(starts), np.arange(0, len(values), size)
    result: dict[str, Any] = {
        "tokens": int(done.sum()),
        "nll": mean,
        "perplexity": math.exp(min(mean, 700.0)),
        "buckets": _buckets(values, done, prefix, streams),
        "blocks": _sums(values, done, runs) | {"size": size},
        "texts": _sums(values, done, texts),
    }
    if streams > 1:
        result["stream_tokens"] = (len(values) - prefix) // streams
    if stride > 1:
        shared = done & scored(len(values), prefix, stride, streams)
        result["on_stride"] = _sums(values, shared, runs) | {"size": size, "texts": _sums(values, shared, texts)}
    return result


def of_answers(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of answers: questions, right, accuracy; by how much of the evidence was in the cache; mean tokens back to it; outcomes.

    Args:
        answers: one a question, each with `right`, `held` (share of the evidence in the cache) and `reach` (tokens back to it).
    """
    right = sum(a["right"] for a in answers)
    asked: Counter[str] = Counter(_where(a["held"]) for a in answers)
    hits: Counter[str] = Counter(_where(a["held"]) for a in answers if a["right"])
    reaches = [a["reach"] for a in answers if a["reach"] is not None]
    return {
        "questions": len(answers),
        "right": right,
        "accuracy": right / len(answers),
        "in_cache": {where: {"questions": asked[where], "right": hits[where]} for where in sorted(asked)},
        **({"reach": round(sum(reaches) / len(reaches), 1)} if reaches else {}),
        "outcomes": "".join("01"[a["right"]] for a in answers),
    }


def of_samples(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of scored questions: how many, their mean score with its standard error, all scores; accuracy where each is right or wrong.

    Args:
        samples: one a question, each with `score`, and `weight` where questions weigh differently: the mean is then the sum of
            scores over the sum of weights.
    """
    scores = np.array([s["score"] for s in samples], np.float64)
    weights = np.array([s.get("weight", 1) for s in samples], np.float64)
    mean, count = float(scores.sum() / weights.sum()), len(samples)
    off = scores - mean * weights
    error = math.sqrt(float(off @ off) * count / (count - 1)) / float(weights.sum()) if count > 1 else None
    result: dict[str, Any] = {"questions": count, "score": mean, "stderr": error, "scores": scores.tolist()}
    if any("weight" in s for s in samples):
        return result | {"weights": weights.tolist()}
    if set(scores.tolist()) <= {0.0, 1.0}:
        right = int(scores.sum())
        result |= {"right": right, "accuracy": right / count, "outcomes": "".join("01"[int(s)] for s in scores)}
        del result["scores"]  # the outcomes say it
    return result


def of_steps(steps: NDArray[np.float64], batch: int) -> dict[str, Any]:
    """Of timed steps, in ms: percentiles, the medians of rounds and their spread, tokens per second.

    Args:
        steps: of every round. [rounds, steps of a round].
        batch: streams side by side.
    """
    medians = np.median(steps, 1)
    return {
        "percentiles_ms": {f"p{q}": float(np.percentile(steps, q)) for q in (50, 90, 99) if steps.size * (100 - q) >= 100},
        "steps": steps.size,
        "spread_ms": [float(medians.min()), float(medians.max())],
        "rounds_ms": [round(float(x), 5) for x in medians],
        "tokens_per_second": 1e3 * batch / float(steps.mean()),
    }


def timing(sittings: Sequence[Sequence[Sequence[float]]]) -> tuple[float, float]:
    """The median of the rounds' medians, and its relative error.

    Steps of a round share what the machine was doing, so rounds count and not steps. Sittings differ by more than rounds
    do: other memory, another minute. The error is half the 95 % interval of the median of rounds, or half that of
    sittings (half their range below 6), whichever is larger.

    Args:
        sittings: times of the steps of every round of every sitting.
    """
    medians = [[float(np.median(r)) for r in rounds] for rounds in sittings]
    pooled = [m for sitting in medians for m in sitting]
    low, high = median_interval(pooled)
    centres = [float(np.median(sitting)) for sitting in medians]
    least, most = median_interval(centres) if len(centres) >= 6 else (min(centres), max(centres))
    median = float(np.median(pooled))
    return median, max(high - low, most - least) / 2 / median


def _where(held: float | None) -> str:
    """In words: whether the evidence was still in the cache."""
    if held is None:
        return "no evidence"
    return {1.0: "whole", 0.0: "gone"}.get(held, "in part")


def scored(length: int, prefix: int, every: int, streams: int = 1) -> NDArray[np.bool_]:
    """Which tokens are scored: all but the prefix and the very first of a stream, or every so-manieth of them. [N] bool."""
    part = (length - prefix) // streams
    first = 1 if not prefix else 0  # of a stream's text
    chosen = np.zeros(length, bool)
    for start in range(prefix, prefix + part * streams, part):
        chosen[start + first : start + part : every] = True
    return chosen


def _sums(values: NDArray[np.float32], done: NDArray[np.bool_], starts: NDArray[np.int64]) -> dict[str, Any]:
    """NLL summed, and tokens counted, over the runs that begin at `starts`."""
    sums = np.add.reduceat(np.where(done, values, np.float32(0)), starts, dtype=np.float64)
    return {"nll_sum": [round(float(x), 5) for x in sums], "tokens": np.add.reduceat(done.astype(int), starts).tolist()}


def _buckets(values: NDArray[np.float32], done: NDArray[np.bool_], prefix: int, streams: int) -> list[dict[str, Any]]:
    """Mean NLL by position in the stream; each bucket twice as long as all before it."""
    length = prefix + (len(values) - prefix) // streams
    place = np.arange(len(values), dtype=np.int32)
    place[prefix:] = prefix + (place[prefix:] - prefix) % (length - prefix)
    edges = [0, _FIRST_BUCKET]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    rows = []
    for low, high in itertools.pairwise(edges):
        part = done & (place >= low) & (place < high)
        if part.any():
            mean = float(values[part].mean(dtype=np.float64))
            rows.append({"from": low, "to": min(high, length), "tokens": int(part.sum()), "nll": mean})
    return rows
