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
    """Sort key: dense first, then by capacity, recompute before other policies.

    Of two modes of positions, the one that is usual comes first: `stream` where a prompt is cut once, as public code leaves its
    keys, and `cache` in an endless stream, whose positions would leave the trained range.
    """
    cell = record.cell
    unusual = cell.positions != ("stream" if cell.evicts == "prompt" else "cache")
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


def _suite(record: Record) -> str:
    """Groups records by suite and model."""
    cell = record.cell.as_json()
    return repr([cell["suite"], cell["suite_version"], cell["model"]])
