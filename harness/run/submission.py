"""Submissions: what a folder adds to the records that stand is verified, laid down, and a drawn sample of it measured again."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.packed import content, stored, write_packed, write_plain
from kvbench.harness.core.sources import source_digest
from kvbench.harness.models.hub import BUILTIN, is_local_name
from kvbench.harness.records import (
    NUMERICS_VERSION,
    Problem,
    Record,
    RecordStore,
    Submitted,
    add_submitted,
    fingerprint,
    newest,
    read_submitted,
)
from kvbench.harness.records.beside import files_beside
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.report import verify
from kvbench.harness.report.review import Repeat, Review, disagreements
from kvbench.harness.run.request import RunRequest
from kvbench.harness.suite import Cell, Overrides, cell_from_spec, labels, load, shipped_suites, with_references

MAX_TRACE_BYTES = 4 * 2**20  # the NLLs of a million tokens
MAX_TRACES_BYTES = 64 * 2**20  # of a submission
_MAX_NAMES = 5  # of cells without a record, in one line
# A path from the root, from a home folder or from a drive; a URL is none.
_LOCAL_PATH = re.compile(r"""(?:^|[\s'"=(\[{,:])((?:(?:/[\w.+-]+){2,}|~[\w-]*/|[A-Za-z]:[\\/]\w)[^\s'"]*)""")

Files = Sequence[tuple[Path, Record]]  # a record and its file


def read_files(folder: Path) -> tuple[Files, list[str]]:
    """The records of a folder with their files, and what is wrong with files that are no records.

    Raises:
        UserError: the folder is a file.
    """
    contents = list(RecordStore(folder).files())
    bad = [f"{path.relative_to(folder)}: {content.reason}" for path, content in contents if isinstance(content, Problem)]
    return [(path, content) for path, content in contents if isinstance(content, Record)], bad


def not_standing(files: Files, results: Path, replace: bool) -> Files:
    """The records to lay down: those of cells that have none, and with `replace` those that are newer.

    Raises:
        UserError: with `replace`, a record that stands is newer.
    """
    stands = {r.cell_id: r for r in newest(RecordStore(results).read_all()[0])}
    latest = {id(r) for r in newest([r for _, r in files])}
    new = []
    for path, record in files:
        there = stands.get(record.cell_id)
        stays = there is not None and (not replace or fingerprint(there) == fingerprint(record))
        if stays or id(record) not in latest:
            continue
        if there is not None and newest([record, there]) == [there]:
            raise UserError(f"{path}: finished {record.finished}, but the record that stands is newer ({there.finished})")
        new.append((path, record))
    return new


def check(files: Files, standing: Sequence[Record]) -> list[str]:
    """What is wrong with submitted records, a line each. Those that stand may complete their suites."""
    suites: dict[str, list[tuple[Path, Record]]] = {}
    for path, record in files:
        suites.setdefault(repr([record.cell.suite, record.cell.suite_version, record.cell.model]), []).append((path, record))
    wrong = []
    for group in suites.values():
        try:
            cells = suite_cells(group[0][1].cell)
        except UserError as error:
            wrong.append(str(error))
            continue
        for path, record in group:
            wrong += [f"{record.stem}: {problem}" for problem in _record_problems(path, record, cells.get(record.cell_id))]
        measured = {r.cell_id for r in standing} | {r.cell_id for _, r in group}
        wrong += _incomplete(group[0][1].cell, [cell for cell_id, cell in cells.items() if cell_id not in measured], len(cells))
    return [*wrong, *_too_large(files)]


def suite_cells(spec: CellSpec) -> dict[str, Cell]:
    """All cells of a recorded cell's suite on its model, by id. The suite is in `./suites` or comes with the project.

    Raises:
        UserError: there is no such suite in this version, or it has a mistake.
    """
    path = {p.stem: p for p in (*shipped_suites(), *Path("suites").glob("*.yaml"))}.get(spec.suite)
    if path is None:
        raise UserError(f"{spec.suite}: no such suite comes with the project: add suites/{spec.suite}.yaml to the pull request")
    suite, cells = load(path)
    if suite.version != spec.suite_version:
        raise UserError(
            f"{spec.suite}, version {spec.suite_version}: the suite has version {suite.version} now: measure it again"
        )
    model = spec.as_json()["model"]
    own = [cell for cell in cells if cell.model.as_json() == model]
    if not own:  # the suite was measured with --model
        settings = [f"model.{k}={json.dumps(v)}" for k, v in model.items() if k != "id" and v is not None]
        own = load(path, Overrides(model["id"], settings=settings))[1]
    return {cell.id: cell for cell in own}


def lay_down(files: Files, results: Path) -> list[Path]:
    """Copy the records and their files into a folder of records, and list them there as submitted. Returns what was written.

    Raises:
        OSError: the folder can't be written to.
    """
    store = RecordStore(results)
    written = []
    for path, record in files:
        target = store.path(record)
        target.parent.mkdir(parents=True, exist_ok=True)
        names = [part.file for part in files_beside(record)]
        for name in (*names, path.name):  # the record comes last, so that none lacks its trace
            copy, data = target if name == path.name else target.with_name(name), content(path.with_name(name))
            written.append(write_packed(copy, data) if copy.suffix == ".jsonl" else write_plain(copy, data))
        add_submitted(target.parent, [Submitted(record=record.stem, sha256=fingerprint(record))])
    return written


def _record_problems(path: Path, record: Record, cell: Cell | None) -> Iterator[str]:
    """What is wrong with one record. cell: of its suite; None if the suite has no such cell."""
    spec, facts, data = record.cell, record.facts, record.data
    yield from (f"{name} names a local path: {text}" for name, text in local_paths(record.as_json()))
    if is_local_name(spec.model.id):
        yield f"its model {spec.model.id} is a local directory, where nobody else can load it: give a hub id"
    if record.status == "failed" and (record.error is None or not record.error.kind):
        yield "it failed and does not say why"
    origin = {
        f"facts.{name}": getattr(facts, name) for name in ("device", "platform", "threads", "weights_sha256", "policy_sha256")
    }
    origin |= {f"facts.versions.{name}": facts.versions.get(name) for name in ("kv-bench", "torch", "transformers")}
    origin |= {"data.source": data.source, "data.ids_sha256": data.ids_sha256}
    lacking = [name for name, value in origin.items() if not value]
    if lacking:
        yield f"it does not say where it comes from: {', '.join(lacking)} is missing"
    if cell is None:
        suite = f"{spec.suite}, version {spec.suite_version}"
        yield f"{suite}, has no such cell: add its policy to the suite's file, and measure without --set"
    elif facts.policy_sha256 != source_digest(cell.policy):
        yield f"the source of {spec.policy} has changed since: measure it again"
    if record.numerics != NUMERICS_VERSION:
        yield f"it has numerics version {record.numerics}, this is {NUMERICS_VERSION}: measure it again"
    if stored(path).is_symlink():
        yield "its file is a link"
    for part in files_beside(record):
        if not os.path.lexists(stored(path.with_name(part.file))):
            yield f"its file {part.file} is missing (git ignores some: add it with git add --force)"
    yield from verify.problems(record, path.parent) or ()


def local_paths(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(field, path) of every text in a JSON value that names a file from the root or from a home folder."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from local_paths(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, str) and (match := _LOCAL_PATH.search(value)):
        yield name, match[1]


def _incomplete(spec: CellSpec, missing: Sequence[Cell], total: int) -> list[str]:
    """The cells of a suite that have no record, in one line."""
    names = list(labels(missing).values())
    more = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    where = f"{spec.suite}, version {spec.suite_version}, on {spec.model.id}"
    listed = f"{'; '.join(names[:_MAX_NAMES])}{more}"
    return [f"{where}: {len(missing)} of {total} cells have no record: {listed}"] if missing else []


def _too_large(files: Files) -> Iterator[str]:
    """Traces that are too large for the repository."""
    traces = [stored(path.with_name(record.trace.file)) for path, record in files if record.trace is not None]
    sizes = {trace: trace.stat().st_size for trace in traces if trace.is_file()}
    for trace, size in sizes.items():
        if size > MAX_TRACE_BYTES:
            yield f"{trace.name}: {size / 2**20:.1f} MiB; a trace may have {MAX_TRACE_BYTES >> 20} MiB"
    total = sum(sizes.values())
    if total > MAX_TRACES_BYTES:
        yield f"the traces have {total / 2**20:.0f} MiB; those of a submission may have {MAX_TRACES_BYTES >> 20} MiB"


def review(results: Path, base: Path, seed: str, sample: int, data: str | None = None) -> Review:
    """Check what a folder of records adds to another. If nothing is wrong, measure `sample` of its cells again.

    The seed decides which; nobody who submits should choose it.

    Raises:
        UserError: a list of submitted records is malformed.
    """
    before = {record.stem: record for record in RecordStore(base).read_all()[0]}
    prints = {stem: fingerprint(record) for stem, record in before.items()}
    after, problems = read_files(results)
    new = [(path, record) for path, record in after if prints.get(record.stem) != fingerprint(record)]
    store = RecordStore(results)
    places = [(path.relative_to(results), store.path(record).relative_to(results)) for path, record in after]
    problems += [f"{path}: belongs at {place}" for path, place in places if path != place]  # else two could have one name
    problems += [f"{stem}: stood before and is missing" for stem in sorted(before.keys() - {r.stem for _, r in after})]
    problems += _wrong_marks(new, read_submitted(base), read_submitted(results))
    problems += check(new, [record for _, record in after])
    stands, records = newest(list(before.values())), [record for _, record in new]
    if problems:
        return Review(records, stands, problems)
    repeatable = drawn([(path, record) for path, record in new if _is_repeatable(record)], seed)
    return Review(records, stands, [], len(repeatable), list(_repeats(repeatable, sample, data)), seed)


def drawn(files: Files, seed: str) -> Files:
    """The files in the order in which their cells are drawn, which depends on the seed alone."""
    return sorted(files, key=lambda file: hashlib.sha256(f"{seed} {file[1].cell_id}".encode()).hexdigest())


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


def _repeats(files: Files, sample: int, data: str | None) -> Iterator[Repeat]:
    """Measure cells again, one after the other, until enough could be measured."""
    with TemporaryDirectory() as scratch:
        for path, record in files:
            if not sample:
                return
            folder = Path(scratch) / record.stem
            try:
                cells = with_references([cell_from_spec(record.cell)])
                *_, again = RunRequest(record.cell.suite, data=data).measure(folder, cells, fresh=True)
            except UserError as error:
                yield Repeat(record, refused=str(error))
                continue
            sample -= 1
            yield Repeat(record, again, disagreements(record, again, (path.parent, folder)))
