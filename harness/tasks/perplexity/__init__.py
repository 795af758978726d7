"""Perplexity of a long text, read as one stream with a cache that is never reset.

Source: Xiao et al. 2023, arXiv:2309.17453, Section 4.1 (PG19, books concatenated, token by token).
Differs: text is tokenised without special tokens and opened once by the tokenizer's own BOS (the release puts one before
every book). A block of tokens passes one layer at a time, which gives the same numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.records import Record, read
from kvbench.harness.records.aggregates import nll_figures
from kvbench.harness.records.metrics import Looks, Metrics, NllMetrics
from kvbench.harness.report import compare
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.pairing import question
from kvbench.harness.report.task import Difference, Traces
from kvbench.harness.tasks.perplexity import page
from kvbench.harness.tasks.perplexity.schema import PerplexityMetrics, PerplexityOptions, Precision
from kvbench.harness.tasks.task import Independent, Job, Options, Task, Tokenizer

if TYPE_CHECKING:
    from kvbench.harness.core.evict import Evict
    from kvbench.harness.data.stream import TokenStream


class Perplexity(Task):
    """NLL of each token, given what the cache holds of the stream before it."""

    options: ClassVar[type[Options]] = PerplexityOptions
    metrics: ClassVar[type[Metrics]] = PerplexityMetrics
    trace: ClassVar[str | None] = ".nll.npy"
    named_by: ClassVar[tuple[str, ...]] = ("data", "book")
    shown_options: ClassVar[tuple[str, ...] | None] = ("data", "split", "tokens", "book", "streams", "prompt")

    @staticmethod
    def data(options: PerplexityOptions, tokenizer: Tokenizer, directory: Path | None) -> TokenStream:
        """Books of the split or generated prose, up to `tokens`."""
        from kvbench.harness.data.stream import newline, stream
        from kvbench.harness.data.texts import texts

        source, books = texts(options.data, options.split, options.book, options.data_seed or 0, options.tokens, directory)
        prefix = None if options.newlines is None else [newline(tokenizer())] * options.newlines
        return stream(books, source, tokenizer(), options.tokens, prefix, short=options.book is not None)

    @staticmethod
    def total(options: PerplexityOptions) -> int:
        """All tokens."""
        return options.tokens

    @classmethod
    def streams(cls, options: PerplexityOptions) -> int:
        """The number of streams that the text is cut into."""
        return options.streams or 1

    @classmethod
    def at_once(cls, options: PerplexityOptions) -> int:
        """As many as are asked for, one if a trial decides."""
        streams, asked = cls.streams(options), options.side_by_side
        return 1 if asked == "auto" else min(streams, asked or streams)

    @classmethod
    def independent(cls, options: PerplexityOptions, data: TokenStream) -> Independent | None:
        """The streams, unless all of them must be read at once."""
        if options.side_by_side is None:
            return None
        streams = cls.streams(options)
        length = data.prefix + data.tokens // streams - 1
        return Independent(streams, length, None if options.side_by_side == "auto" else cls.at_once(options))

    @classmethod
    def reference(cls, options: PerplexityOptions) -> str | None:
        """The policy whose difference to the cell decides how far the text is read."""
        return None if options.until is None else options.until.reference

    @classmethod
    def tokens_read(cls, options: PerplexityOptions, data: TokenStream) -> int | None:
        """All of a stream but its last token, which no token follows; None if reading may stop early."""
        return None if options.until is not None else data.prefix + data.tokens // cls.streams(options) - 1

    @classmethod
    def prompt_tokens(cls, options: PerplexityOptions) -> int | None:
        """The tokens of each stream that are its prompt, without the prefix."""
        return options.prompt

    @classmethod
    def why_not(cls, options: PerplexityOptions, evict: Evict) -> str:
        """Eviction after a prompt needs the option `prompt`."""
        refused = super().why_not(options, evict)
        return f"{refused}: give it prompt: TOKENS" if refused else ""

    @classmethod
    def windows(cls, options: PerplexityOptions) -> float:
        """One per scored token."""
        return (options.tokens - cls.streams(options) * (options.prompt or 0)) / options.stride

    @staticmethod
    def run(options: PerplexityOptions, job: Job) -> PerplexityMetrics:
        """Score the stream; the trace gets one float32 NLL per token, NaN for tokens that are not scored."""
        from kvbench.harness.tasks.perplexity.measure import measure

        return measure(options, job)

    @classmethod
    def from_trace(cls, record: Record, trace: Path) -> Mapping[str, Any]:
        """All figures but bytes and the costs of facts, which need the text."""
        nll, metrics, prefix = np.load(trace, mmap_mode="r"), record.measured(NllMetrics), len(record.data.prefix)
        options = record.cell.task_options(PerplexityOptions)
        assert metrics is not None
        whole = len(nll) if metrics.tokens_read is None else prefix + record.data.tokens
        figures = nll_figures(nll, prefix, [0], options.stride, cls.streams(options), options.prompt or 0, whole)
        if metrics.looks is not None:
            figures |= {"tokens_read": len(nll) - prefix} | _looks(record, metrics.looks, nll, trace.parent)
        figures["texts"] = _text_sums(nll[np.isfinite(nll)], metrics.texts.tokens)
        if "on_stride" in figures:
            on_stride = record.metrics.as_json()["on_stride"]
            figures["on_stride"] |= {"texts": on_stride["texts"]}
            if sum(on_stride["texts"]["tokens"]) != sum(on_stride["tokens"]):
                raise ValueError("on_stride: texts and runs differ in their number of tokens")
        return figures

    @classmethod
    def derived(cls, record: Record) -> Iterator[tuple[str, Any]]:
        """Perplexity, and bits per byte; older records lack the bytes."""
        metrics = record.measured(NllMetrics)
        assert metrics is not None
        yield "perplexity", math.exp(min(metrics.nll, 700.0))
        if metrics.bytes is not None:
            yield "bits_per_byte", metrics.nll * metrics.tokens / math.log(2) / max(1, metrics.bytes)

    @classmethod
    def cached_tokens(cls, record: Record) -> tuple[int, int] | None:
        """Those between steps; if the cache is unbounded, all tokens of a stream but the last, which is never read."""
        if record.cell.capacity is not None or record.cell.evict == "prompt":
            return super().cached_tokens(record)
        streams = cls.streams(record.cell.task_options(PerplexityOptions))
        return streams, len(record.data.prefix) + record.data.tokens // streams - 1

    @classmethod
    def headline(cls, record: Record) -> str:
        """Perplexity over all tokens that the record scored."""
        return page.headline(record)

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Perplexity, paired differences, charts, and tables by position."""
        return page.body(records)

    @classmethod
    def differences(cls, a: Record, b: Record, traces: Traces) -> list[Difference]:
        """NLL, paired by token."""
        return compare.nll(a, b, traces)


def _looks(record: Record, looks: Looks, nll: NDArray[np.float32], folder: Path) -> dict[str, Any]:
    """The looks, taken again as long as the intervals are not narrow; none if the reference's record is not in the folder."""
    options, base = record.cell.task_options(PerplexityOptions), read(folder / looks.reference)
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
    """Index of each text's first scored token. counts: scored tokens of each text."""
    scored = np.flatnonzero(np.isfinite(nll))
    return [0, *(int(scored[n]) for n in itertools.accumulate(counts[:-1]))]


def _text_sums(values: Any, counts: list[int]) -> dict[str, Any]:
    """NLL and number of scored tokens of each text."""
    ends = np.cumsum(counts)
    if not len(ends) or ends[-1] != len(values):
        raise ValueError(f"the texts have {sum(counts)} scored tokens, but the trace has {len(values)}")
    sums = [float(part.sum(dtype=np.float64)) for part in np.split(values, ends[:-1])]
    return {"nll_sum": [round(x, 5) for x in sums], "tokens": counts}
