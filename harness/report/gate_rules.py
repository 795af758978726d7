"""The figures of a record, and the rule by which the gate compares each; a rule is declared on the figure's field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.records.rules import Rule, rule_in
from kvbench.harness.records.types import Document

Name = tuple[str, ...]  # of a figure in a record: ("metrics", "buckets", "3", "nll")


def figures(record: Record) -> Iterator[tuple[Name, Any]]:
    """Every plain value of a record's metrics, data and facts, with its name; an empty list or mapping is a value too."""
    for part in ("metrics", "data", "facts"):
        yield from _leaves((part,), getattr(record, part).as_json())


def rule_of(record: Record, name: Name) -> Rule | None:
    """The rule of a figure; None if its field declares none."""
    part, *path = name
    model: type[Document] = type(getattr(record, part))
    return rule_in(model, tuple(path)) if path else None


def _leaves(name: Name, value: Any) -> Iterator[tuple[Name, Any]]:
    if isinstance(value, dict) and (value or len(name) == 1):
        for key, inner in value.items():
            yield from _leaves((*name, str(key)), inner)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves((*name, str(index)), inner)
    else:
        yield name, value
