"""A suite as it is asked for, on the command line or from Python: its cells, and their records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.harness.core.errors import UserError

if TYPE_CHECKING:
    from kvbench.harness.records import Record
    from kvbench.harness.suite import Cell


PUBLISHED = Path("leaderboard/results")  # of a checkout, so that every cell on its page can be measured again


@dataclass(frozen=True)
class Asked:
    """A suite, and what is changed of it for a run."""

    suite: str
    model: str | None = None
    data: str | None = None
    policies: Sequence[str] = ()
    settings: Sequence[str] = ()
    device: str = "auto"
    dtype: str | None = None
    threads: int | None = None

    def changes(self) -> dict[str, Any]:
        """What is not as the suite has it, for a file."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {k: v for k, v in plain.items() if k != "suite" and v and v != "auto"}

    def cells(self, results: Path | None = None) -> list[Cell]:
        """The cells: of the suite, or the one of a record whose cell id begins like that.

        Args:
            results: folder of the records to find that cell in; the published ones are looked through after it.

        Raises:
            UserError: no such suite or record, or a mistake in it.
        """
        from kvbench.harness import suite as suites
        from kvbench.harness.suite.overrides import Overrides

        if results is not None and re.fullmatch("[0-9a-f]{8,64}", self.suite) and not Path(self.suite).exists():
            return [self._again(results)]
        overrides = Overrides(self.model, self.dtype, self.policies, self.settings)
        return suites.load(suites.find(self.suite), overrides)[1]

    def _again(self, results: Path) -> Cell:
        """The cell of a record."""
        from kvbench.harness import suite as suites
        from kvbench.harness.models.hub import is_local_name
        from kvbench.harness.records import RecordStore

        for folder in (results, PUBLISHED):
            matches = {r.cell_id: r for r in RecordStore(folder).read_all()[0] if r.cell_id.startswith(self.suite)}
            if matches:
                break
        else:
            raise UserError(f"{self.suite}: no cell of the records in {results} begins like that")
        if len(matches) > 1:
            raise UserError(f"{self.suite}: {len(matches)} cells of the records in {folder} begin like that: give more of the id")
        if self.policies or self.settings or self.dtype:
            raise UserError(
                f"{self.suite}: a record's cell is measured as it was asked for; --policy, --set and --dtype change it"
            )
        cell = suites.again(next(iter(matches.values())).cell, self.model)
        if self.model is None and is_local_name(cell.model.id):
            raise UserError(f"{self.suite}: its model {cell.model.id} was a local directory: give --model DIR, where it is now")
        return cell

    def measured(
        self, results: Path, cells: Sequence[Cell], fresh: bool = False, block: int | None = None, walk: bool = False, *,
        progress: bool = True, tracebacks: bool = False,
    ) -> list[Record]:  # fmt: skip
        """The records of cells, measured where there are none yet.

        Args:
            results: folder of the records.
            cells: to measure.
            fresh: measure finished cells again.
            block: tokens that pass a layer at once; chosen from memory when None.
            walk: token by token inside the layers even where nothing is evicted.
            progress: show on stderr how far it is.
            tracebacks: show those of failed cells there, too.
        """
        import torch

        from kvbench.harness.models.load import device_of
        from kvbench.harness.records import RecordStore
        from kvbench.harness.run.progress import ProgressView, Silence, StderrConsole
        from kvbench.harness.run.runner import RunOptions, run

        if self.threads:
            torch.set_num_threads(self.threads)
        directory = Path(self.data).expanduser() if self.data else None
        options = RunOptions(device_of(self.device), directory, block, walk, fresh)
        if not progress:
            return run(cells, RecordStore(results), options, Silence())
        with ProgressView(StderrConsole(), tracebacks) as view:
            return run(cells, RecordStore(results), options, view)
