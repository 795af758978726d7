"""Sizes of a cell's work, as far as the options of its task decide them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of a cell's work. `side_by_side`, `kv_streams` and `prompt` are exact; the others are for estimates.

    Attributes:
        sequences: number of texts, samples, streams or answers that are read, each starting with an empty cache.
        length: tokens of a sequence.
        side_by_side: smallest number of sequences whose caches are in memory at once.
        kv_streams: number of sequences whose bytes of K and V are summed in a record.
        steps: decode steps, each for all sequences side by side.
        windows: windows that `recompute_window` computes; None: one per generated token, or per token read if there are no steps.
        prompt: tokens of the prompt that opens each sequence; None if prompts differ in length, 0 without a prompt.
        not_after_prompt: reason that the task refuses `evict: prompt`; empty: the task refuses it only without a prompt.
        block_of_all: whether a job's `block` counts the tokens of all sequences side by side, not of each sequence.
        reference: policy whose record a cell at the same capacity needs while it is measured (`Job.reference`). The policy takes
            no parameters; its own cell is measured first and needs no reference.
    """

    sequences: int
    length: int
    side_by_side: int = 1
    kv_streams: int = 1
    steps: int = 0
    windows: float | None = None
    prompt: int | None = 0
    not_after_prompt: str = ""
    block_of_all: bool = False
    reference: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.sequences * self.length

    @property
    def recomputed_windows(self) -> float:
        """Windows that `recompute_window` computes."""
        return self.windows if self.windows is not None else self.steps * self.side_by_side or self.tokens

    def seconds(self, token: float, step: float) -> float:
        """Estimate the seconds of the measurement.

        Args:
            token: seconds per token that is read in a block.
            step: seconds per decode step of the sequences side by side.
        """
        return self.tokens * token + self.steps * step
