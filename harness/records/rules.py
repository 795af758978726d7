"""How the gate holds a figure: an annotation of its field in a record's model. A field without one is an error of the gate."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel

Where = Literal["everywhere", "same machine", "bounded"]

# Tolerances of figures that are computed the same way twice. On one machine nothing else than rounding may differ, and there
# unchanged runs gave the same bits (docs/gate.md); this leaves room for blocks of another size.
MEAN_NATS = 2e-5  # of a mean over all tokens
PART_NATS = 1e-4  # of a mean over some of them
RUN_NATS = 4e-3  # of a sum over a run of at least 32 tokens
SUM = 2e-5  # relative, of long sums and of what is computed from means


@dataclass(frozen=True)
class Held:
    """A figure that must be as it was.

    Attributes:
        check: what a difference is called.
        absolute: by how much it may differ; 0 for equality.
        relative: likewise, as a share of the baseline's.
        where: "everywhere"; on the "same machine" (device, instructions, threads, torch) in float32, where sums are rounded
            alike; or where the cache is "bounded", because a dense cache grows by as many steps as time allowed.
    """

    check: str = "figures"
    absolute: float = 0.0
    relative: float = 0.0
    where: Where = "everywhere"

    def allows(self, base: Any, now: Any) -> bool:
        """Whether the judged record may have `now` where the baseline has `base`."""
        numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (base, now))
        if not numbers:
            return bool(base == now)
        return math.isclose(base, now, rel_tol=0.0, abs_tol=max(self.absolute, self.relative * abs(base)))


@dataclass(frozen=True)
class Elsewhere:
    """A figure that another check judges.

    Attributes:
        check: which.
    """

    check: str


@dataclass(frozen=True)
class NotHeld:
    """A figure that may be anything.

    Attributes:
        because: why.
    """

    because: str


Rule = Held | Elsewhere | NotHeld


@dataclass(frozen=True)
class Compared:
    """A figure that `bench compare` gives a verdict on.

    Attributes:
        margin: the largest change that nobody would act on.
        more_is_better: whether a larger figure is the better one.
    """

    margin: float
    more_is_better: bool


def near(absolute: float = 0.0, relative: float = 0.0) -> Held:
    """Equal on the same machine, but for rounding."""
    return Held(absolute=absolute, relative=relative, where="same machine")


EXACT = Held()
ANSWERED = Held(check="answers", where="same machine")
BYTES = Held(check="bytes")
BYTES_IF_BOUNDED = Held(check="bytes", where="bounded")
MACHINE = NotHeld("a fact of the machine: where it differs, figures that depend on it are not compared")
TIME = NotHeld("a time of one moment: the step at the end of the stream, as a ratio, decides")
CODE = NotHeld("says that code changed; the figures say whether it matters")


@cache
def rule_in(model: type[BaseModel], path: tuple[str, ...]) -> Rule | None:
    """The rule of a figure: its field's own, or that of the field it lies in.

    Args:
        model: of the part of the record.
        path: to the figure, with the keys of the JSON and places in lists: ("buckets", "3", "nll").
    """
    field = next((f for name, f in model.model_fields.items() if path[0] in (name, f.alias)), None)
    if field is None:
        others: Rule | None = getattr(model, "other_fields", None)
        return others
    own = next((m for m in field.metadata if isinstance(m, (Held, Elsewhere, NotHeld))), None)
    return _inside(field.annotation, path[1:]) or own


def _inside(annotation: Any, path: tuple[str, ...]) -> Rule | None:
    """The rule that a model within an annotation has for what is left of the path."""
    if not path:
        return None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return rule_in(annotation, path)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return next((found for part in inner if (found := _inside(part, path))), None)
    if origin is typing.Annotated:
        return _inside(inner[0], path)
    return _inside(inner[-1], path[1:]) if origin in (list, dict) else None


def rules(model: type[BaseModel]) -> Iterator[tuple[str, Rule | None]]:
    """Every field of a model, and of the models in it, with its own rule: "curve.*.position"."""
    for name, field in model.model_fields.items():
        own = next((m for m in field.metadata if isinstance(m, (Held, Elsewhere, NotHeld))), None)
        inner, stars = _model_in(field.annotation)
        yield from ((f"{field.alias or name}{stars}.{deeper}", rule) for deeper, rule in (rules(inner) if inner else ()))
        if inner is None or own is not None:
            yield field.alias or name, own


def _model_in(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The model that a field holds, one or many, and a star for every list or mapping around it."""
    if isinstance(annotation, type):
        return (annotation, "") if issubclass(annotation, BaseModel) else (None, "")
    star = ".*" if typing.get_origin(annotation) in (list, dict) else ""
    for part in typing.get_args(annotation):
        model, stars = _model_in(part)
        if model is not None:
            return model, star + stars
    return None, ""


def compared(model: type[BaseModel]) -> dict[str, Compared]:
    """The figures of a model that `bench compare` gives a verdict on."""
    return {name: mark for name, field in model.model_fields.items() for mark in field.metadata if isinstance(mark, Compared)}
