"""A page is made of what it can be made of: a record that no page can be made with is left out, and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvbench.harness.records import Record

Made = TypeVar("Made")


def made_of(records: Sequence[Record], make: Callable[[list[Record]], Made]) -> tuple[Made, list[tuple[Record, Exception]]]:
    """What is made of records, and those that it was made without, each with what it raised.

    Args:
        records: to make it of.
        make: makes it, from any part of the records; what it raises is taken to be their fault.

    Raises:
        Exception: of `make`, where it fails without any record.
    """

    def error(part: list[Record]) -> Exception | None:
        try:
            make(part)
        except Exception as found:  # whatever it is, the other records deserve their page
            return found
        return None

    try:
        return make(list(records)), []
    except Exception:
        make([])

    def works(part: list[Record]) -> bool:
        return error(part) is None

    found = _sound(list(records), works)
    found = _joined(found, _without(records, found), works)  # what only a record that is left out now had stood against
    broken = _without(records, found)
    sound = _without(records, broken)
    return make(sound), [(r, reason) for r in broken if (reason := error([*sound, r])) is not None]


def _sound(records: list[Record], works: Callable[[list[Record]], bool]) -> list[Record]:
    """As many of the records as work together; the halves are looked at apart, so that a bad record is found in few trials."""
    if works(records):
        return records
    if len(records) == 1:
        return []
    middle = len(records) // 2
    first, second = _sound(records[:middle], works), _sound(records[middle:], works)
    if works(first + second):
        return first + second
    return max(_joined(first, second, works), _joined(second, first, works), key=len)  # one bad record costs no good ones


def _without(records: Sequence[Record], others: Sequence[Record]) -> list[Record]:
    """Those that are not among the others."""
    known = {id(r) for r in others}
    return [r for r in records if id(r) not in known]


def _joined(to: list[Record], others: list[Record], works: Callable[[list[Record]], bool]) -> list[Record]:
    """`to`, and of the others each that works with what is there."""
    for record in others:
        to = [*to, record] if works([*to, record]) else to
    return to
