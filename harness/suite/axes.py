"""Axes of a cell that have several notations in a suite: `capacity`, `evict` (time of eviction) and `kv` (codec of K and V)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Annotated, Any, LiteralString, get_args

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvbench.harness.core.codec import BITS, Codec, Keys, Kivi
from kvbench.harness.core.errors import LARGEST_INTEGER, did_you_mean
from kvbench.harness.core.evict import By, Evict, Pages, Worth
from kvbench.harness.suite.text import spread

Budget = int | dict[str, Any]  # tokens, {"share": of the prompt} or {"bytes": of one stream}; "count" says which bytes count
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def multiplied(value: Any) -> list[Any]:
    """Return the values of an axis: the items of a list, with lists inside mappings expanded."""
    items = value if isinstance(value, list) else [value]
    return [one for item in items for one in (_spread(item) if isinstance(item, dict) else [item])]


def _spread(mapping: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Expand the lists in a mapping and in the mappings inside it."""
    yield from spread({k: multiplied(v) if isinstance(v, dict) else v for k, v in mapping.items()})


def evict_from(value: Any) -> Evict:
    """Parse a suite's `evict`: `step`, `prompt`, `{every: TOKENS}` or `{pages: TOKENS}`.

    Raises:
        PydanticCustomError: the value has none of these forms.
    """
    if value == "prompt":
        return "prompt"
    if value == "step":
        return 1
    if isinstance(value, dict) and "pages" in value:
        return _pages_from(value)
    if not isinstance(value, dict) or list(value) != ["every"]:
        raise PydanticCustomError("evict", "expected step, prompt, {every: TOKENS} or {pages: TOKENS}")
    if not _is_whole(value["every"]):
        raise PydanticCustomError("evict", "every is a number of tokens, at least 1")
    return int(value["every"])


def _pages_from(value: dict[str, Any]) -> Pages:
    """Parse the page settings `{pages: 16, by: union, worth: mean}`."""
    _refuse_unknown("evict", value, ("pages", "by", "worth"), "pages have no")
    if not _is_whole(value["pages"]):
        raise PydanticCustomError("evict", "pages is a number of tokens, at least 1")
    by, worth = value.get("by", "union"), value.get("worth", "mean")
    _refuse_unknown("evict", [by], get_args(By), "pages can't go by")
    _refuse_unknown("evict", [worth], get_args(Worth), "the worth of pages can't be their")
    return Pages(value["pages"], by, worth)


def kv_from(value: Any) -> Codec | None:
    """Parse a suite's `kv`: `dtype`, a codec such as `int4`, or a mapping such as `{codec: int4, group: 32}`.

    Raises:
        PydanticCustomError: the value has none of these forms.
    """
    if value is None or value == "dtype":
        return None
    given = {"codec": value} if isinstance(value, str) else value
    if not isinstance(given, dict) or not isinstance(given.get("codec"), str):
        raise PydanticCustomError("kv", f"expected dtype, {', '.join(BITS)} or {{codec: ...}}")
    name, group, exempt, keys = given["codec"], given.get("group", 32), given.get("exempt", {}), given.get("keys", "unrotated")
    _refuse_unknown("kv", [name], tuple(BITS), "there is no codec")
    is_kivi = name.startswith("kivi")
    _refuse_unknown("kv", given, ("codec", "group", "residual" if is_kivi else "exempt", "keys"), f"{name} has no")
    _refuse_unknown("kv", [keys], get_args(Keys), "keys can't be")
    if not isinstance(exempt, dict):
        raise PydanticCustomError("kv", "exempt is a mapping: {sinks: TOKENS, recent: TOKENS}")
    _refuse_unknown("kv", exempt, ("sinks", "recent"), "kv.exempt has no")
    residual = given.get("residual", 128)
    if not (_is_whole(group) and _is_whole(residual)) or not all(_is_whole(n, 0) for n in exempt.values()):
        raise PydanticCustomError("kv", "group and residual are numbers, at least 1; sinks and recent are tokens")
    try:
        return Kivi(name, group, keys=keys, residual=residual) if is_kivi else Codec(name, group, **exempt, keys=keys)
    except ValueError as error:
        raise PydanticCustomError("kv", str(error).removeprefix("kv: ")) from None


def _refuse_unknown(axis: LiteralString, given: Iterable[Any], known: Sequence[str], what: str) -> None:
    """Refuse names that are not known. `what` is the beginning of the message."""
    for name in given:
        if name not in known:
            raise PydanticCustomError(axis, f"{what} '{name}'{did_you_mean(str(name), known)}")


def budget_from(value: Any) -> Budget | None:
    """Parse a suite's `capacity`: tokens, `{share: 0.25}` or `{bytes: 1MiB}`, optionally with `count: all`.

    The result has the bytes as an integer, and `count: kv` by default.

    Raises:
        PydanticCustomError: the value has none of these forms.
    """
    if value is None or _is_whole(value):
        return None if value is None else int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        raise PydanticCustomError("capacity", "Input should be greater than or equal to 1")
    if not isinstance(value, dict):
        raise PydanticCustomError("capacity", "Input should be a valid integer, {share: OF_PROMPT} or {bytes: SIZE}")
    count = value.get("count", "kv")
    if count not in ("kv", "all"):
        raise PydanticCustomError("capacity", "count is kv (K and V alone) or all")
    value = {key: of for key, of in value.items() if key != "count"}
    if list(value) == ["share"]:
        share = value["share"]
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise PydanticCustomError("capacity", "share is a part of the prompt, above 0 and at most 1")
        return {"share": share, "count": count}
    if list(value) != ["bytes"]:
        raise PydanticCustomError("capacity", "expected tokens, {share: OF_PROMPT} or {bytes: SIZE}")
    return {"bytes": size_in_bytes(value["bytes"]), "count": count}


def size_in_bytes(value: Any) -> int:
    """Parse a size such as 65536, 64KiB or 1.5MiB. Return its bytes.

    Raises:
        PydanticCustomError: the value is no size.
    """
    match = re.fullmatch(r"(\d{1,19}(?:\.\d{1,19})?) ?([A-Za-z]*)", str(value)) if not isinstance(value, (bool, float)) else None
    size = 0 if match is None else int(Fraction(match[1]) * _UNITS.get(match[2], 0))
    if not 1 <= size <= LARGEST_INTEGER:
        raise PydanticCustomError("capacity", "bytes is a size such as 65536, 64KiB or 1.5MiB")
    return size


def _is_whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST_INTEGER


def _checked(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Return a validator that checks every value of an axis and leaves the axis unchanged."""

    def validate(value: Any) -> Any:
        for one in multiplied(value):
            check(one)
        return value

    return validate


def _notations(one: list[dict[str, Any]]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*one, {"type": "array", "items": {"anyOf": one}}]})


def _mapping(key: str, value: dict[str, Any], **others: dict[str, Any]) -> dict[str, Any]:
    several = {"anyOf": [value, {"type": "array", "items": value}]}
    return {"type": "object", "required": [key], "additionalProperties": False, "properties": {key: several, **others}}


_TOKENS = {"type": "integer", "minimum": 1}
_COUNT = {"enum": ["kv", "all"]}
_CAPACITY = [
    _TOKENS,
    _mapping("share", {"type": "number", "exclusiveMinimum": 0, "maximum": 1}, count=_COUNT),
    _mapping("bytes", {"anyOf": [_TOKENS, {"type": "string"}]}, count=_COUNT),
    {"type": "null"},
]
_EVICT = [{"enum": ["step", "prompt"]}, _mapping("every", _TOKENS), _mapping("pages", _TOKENS, by={}, worth={})]
_KV = [
    {"enum": ["dtype", *BITS]},
    {
        "type": "object",
        "required": ["codec"],
        "additionalProperties": False,
        "properties": {name: {} for name in ("codec", "group", "exempt", "residual", "keys")},
    },
]

OneKV = Annotated[Any, PlainValidator(kv_from), WithJsonSchema({"anyOf": _KV})]
KVs = Annotated[Any, PlainValidator(_checked(kv_from)), _notations(_KV)]
OneEvict = Annotated[Any, PlainValidator(evict_from), WithJsonSchema({"anyOf": _EVICT})]
OneCapacity = Annotated[Any, PlainValidator(budget_from), WithJsonSchema({"anyOf": _CAPACITY})]
Evicts = Annotated[Any, PlainValidator(_checked(evict_from)), _notations(_EVICT)]
Capacities = Annotated[Any, PlainValidator(_checked(budget_from)), _notations(_CAPACITY)]
