"""Records grouped and ordered as the pages show them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from kvbench.harness.records import Record, newest


def groups(records: Iterable[Record]) -> list[list[Record]]:
    """The newest record of every cell, grouped by suite and model."""
    shown = sorted(newest(list(records)), key=lambda r: (_suite(r), order(r)))
    return [list(group) for _, group in itertools.groupby(shown, key=_suite)]


def order(record: Record) -> tuple[Any, ...]:
    """Sort key: dense first, then by capacity, recompute before other policies."""
    cell = record.cell
    unusual = cell.positions != usual_positions(cell.evicts)
    first = {"dense": 0, "recompute_window": 1, "recompute_sink_window": 1}.get(cell.policy, 2)
    return (
        cell.capacity or 0,
        first,
        cell.policy,
        repr(cell.parameters),
        cell.evicts,
        unusual,
        cell.positions,
        cell.seed,
        record.key,
    )


def usual_positions(evicts: str) -> str:
    """The mode that comes first: as public code leaves the keys of a prompt that it cuts, and ranks in an endless stream."""
    return "stream" if evicts == "prompt" else "cache"


def _suite(record: Record) -> str:
    """Groups records by suite and model."""
    cell = record.cell.as_json()
    return repr([cell["suite"], cell["suite_version"], cell["model"]])
