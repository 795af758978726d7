"""A record of the baseline beside the record that is judged, and what may be asked of the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from kvbench.harness.records import Record
from kvbench.harness.report.compare import setup_changes
from kvbench.harness.report.sources import find_trace

State = Literal["ok", "regression", "could not compare", "not compared"]
Result = tuple[str, State, str]  # of a check: its name, the state, the figures


@dataclass(frozen=True)
class Pair:
    """The same cell, measured then and now.

    Attributes:
        base: the baseline's record.
        now: the record that is judged.
        folders: that hold the two and their traces.
        run: all records that `now` was measured with.
        base_run: all that `base` was measured with.
    """

    base: Record
    now: Record
    folders: tuple[Path, Path]
    run: Sequence[Record] = ()
    base_run: Sequence[Record] = ()

    @cached_property
    def setup_changes(self) -> str:
        """In words, what of device, threads, instructions and torch is another; empty on the same machine."""
        return setup_changes(self.base, self.now, "torch")

    @cached_property
    def not_rounded_alike(self) -> str:
        """Why figures may differ by more than float32's rounding; empty where they may not."""
        return self.setup_changes or ("" if self.base.cell.model.dtype == "float32" else "not float32")

    @cached_property
    def traces(self) -> tuple[Path | None, Path | None]:
        """The files of per-token or per-question figures; the baseline's where only a trace of the same hash is missing."""
        base, now = find_trace(self.base, self.folders[0]), find_trace(self.now, self.folders[1])
        return base, base if now is None and self.base.trace == self.now.trace else now
