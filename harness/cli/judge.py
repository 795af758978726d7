"""Verbs that compare records and judge them."""

from __future__ import annotations

import datetime
import itertools
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from kvbench.harness.cli.output import FILLED, RESULTS, RESULTS_VARIABLE, debugging, print_rows, skipped, writable
from kvbench.harness.cli.rerun import asked_again, kept, still_asked, with_those_beside
from kvbench.harness.cli.running import suite_options
from kvbench.harness.core.errors import Exit, RefusedModelError, UserError
from kvbench.harness.run.asked import Asked

if TYPE_CHECKING:
    from kvbench.harness.records import Record
    from kvbench.harness.report.baseline_file import Baseline
    from kvbench.harness.report.gate import Finding, Measured


_MANY = 4  # cells of which one row is enough


@click.command()
@click.argument("a", type=FILLED)
@click.argument("b", default=RESULTS, envvar=RESULTS_VARIABLE, type=FILLED)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option("--markdown", is_flag=True, help="Print as markdown, for a comment on a pull request.")
def compare(a: str, b: str, as_json: bool, markdown: bool) -> None:
    """Judge B against A, metric by metric: each a record's file, a folder of records, or a git revision.

    Paired token by token and question by question where both read the same. B is ./results, or BENCH_RESULTS, if not given.

    \b
    bench compare leaderboard/results
    bench compare HEAD~1 HEAD
    bench compare before/ after/ --markdown
    bench compare results/.../h2o-*.json results/.../sink_window-*.json
    """
    from kvbench.harness.report import verdicts
    from kvbench.harness.report.sources import open_records

    with open_records(a, skipped) as (first, folder_a), open_records(b, skipped) as (second, folder_b):
        found = verdicts.judge_all((first, folder_a), (second, folder_b))
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
@click.option("--baseline", "folder", required=True, metavar="DIR", type=FILLED, help="What to hold the records to.")
@click.option(
    "--results", metavar="DIR", type=FILLED, help="Judge the records of this folder; without it the baseline's suite is run."
)
@click.option("--keep", metavar="DIR", type=FILLED, help="Folder for the records of the run; thrown away if not given.")
@click.option("--model", metavar="DIR|HUB_ID", type=FILLED, help="Where the baseline's model is, if it was a local one.")
@click.option("--data", metavar="DIR", envvar="BENCH_DATA", type=FILLED, help="Directory of the text, if the suite needs one.")
@click.option("--json", "as_json", is_flag=True, help="Print every finding as JSON.")
def check(folder: str, results: str | None, keep: str | None, model: str | None, data: str | None, as_json: bool) -> None:
    """The regression gate: exit 0 as good as the baseline, 1 a regression, 3 something could not be compared.

    Every figure of every record, every token's NLL, every answer, the bytes, and times beside what was measured with them.

    \b
    bench check --baseline leaderboard/baselines/quickstart
    bench check --baseline leaderboard/baselines/quickstart --results results
    bench check --baseline baselines/mine --model ~/models/mine --data ~/books
    """
    from kvbench.harness.report import baseline, gate
    from kvbench.harness.report.sources import open_records

    about, records = baseline.load(Path(folder))
    if results is not None:
        with open_records(results, skipped) as (now, where):
            findings = gate.check((records, Path(folder)), (now, where), about.bands)
    else:
        findings = _run(about, (records, Path(folder)), keep, model, data)
    if as_json:
        click.echo(json.dumps([vars(f) for f in findings], indent=1, ensure_ascii=False))
    else:
        print_rows(_rows([f for f in findings if f.state != "ok"]), False)
    code = gate.exit_code(findings)
    verdict = {Exit.OK: "as good as the baseline", Exit.NO: "REGRESSION"}.get(code, "could not be compared")
    click.echo(f"{verdict}: {sum(f.state == 'ok' for f in findings)} of {len(findings)} checks passed", err=True)
    sys.exit(code)


def _rows(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """What is not as it was, a row each; what is said of many cells alike, such as another device, once."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for f in findings:
        alike.setdefault((f.state, f.check, f.says), []).append(f.cell)
    return [
        {"state": state, "check": check, "cell": cell, "says": says}
        for (state, check, says), cells in alike.items()
        for cell in (cells if len(cells) < _MANY else [f"{len(cells)} cells"])
    ]


def _run(about: Baseline, base: Measured, keep: str | None, model: str | None, data: str | None) -> list[Finding]:
    """Measure the baseline's suite, and judge it; what looks slower or larger is measured again."""
    from kvbench.harness.report import gate

    asked = asked_again(about, base[1], model, data)
    cells = still_asked(asked, *base)
    with TemporaryDirectory() as scratch:
        target = writable(Path(keep)) if keep else Path(scratch) / "records"
        try:
            now = asked.measured(target, cells, fresh=True, tracebacks=debugging())
        except RefusedModelError as error:
            return gate.check(base, ([], target), about.bands, refused=str(error))
        tries = itertools.count(1)

        def again(ids: Collection[str]) -> list[Record]:
            click.echo(f"{len(ids)} cells looked slower or larger: measured again", err=True)
            folder, chosen = Path(scratch) / f"again{next(tries)}", with_those_beside(ids, cells)
            return asked.measured(folder, chosen, fresh=True, tracebacks=debugging())

        return gate.remeasure(gate.check(base, (now, target), about.bands), base[0], about.bands, again)


@click.group()
def baseline() -> None:
    """Make what `bench check` holds records to.

    \b
    bench baseline update leaderboard/baselines/quickstart --suite quickstart --why "H2O's sums in float32"
    """


@baseline.command()
@click.argument("folder", type=FILLED)
@click.option("--suite", required=True, help="To measure: a file, or the name of a suite that comes with the project.")
@suite_options
@click.option("--runs", default=8, show_default=True, type=click.IntRange(1), help="Of the latency cells, to learn their noise.")
@click.option("--why", required=True, help="What changed that a new baseline is right: kept in it.")
@click.option("--who", help="Who says so; git's user.name if not given.")
def update(folder: str, suite: str, runs: int, why: str, who: str | None, **options: Any) -> None:
    """Measure a suite and put its records in FOLDER, with the noise of its latency.

    FOLDER must be missing, empty, or hold a baseline and nothing else, which is replaced.
    """
    from kvbench.harness.core import plugins
    from kvbench.harness.records.metrics import StepMetrics
    from kvbench.harness.report import bands
    from kvbench.harness.report import baseline as baselines
    from kvbench.harness.report.baseline_file import Baseline

    asked = Asked(suite, **options)
    target = baselines.replaceable(Path(folder))
    kept_suite, kept_options = kept(asked, target)
    with TemporaryDirectory(dir=writable(target.parent), prefix=".update-") as scratch:
        records = Path(scratch) / "records"
        cells = asked.cells()
        first = asked.measured(records, cells, fresh=True, tracebacks=debugging())
        latency = [c for c in cells if issubclass(plugins.task_class(c.task.name).metrics, StepMetrics)]
        more = range(1, runs) if latency else ()
        repeated = [first, *(asked.measured(Path(scratch) / f"{n}", latency, fresh=True, tracebacks=debugging()) for n in more)]
        learnt = bands.learn(repeated)
        about = Baseline(
            suite=kept_suite, options=kept_options, who=who or _git_user(), why=why, bands=learnt,
            when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )  # fmt: skip
        baselines.store(target, about, records)
    click.echo(f"{len(first)} records -> {folder}")
    others = {r.cell_id for r in first if not bands.is_dense(r)}
    failed, wide = sum(r.status != "ok" for r in first), bands.too_noisy({k: v for k, v in learnt.items() if k in others})
    if failed:
        click.echo(f"{failed} of them failed: the baseline holds nobody to these cells", err=True)
    if wide:
        click.echo(
            f"{len(wide)} of {len(others & set(learnt))} latency cells are too noisy here to notice a slowdown of 30 %", err=True
        )


def _git_user() -> str:
    import getpass
    import subprocess

    try:
        found = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        found = ""
    return found or getpass.getuser()
