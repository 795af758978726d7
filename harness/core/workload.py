"""Sizes of a cell's work, as far as the options of its task decide them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of a cell's work. `side_by_side`, `kv_streams` and `prompt` are exact; the others are for estimates.

    Attributes:
        sequences: number of texts, samples, streams or answers that are read, each with an empty cache.
        length: tokens of a sequence.
        side_by_side: smallest number of sequences whose caches are in memory at once.
        kv_streams: sequences whose bytes of K and V a record adds up.
        steps: decode steps, each of all sequences side by side.
        windows: windows that `recompute_window` computes; if None, one per token generated, or per token read without steps.
        prompt: tokens of the prompt that opens each sequence; None if prompts differ in length, 0 without a prompt.
        not_after_prompt: why the task refuses `evict: prompt`, where it knows more than that there is no prompt.
        block_of_all: a job's `block` counts the tokens of all sequences side by side, not of each.
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
            token: seconds of a token that is read in a block.
            step: seconds of a decode step of the sequences side by side.
        """
        return self.tokens * token + self.steps * step
