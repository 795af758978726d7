"""Orders of cells to measure in another process, and its answers. `multiprocessing` or Ray pickles both."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvbench.harness.run.ledger import Group, Outcome
from kvbench.harness.run.request import RunOptions
from kvbench.harness.suite import Cell
from kvbench.harness.tasks.task import Data, MeasurementError


@dataclass(frozen=True)
class Order:
    """Groups of cells to measure.

    A user's files must have been loaded before an order is unpickled (`user_files.receive`).

    Attributes:
        groups: groups of cells; the cells of a group are measured at once.
        cells: all cells of the run. A cache that does not fit is reported when its model is loaded.
        options: options of the run, with the device of the process that measures.
        folder: working folder of the run. A worker uses the same folder if its machine has it.
    """

    groups: Sequence[Group]
    cells: Sequence[Cell]
    options: RunOptions
    threads: int
    folder: str

    @classmethod
    def from_groups(cls, groups: Sequence[Group], cells: Sequence[Cell], options: RunOptions, threads: int) -> Self:
        """Create an order that can be pickled, with absolute paths of local models.

        Raises:
            MeasurementError: a policy is a class that another process can't import.
        """
        sent: dict[int, Data] = {}
        for item in (item for group in groups for item in group):
            kind = type(item.cell.policy)
            if kind.__module__ == "__main__":
                raise MeasurementError(
                    f"it is measured in another process, which can't import {kind.__name__}: write it to a file, and give "
                    f"file.py:{kind.__name__}"
                )
            if id(item.data) not in sent:
                sent[id(item.data)] = _sendable(item.data)
        packed = [
            [dataclasses.replace(item, data=sent[id(item.data)], directory=item.directory.resolve()) for item in group]
            for group in groups
        ]
        return cls(packed, cells, options, threads, os.getcwd())


@dataclass(frozen=True)
class GroupOutcomes:
    """Outcomes of a group.

    Attributes:
        outcomes: outcomes in the order of the group; their files are bytes.
        notes: (label, text) of each note about a policy.
    """

    outcomes: Sequence[Outcome]
    notes: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class UnsentData:
    """Placeholder for data that can't be pickled. The process that measures reads the data itself."""

    ids_sha256: str
    tokens: int

    def facts(self) -> dict[str, Any]:
        """Return no facts: the record already has the facts of the data."""
        return {}


def _sendable(data: Data) -> Data:
    """Return the data, or `UnsentData` if they can't be pickled: a user's task, and lm-eval, may hold anything."""
    try:
        pickle.dumps(data)
    except Exception:
        return UnsentData(data.ids_sha256, data.tokens)
    return data
