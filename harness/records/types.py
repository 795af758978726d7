"""Numbers, names and parts of a record, as its file may hold them. Imports no torch.

Numbers are finite and bounded, so that sums and squares of them are finite too.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

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


class Part(BaseModel):
    """Strict: no text for a number, no NaN. What is not named here is any JSON of bounded numbers."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, Plain]
