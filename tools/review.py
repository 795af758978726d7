"""Verify the records that a branch adds or changes, and measure a sample of their cells again.

    python tools/review.py                                  # since the branch left origin/main
    python tools/review.py --base HEAD~1 --sample 20

Exit code 1: a record is wrong, or a cell that was measured again differs. Times and peaks are facts of one machine and are never
measured again. What stays unseen: a forged record whose figures agree with each other, if its cell is not drawn.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.source_digests import source_digest
from kvbench.harness.models.hub import BUILTIN, is_local_name
from kvbench.harness.records import NUMERICS_VERSION, Problem, Record, RecordStore, digest
from kvbench.harness.records.figure_rules import PART_NATS
from kvbench.harness.report import gate, gate_times, verify
from kvbench.harness.report.compare import MARKS, differences
from kvbench.harness.report.sources import open_folder
from kvbench.harness.report.task_report import OF_MACHINE
from kvbench.harness.run.request import RunRequest
from kvbench.harness.suite import cell_from_spec, load, shipped_suites, with_references

RESULTS = "leaderboard/records"
_NOT_OF_FIGURES = {*gate_times.CHECKS, "method", "flags", "quality"}  # checks of the code or the machine, not of a record
_LOCAL_PATH = re.compile(r'"((?:/[\w.+-]+){2,}|~/|[A-Za-z]:\\\\)')
_ORIGIN = ("device", "platform", "threads", "weights_sha256", "policy_sha256")
Files = list[tuple[Path, Record]]  # a record and its file


def added(results: Path, base: Path) -> tuple[Files, list[str]]:
    """Return the records that differ from those of `base`, and a line for each file that is no record or is gone."""
    before = {record.stem: digest(record.as_json()) for record in RecordStore(base).read_all()[0]}
    contents = list(RecordStore(results).files())
    files = [(path, content) for path, content in contents if isinstance(content, Record)]
    problems = [f"{path}: {content.reason}" for path, content in contents if isinstance(content, Problem)]
    problems += [f"{stem}: stood before and is missing" for stem in sorted(before.keys() - {r.stem for _, r in files})]
    return [(path, r) for path, r in files if before.get(r.stem) != digest(r.as_json())], problems


def suite_cells(record: Record) -> set[str]:
    """Return the ids of the cells of a record's suite.

    Raises:
        UserError: the suite does not come with the project, or has another version.
    """
    cell = record.cell
    path = next((path for path in shipped_suites() if path.stem == cell.suite), None)
    if path is None:
        raise UserError(f"no suite {cell.suite} comes with the project: add suites/{cell.suite}.yaml")
    suite, cells = load(path)
    if suite.version != cell.suite_version:
        raise UserError(f"suite {cell.suite} has version {suite.version}, the record {cell.suite_version}: measure it again")
    return {one.id for one in cells if one.model.id == cell.model.id} or {record.cell_id}  # measured with --model


def problems(path: Path, record: Record) -> Iterator[str]:
    """Yield what is wrong with a record."""
    facts = record.facts
    if match := _LOCAL_PATH.search(json.dumps(record.as_json())):
        yield f"it names a path of one machine: {match[1]}"
    if is_local_name(record.cell.model.id):
        yield f"its model {record.cell.model.id} is a local directory: give a hub id"
    if missing := [name for name in _ORIGIN if not getattr(facts, name)]:
        yield f"it does not say where it was measured: {', '.join(missing)} is missing"
    try:
        if record.cell_id not in suite_cells(record):
            yield f"suite {record.cell.suite} has no such cell: add its policy to the suite, and measure without --set"
        if facts.policy_sha256 != source_digest(cell_from_spec(record.cell).policy):
            yield f"the source of {record.cell.policy} has changed since: measure it again"
    except UserError as error:
        yield str(error)
    if record.numerics != NUMERICS_VERSION:
        yield f"it has numerics version {record.numerics}, this is {NUMERICS_VERSION}: measure it again"
    yield from verify.problems(record, path.parent) or ()


def is_repeatable(record: Record) -> bool:
    """Return whether the cell has a built-in model, and figures that do not depend on the machine."""
    task = plugins.known_task(record.cell.task.name)
    of_machine = task is None or task.measures in OF_MACHINE
    return record.status == "ok" and record.cell.model.id.startswith(BUILTIN) and not of_machine


def repeat(path: Path, record: Record, data: str | None, scratch: Path) -> list[str]:
    """Measure a cell again, and return how its figures differ from the record; empty if they agree."""
    cells = with_references([cell_from_spec(record.cell)])
    *_, again = RunRequest(record.cell.suite, data=data, fresh=True).measure(scratch, cells)
    if again.status != "ok":
        return [f"the cell failed: {again.failure}"]
    findings = gate.check(([record], path.parent), ([again], scratch), {})
    unlike = [f"{f.check}: {f.says}" for f in findings if f.state == "regression" and f.check not in _NOT_OF_FIGURES]
    for difference in differences(record, again):
        mark = MARKS.get(difference.metric)
        margin = None if mark is None else PART_NATS if difference.metric == "nll" else mark.margin
        a, b = difference.a, difference.b
        if margin is not None and a is not None and b is not None and abs(b - a) > margin and difference.metric != "ms":
            unlike.append(f"{difference.metric} is {a:.6g} in the record, {b:.6g} measured; {margin:.3g} may lie between them")
    return unlike


def branching() -> str:
    """Return the newest commit that the branch shares with origin/main."""
    found = subprocess.run(["git", "merge-base", "origin/main", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "origin/main"


def main() -> int:
    """Review the working tree's records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="records before: a folder or a git revision. Default: where the branch left origin/main")
    parser.add_argument("--results", default=RESULTS, type=Path)
    parser.add_argument("--sample", default=8, type=int, help="number of cells to measure again")
    parser.add_argument("--seed", default="", help="decides which cells are drawn")
    parser.add_argument("--data", help="directory of the text, if a suite needs one")
    options = parser.parse_args()
    with open_folder(options.base or f"{branching()}:{RESULTS}") as base:
        files, wrong = added(options.results, base)
    wrong += [f"{record.stem}: {problem}" for path, record in files for problem in problems(path, record)]
    drawn = sorted(
        (file for file in files if is_repeatable(file[1])),
        key=lambda file: hashlib.sha256(f"{options.seed} {file[1].cell_id}".encode()).hexdigest(),
    )[: 0 if wrong else options.sample]
    for path, record in drawn:
        with TemporaryDirectory() as scratch:
            differs = repeat(path, record, options.data, Path(scratch))
        print(f"{record.stem}: {'agrees' if not differs else 'differs'}")
        wrong += [f"{record.stem}: {difference}" for difference in differs]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{len(files)} records are new or changed, {len(drawn)} measured again, {len(wrong)} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"review: {error}")
