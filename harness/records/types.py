"""Numbers, names and parts of a record, as its file may hold them. Imports no torch.

Numbers are finite and bounded, so that sums and squares of them are finite too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

_LARGEST = 2**63 - 1

Whole = Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Positive = Annotated[int, Field(ge=1, le=_LARGEST)]
Number = Annotated[float, Field(ge=-1e18, le=1e18)]
Amount = Annotated[float, Field(ge=0, le=1e18)]
Duration = Annotated[float, Field(gt=0, le=1e18)]
Nats = Annotated[float, Field(ge=-1e12, le=1e12)]  # of a token, or summed over many
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=500)]
FileName = Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f]*[^/\\\x00-\x1f.][^/\\\x00-\x1f]*$", max_length=255)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Outcomes = Annotated[str, Field(pattern="^[01]*$")]


def _plain(value: Any) -> Any:
    """Any JSON, its numbers finite and bounded.

    Raises:
        ValueError: a number is not.
    """
    if isinstance(value, dict):
        for part in value.values():
            _plain(part)
    elif isinstance(value, list):
        for part in value:
            _plain(part)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number that is not finite")
    elif isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError("a number of more than 63 bits")
    return value


Plain = Annotated[Any, AfterValidator(_plain)]


class BadRecordError(ValueError):
    """A record, or a part of one, does not hold what it must."""

    def __init__(self, place: tuple[Any, ...], problem: str) -> None:
        """place: keys that lead to what is wrong; problem: in words."""
        super().__init__(f"{'.'.join(map(str, place)) or 'it'}: {problem}")
        self.place, self.problem = place, problem

    @classmethod
    def from_validation(cls, error: ValidationError) -> Self:
        """The first mistake of several."""
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return cls(first["loc"], first["msg"])

    def inside(self, *parents: str) -> BadRecordError:
        """The same mistake, told from further out."""
        return BadRecordError((*parents, *self.place), self.problem)


class Part(BaseModel):
    """Strict: no text for a number, no NaN. What is not named here is any JSON of bounded numbers."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True, populate_by_name=True)
    __pydantic_extra__: dict[str, Plain]


class Document(Part):
    """A part of a record that is written back as the JSON it came from: unknown keys, their order, and 1 where it was no 1.0."""

    _json: dict[str, Any] | None = PrivateAttr(None)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Check a mapping, and keep it.

        Raises:
            BadRecordError: the first mistake in it.
        """
        try:
            made = cls.model_validate(value)
        except ValidationError as error:
            raise BadRecordError.from_validation(error) from None
        made._json = dict(value)
        return made

    def as_json(self) -> dict[str, Any]:
        """What it was made of, not to be changed."""
        if self._json is None:
            self._json = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return self._json

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Document) and self.as_json() == other.as_json()

    __hash__ = None  # type: ignore[assignment]  # it holds lists
