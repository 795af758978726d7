"""A record of the baseline, paired with the record to judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from kvbench.harness.records import Record
from kvbench.harness.report.compare import setup_changes
from kvbench.harness.report.sources import find_trace

_BY_POSITION = ("closed form", "windows run afresh")  # ways to read blocks
State = Literal["ok", "better", "regression", "could not compare", "not compared"]
Result = tuple[str, State, str]  # (check, state, figures)


@dataclass(frozen=True)
class Pair:
    """The same cell, measured then and now.

    Attributes:
        base: the baseline's record.
        now: the record to judge.
        folders: of the two records and their traces.
        run: all records of the run that measured `now`.
        base_run: all records of the baseline.
    """

    base: Record
    now: Record
    folders: tuple[Path, Path]
    run: Sequence[Record] = ()
    base_run: Sequence[Record] = ()

    @cached_property
    def setup_changes(self) -> str:
        """In words, which of device, threads, instructions, TF32 and torch differ; empty on the same machine."""
        return setup_changes(self.base, self.now, "torch")

    @cached_property
    def rounding_differs(self) -> str:
        """Why figures may differ by more than rounding in float32; empty if they may not."""
        return self.setup_changes or ("" if self.base.cell.model.dtype == "float32" else "not float32")

    @cached_property
    def between_cpus(self) -> bool:
        """Whether float32 was rounded otherwise, by another CPU or another number of its threads, and nothing else differs."""
        cpus = all(r.facts.instructions and not r.facts.instructions.startswith("sm_") for r in (self.base, self.now))
        return bool(self.setup_changes) and cpus and self.base.cell.model.dtype == "float32"

    @property
    def by_position(self) -> bool:
        """Whether the policy keeps tokens by their positions alone, so that rounding can't change which."""
        return self.base.facts.method in _BY_POSITION

    @cached_property
    def traces(self) -> tuple[Path | None, Path | None]:
        """Files of per-token or per-question figures. The baseline's stands in for a missing one of the same hash."""
        base, now = find_trace(self.base, self.folders[0]), find_trace(self.now, self.folders[1])
        return base, base if now is None and self.base.trace == self.now.trace else now
