"""Renders a page even if some records break it: those are left out and reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvbench.harness.records import Record

Result = TypeVar("Result")


def make_without_broken(
    records: Sequence[Record], make: Callable[[list[Record]], Result]
) -> tuple[Result, list[tuple[Record, Exception]]]:
    """Call `make` with as many of the records as it accepts.

    Args:
        records: to pass to `make`.
        make: accepts any subset of the records; an exception counts against the subset.

    Returns:
        The result, and the records left out, each with its exception.

    Raises:
        Exception: `make` fails even without records.
    """

    def error(part: list[Record]) -> Exception | None:
        try:
            make(part)
        except Exception as raised:  # whatever it is, the other records get their page
            return raised
        return None

    try:
        return make(list(records)), []
    except Exception:
        make([])

    def works(part: list[Record]) -> bool:
        return error(part) is None

    kept = _sound(list(records), works)
    kept = _extended(kept, _without(records, kept), works)  # some failed only together with a record now left out
    broken = _without(records, kept)
    sound = _without(records, broken)
    return make(sound), [(r, reason) for r in broken if (reason := error([*sound, r])) is not None]


def _sound(records: list[Record], works: Callable[[list[Record]], bool]) -> list[Record]:
    """As many records as work together. Halves are searched separately, to find a bad record in few trials."""
    if works(records):
        return records
    if len(records) == 1:
        return []
    middle = len(records) // 2
    first, second = _sound(records[:middle], works), _sound(records[middle:], works)
    if works(first + second):
        return first + second
    # Keep the larger set: a bad record costs no good ones.
    return max(_extended(first, second, works), _extended(second, first, works), key=len)


def _without(records: Sequence[Record], others: Sequence[Record]) -> list[Record]:
    """The records that are not among `others`."""
    known = {id(r) for r in others}
    return [r for r in records if id(r) not in known]


def _extended(kept: list[Record], others: list[Record], works: Callable[[list[Record]], bool]) -> list[Record]:
    """Add each of the others that works with those kept so far."""
    for record in others:
        kept = [*kept, record] if works([*kept, record]) else kept
    return kept
