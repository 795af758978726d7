"""Running a suite from the command line: what was asked, as options of several verbs, and the records it gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbench.harness.cli.output import FILLED, debugging
from kvbench.harness.core.errors import UserError

if TYPE_CHECKING:
    from kvbench.harness.records import Record
    from kvbench.harness.suite import Cell

PUBLISHED = Path("leaderboard/results")  # of a checkout: whoever reads a row of its page can measure that cell again

_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--model", metavar="DIR|HUB_ID", type=FILLED, help="Use this model instead of the suite's."),
    click.option(
        "--data", metavar="DIR", envvar="BENCH_DATA", type=FILLED,
        help="Directory of the text: .parquet or .txt (or BENCH_DATA).",
    ),
    click.option(
        "--policy", "policies", multiple=True, metavar="POLICY",
        help="Only these: a name, file.py:Class, or '{name: h2o, window: 8}'.",
    ),
    click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE",
        help="Change the suite, e.g. --set tokens=20000 --set capacity=[128,256].",
    ),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1."),
    click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of the weights and the cache."),
    click.option("--threads", type=click.IntRange(1), help="CPU threads; torch's default when not given."),
]  # fmt: skip


def suite_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What may be asked of a suite's run."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class Asked:
    """A suite and what the command line changes of it."""

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
            asked = {r.cell_id: r for r in RecordStore(folder).read_all()[0] if r.cell_id.startswith(self.suite)}
            if asked:
                break
        else:
            raise UserError(f"{self.suite}: no cell of the records in {results} begins like that")
        if len(asked) > 1:
            raise UserError(f"{self.suite}: {len(asked)} cells of the records in {folder} begin like that: give more of the id")
        if self.policies or self.settings or self.dtype:
            raise UserError(
                f"{self.suite}: a record's cell is measured as it was asked for; --policy, --set and --dtype change it"
            )
        cell = suites.again(next(iter(asked.values())).cell, self.model)
        if self.model is None and is_local_name(cell.model.id):
            raise UserError(f"{self.suite}: its model {cell.model.id} was a local directory: give --model DIR, where it is now")
        return cell

    def measured(
        self, results: Path, cells: Sequence[Cell], fresh: bool = False, block: int | None = None, walk: bool = False
    ) -> list[Record]:
        """Their records, measured where they are not there yet, and shown while they are."""
        import torch

        from kvbench.harness.models.load import device_of
        from kvbench.harness.records import RecordStore
        from kvbench.harness.run.progress import ProgressView, StderrConsole
        from kvbench.harness.run.runner import RunOptions, run

        if self.threads:
            torch.set_num_threads(self.threads)
        directory = Path(self.data).expanduser() if self.data else None
        options = RunOptions(device_of(self.device), directory, block, walk, fresh)
        with ProgressView(StderrConsole(), debugging()) as view:
            return run(cells, RecordStore(results), options, view)
