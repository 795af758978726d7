"""Verbs that look after records."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kvbench.harness.cli.output import FILLED, RESULTS, RESULTS_VARIABLE, results_option, skipped
from kvbench.harness.core.errors import Exit, UserError
from kvbench.harness.core.visible import visible


@click.group()
def records() -> None:
    """Look after records: verify them, take them elsewhere.

    \b
    bench records verify
    bench records verify leaderboard/results
    bench records export records.parquet
    """


@records.command()
@click.argument("folder", default=RESULTS, envvar=RESULTS_VARIABLE, type=FILLED)
def verify(folder: str) -> None:
    """Compute every figure of the records in FOLDER again, from its trace or the rest of the record, and say what does not hold.

    FOLDER is ./results, or BENCH_RESULTS, if not given. Figures that follow from neither are named at the end: only a new
    measurement can check them.
    """
    from kvbench.harness.records import Problem, RecordStore
    from kvbench.harness.report.verify import verify as verdict_of

    count = hold = elsewhere = 0
    unverifiable: dict[str, None] = {}
    for path, found in RecordStore(Path(folder)).files():
        said = [found.reason] if isinstance(found, Problem) else None
        if not isinstance(found, Problem):
            verdict = verdict_of(found, path.parent)
            said = verdict.problems
            unverifiable |= dict.fromkeys(verdict.unverifiable)
        count, hold, elsewhere = count + 1, hold + (said == []), elsewhere + (said is None)
        for problem in said or []:
            click.echo(visible(f"{path}: {problem}"))
    if not count:
        raise UserError(f"{folder}: no records there")
    wrong = count - hold - elsewhere
    click.echo(f"{hold} records hold, {wrong} don't, {elsewhere} have their trace elsewhere", err=True)
    if unverifiable:
        click.echo(f"{len(unverifiable)} figures are not verifiable: {visible(', '.join(unverifiable))}", err=True)
    if wrong:
        sys.exit(Exit.NO)


@records.command()
@click.argument("out", type=FILLED)
@results_option
@click.option("--all", "everything", is_flag=True, help="Every record, not only the newest of each cell.")
def export(out: str, results: str, everything: bool) -> None:
    """Write the records as one flat table: OUT ends in .parquet or .csv."""
    from kvbench.harness.records import RecordStore, newest
    from kvbench.harness.report.export import write

    found, problems = RecordStore(Path(results)).read_all()
    for problem in problems:
        skipped(problem)
    if not found:
        raise UserError(f"{results}: no records there")
    shown = found if everything else newest(found)
    columns = write(shown, Path(out))
    click.echo(f"{len(shown)} records, {columns} columns -> {out}")
