"""How many independent streams are read at once: an option that changes speed and memory, and figures by rounding only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError


def _checked(value: Any) -> Any:
    if value == "auto" or value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise PydanticCustomError("side_by_side", "auto, or a whole number from 1 on")


SideBySide = Annotated[int | Literal["auto"], BeforeValidator(_checked)]  # streams read at once; auto: a trial decides


@dataclass(frozen=True)
class Independent:
    """Streams that give the same figures whether they are read at once or one after another.

    Attributes:
        count: of the streams.
        tokens: of the longest.
        at_once: how many the suite asks to be read at once; None: a trial decides.
        caches: caches of one stream that are held at a time: 2 while a stream is forked.
    """

    count: int
    tokens: int
    at_once: int | None = None
    caches: int = 1
