"""Checks a submission (records that follow from their traces, of complete suites, whose origin is known) and lays it down."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.packed import content, stored, write_packed, write_plain
from kvbench.harness.core.sources import source_digest
from kvbench.harness.models.hub import is_local_name
from kvbench.harness.records import (
    NUMERICS_VERSION,
    Problem,
    Record,
    RecordStore,
    Submitted,
    add_submitted,
    fingerprint,
    newest,
)
from kvbench.harness.records.beside import files_beside
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.records.record import parse_time
from kvbench.harness.report.verify import problems as verify_problems
from kvbench.harness.suite import Cell, Overrides, labels, load, shipped_suites

MAX_TRACE_BYTES = 4 * 2**20  # the NLLs of a million tokens
MAX_TRACES_BYTES = 64 * 2**20  # of a submission
_MAX_NAMES = 5  # of cells without a record, in one line
# A path from the root, from a home folder or from a drive; a URL is none.
_LOCAL_PATH = re.compile(r"""(?:^|[\s'"=(\[{,:])((?:(?:/[\w.+-]+){2,}|~[\w-]*/|[A-Za-z]:[\\/]\w)[^\s'"]*)""")

Files = Sequence[tuple[Path, Record]]  # a record and its file


def read_files(folder: Path) -> tuple[Files, list[str]]:
    """The newest record of every cell of a folder with its file, and what is wrong with files that are no records.

    Raises:
        UserError: the folder is a file.
    """
    contents = list(RecordStore(folder).files())
    paths = {id(content): path for path, content in contents}
    records = newest([content for _, content in contents if isinstance(content, Record)])
    bad = [f"{path}: {content.reason}" for path, content in contents if isinstance(content, Problem)]
    return [(paths[id(record)], record) for record in records], bad


def not_standing(files: Files, results: Path, replace: bool) -> Files:
    """The records to lay down: those of cells that have none, and with `replace` those that are newer.

    Args:
        files: of the submission.
        results: the folder to lay them down in.
        replace: also those of cells that have a record.

    Raises:
        UserError: with `replace`, a record that stands is newer.
    """
    stands = {r.cell_id: r for r in newest(RecordStore(results).read_all()[0])}
    new = [(p, r) for p, r in files if r.cell_id not in stands]
    for path, record in files if replace else ():
        there = stands.get(record.cell_id)
        if there is None or fingerprint(there) == fingerprint(record):
            continue
        times = parse_time(record.finished), parse_time(there.finished)
        if times[0] is None or times[1] is None or times[0] <= times[1]:
            raise UserError(f"{path}: finished {record.finished}, but the record that stands is newer ({there.finished})")
        new.append((path, record))
    return new


def check(files: Files, standing: Sequence[Record]) -> list[str]:
    """What is wrong with the records of a submission, each a line that names the record or the suite.

    Args:
        files: of the submission.
        standing: records that complete its suites.
    """
    groups: dict[str, list[tuple[Path, Record]]] = {}
    for path, record in files:
        groups.setdefault(_suite_of(record.cell), []).append((path, record))
    wrong = []
    for group in groups.values():
        first = group[0][1].cell
        try:
            cells = suite_cells(first)
        except UserError as error:
            wrong.append(str(error))
            continue
        for path, record in group:
            wrong += [f"{record.stem}: {problem}" for problem in _record_problems(path, record, cells.get(record.cell_id))]
        measured = {r.cell_id for r in [*standing, *(r for _, r in group)]}
        wrong += _incomplete(first, [cell for cell_id, cell in cells.items() if cell_id not in measured], len(cells))
    return wrong + _too_large(files)


def suite_cells(spec: CellSpec) -> dict[str, Cell]:
    """All cells of a recorded cell's suite on its model, by id. The suite is in `./suites` or comes with the project.

    Raises:
        UserError: there is no such suite in this version, or it has a mistake.
    """
    versions = []
    for path in [*sorted(Path("suites").glob("*.yaml")), *shipped_suites()]:
        if not re.search(rf"^suite: *{re.escape(spec.suite)} *$", path.read_text(encoding="utf-8"), re.MULTILINE):
            continue
        suite, cells = load(path)
        if suite.version == spec.suite_version:
            model = spec.as_json()["model"]
            own = [cell for cell in cells if cell.model.as_json() == model]
            return {cell.id: cell for cell in own or load(path, _on(model))[1]}
        versions.append(suite.version)
    if versions:
        raise UserError(f"{spec.suite}, version {spec.suite_version}: the suite has version {versions[0]} now: measure it again")
    raise UserError(f"{spec.suite}: no such suite comes with the project: add suites/{spec.suite}.yaml to the pull request")


def lay_down(files: Files, results: Path) -> list[Path]:
    """Copy the records and their files into a folder of records, and list them there as submitted. Returns what was written.

    Raises:
        OSError: the folder can't be written to.
    """
    store = RecordStore(results)
    entries: dict[Path, list[Submitted]] = {}
    written = []
    for path, record in files:
        target = store.path(record)
        target.parent.mkdir(parents=True, exist_ok=True)
        names = [part.file for part in files_beside(record)]
        for name in (*names, path.name):  # the record comes last, so that none lacks its trace
            copy, data = target if name == path.name else target.with_name(name), content(path.with_name(name))
            written.append(write_packed(copy, data) if copy.suffix == ".jsonl" else write_plain(copy, data))
        entries.setdefault(target.parent, []).append(Submitted(record=record.stem, sha256=fingerprint(record)))
    for folder, lines in entries.items():
        add_submitted(folder, lines)
    return written


def _suite_of(spec: CellSpec) -> str:
    return repr([spec.suite, spec.suite_version, spec.as_json()["model"]])


def _on(model: Mapping[str, Any]) -> Overrides:
    """The changes to a suite that put it on a recorded model."""
    settings = [f"model.{k}={json.dumps(v)}" for k, v in model.items() if k != "id" and v is not None]
    return Overrides(model["id"], settings=settings)


def _record_problems(path: Path, record: Record, cell: Cell | None) -> Iterator[str]:
    """What is wrong with one record. cell: of its suite; None if the suite has no such cell."""
    yield from (f"{name} names a local path: {text}" for name, text in local_paths(record.as_json()))
    if is_local_name(record.cell.model.id):
        yield f"its model {record.cell.model.id} is a local directory, where nobody else can load it: give a hub id"
    if record.status == "failed" and (record.error is None or not record.error.kind):
        yield "it failed and does not say why"
    lacking = [name for name, value in _provenance(record) if not value]
    if lacking:
        yield f"it does not say where it comes from: {', '.join(lacking)} is missing"
    if cell is None:
        spec = record.cell
        suite = f"{spec.suite}, version {spec.suite_version}"
        yield f"{suite}, has no such cell: add its policy to the suite's file, and measure without --set"
    elif record.facts.policy_sha256 != source_digest(cell.policy):
        yield f"the source of {record.cell.policy} has changed since: measure it again"
    if record.numerics != NUMERICS_VERSION:
        yield f"it has numerics version {record.numerics}, this is {NUMERICS_VERSION}: measure it again"
    if stored(path).is_symlink():
        yield "its file is a link"
    for part in files_beside(record):
        if not os.path.lexists(stored(path.with_name(part.file))):
            yield f"its file {part.file} is missing (git ignores some: add it with git add --force)"
    yield from verify_problems(record, path.parent) or ()


def _provenance(record: Record) -> list[tuple[str, Any]]:
    """What must be known of a record's origin: (field, value)."""
    facts, data = record.facts, record.data
    return [
        ("facts.device", facts.device), ("facts.platform", facts.platform), ("facts.threads", facts.threads),
        *((f"facts.versions.{name}", facts.versions.get(name)) for name in ("kv-bench", "torch", "transformers")),
        ("facts.weights_sha256", facts.weights_sha256), ("facts.policy_sha256", facts.policy_sha256),
        ("data.source", data.source), ("data.ids_sha256", data.ids_sha256),
    ]  # fmt: skip


def local_paths(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(field, path) of every text in a JSON value that names a file from the root or from a home folder."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from local_paths(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from local_paths(inner, f"{name}.{index}")
    elif isinstance(value, str):
        yield from ((name, match[1]) for match in itertools.islice(_LOCAL_PATH.finditer(value), 1))


def _incomplete(spec: CellSpec, missing: Sequence[Cell], total: int) -> list[str]:
    """The cells of a suite that have no record, in one line."""
    if not missing:
        return []
    names = list(labels(missing).values())
    more = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    where = f"{spec.suite}, version {spec.suite_version}, on {spec.model.id}"
    return [f"{where}: {len(missing)} of {total} cells have no record: {'; '.join(names[:_MAX_NAMES])}{more}"]


def _too_large(files: Files) -> list[str]:
    """Traces that are too large for the repository."""
    traces = [stored(path.with_name(record.trace.file)) for path, record in files if record.trace is not None]
    sizes = {trace: trace.stat().st_size for trace in traces if trace.is_file()}
    wrong = [
        f"{trace.name}: {size / 2**20:.1f} MiB; a trace may have {MAX_TRACE_BYTES >> 20} MiB"
        for trace, size in sizes.items()
        if size > MAX_TRACE_BYTES
    ]
    total = sum(sizes.values())
    if total > MAX_TRACES_BYTES:
        wrong.append(f"the traces have {total / 2**20:.0f} MiB; those of a submission may have {MAX_TRACES_BYTES >> 20} MiB")
    return wrong
