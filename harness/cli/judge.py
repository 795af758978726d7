"""Verbs that compare records and judge them."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from harness.cli.output import print_rows, skipped, writable
from harness.cli.running import Asked, suite_options
from harness.errors import Exit, UserError

if TYPE_CHECKING:
    from harness.records import Record
    from harness.report.gate import Finding

_TRIES = 3  # a step that looks slower is measured again, so that only what stays slower is a regression


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option("--markdown", is_flag=True, help="Print as markdown, for a comment on a pull request.")
def compare(a: str, b: str, as_json: bool, markdown: bool) -> None:
    """Judge B against A, metric by metric: each a record's file, a folder of records, or a git revision.

    Paired token by token and question by question where both read the same.

    \b
    bench compare HEAD leaderboard/results
    bench compare before/ after/ --markdown
    bench compare results/.../h2o-*.json results/.../sink_window-*.json
    """
    from harness.report import verdicts
    from harness.report.sources import records_of

    with records_of(a, skipped) as (first, folder_a), records_of(b, skipped) as (second, folder_b):
        found = verdicts.of((first, folder_a), (second, folder_b))
    if not found:
        raise UserError(f"{a} and {b} have no cell in common: {len(first)} and {len(second)} records")
    if as_json:
        click.echo(json.dumps([x.as_json() for x in found], indent=1, ensure_ascii=False))
    elif markdown:
        click.echo(verdicts.markdown(found, a, b), nl=False)
    else:
        print_rows([x.cells() for x in found], False)
        click.echo(verdicts.summary(found), err=True)


@click.command()
@click.option("--baseline", "folder", required=True, metavar="DIR", help="What to hold the records to.")
@click.option("--results", metavar="DIR", help="Judge the records of this folder; without it the baseline's suite is run.")
@click.option("--keep", metavar="DIR", help="Folder for the records of the run; thrown away if not given.")
@click.option("--data", metavar="DIR", envvar="BENCH_DATA", help="Directory of the text, if the suite needs one.")
@click.option("--json", "as_json", is_flag=True, help="Print every finding as JSON.")
def check(folder: str, results: str | None, keep: str | None, data: str | None, as_json: bool) -> None:
    """The regression gate: exit 0 as good as the baseline, 1 a regression, 3 something could not be compared.

    Every token's NLL, the paired mean, the bytes, and each step's time beside dense's, measured in turn.

    \b
    bench check --baseline leaderboard/baselines/quickstart
    bench check --baseline leaderboard/baselines/quickstart --results leaderboard/results
    """
    from harness.report import baseline, gate
    from harness.report.sources import records_of

    about, records = baseline.load(Path(folder))
    if results is not None:
        with records_of(results, skipped) as (now, where):
            findings = gate.check((records, Path(folder)), (now, where), about.bands)
    else:
        asked = Asked(about.suite, **(about.options | ({"data": data} if data else {})))
        with TemporaryDirectory() as scratch:
            target = writable(Path(keep)) if keep else Path(scratch) / "records"
            now = asked.measured(target, asked.cells(), fresh=True)
            findings = gate.check((records, Path(folder)), (now, target), about.bands)
            findings = _again(findings, lambda n: _latency_run(asked, Path(scratch) / f"again{n}"), about.bands, records)
    if as_json:
        click.echo(json.dumps([vars(f) for f in findings], indent=1, ensure_ascii=False))
    else:
        shown = [f for f in findings if f.state != "ok"]
        print_rows([{"state": f.state, "check": f.check, "cell": f.cell, "says": f.says} for f in shown], False)
    code = gate.exit_code(findings)
    verdict = {Exit.OK: "as good as the baseline", Exit.NO: "REGRESSION"}.get(code, "could not be compared")
    click.echo(f"{verdict}: {sum(f.state == 'ok' for f in findings)} of {len(findings)} checks passed", err=True)
    sys.exit(code)


def _again(
    findings: list[Finding], measure: Callable[[int], list[Record]], bands: dict[str, Any], base: list[Record]
) -> list[Finding]:
    """Latency that looked like a regression, measured again: what is within its band once is none."""
    from harness.report import gate

    for attempt in range(1, _TRIES):
        slow = {f.cell_id for f in findings if f.check == "latency" and f.state == "regression"}
        if not slow:
            break
        click.echo(f"{len(slow)} cells looked slower: measured again", err=True)
        again = gate.check(([r for r in base if r.cell_id in slow], Path()), (measure(attempt), Path()), bands)
        fine = {f.cell_id: f for f in again if f.check == "latency" and f.state == "ok"}
        findings = [fine[f.cell_id] if f.check == "latency" and f.cell_id in fine else f for f in findings]
    return findings


def _latency_run(asked: Asked, target: Path) -> list[Record]:
    """The suite's latency cells alone."""
    return asked.measured(target, [c for c in asked.cells() if c.task.name == "latency"], fresh=True)


@click.group()
def baseline() -> None:
    """Make what `bench check` holds records to.

    \b
    bench baseline update leaderboard/baselines/quickstart --suite quickstart --why "H2O's sums in float32"
    """


@baseline.command()
@click.argument("folder")
@click.option("--suite", required=True, help="To measure: a file, or the name of a suite that comes with the project.")
@suite_options
@click.option("--runs", default=8, show_default=True, type=click.IntRange(1), help="Of the latency cells, to learn their noise.")
@click.option("--why", required=True, help="What changed that a new baseline is right: kept in it.")
@click.option("--who", help="Who says so; git's user.name if not given.")
def update(folder: str, suite: str, runs: int, why: str, who: str | None, **options: Any) -> None:
    """Measure a suite and put its records in FOLDER, in place of what is there, with the noise of its latency."""
    from harness.report import baseline as baselines

    asked = Asked(suite, **options)
    writable(Path(folder).parent)
    with TemporaryDirectory(dir=Path(folder).parent, prefix=".update-") as scratch:
        records = Path(scratch) / "records"
        cells = asked.cells()
        first = asked.measured(records, cells, fresh=True)
        latency = any(c.task.name == "latency" for c in cells)
        repeated = [first, *(_latency_run(asked, Path(scratch) / f"{n}") for n in range(1, runs if latency else 1))]
        bands = baselines.bands(repeated)
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        about = baselines.Baseline(suite, asked.changes(), who or _git_user(), when, why, bands)
        baselines.store(Path(folder), about, records)
    click.echo(f"{len(first)} records -> {folder}")
    wide = baselines.too_noisy(bands)
    if wide:
        click.echo(f"{len(wide)} of {len(bands)} latency cells are too noisy here to notice a slowdown of 30 %", err=True)


def _git_user() -> str:
    import getpass
    import subprocess

    try:
        found = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        found = ""
    return found or getpass.getuser()
