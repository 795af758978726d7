"""Rules by which the gate checks figures. A rule annotates a figure's field; a field without a rule fails the gate."""

from __future__ import annotations

import math
import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel

Scope = Literal["everywhere", "same machine", "bounded"]

# Tolerances for two runs on one machine, where only rounding may differ. Unchanged runs gave the same bits (docs/gate.md); the
# tolerances allow for another block size.
MEAN_NATS = 2e-5  # for a mean over all tokens
PART_NATS = 1e-4  # for a mean over some tokens
RUN_NATS = 4e-3  # for a sum over a run of at least 32 tokens
SUM = 2e-5  # relative, for long sums and figures computed from means


@dataclass(frozen=True)
class Checked:
    """A figure that must equal the baseline's.

    Attributes:
        check: name of the check that reports a difference.
        absolute: largest difference allowed; 0 for equality.
        relative: largest difference allowed, as a share of the baseline's figure; the larger of the two bounds applies.
        scope: records that are checked. "everywhere": all records. "same machine": records in float32 with equal device,
            instructions, threads and torch, where sums round alike. "bounded": records of a bounded cache, because the size of a
            dense cache depends on the number of timed steps.
    """

    check: str = "figures"
    absolute: float = 0.0
    relative: float = 0.0
    scope: Scope = "everywhere"

    def allows(self, base: Any, now: Any) -> bool:
        """Whether the new record may have `now` where the baseline has `base`."""
        numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (base, now))
        if not numbers:
            return bool(base == now)
        return math.isclose(base, now, rel_tol=0.0, abs_tol=max(self.absolute, self.relative * abs(base)))


@dataclass(frozen=True)
class Elsewhere:
    """A figure that another check of the gate compares."""

    check: str


@dataclass(frozen=True)
class Unchecked:
    """A figure that the gate does not check."""

    because: str


Rule = Checked | Elsewhere | Unchecked


@dataclass(frozen=True)
class Compared:
    """A figure that `bench compare` gives a verdict on.

    Attributes:
        margin: largest change that does not matter in practice.
        more_is_better: whether a larger figure is better.
        sums: name of the list of the figure's sums over each sample ("sums.kl"), by which records of `SampleMetrics` are paired.
    """

    margin: float
    more_is_better: bool
    sums: str = ""


def near(absolute: float = 0.0, relative: float = 0.0) -> Checked:
    """Return a rule that figures of the same machine are equal up to rounding."""
    return Checked(absolute=absolute, relative=relative, scope="same machine")


EXACT = Checked()
ANSWERED = Checked(check="answers", scope="same machine")
BYTES = Checked(check="bytes")
BYTES_IF_BOUNDED = Checked(check="bytes", scope="bounded")
MACHINE = Unchecked("a fact about the machine; figures that depend on it are compared only if it is equal")
TIME = Unchecked("one absolute time; the gate compares ratios of steps at the end of the stream")
CODE = Unchecked("shows that code changed; the figures show whether that matters")


@cache
def rule_in(model: type[BaseModel], path: tuple[str, ...]) -> Rule | None:
    """Return the rule of a figure's field, or of the innermost enclosing field that has a rule.

    Args:
        path: JSON keys and list indices that lead to the figure: ("buckets", "3", "nll").
    """
    field = next((f for name, f in model.model_fields.items() if path[0] in (name, f.alias)), None)
    if field is None:
        others: Rule | None = getattr(model, "other_fields", None)
        return others
    own = next((m for m in field.metadata if isinstance(m, (Checked, Elsewhere, Unchecked))), None)
    return _inside(field.annotation, path[1:]) or own


def _inside(annotation: Any, path: tuple[str, ...]) -> Rule | None:
    """Return the rule of a figure inside a field's annotation. `path` starts below the field."""
    if not path:
        return None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return rule_in(annotation, path)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return next((rule for part in inner if (rule := _inside(part, path))), None)
    if origin is typing.Annotated:
        return _inside(inner[0], path)
    return _inside(inner[-1], path[1:]) if origin in (list, dict) else None


def compared(model: type[BaseModel]) -> dict[str, Compared]:
    """Return the figures of a metrics class on which `bench compare` gives a verdict."""
    return {name: mark for name, field in model.model_fields.items() for mark in field.metadata if isinstance(mark, Compared)}
