"""Rules whose authors publish only scripts, each written plainly from the rule: Python lists and floats, one token at a time.

A rule takes the attention of all layers over a prompt, and returns what is kept, with the scores that it was ranked by. Where a
rule ranks by float32 sums, lists of floats give the same order but for rounding.

Axis letters: L layers, H KV heads, G query heads of a KV head, N tokens of the prompt, D key dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, sqrt
from operator import mul

Rows = list[list[float]]  # [N][N]: of each query, over the keys


@dataclass
class Layer:
    """Dense attention of one layer over a prompt.

    Attributes:
        weights: softmax weights; 0 for later keys. [H][G][N][N].
        logits: what the softmax was taken of; -inf for later keys. [H][G][N][N].
        keys: rotated. [H][N][D].
    """

    weights: list[list[Rows]]
    logits: list[list[Rows]]
    keys: list[Rows]


@dataclass
class Kept:
    """What each head keeps, and by which scores. Heads are KV heads, or all query heads of each KV head in turn."""

    positions: list[list[int]]
    scores: list[list[float]]


def top(scores: list[float], count: int) -> list[int]:
    """The `count` highest; among equals the latest."""
    return sorted(sorted(range(len(scores)), key=lambda i: (scores[i], i))[max(0, len(scores) - count) :])


def pooled(scores: list[float], kernel: int, pool: str) -> list[float]:
    """Maximum, or mean with zeros beyond the ends, over `kernel` neighbours."""
    half, result = kernel // 2, []
    for i in range(len(scores)):
        near = scores[max(0, i - half) : i + half + 1]
        result.append(max(near) if pool == "max" else sum(near) / kernel)
    return result


def window_sums(rows: Rows, window: int) -> list[float]:
    """What the last `window` queries give to each key before them. [N - window]."""
    length = len(rows)
    return [sum(rows[q][k] for q in range(length - window, length)) for k in range(length - window)]


def mean_of(lists: list[list[float]]) -> list[float]:
    """Element by element."""
    return [sum(values) / len(lists) for values in zip(*lists, strict=True)]


def with_window(scores: list[float], window: int) -> list[float]:
    """Scores of all tokens, the window's infinite."""
    return scores + [inf] * window


def ranked(scores: list[list[float]], budgets: list[int]) -> Kept:
    """The highest of every head."""
    return Kept([top(s, b) for s, b in zip(scores, budgets, strict=True)], scores)


def snap_scores(layer: Layer, window: int, kernel: int, pool: str = "max") -> list[list[float]]:
    """SnapKV's scores of a KV head: the query group's mean before pooling. [H][N - window]."""
    return [pooled(mean_of([window_sums(rows, window) for rows in head]), kernel, pool) for head in layer.weights]


def snapkv(layers: list[Layer], capacity: int, window: int, kernel: int, pool: str) -> list[Kept]:
    """KVCache-Factory, `kv_cache_granularity kv_head`: SnapKV's rule with one selection a KV head."""
    found = []
    for layer in layers:
        scores = [with_window(s, window) for s in snap_scores(layer, window, kernel, pool)]
        found.append(ranked(scores, [capacity] * len(scores)))
    return found


def snapkv_per_query_head(layers: list[Layer], capacity: int, window: int, kernel: int, pool: str) -> list[Kept]:
    """FasterDecoding/SnapKV, `SnapKVCluster.update_kv`: keys are repeated for every query head before they are chosen."""
    found = []
    for layer in layers:
        rows = [rows for head in layer.weights for rows in head]
        scores = [with_window(pooled(window_sums(r, window), kernel, pool), window) for r in rows]
        found.append(ranked(scores, [capacity] * len(scores)))
    return found


def pyramid_budgets(capacity: int, layers: int, length: int, window: int, beta: int) -> list[int]:
    """KVCache-Factory, `PyramidKVCluster._update_kv_kv_head`: tokens beside the window, in integers. [L]."""
    beside = capacity - window
    if length < 2 * beside:
        return [beside] * layers
    fewest = beside // beta
    most = 2 * beside - fewest
    if most >= length - window:
        most, fewest = length - window, 2 * beside - (length - window)
    step = (most - fewest) // (layers - 1)
    return [most - layer * step for layer in range(layers)]


def pyramidkv(layers: list[Layer], capacity: int, window: int, kernel: int, beta: int) -> list[Kept]:
    """KVCache-Factory, `PyramidKVCluster`, one selection a KV head."""
    length = len(layers[0].weights[0][0])
    budgets = pyramid_budgets(capacity, len(layers), length, window, beta)
    found = []
    for layer, budget in zip(layers, budgets, strict=True):
        scores = [with_window(s, window) for s in snap_scores(layer, window, kernel)]
        found.append(ranked(scores, [budget + window] * len(scores)))
    return found


def adakv(layers: list[Layer], capacity: int, window: int, kernel: int, floor: float) -> list[Kept]:
    """FFY0/AdaKV, `AdaptiveSnapKVCluster.update_kv_gqa` with `gqa_func` mean: shares of a layer's largest scores."""
    beside, found = capacity - window, []
    for layer in layers:
        scores = snap_scores(layer, window, kernel)
        pool = sorted(((s, i, head) for head, of in enumerate(scores) for i, s in enumerate(of)), reverse=True)
        largest = [head for _, _, head in pool[: len(scores) * beside]]
        least = int(beside * floor)
        budgets = [round(largest.count(head) * (1 - floor) + least) for head in range(len(scores))]
        found.append(ranked([with_window(s, window) for s in scores], [b + window for b in budgets]))
    return found


def group_sums(layer: Layer) -> list[list[float]]:
    """All weights a key has received from all queries and the query group. [H][N]."""
    return [[sum(query[k] for rows in head for query in rows[k:]) for k in range(len(head[0]))] for head in layer.weights]


def h2o(layers: list[Layer], capacity: int, window: int | None = None) -> list[Kept]:
    """FMInference/H2O, `H2OKVCache_LayerWise.__call__` after a prompt; KVCache-Factory's `H2OKVCluster` has a window of 8."""
    window = capacity // 2 if window is None else window
    found = []
    for layer in layers:
        scores = [with_window(sums[: len(sums) - window], window) for sums in group_sums(layer)]
        found.append(ranked(scores, [capacity] * len(scores)))
    return found


def tova(layers: list[Layer], capacity: int) -> list[Kept]:
    """schwartz-lab-NLP/TOVA, `TOVACache.reduce`: the last query's weights, the mean of all query heads of the layer."""
    found = []
    for layer in layers:
        mean = mean_of([rows[-1] for head in layer.weights for rows in head])
        found.append(ranked([mean] * len(layer.weights), [capacity] * len(layer.weights)))
    return found


def softmax(values: list[float]) -> list[float]:
    """exp(v) / sum of exp."""
    highest = max(values)
    powers = [exp(v - highest) for v in values]
    return [p / sum(powers) for p in powers]


def alike(keys: Rows, threshold: float = 0.5) -> list[float]:
    """Zefan-Cai/R-KV, `cal_similarity`: for every key, the softmax of how like the others are to it on average. [N].

    Of the keys more alike than the threshold to one key, the latest is not counted against it.
    """
    sizes = [sqrt(sum(x * x for x in key)) + 1e-8 for key in keys]
    units = [[x / size for x in key] for key, size in zip(keys, sizes, strict=True)]
    sums = [0.0] * len(keys)
    for row, key in enumerate(units):
        cosines = [sum(map(mul, key, other)) for other in units]
        cosines[row] = 0.0
        latest = max((i for i, c in enumerate(cosines) if c > threshold), default=0)
        cosines[latest] = 0.0
        sums = [s + c for s, c in zip(sums, cosines, strict=True)]
    return softmax([s / len(keys) for s in sums])


def rkv(layers: list[Layer], capacity: int, window: int, kernel: int, mix: float) -> list[Kept]:
    """Zefan-Cai/R-KV, `R1KV.update_kv`: logits' maximum over the query group, softmax over the keys before the window."""
    found = []
    for layer in layers:
        scores = []
        for head, keys in zip(layer.logits, layer.keys, strict=True):
            length = len(keys)
            before = range(length - window)
            queries = [softmax([max(rows[q][k] for rows in head) for k in before]) for q in range(length - window, length)]
            attended = pooled(mean_of(queries), kernel, "max")
            similar = alike(keys)
            scores.append(with_window([mix * attended[k] - (1 - mix) * similar[k] for k in before], window))
        found.append(ranked(scores, [capacity] * len(scores)))
    return found


def d2o_scores(layers: list[Layer], capacity: int, sinks: int) -> list[Kept]:
    """AIoT-MLSys-Lab/D2O, `D2O_LayerKVCache.__call__` before it merges, with the same budget in every layer."""
    window, found = capacity // 2, []
    for layer in layers:
        scores = []
        for rows in (rows for head in layer.weights for rows in head):
            sums = [sum(query[k] for query in rows[k:]) for k in range(len(rows) - window)]
            scores.append(with_window([inf] * sinks + sums[sinks:], window))
        found.append(ranked(scores, [capacity] * len(scores)))
    return found
