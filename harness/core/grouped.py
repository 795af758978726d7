"""Grouping of items by key, and the keys that tell mappings apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items of each key. Keys and items keep the order of `items`."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def distinguishing_keys(mappings: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the keys that tell mappings apart. A missing key counts as None.

    A key is left out if its value follows from those of earlier keys, such as a window from the sinks.
    """
    kept: list[str] = []
    parts = [""] * len(mappings)  # values of the kept keys
    for key in dict.fromkeys(key for mapping in mappings for key in mapping):
        finer = [f"{part} {mapping.get(key)!r}" for part, mapping in zip(parts, mappings, strict=True)]
        if len(set(finer)) > len(set(parts)):
            kept, parts = [*kept, key], finer
    return kept
