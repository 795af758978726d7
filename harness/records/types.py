"""Types of the values in a record's file. Imports no torch.

Numbers are finite and bounded, so that their sums and squares are finite too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

M = TypeVar("M", bound=BaseModel)
_LARGEST = 2**63 - 1

Whole = Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Positive = Annotated[int, Field(ge=1, le=_LARGEST)]
Number = Annotated[float, Field(ge=-1e18, le=1e18)]
Amount = Annotated[float, Field(ge=0, le=1e18)]
Duration = Annotated[float, Field(gt=0, le=1e18)]
Nats = Annotated[float, Field(ge=-1e12, le=1e12)]  # NLL of one token, or a sum over tokens
Share = Annotated[float, Field(ge=0, le=1)]
Ends = Annotated[list[Number], Field(min_length=2, max_length=2)]  # of an interval
Name = Annotated[str, Field(min_length=1, max_length=500)]
FileName = Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f]*[^/\\\x00-\x1f.][^/\\\x00-\x1f]*$", max_length=255)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Outcomes = Annotated[str, Field(pattern="^[01]*$")]


def _bounded(value: Any) -> Any:
    """Check that all numbers in a JSON value are finite and bounded."""
    if isinstance(value, dict):
        for part in value.values():
            _bounded(part)
    elif isinstance(value, list):
        for part in value:
            _bounded(part)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")
    elif isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError("a number has more than 63 bits")
    return value


Plain = Annotated[Any, AfterValidator(_bounded)]


class BadRecordError(ValueError):
    """A record, or part of one, is invalid."""

    def __init__(self, place: tuple[Any, ...], problem: str) -> None:
        """Create the error of an invalid value.

        Args:
            place: keys that lead to the value.
            problem: reason that the value is invalid.
        """
        super().__init__(f"{'.'.join(map(str, place)) or 'record'}: {problem}")
        self.place, self.problem = place, problem

    @classmethod
    def from_validation(cls, error: ValidationError) -> Self:
        """Return the first mistake that pydantic reports."""
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return cls(first["loc"], first["msg"])

    def inside(self, *parents: str) -> BadRecordError:
        """Return the same error with the keys of enclosing parts before its place."""
        return BadRecordError((*parents, *self.place), self.problem)


class Part(BaseModel):
    """Strictly validated part of a record: no text in place of a number, no NaN. Unknown fields with bounded numbers are kept."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True, populate_by_name=True)
    __pydantic_extra__: dict[str, Plain]


def validate(model: type[M], value: Mapping[str, Any]) -> M:
    """Return the pydantic model of a mapping.

    Raises:
        BadRecordError: the mapping is invalid. The message names the first mistake.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise BadRecordError.from_validation(error) from None


class Document(Part):
    """A part of a record that writes back exactly the JSON that was read: unknown keys, the order of keys, 1 and not 1.0."""

    _json: dict[str, Any] | None = PrivateAttr(None)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Validate a mapping.

        Raises:
            BadRecordError: the mapping is invalid. The message names the first mistake.
        """
        document = validate(cls, value)
        document._json = dict(value)
        return document

    def as_json(self) -> dict[str, Any]:
        """Return the JSON of the part. The caller must not change it."""
        private = self.__pydantic_private__  # `self._json` takes ten times as long
        assert private is not None
        known: dict[str, Any] | None = private["_json"]
        if known is None:
            known = private["_json"] = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return known

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Document) and self.as_json() == other.as_json()

    __hash__ = None  # type: ignore[assignment]  # it holds lists
