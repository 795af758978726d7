"""The command `bench records`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kvbench.harness.cli.output import FILLED, RESULTS, RESULTS_VARIABLE, report_skipped, results_option
from kvbench.harness.core.errors import Exit, UserError
from kvbench.harness.core.files import writable
from kvbench.harness.core.shown import visible


@click.group()
def records() -> None:
    """Verify records, publish them, or export them to a table.

    \b
    bench records verify
    bench records verify leaderboard/records
    bench records publish results leaderboard/records
    bench records export records.parquet
    """


@records.command()
@click.argument("folder", default=RESULTS, envvar=RESULTS_VARIABLE, type=FILLED)
def verify(folder: str) -> None:
    """Recompute the figures of the records in FOLDER, and report those that differ.

    Each figure is computed from the record's trace or its other figures. Only a new measurement can check a figure that follows
    from neither. FOLDER defaults to BENCH_RESULTS or ./results. Exit code 1: a record is wrong, or none could be verified.
    """
    from kvbench.harness.records import Problem, RecordStore
    from kvbench.harness.report import verify as verifier

    correct = wrong = without_trace = 0
    for path, record in RecordStore(Path(folder)).files():
        problems = [record.reason] if isinstance(record, Problem) else verifier.problems(record, path.parent)
        without_trace += problems is None
        correct += problems == []
        wrong += bool(problems)
        for problem in problems or []:
            click.echo(visible(f"{path}: {problem}"))
    if not correct + wrong + without_trace:
        raise UserError(f"{folder}: no records there: run a suite first, or name another folder")
    click.echo(f"{correct} records are correct, {wrong} are not, {without_trace} can't be verified without their trace", err=True)
    if wrong or not correct:
        sys.exit(Exit.NO)


@records.command()
@click.argument("source", metavar="FROM", type=FILLED)
@click.argument("target", metavar="TO", type=FILLED)
@click.option("--arrays", is_flag=True, help="Also publish traces with a number per token, which are large.")
def publish(source: str, target: str, arrays: bool) -> None:
    """Copy the records of FROM into the published folder TO, which has two files per suite.

    SUITE.jsonl has a line per record, SUITE.parquet the long lists and the traces. A record replaces an older one of the same
    cell and key. Every command reads both kinds of folders.

    \b
    bench records publish results leaderboard/records
    """
    from kvbench.harness.records import publish as copied

    if not Path(source).exists():
        raise UserError(f"{source}: no such folder")
    counts = copied(Path(source), writable(Path(target)), arrays)
    for suite, count in counts.items():
        click.echo(f"{suite}: {count} records are new or changed -> {Path(target) / suite}.jsonl")
    if not counts:
        raise UserError(f"{source}: no records there: run a suite first, or name another folder")


@records.command()
@click.argument("out", type=FILLED)
@results_option
@click.option("--all", "everything", is_flag=True, help="Export every record, not only the newest of each cell.")
def export(out: str, results: str, everything: bool) -> None:
    """Write the records to OUT as one flat table. OUT ends in .parquet or .csv."""
    from kvbench.harness.records import RecordStore, newest
    from kvbench.harness.report.export import write

    records, problems = RecordStore(Path(results)).read_all()
    for problem in problems:
        report_skipped(problem)
    if not records:
        raise UserError(f"{results}: no records there: run a suite first, or give another --results")
    exported = records if everything else newest(records)
    columns = write(exported, Path(out))
    click.echo(f"{len(exported)} records, {columns} columns -> {out}")
