"""What is measured at once: one cell, or the cells of one model and task that are measured side by side."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records import digest
from kvbench.harness.run.prepare import Prepared

Group = Sequence[Prepared]


def groups(prepared: Sequence[Prepared]) -> list[Group]:
    """Cells that are measured at once: one alone, or those of one model, task and seed if the task measures side by side."""
    found: dict[str, list[Prepared]] = {}
    for item in prepared:
        cell = item.cell
        alone = "" if item.task.together else cell.id
        found.setdefault(digest([cell.model.model_dump(), cell.task.model_dump(), cell.seed, alone]), []).append(item)
    return list(found.values())


def needs_machine(group: Group) -> bool:
    """Whether nothing else may run on the machine meanwhile: its figures are times or memory."""
    return group[0].task.of_device or group[0].task.apart
