"""Records in Python, as a list or a pandas data frame. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.harness.records import Problem, Record, RecordStore, newest
from kvbench.harness.report.export import rows

if TYPE_CHECKING:
    from pandas import DataFrame


class Records(list[Record]):
    """A list of records.

    Attributes:
        problems: files that could not be read as records, each with the reason.
    """

    def __init__(self, records: Iterable[Record] = (), problems: Iterable[Problem] = ()) -> None:
        super().__init__(records)
        self.problems = list(problems)

    def to_frame(self) -> DataFrame:
        """One row per record: `policy`, `capacity`, `model.id`, `task.name`, `parameters.sinks`, `metrics.nll`, `facts.seconds`.

        Lists (buckets, blocks, rounds) are left out: they are in the records.
        """
        from pandas import DataFrame

        return DataFrame.from_records(rows(self))

    def _repr_html_(self) -> str:
        """For notebooks: the table that `bench run` prints."""
        from pandas import DataFrame

        from kvbench.harness.report import summary

        return str(DataFrame.from_records(summary.rows(self)).to_html(index=False, na_rep=""))


def load_records(folder: str | Path, *, all_versions: bool = False) -> Records:
    """Read the records of a folder.

    Args:
        folder: the folder given to `bench run --results`.
        all_versions: include older records of a cell, not only the newest.

    Raises:
        UserError: `folder` is a file.
    """
    records, problems = RecordStore(Path(folder).expanduser()).read_all()
    return Records(records if all_versions else newest(records), problems)
