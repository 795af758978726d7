"""Pairing of records: comparable records, their common tokens, their paired difference, and the verdict on it.

A policy that recomputes its window may score only every `stride`-th token. Other policies score all tokens and also record sums
over every `stride`-th token (`on_stride`), so that they can be compared with such a policy. Comparisons among the other policies
still use all tokens. If cells stop as soon as their interval is narrow (`until`), a column is over the beginning of the text that
all cells read. docs/statistics.md has the rule ("The same tokens").
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.intervals import MIN_BLOCKS, Ends, Interval, clustered, interval
from kvbench.harness.core.perplexity import perplexity
from kvbench.harness.records import Record
from kvbench.harness.records.beside import TraceFile
from kvbench.harness.records.figure_rules import Compared
from kvbench.harness.records.metrics import Blocks, Bucket, NllMetrics, StrideBlocks, Sums

_FIRST_BUCKET = 256  # positions


def question(record: Record) -> str:
    """Return a key of suite, model, task, version of the task, and text. Records with equal keys are comparable."""
    cell = record.cell.as_json()
    parts = [cell["suite"], cell["suite_version"], cell["model"], cell["task"], record.data.ids_sha256]
    return repr([*parts, *task_version(record)])


def task_version(record: Record) -> list[str]:
    """Return the version of a record's task in a list, which is empty for the first version."""
    return [] if record.data.task_version is None else [record.data.task_version]


def past_training(record: Record) -> bool:
    """Whether a cache that grows was read past the model's training length, so that its NLL has a trend.

    Dense grows, and so does a prompt after its cut, whose tokens are renumbered with `cache` positions.
    """
    cell, length, metrics = record.cell, record.facts.training_length, record.measured(NllMetrics)
    tokens = record.data.tokens if metrics is None else metrics.stream_tokens or record.data.tokens
    if cell.capacity is not None and (metrics is None or cell.evict != "prompt"):
        return False
    if cell.capacity is not None and cell.positions == "cache":
        tokens -= max(0, int(cell.options.get("prompt") or 0) - cell.capacity)
    return length is not None and tokens > length


def nll_interval(record: Record) -> Interval | None:
    """Return the mean NLL of the whole stream with its interval; None if not measured."""
    metrics = record.measured(NllMetrics)
    if metrics is None:
        return None
    looks = metrics.planned_looks
    nll, tokens = sums_of_texts(metrics.texts)
    if len(tokens) >= MIN_BLOCKS:
        return clustered(nll, tokens, looks)
    whole = units(metrics.all_tokens, -1, metrics.stream_tokens, len(record.data.prefix))
    if whole.independent:
        return clustered(whole.nll, whole.tokens, looks)
    result = interval(*metrics.blocks.arrays, metrics.blocks.size, record.cell.capacity or 0, looks)
    return replace(result, low=None, high=None, p=None) if past_training(record) else result


def paired(record: Record, base: Record, trend: bool = False) -> Interval | None:
    """Return the mean NLL of `record` minus that of `base`, in nats per token.

    The mean is over the tokens that both records scored after the larger cache filled. The result is None if the records can't be
    paired, or if one has a trend; then only buckets can be compared. If reading could stop early, the interval is corrected for
    the planned looks. trend: whether both records are of one cell, so that a trend cancels.
    """
    if record is base or question(record) != question(base):
        return None
    if not trend and (past_training(record) or past_training(base)):
        return None
    ours, theirs = record.measured(NllMetrics), base.measured(NllMetrics)
    if ours is None or theirs is None:
        return None
    capacity = max(record.cell.capacity or 0, base.cell.capacity or 0)
    looks = max(ours.planned_looks, theirs.planned_looks)
    return mean_difference(ours, theirs, capacity, len(record.data.prefix), looks)


def mean_difference(ours: NllMetrics, theirs: NllMetrics, capacity: int, prefix: int, looks: int = 1) -> Interval | None:
    """Return the mean NLL of `ours` minus that of `theirs`, two readings of a text, in nats per token.

    The mean is over the tokens that both readings scored after the larger cache filled; None without such tokens.

    Args:
        capacity: capacity of the larger cache, in tokens.
        prefix: number of tokens that open the text.
        looks: number of planned lengths at which reading might have stopped.
    """
    read = min((m.tokens_read for m in (ours, theirs) if m.tokens_read is not None), default=None)
    a, b = (beginning(m.all_tokens, prefix, read) for m in (ours, theirs))
    if a.tokens != b.tokens:  # one reading scored only every `stride`-th token
        if ours.on_stride is None or theirs.on_stride is None:
            return None
        a, b = (beginning(sums, prefix, read) for sums in (ours.on_stride, theirs.on_stride))
    if a.size != b.size:
        return None
    of_ours, of_theirs = (units(x, capacity, ours.stream_tokens, prefix) for x in (a, b))
    if not np.array_equal(of_ours.tokens, of_theirs.tokens) or of_ours.tokens.sum() == 0:
        return None
    difference = of_ours.nll - of_theirs.nll
    if of_ours.independent:
        return clustered(difference, of_ours.tokens, looks)
    return interval(difference, of_ours.tokens, a.size, capacity, looks)


def mean_nll(record: Record, capacity: int, read: int | None = None) -> float | None:
    """Return the mean NLL over the tokens on which caches of a capacity are compared; None if not measured.

    These tokens come after a cache of `capacity` tokens has filled. If no token is left, all tokens are used. read: number of
    first tokens of the text to use; None: all.
    """
    metrics, prefix = record.measured(NllMetrics), len(record.data.prefix)
    if metrics is None:
        return None
    blocks = beginning(metrics.all_tokens, prefix, read)
    nll, tokens, _ = units(blocks, capacity, metrics.stream_tokens, prefix)
    if not tokens.sum():
        nll, tokens = blocks.arrays
    return float(nll.sum() / tokens.sum()) if tokens.sum() else metrics.nll


class Units(NamedTuple):
    """Units over which an interval is computed, after a cache has filled.

    Attributes:
        nll: sum of NLL in each unit. [n].
        tokens: number of tokens in each unit. [n].
        independent: whether units are texts, or streams that each begin with an empty cache; else consecutive runs of tokens.
    """

    nll: NDArray[np.float64]
    tokens: NDArray[np.float64]
    independent: bool


def units(blocks: StrideBlocks, capacity: int, stream_tokens: int | None, prefix: int) -> Units:
    """Return the units: texts if more than `MIN_BLOCKS`, else streams if at least `MIN_BLOCKS`, else runs of tokens.

    Args:
        capacity: capacity of the larger cache, in tokens.
        stream_tokens: tokens of text per stream; None if there is one stream.
        prefix: number of tokens that open the text.
    """
    nll, tokens = sums_of_texts(blocks.texts)
    if len(tokens) > MIN_BLOCKS:
        return Units(nll[1:], tokens[1:], True)  # the caches filled during the first text
    nll, tokens = blocks.arrays
    full = after_filling(len(tokens), blocks.size, capacity, stream_tokens, prefix)
    nll, tokens = nll[full], tokens[full]
    if stream_tokens is not None:
        streams = ((np.arange(len(full)) * blocks.size - prefix) // stream_tokens)[full]
        firsts = np.flatnonzero(np.diff(streams, prepend=-1))
        if len(firsts) >= MIN_BLOCKS:
            return Units(np.add.reduceat(nll, firsts), np.add.reduceat(tokens, firsts), True)
    return Units(nll, tokens, False)


def after_filling(runs: int, size: int, capacity: int, stream_tokens: int | None, prefix: int) -> NDArray[np.bool_]:
    """Return which runs of `size` positions lie entirely after the cache has filled, in each stream. [runs] bool."""
    starts = np.arange(runs) * size
    if stream_tokens is None:
        return starts >= capacity + 1
    position = (starts - prefix) % stream_tokens
    return (position >= capacity + 1) & (position + size <= stream_tokens)


def beginning(sums: StrideBlocks, prefix: int, read: int | None) -> StrideBlocks:
    """Return the sums over the first `read` tokens of a text, in whole runs and whole texts; all sums if `read` is None.

    prefix: number of tokens that open the text.
    """
    if read is None:
        return sums
    runs, of_texts = (prefix + read) // sums.size, sums.texts
    tokens = sums.tokens[:runs]
    texts = bisect_right(list(accumulate(of_texts.tokens)), sum(tokens))
    whole = Sums.model_construct(nll_sum=of_texts.nll_sum[:texts], tokens=of_texts.tokens[:texts])
    return StrideBlocks.model_construct(nll_sum=sums.nll_sum[:runs], tokens=tokens, size=sums.size, texts=whole)


def sums_of_texts(texts: Sums) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (sum of NLL, tokens) of each text that has scored tokens. [n] each."""
    nll, tokens = texts.arrays
    return nll[tokens > 0], tokens[tokens > 0]


class Common(NamedTuple):
    """Tokens of a column.

    Attributes:
        stride: distance between the tokens.
        read: number of first tokens of the text to which the column is limited; None: no limit.
    """

    stride: int = 1
    read: int | None = None

    @property
    def are_all(self) -> bool:
        """Whether these are all tokens that each record scored."""
        return self == Common()


def scores_all(record: Record) -> bool:
    """Whether a record has the NLL of every token, not only of every `stride`-th."""
    metrics = record.measured(NllMetrics)
    return metrics is None or metrics.on_stride is None or metrics.on_stride.tokens != metrics.blocks.tokens


def stride_of(record: Record) -> int:
    """Return the distance between the tokens that are scored when the window is recomputed."""
    return int(record.cell.options.get("stride", 1))


def strided(record: Record) -> str:
    """Return the label of the scored tokens; empty if a record scored all."""
    return "" if scores_all(record) else f" (1 token in {stride_of(record)})"


def common_tokens(records: Sequence[Record]) -> Common:
    """Return the tokens that all records scored, without regard to records that scored only every `stride`-th token."""
    scored = [r for r in records if r.measured(NllMetrics)]
    read = {r.tokens_read for r in scored} if any(r.metrics.tokens_read for r in scored) else set()
    return Common(1, min(read) if len(read) > 1 else None)


def strided_tokens(records: Sequence[Record]) -> Common:
    """Return the tokens that all records scored, including records that scored only every `stride`-th token."""
    stride = next((stride_of(r) for r in records if r.measured(NllMetrics) and not scores_all(r)), 1)
    return common_tokens(records)._replace(stride=stride)


def on_common(record: Record, common: Common) -> Record | None:
    """Return the record as if it had scored only these tokens; None if it failed or has no sums over them."""
    if record.status != "ok":
        return None
    if common.are_all:
        return record
    metrics = record.measured(NllMetrics)
    sums = None if metrics is None else metrics.all_tokens if common.stride == 1 else metrics.on_stride
    if metrics is None or sums is None:
        return None
    shared = beginning(sums, len(record.data.prefix), common.read)
    tokens = sum(shared.tokens)
    nll = sum(shared.nll_sum) / tokens
    blocks = Blocks.model_construct(nll_sum=shared.nll_sum, tokens=shared.tokens, size=shared.size)
    figures = {"tokens": tokens, "nll": nll, "perplexity": perplexity(nll), "blocks": blocks, "texts": shared.texts}
    figures |= {"on_stride": shared if common.stride > 1 else None, "buckets": _buckets(metrics, shared)}
    return replace(record, metrics=metrics.model_copy(update=figures))


def describe_tokens(records: Sequence[Record], common: Common) -> str:
    """Describe the tokens that every row covers."""
    if common.read is not None:
        return f"the first {common.read:,} tokens, which every row read" + (f", one in {common.stride}" * (common.stride > 1))
    scored = next((m.on_stride for r in records if (m := r.measured(NllMetrics)) and not scores_all(r)), None)
    if scored is None:
        return "all tokens"
    return f"the {sum(scored.tokens):,} tokens that every row scored, one in {common.stride}"


def _buckets(metrics: NllMetrics, shared: StrideBlocks) -> list[Bucket]:
    """Return the mean NLL by position in doubling buckets; empty for several streams, whose blocks span different positions."""
    if metrics.stream_tokens is not None or not metrics.buckets:
        return []
    size, end = shared.size, min(metrics.buckets[-1].to, len(shared.tokens) * shared.size)
    low, high, buckets = 0, max(_FIRST_BUCKET, size), []
    while low < end:
        runs = slice(low // size, high // size)
        tokens = sum(shared.tokens[runs])
        if tokens:
            mean = sum(shared.nll_sum[runs]) / tokens
            buckets.append(Bucket.model_construct(from_=low, to=min(high, end), tokens=tokens, nll=mean))
        low, high = high, 2 * high
    return buckets


Verdict = Literal["better", "worse", "same", "can't tell"]
Traces = tuple[TraceFile | None, TraceFile | None]  # of two records, where available


@dataclass(frozen=True)
class Difference:
    """Difference of two records in a metric, of which they have the figures `a` and `b`, with the verdict on `b`.

    Attributes:
        change: b - a; for `step_ms`, b / a - 1; None if unknown.
        low: lower end of the 95 % interval of `change`; None without an interval.
        high: upper end of the interval.
        why: explanation of the verdict, if the figures alone don't explain it.
    """

    metric: str
    a: float | None
    b: float | None
    change: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    why: str = ""

    @classmethod
    def judged(
        cls, metric: str, a: float, b: float, change: float | None, ends: Ends | None, mark: Compared | None, why: str = ""
    ) -> Self:
        """Return a difference with the verdict that follows from its interval. mark: margin and direction of the metric."""
        low, high = ends or (None, None)
        verdict: Verdict = "can't tell" if mark is None else judge_interval(low, high, mark.margin, mark.more_is_better)
        return cls(metric, a, b, change, low, high, verdict, why)


def judge_interval(low: float | None, high: float | None, margin: float, more_is_better: bool = False) -> Verdict:
    """Return the verdict on a change with this interval; "same" if the interval lies within the margin."""
    if low is None or high is None:
        return "can't tell"
    if -margin <= low and high <= margin:
        return "same"
    if low > 0 or high < 0:
        return "better" if (low > 0) == more_is_better else "worse"
    return "can't tell"
