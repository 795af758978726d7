"""Verbs that look after records."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from harness.cli.output import RESULTS, skipped
from harness.errors import Exit, UserError


@click.group()
def records() -> None:
    """Look after records: verify them, take them elsewhere.

    \b
    bench records verify leaderboard/results
    bench records export records.parquet
    """


@records.command()
@click.argument("folder", default=RESULTS)
def verify(folder: str) -> None:
    """Compute every aggregate of the records in FOLDER again from its trace, and say what does not hold."""
    from harness.records import RecordStore
    from harness.report.verify import problems

    store = RecordStore(Path(folder))
    found, unreadable = store.read_all()
    if not found and not unreadable:
        raise UserError(f"{folder}: no records there")
    wrong, untold = len(unreadable), 0
    for file in unreadable:
        click.echo(f"{file.path}: {file.reason}")
    for record in found:
        path = store.path(record)
        said = problems(record, path.parent)
        untold += said is None
        wrong += bool(said)
        for problem in said or []:
            click.echo(f"{path}: {problem}")
    click.echo(
        f"{len(found) - untold - (wrong - len(unreadable))} records hold, {wrong} don't, {untold} have their trace elsewhere",
        err=True,
    )
    if wrong:
        sys.exit(Exit.NO)


@records.command()
@click.argument("out")
@click.option("--results", default=RESULTS, show_default=True, help="Folder of the records.")
@click.option("--all", "everything", is_flag=True, help="Every record, not only the newest of each cell.")
def export(out: str, results: str, everything: bool) -> None:
    """Write the records as one flat table: OUT ends in .parquet or .csv."""
    from harness.records import RecordStore, newest
    from harness.report.export import write

    found, problems = RecordStore(Path(results)).read_all()
    for problem in problems:
        skipped(problem)
    if not found:
        raise UserError(f"{results}: no records there")
    shown = found if everything else newest(found)
    columns = write(shown, Path(out))
    click.echo(f"{len(shown)} records, {columns} columns -> {out}")
