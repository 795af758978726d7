"""Reading on until the paired interval to a reference is narrow enough.

The difference is looked at after doubling lengths of the text. Every look's interval is corrected for the number of planned
looks (`core/intervals.py`), so the one at which reading stops holds as often as an interval of a text of fixed length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.intervals import look_lengths
from kvbench.harness.records.aggregates import nll_figures
from kvbench.harness.records.metrics import Look, Looks, NllMetrics
from kvbench.harness.report.pairing import mean_difference
from kvbench.harness.tasks.perplexity.schema import PerplexityOptions, Until


@dataclass(frozen=True)
class Precision:
    """Looks at how precisely the difference to the reference is known.

    Attributes:
        options: of the task.
        until: when to stop.
        prefix: number of tokens that open the stream.
        tokens: of the whole text.
        starts: index of each text's first token in the stream.
        capacity: of the cell, in tokens.
        reference: figures of the reference, on the whole text.
        file: of the reference's record.
    """

    options: PerplexityOptions
    until: Until
    prefix: int
    tokens: int
    starts: Sequence[int]
    capacity: int
    reference: NllMetrics
    file: str

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of the text read at each planned look."""
        return look_lengths(self.tokens, self.capacity)

    def look(self, nll: NDArray[np.float32]) -> Look:
        """The difference after the beginning of the text. nll: of the prefix and that beginning, in nats. [N]."""
        read, whole = len(nll) - self.prefix, self.prefix + self.tokens
        figures = nll_figures(
            nll, self.prefix, self.starts, self.options.stride, prompt=self.options.prompt or 0, length=whole
        )  # fmt: skip
        so_far = NllMetrics.from_json(figures | {"tokens_read": read})
        found = mean_difference(so_far, self.reference, self.capacity, self.prefix, len(self.lengths))
        low, mean, high = (None, None, None) if found is None else (found.low, found.mean, found.high)
        return Look(tokens=read, mean=mean, low=low, high=high)

    def is_narrow(self, look: Look) -> bool:
        """Whether a look's interval is as narrow as asked for."""
        return look.low is not None and look.high is not None and look.high - look.low <= 2 * self.until.interval

    def looks(self, taken: Sequence[Look]) -> Looks:
        """What the record keeps. taken: in order."""
        narrow = self.is_narrow(taken[-1])
        return Looks(
            reference=self.file, planned=len(self.lengths), taken=list(taken),
            reason="interval reached" if narrow else "limit reached",
        )  # fmt: skip
