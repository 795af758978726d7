"""The shortest names that distinguish policies of one capacity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbench.harness.core.visible import visible
from kvbench.harness.report.rows import Row


def short_names(policies: Sequence[Row]) -> list[str]:
    """Each policy with the settings in which it differs from others of its name and capacity."""
    names = []
    for row in policies:
        rivals = [r for r in policies if (r.cell.policy, r.cell.capacity) == (row.cell.policy, row.cell.capacity)]
        alternatives: list[dict[str, object]] = [_settings(r) for r in rivals]
        kept = [key for key in alternatives[0] if len({repr(a.get(key)) for a in alternatives}) > 1]
        for key in reversed(kept):  # drop what follows from the rest, such as a window from the sinks
            others = [k for k in kept if k != key]
            if len({repr([a.get(k) for k in others]) for a in alternatives}) == len(alternatives):
                kept = others
        settings = _settings(row)
        extra = ", ".join(f"{key} {settings[key]}" for key in kept if settings.get(key) is not None)
        names.append(visible(without_folder(row.cell.policy) + (f" ({extra})" if extra else "")))
    return names


def without_folder(name: str) -> str:
    """The policy's name without the folder of its file."""
    path, colon, rest = name.partition(":")
    return f"{Path(path).name}{colon}{rest}"


def _settings(row: Row) -> dict[str, object]:
    """Everything in which two rows of one policy and capacity can differ."""
    cell = row.cell
    return {**cell.settings, "evict": cell.evicts, "positions": cell.positions, "limit": cell.limit, "seed": cell.seed}
