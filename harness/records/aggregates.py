"""A record's figures, computed from its trace: tokens, answers, or timed steps. Imports no torch."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.intervals import median_interval
from kvbench.harness.core.perplexity import perplexity

_MAX_BLOCKS = 4096
_MIN_BLOCK_TOKENS = 32
_FIRST_BUCKET_TOKENS = 256  # of a stream


def nll_figures(
    nll: NDArray[np.float32],
    prefix: int,
    starts: Sequence[int],
    stride: int = 1,
    streams: int = 1,
    prompt: int = 0,
    length: int | None = None,
) -> dict[str, Any]:
    """Compute the figures of per-token NLLs.

    Args:
        nll: nats per token, NaN where not scored. [N].
        prefix: number of tokens that open the stream.
        starts: index of each text's first token.
        stride: distance between tokens that recompute-window scores, in tokens.
        streams: number of streams that the text was cut into.
        prompt: first tokens of each stream that are not scored.
        length: tokens of the whole stream with its prefix, of which `nll` may be the beginning. The length of runs depends on
            `length`, so that runs of two beginnings of one text are equal.

    Returns:
        tokens, nll (mean, nats) and perplexity; `buckets` by position in a stream; `blocks`: sums over short runs of positions,
        from which intervals and paired differences are computed; `texts`: sums per text; `on_stride`: `blocks` and `texts`
        over every `stride`-th token, if `stride` exceeds 1; `stream_tokens`: tokens of text per stream, if there are several.
    """
    values, is_scored = np.asarray(nll), np.isfinite(nll)
    mean = float(values[is_scored].mean(dtype=np.float64))
    size = max(_MIN_BLOCK_TOKENS, 2 ** math.ceil(math.log2((length or len(values)) / _MAX_BLOCKS)))
    texts, runs = np.array([start for start in starts if start < len(values)]), np.arange(0, len(values), size)
    result: dict[str, Any] = {
        "tokens": int(is_scored.sum()),
        "nll": mean,
        "perplexity": perplexity(mean),
        "buckets": _buckets(values, is_scored, prefix, streams),
        "blocks": _sums(values, is_scored, runs) | {"size": size},
        "texts": _sums(values, is_scored, texts),
    }
    if streams > 1:
        result["stream_tokens"] = (len(values) - prefix) // streams
    if stride > 1:
        shared = is_scored & scored_mask(len(values), prefix, stride, streams, prompt)
        result["on_stride"] = _sums(values, shared, runs) | {"size": size, "texts": _sums(values, shared, texts)}
    return result


def answer_figures(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compute the accuracy of answers, in total and by the share of the evidence that was in the cache.

    Args:
        answers: mapping per question, with `right`, `held` (share of the evidence in the cache) and `reach` (distance to the
            evidence in tokens). Questions in turns have `turn` and `kind`; questions about a corrected value have `old`, the
            value before the correction.
    """
    right = sum(a["right"] for a in answers)
    corrected = [a for a in answers if "old" in a]
    reaches = [a["reach"] for a in answers if a["reach"] is not None]
    return {
        "questions": len(answers),
        "right": right,
        "accuracy": right / len(answers),
        "in_cache": _counts(answers, lambda a: _evidence_in_cache(a["held"])),
        **({"kinds": _counts(answers, lambda a: a["kind"])} if "kind" in answers[0] else {}),
        **({"turns": _counts(answers, lambda a: a["turn"])} if "turn" in answers[0] else {}),
        **({"stale": sum(a["said"] == a["old"] for a in corrected)} if corrected else {}),
        **({"reach": round(sum(reaches) / len(reaches), 1)} if reaches else {}),
        "outcomes": "".join("01"[a["right"]] for a in answers),
    }


def _counts(answers: Sequence[dict[str, Any]], part: Callable[[dict[str, Any]], Any]) -> dict[str, dict[str, int]]:
    """Count questions and right answers of each part, in the order of the parts."""
    questions = Counter(part(a) for a in answers)
    right = Counter(part(a) for a in answers if a["right"])
    return {str(name): {"questions": questions[name], "right": right[name]} for name in sorted(questions)}


def sample_figures(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compute the mean score of questions with its standard error, and the accuracy if every score is 0 or 1.

    Args:
        samples: mapping per question, each with `score`. If all samples have a `depth` and are right or wrong, right answers are
            also counted by tenth of the depth. If samples have a `weight`, the mean is the sum of scores over the sum of weights.
            If samples have `scores`, one per answer, `score` is their mean, and pass@k is computed if all are 0 or 1.
    """
    scores = np.array([s["score"] for s in samples], np.float64)
    weights = np.array([s.get("weight", 1) for s in samples], np.float64)
    mean, count = float(scores.sum() / weights.sum()), len(samples)
    deviations = scores - mean * weights
    error = math.sqrt(float(deviations @ deviations) * count / (count - 1)) / float(weights.sum()) if count > 1 else None
    result: dict[str, Any] = {"questions": count, "score": mean, "stderr": error, "scores": scores.tolist()}
    if any("weight" in s for s in samples):
        return result | {"weights": weights.tolist()}
    if "scores" in samples[0]:
        answers = np.array([s["scores"] for s in samples], np.float64)
        number = answers.shape[1]
        if np.isin(answers, (0.0, 1.0)).all():
            result["pass_at"] = {str(k): float(pass_at(answers.sum(1), number, k).mean()) for k in pass_sizes(number)}
        return result | {"samples": number}
    if set(scores.tolist()) <= {0.0, 1.0}:
        right = int(scores.sum())
        result |= {"right": right, "accuracy": right / count, "outcomes": "".join("01"[int(s)] for s in scores)}
        del result["scores"]  # outcomes hold the same information
        if all("depth" in s for s in samples):
            result["depths"] = _counts(
                [{"right": s["score"] == 1, "tenth": min(9, int(10 * s["depth"]))} for s in samples], itemgetter("tenth")
            )
    return result


def pass_sizes(number: int) -> list[int]:
    """Return the values of k for which pass@k of `number` answers is recorded: 1, 2, 4, ... and `number`."""
    return sorted({*(1 << bits for bits in range(number.bit_length())), number})


def pass_at(right: NDArray[np.float64], number: int, k: int) -> NDArray[np.float64]:
    """Return the chance that at least one of k answers is right if `right` of `number` are. [questions].

    The chance is 1 - C(n - c, k) / C(n, k), with n = `number` and c = `right`.

    Source: Chen et al. 2021, arXiv:2107.03374, Section 2.1.
    """
    wrong = number - right[:, None] - np.arange(k)  # wrong answers left before each draw
    return np.asarray(1.0 - np.prod(np.maximum(wrong, 0) / (number - np.arange(k)), axis=1))


def step_figures(steps: NDArray[np.float64], batch: int) -> dict[str, Any]:
    """Compute percentiles of timed steps, the median of each round, the spread of the medians, and tokens per second.

    Args:
        steps: milliseconds. [rounds, steps of a round].
        batch: number of streams side by side.
    """
    medians = np.median(steps, 1)
    return {
        "percentiles_ms": {f"p{q}": float(np.percentile(steps, q)) for q in (50, 90, 99) if steps.size * (100 - q) >= 100},
        "steps": steps.size,
        "spread_ms": [float(medians.min()), float(medians.max())],
        "rounds_ms": [round(float(x), 5) for x in medians],
        "tokens_per_second": 1e3 * batch / float(steps.mean()),
    }


def largest(sittings: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the milliseconds of a sitting's longest step, as the median over sittings.

    Args:
        sittings: milliseconds of the steps, by sitting and round.
    """
    return float(np.median([np.max(rounds) for rounds in sittings]))


def timing(sittings: Sequence[Sequence[Sequence[float]]]) -> tuple[float, float]:
    """Return the median of the rounds' medians, and its relative error.

    Steps of one round are not independent, because they share the state of the machine. The sample therefore consists of rounds.
    Sittings differ more than rounds, because caches have other addresses in memory. The error is the larger of two values: half
    the 95 % interval of the rounds' median, and half the 95 % interval of the sittings' median. With fewer than 6 sittings, the
    second value is half their range.

    Args:
        sittings: milliseconds of the steps, by sitting and round.
    """
    medians = [[float(np.median(r)) for r in rounds] for rounds in sittings]
    pooled = [m for sitting in medians for m in sitting]
    low, high = median_interval(pooled)
    centres = [float(np.median(sitting)) for sitting in medians]
    least, most = median_interval(centres) if len(centres) >= 6 else (min(centres), max(centres))
    median = float(np.median(pooled))
    return median, max(high - low, most - least) / 2 / median


def _evidence_in_cache(held: float | None) -> str:
    if held is None:
        return "no evidence"
    return {1.0: "whole", 0.0: "gone"}.get(held, "in part")


def scored_mask(length: int, prefix: int, stride: int, streams: int = 1, prompt: int = 0) -> NDArray[np.bool_]:
    """Return a mask of scored tokens: every `stride`-th token except prefix, prompt and a stream's first token. [N] bool."""
    stream_length = (length - prefix) // streams
    skipped = prompt or (0 if prefix else 1)
    mask = np.zeros(length, bool)
    for start in range(prefix, prefix + stream_length * streams, stream_length):
        mask[start + skipped : start + stream_length : stride] = True
    return mask


def _sums(values: NDArray[np.float32], is_scored: NDArray[np.bool_], starts: NDArray[np.int64]) -> dict[str, Any]:
    """Return the sum of NLL and the number of tokens of each run. A run begins at one of `starts` and ends at the next."""
    filled = starts < np.append(starts[1:], len(values))  # reduceat gives an empty run the value at its start
    sums, tokens = np.zeros(len(starts)), np.zeros(len(starts), int)
    sums[filled] = np.add.reduceat(np.where(is_scored, values, np.float32(0)), starts[filled], dtype=np.float64)
    tokens[filled] = np.add.reduceat(is_scored.astype(int), starts[filled])
    return {"nll_sum": [round(float(x), 5) for x in sums], "tokens": tokens.tolist()}


def buckets(tokens: int, first: int = 32) -> list[tuple[int, int]]:
    """Return buckets of positions as (start, stop). The first stops at `first`, each other at twice the stop before."""
    edges = [0]
    while edges[-1] < tokens:
        edges.append(min(tokens, max(first, 2 * edges[-1])))
    return list(itertools.pairwise(edges))


def _buckets(values: NDArray[np.float32], is_scored: NDArray[np.bool_], prefix: int, streams: int) -> list[dict[str, Any]]:
    """Return the mean NLL by position in the stream."""
    length = prefix + (len(values) - prefix) // streams
    position = np.arange(len(values), dtype=np.int32)
    position[prefix:] = prefix + (position[prefix:] - prefix) % (length - prefix)
    rows = []
    for low, high in buckets(length, _FIRST_BUCKET_TOKENS):
        part = is_scored & (position >= low) & (position < high)
        if part.any():
            mean = float(values[part].mean(dtype=np.float64))
            rows.append({"from": low, "to": high, "tokens": int(part.sum()), "nll": mean})
    return rows
