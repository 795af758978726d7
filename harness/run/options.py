"""Options of a run, and steps of keep maps (`--trace kept[=STEPS]`). This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.harness.core.errors import UserError

if TYPE_CHECKING:
    import torch

_DEFAULT_STEPS = 16  # number of steps, spread evenly over the stream; the last step of the stream is added
_EXPECTED = "expected kept, kept=all, or kept=STEPS such as kept=128,256,end"


@dataclass(frozen=True)
class KeepSteps:
    """Steps after which kept positions are recorded.

    Attributes:
        text: the user's request: empty (the default steps), "all", or a list such as "128,256,end".
    """

    text: str = ""

    @classmethod
    def from_option(cls, trace: str) -> KeepSteps:
        """Parse the value of `--trace`.

        Raises:
            UserError: the value has another form.
        """
        name, equals, text = trace.partition("=")
        words = text.split(",")
        if name.strip() != "kept" or (equals and not all(_is_step(w) for w in words) and text.strip() != "all"):
            raise UserError(f"--trace {trace}: {_EXPECTED}")
        return cls(",".join(w.strip() for w in words))

    def of(self, tokens: int) -> list[int]:
        """Return the steps of a stream, in order. A step is the index of the token that was processed last.

        Raises:
            UserError: the stream has no such step.
        """
        if self.text == "all":
            return list(range(tokens))
        if not self.text:
            parts = _DEFAULT_STEPS + 1
            return sorted({-(-tokens * part // parts) - 1 for part in range(1, parts + 1)})
        steps = sorted({tokens - 1 if word == "end" else int(word) for word in self.text.split(",")})
        if steps[-1] >= tokens:
            raise UserError(
                f"--trace kept={self.text}: the last step of a stream is {tokens - 1:,}, so there is no {steps[-1]:,}"
            )
        return steps


@dataclass(frozen=True)
class RunOptions:
    """Options of a run. They change numbers by rounding only.

    Attributes:
        data: directory of the text; the task's own source when None.
        block: T, tokens that pass a layer at once; chosen by method and free memory when None.
        walk: always read token by token inside the layers.
        fresh: measure finished cells again.
        keep: write keep maps of these steps, and measure finished cells without a keep map again; None writes no maps.
    """

    device: torch.device
    data: Path | None = None
    block: int | None = None
    walk: bool = False
    fresh: bool = False
    keep: KeepSteps | None = None


def _is_step(word: str) -> bool:
    return word.strip() == "end" or (word.strip().isascii() and word.strip().isdigit())
