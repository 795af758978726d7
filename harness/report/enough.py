"""How much text a table of perplexities needs for intervals, and about how long reading it takes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvbench.harness.core.durations import about
from kvbench.harness.core.intervals import MIN_BLOCK_TOKENS, MIN_BLOCKS, long_enough
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics
from kvbench.harness.report.pairing import on_all_tokens, units

_STEP = 4096  # what a number of tokens is rounded up to
_RUNS = 128  # tokens that a stream should have beyond those that fill its cache: a few runs


def longer_text(records: Sequence[Record]) -> str:
    """What to set so that the text has an interval, and the time that takes; empty if it has one.

    Args:
        records: of one text, of policies of any capacity.
    """
    scored = [(r, metrics) for r in records if (metrics := r.measured(NllMetrics))]
    if not scored:
        return ""
    record, metrics = scored[0]
    capacity = max(r.cell.capacity or 0 for r, _ in scored)
    read = units(on_all_tokens(metrics), capacity, metrics.stream_tokens, len(record.data.prefix))
    if read.independent or long_enough(len(read.tokens), metrics.blocks.size, capacity):
        return ""
    if metrics.stream_tokens is None:
        needed = MIN_BLOCKS * max(MIN_BLOCK_TOKENS, 2 * capacity) + capacity + _RUNS
        tokens = _STEP * math.ceil(needed / _STEP)
        setting = f"--set tokens={tokens}"
    else:
        streams = max(MIN_BLOCKS, record.data.tokens // metrics.stream_tokens)
        tokens = streams * max(metrics.stream_tokens, 2 * capacity + _RUNS)
        setting = f"--set streams={streams} --set tokens={tokens}"
    seconds = sum(r.facts.seconds or 0.0 for r, _ in scored) * tokens / max(1, record.data.tokens)
    return f"{setting}, {about(seconds)}"
