"""Perplexity of a long text, read as one stream with a cache that is never reset.

Source: Xiao et al. 2023, arXiv:2309.17453, Section 4.1 (PG19, books concatenated, token by token).
Differs: text is tokenised without special tokens, after a single BOS of the tokenizer (the release puts a BOS before every
book). A block of tokens passes one layer at a time, which gives the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.perplexity import perplexity
from kvbench.harness.data.stream import TokenStream, newline, stream
from kvbench.harness.data.texts import texts
from kvbench.harness.records import Record
from kvbench.harness.records.aggregates import nll_figures
from kvbench.harness.records.beside import TraceFile, read_beside
from kvbench.harness.records.metrics import Looks, NllMetrics
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.markdown import digits, md, measured_table, number, policy_table, rounded, with_ends
from kvbench.harness.report.pairing import (
    Common,
    common_tokens,
    describe_tokens,
    nll_interval,
    on_common,
    paired,
    past_training,
    question,
    scores_all,
    strided,
    strided_tokens,
)
from kvbench.harness.report.rows import kv_cells
from kvbench.harness.report.task_charts import over_the_stream
from kvbench.harness.tasks.perplexity.perplexity_options import PerplexityMetrics, PerplexityOptions, Precision
from kvbench.harness.tasks.task import Job, Task, Tokenizer, Workload


class Perplexity(Task):
    """NLL of each token, given the tokens of the stream that the cache holds."""

    options = PerplexityOptions
    metrics = PerplexityMetrics
    trace = ".nll.npy"

    @staticmethod
    def data(options: PerplexityOptions, tokenizer: Tokenizer, directory: Path | None) -> TokenStream:
        """Return the first `tokens` tokens of books of the split or of generated prose."""
        source, books = texts(options.data, options.split, options.book, options.data_seed or 0, options.tokens, directory)
        prefix = None if options.newlines is None else [newline(tokenizer())] * options.newlines
        return stream(books, source, tokenizer(), options.tokens, prefix, short=options.book is not None)

    @classmethod
    def workload(cls, options: PerplexityOptions) -> Workload:
        """Return streams of equal length. A window is recomputed for each scored token."""
        streams, prompt = options.streams or 1, options.prompt or 0
        return Workload(
            sequences=streams,
            length=options.tokens // streams,
            side_by_side=min(streams, options.side_by_side or streams),
            kv_streams=streams,
            windows=(options.tokens - streams * prompt) / options.stride,
            prompt=prompt,
            reference=options.until.reference if options.until else None,
        )

    @classmethod
    def tokens_read(cls, options: PerplexityOptions, data: TokenStream) -> int | None:
        """Return the tokens of a stream except the last, which predicts nothing; None if reading may stop early."""
        return None if options.until is not None else data.prefix + data.tokens // (options.streams or 1) - 1

    @staticmethod
    def run(options: PerplexityOptions, job: Job) -> PerplexityMetrics:
        """Score the stream, and write one float32 NLL per token to the trace, NaN for tokens that are not scored."""
        from kvbench.harness.tasks.perplexity.score_text import measure

        return measure(options, job)

    @classmethod
    def from_trace(cls, record: Record, trace: IO[bytes]) -> Mapping[str, Any]:
        """Recompute all figures from the trace, except bytes and the costs of facts, which need the text."""
        nll, metrics, prefix = np.load(trace), record.measured(NllMetrics), len(record.data.prefix)
        options = record.cell.task_options(PerplexityOptions)
        assert metrics is not None
        whole = len(nll) if metrics.tokens_read is None else prefix + record.data.tokens
        figures = nll_figures(nll, prefix, [0], options.stride, options.streams or 1, options.prompt or 0, whole)
        if metrics.looks is not None and isinstance(trace, TraceFile):
            figures |= {"tokens_read": len(nll) - prefix} | _looks(record, metrics.looks, nll, trace.folder)
        figures["texts"] = _text_sums(nll[np.isfinite(nll)], metrics.texts.tokens)
        if "on_stride" in figures:
            on_stride = record.metrics.as_json()["on_stride"]
            figures["on_stride"] |= {"texts": on_stride["texts"]}
            if sum(on_stride["texts"]["tokens"]) != sum(on_stride["tokens"]):
                raise ValueError("on_stride: texts and runs differ in their number of tokens")
        return figures

    @classmethod
    def cached_tokens(cls, record: Record) -> int | None:
        """Return the largest number of a stream's tokens in the cache. An unbounded cache holds all but the unread last token."""
        if record.cell.capacity is not None or record.cell.evict == "prompt":
            return super().cached_tokens(record)
        return len(record.data.prefix) + record.data.tokens // (record.cell.task_options(PerplexityOptions).streams or 1) - 1

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Return perplexity, paired differences, charts, and tables by position."""
        return _page(records)


def _looks(record: Record, looks: Looks, nll: NDArray[np.float32], folder: Path) -> dict[str, Any]:
    """Recompute the looks until an interval is narrow enough; empty if the reference's record is not in the folder.

    Raises:
        ValueError: the file of the reference is the record of another cell.
    """
    options, base = record.cell.task_options(PerplexityOptions), read_beside(record, looks.reference, folder)
    figures = base.measured(NllMetrics) if isinstance(base, Record) else None
    if not isinstance(base, Record) or figures is None or options.until is None:
        return {}
    if base.cell.policy != options.until.reference or question(base) != question(record):
        raise ValueError(f"{looks.reference} is not the record of its reference")
    prefix, metrics = len(record.data.prefix), record.measured(NllMetrics)
    assert metrics is not None
    starts = _text_starts(nll, metrics.texts.tokens)
    precision = Precision(
        options, options.until, prefix, record.data.tokens, starts, record.cell.capacity or 0, figures, looks.reference
    )
    taken = []
    for length in precision.lengths:
        taken.append(precision.look(nll[: prefix + length]))
        if precision.is_narrow(taken[-1]) or length >= len(nll) - prefix:
            break
    return {"looks": precision.looks(taken).model_dump()}


def _text_starts(nll: NDArray[np.float32], counts: list[int]) -> list[int]:
    """Return the index of each text's first scored token, or of the next text's if the text has none.

    Args:
        counts: number of scored tokens of each text.
    """
    scored = [*np.flatnonzero(np.isfinite(nll)), len(nll)]
    return [0, *(int(scored[n]) for n in itertools.accumulate(counts[:-1]))]


def _text_sums(values: Any, counts: list[int]) -> dict[str, Any]:
    """Return the summed NLL and the number of scored tokens of each text."""
    ends = np.cumsum(counts)
    if not len(ends) or ends[-1] != len(values):
        raise ValueError(f"the texts have {sum(counts)} scored tokens, but the trace has {len(values)}")
    sums = [float(part.sum(dtype=np.float64)) for part in np.split(values, ends[:-1])]
    return {"nll_sum": [round(x, 5) for x in sums], "tokens": counts}


def _page(records: Sequence[Record]) -> list[str | Chart]:
    """Return the description, the table, the chart over the stream, and tables by position."""
    data, options = records[0].data, records[0].cell.task_options(PerplexityOptions)
    prefix, kind, common = len(data.prefix), " newlines" if options.newlines else "", common_tokens(records)
    about = (
        f"{md(options.name)} on {md(data.source or '?')}, {number(data.tokens)} tokens"
        f"{f' after a prefix of {prefix}{kind}' if prefix else ''}"
        f"{f', cut into {options.streams} streams' if options.streams else ''}."
    )
    about += "" if common.are_all else f" Perplexity is over {describe_tokens(records, common)}; bits/byte are over all tokens."
    about += _until(options, records)
    thin = strided_tokens(records)
    complete = [r for r in records if r.status == "ok" and scores_all(r)]
    return [
        about + "\n",
        *_table(records, common),
        *over_the_stream(records),
        *_not_in_chart(records, thin.stride),
        *_buckets(complete),
        *_common_buckets(records, thin),
        *_facts(records),
    ]


def _until(options: PerplexityOptions, records: Sequence[Record]) -> str:
    """Describe when reading stopped, and the number of looks for which intervals are corrected."""
    if options.until is None:
        return ""
    looks = max((m.planned_looks for r in records if (m := r.measured(NllMetrics))), default=1)
    return (
        f" Each policy was read until the 95 % interval of its Δ NLL to {md(options.until.reference)} was at most "
        f"±{options.until.interval:g} nats, or to the end; intervals are corrected for {looks} planned looks."
    )


def _table(records: Sequence[Record], common: Common) -> list[str]:
    """Return the table of perplexities and differences. Perplexity on all tokens has a column if `common` are fewer."""
    dense = next((r for r in records if r.cell.is_dense), None)
    recompute = {r.cell.capacity: r for r in records if r.cell.policy == "recompute_window"}
    on_all, may_stop = not common.are_all, any(r.metrics.tokens_read for r in records)

    def row(record: Record, metrics: NllMetrics) -> dict[str, str]:
        whole_text = scores_all(record)
        return {
            "tokens read": _read(record, metrics) if may_stop else "",
            "perplexity": _perplexity(on_common(record, common)) + strided(record),
            "on all tokens": _perplexity(record) if on_all and whole_text else "",
            "bits/byte": f"{metrics.bits_per_byte:.3f}" if whole_text and metrics.bits_per_byte is not None else "",
            "Δ NLL to dense": _difference(record, dense),
            "Δ NLL to recompute": _difference(record, recompute.get(record.cell.capacity)),
            **kv_cells(record, records),
            "tokens/s": rounded(record.facts.tokens_per_second),
        }

    return measured_table(records, NllMetrics, row)


def _read(record: Record, metrics: NllMetrics) -> str:
    """Return the tokens read, with "(limit)" if the text ended before the interval was narrow enough."""
    limit = metrics.looks is not None and metrics.looks.reason == "limit reached"
    return number(record.tokens_read) + (" (limit)" if limit else "")


def _perplexity(record: Record | None) -> str:
    mean = None if record is None else nll_interval(record)
    if record is None or mean is None:
        return ""
    has_trend = past_training(record)
    ends = None if has_trend or mean.ends is None else [perplexity(end) for end in mean.ends]
    return with_ends(perplexity(mean.mean), ends, digits, " (trend)" if has_trend else " (too short)")


def _difference(record: Record, base: Record | None) -> str:
    if base is None or base is record:
        return "" if base is None else "0"
    if past_training(base) or past_training(record):
        return "trend"
    difference = paired(record, base)
    return "" if difference is None else with_ends(difference.mean, difference.ends, "{:+.4f}".format)


def _not_in_chart(records: Sequence[Record], stride: int) -> list[str]:
    return [f"Not in the chart: {_recompute(records)}, which scored one token in {stride}.\n"] if stride > 1 else []


def _recompute(records: Sequence[Record]) -> str:
    """Return the names of the policies that scored only some tokens."""
    return md(" and ".join(dict.fromkeys(r.cell.policy for r in records if r.status == "ok" and not scores_all(r))))


def _buckets(records: Sequence[Record], which_tokens: str = "") -> list[str]:
    """Return a table of perplexity by position in the stream."""
    measured = [(r, m.buckets) for r in records if (m := r.measured(NllMetrics)) and m.buckets]
    if not measured:
        return []
    rows = [(r, {(b.from_, b.to): digits(perplexity(b.nll)) for b in buckets}) for r, buckets in measured]
    length = measured[0][0].facts.training_length
    trained = f" (training length {number(length)})" if length else ""
    about = f"Perplexity by position in the stream{which_tokens}{trained}:\n"
    return [about, *policy_table(rows, records, lambda ends: f"{ends[0]:,} to {ends[1]:,}")]


def _common_buckets(records: Sequence[Record], common: Common) -> list[str]:
    """Return a folded table by position over the tokens that every row scored; empty if every row scored all tokens."""
    shared = [same for r in records if (same := on_common(r, common)) is not None] if common.stride > 1 else []
    lines = _buckets(shared, f", over {describe_tokens(records, common)}")
    return [f"<details><summary>By position, with {_recompute(records)}</summary>\n", *lines, "</details>\n"] if lines else []


def _facts(records: Sequence[Record]) -> list[str]:
    """Return a table of the NLL of facts in generated prose, by distance to their previous mention."""
    measured = [(r, m.facts) for r in records if (m := r.measured(PerplexityMetrics)) and m.facts]
    if not measured:
        return []
    # By the range of words since the previous mention; (0, 0) for a first mention.
    rows = [(r, {tuple(f.words_back or (0, 0)): f"{f.nats:.2f}" for f in facts}) for r, facts in measured]
    drawn = measured[0][1][0].drawn_nats
    return [
        f"NLL of a fact in nats, by words since its previous mention. A new fact is one of "
        f"{round(perplexity(drawn))}, so it costs {drawn:.2f} nats; a model that remembers it pays almost none:\n",
        *policy_table(rows, records, lambda words: f"{words[0]:,} to {words[1]:,}" if words[1] else "first mention"),
    ]
