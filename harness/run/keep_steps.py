"""Which steps a keep map holds: the option `--trace kept[=STEPS]`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.harness.core.errors import UserError

_DEFAULT_STEPS = 16  # spread evenly over the stream, before the last one
_EXPECTED = "expected kept, kept=all, or kept=STEPS such as kept=128,256,end"


@dataclass(frozen=True)
class KeepSteps:
    """The steps after which to note what is kept.

    Attributes:
        text: what the user asked for: empty (the default steps), "all", or a list such as "128,256,end".
    """

    text: str = ""

    @classmethod
    def from_option(cls, trace: str) -> KeepSteps:
        """Parse the value of `--trace`.

        Raises:
            UserError: it is something else.
        """
        name, equals, text = trace.partition("=")
        words = text.split(",")
        if name.strip() != "kept" or (equals and not all(_is_step(w) for w in words) and text.strip() != "all"):
            raise UserError(f"--trace {trace}: {_EXPECTED}")
        return cls(",".join(w.strip() for w in words))

    def of(self, tokens: int) -> list[int]:
        """The steps of a stream, in order. A step is the index of the token that was processed last.

        Args:
            tokens: that are read of the stream.

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


def _is_step(word: str) -> bool:
    return word.strip() == "end" or (word.strip().isascii() and word.strip().isdigit())
