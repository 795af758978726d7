"""Reviews a submission: checks its records, and measures a drawn sample of its cells again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError
from kvbench.harness.models.hub import BUILTIN
from kvbench.harness.records import Problem, Record, RecordStore, Submitted, fingerprint, newest, read_submitted
from kvbench.harness.report.agreement import disagreements
from kvbench.harness.report.review import Repeat, Review
from kvbench.harness.run.request import RunRequest
from kvbench.harness.run.submission import Files, check
from kvbench.harness.suite import cell_from_spec


@dataclass(frozen=True)
class Draw:
    """Which cells are measured again, and how.

    Attributes:
        seed: decides the order in which cells are drawn; nobody who submits should choose it.
        size: number of cells to measure.
        data: directory of the text; the task's own source when None.
    """

    seed: str
    size: int
    data: str | None = None

    def order(self, files: Files) -> Files:
        """The files in the order in which their cells are drawn."""
        return sorted(files, key=lambda file: hashlib.sha256(f"{self.seed} {file[1].cell_id}".encode()).hexdigest())


def review(results: Path, base: Path, draw: Draw) -> Review:
    """Check what a folder of records adds to another, and measure some of it again. The cells are drawn if nothing is wrong.

    Args:
        results: the folder with the submission.
        base: the folder as it was before.
        draw: which cells to measure again.

    Raises:
        UserError: a list of submitted records is malformed.
    """
    before = {record.stem: record for record in RecordStore(base).read_all()[0]}
    prints = {stem: fingerprint(record) for stem, record in before.items()}
    contents = list(RecordStore(results).files())
    after = [(path, record) for path, record in contents if isinstance(record, Record)]
    new = [(path, record) for path, record in after if prints.get(record.stem) != fingerprint(record)]
    problems = [f"{path.relative_to(results)}: {bad.reason}" for path, bad in contents if isinstance(bad, Problem)]
    problems += _misplaced(after, RecordStore(results))
    problems += [f"{stem}: stood before and is missing" for stem in sorted(before.keys() - {r.stem for _, r in after})]
    problems += _wrong_marks(new, read_submitted(base), read_submitted(results))
    problems += check(new, [record for _, record in after])
    stands, records = newest(list(before.values())), [record for _, record in new]
    if problems:
        return Review(records, stands, problems)
    repeatable = [(path, record) for path, record in new if _is_repeatable(record)]
    return Review(records, stands, [], len(repeatable), list(_repeats(draw.order(repeatable), draw)), draw.seed)


def _misplaced(files: Files, store: RecordStore) -> Iterator[str]:
    """Records that do not lie where their content says, so that two could have one name."""
    for path, record in files:
        if path != store.path(record):
            yield f"{path.relative_to(store.folder)}: belongs at {store.path(record).relative_to(store.folder)}"


def _wrong_marks(new: Files, before: dict[str, Submitted], after: dict[str, Submitted]) -> Iterator[str]:
    """Lines of `submitted.jsonl` that are missing, or that only CI may write."""
    for stem in sorted(before.keys() - after.keys()):
        yield f"{stem}: its line in submitted.jsonl was removed"
    for stem, entry in after.items():
        if entry.repeated and entry != before.get(stem):
            yield f"{stem}: is marked as repeated by CI, and only CI marks that, once the pull request is merged"
    for _, record in new:
        listed = after.get(record.stem)
        if listed is None or listed.sha256 != fingerprint(record):
            yield f"{record.stem}: is not listed in submitted.jsonl as it is now: lay it down with bench submit"


def _is_repeatable(record: Record) -> bool:
    """Whether the cell went well, its model is here, and its figures are not times or peaks of one machine."""
    task = plugins.known_task(record.cell.task.name)
    return record.status == "ok" and record.cell.model.id.startswith(BUILTIN) and task is not None and not task.of_device


def _repeats(files: Files, draw: Draw) -> Iterator[Repeat]:
    """Measure cells again, one after the other, until enough could be measured."""
    measured = 0
    with TemporaryDirectory() as scratch:
        for path, record in files:
            if measured == draw.size:
                return
            repeat = _repeat(path, record, Path(scratch) / record.stem, draw.data)
            measured += repeat.again is not None
            yield repeat


def _repeat(path: Path, record: Record, folder: Path, data: str | None) -> Repeat:
    request = RunRequest(record.cell.suite, data=data)
    try:
        (again,) = request.measure(folder, [cell_from_spec(record.cell)], fresh=True)
    except UserError as error:
        return Repeat(record, refused=str(error))
    return Repeat(record, again, disagreements(record, again, (path.parent, folder)))
