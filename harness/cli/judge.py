"""The commands `bench compare`, `check` and `baseline`."""

from __future__ import annotations

import datetime
import itertools
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from kvbench.harness.cli.output import FILLED, RESULTS, RESULTS_VARIABLE, debugging, print_rows, report_skipped, results_option
from kvbench.harness.cli.rerun import cells_of_baseline, portable, request_from_baseline, with_groups
from kvbench.harness.cli.run import suite_options
from kvbench.harness.core.errors import RefusedModelError, UserError
from kvbench.harness.core.files import writable
from kvbench.harness.core.grouped import grouped
from kvbench.harness.run.request import RunRequest

if TYPE_CHECKING:
    from kvbench.harness.records import Record
    from kvbench.harness.report.baseline import Baseline
    from kvbench.harness.report.gate import Finding, Measured

_MIN_MERGED_ROWS = 4


@click.command()
@click.argument("a", type=FILLED)
@click.argument("b", default=RESULTS, envvar=RESULTS_VARIABLE, type=FILLED)
@results_option
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option("--markdown", is_flag=True, help="Print as Markdown, for a comment on a pull request.")
@click.option("--all", "every", is_flag=True, help="Also show unchanged figures on a terminal; a pipe always gets them.")
def compare(a: str, b: str, results: str, as_json: bool, markdown: bool, every: bool) -> None:
    """Compare the records B with the records A, metric by metric.

    A and B are each a record's file, the beginning of a cell id, a folder of records, or a git revision. B defaults to
    BENCH_RESULTS or ./results. Records that read the same text are compared token by token, or question by question. Each
    interval is of one comparison, not corrected for the number of pairs as on the pages.

    \b
    bench compare leaderboard/records
    bench compare HEAD~1 HEAD
    bench compare before/ after/ --markdown
    bench compare 128d93c6 1a2d4db3
    """
    from kvbench.harness.report import compare as comparison
    from kvbench.harness.report.sources import open_records

    where = Path(results)
    with (
        open_records(a, report_skipped, where) as (first, folder_a),
        open_records(b, report_skipped, where) as (second, folder_b),
    ):
        judged = comparison.judge_all((first, folder_a), (second, folder_b))
    if not judged:
        raise UserError(f"{a} ({len(first)} records) and {b} ({len(second)} records) have no cell in common")
    if as_json:
        print_rows([x.as_json() for x in judged], as_json)
    elif markdown:
        click.echo(comparison.markdown(judged, a, b), nl=False)
    else:
        shown = [x for x in judged if x.difference.verdict != "same"] if sys.stdout.isatty() and not every else judged
        if shown:
            print_rows([x.cells() for x in shown], False)
        hidden = f" ({len(judged) - len(shown)} not shown: --all)" if len(shown) < len(judged) else ""
        click.echo(comparison.summary(judged) + hidden, err=True)


@click.command()
@click.option("--baseline", "folder", required=True, metavar="DIR", type=FILLED, help="Folder of the baseline.")
@click.option(
    "--results", metavar="DIR", type=FILLED, help="Check the records in this folder. Default: run the baseline's suite."
)
@click.option("--keep", metavar="DIR", type=FILLED, help="Keep the records of the run in this folder.")
@click.option(
    "--model", metavar="DIR|HUB_ID", type=FILLED, help="Folder or hub id of the baseline's model, if the model was local."
)
@click.option("--data", metavar="DIR", envvar="BENCH_DATA", type=FILLED, help="Directory of the text, if the suite needs one.")
@click.option("--allow-better", is_flag=True, help="Accept figures that are better than their limits.")
@click.option("--json", "as_json", is_flag=True, help="Print every finding as JSON.")
def check(
    folder: str, results: str | None, keep: str | None, model: str | None, data: str | None, allow_better: bool, as_json: bool
) -> None:
    """Check records against a baseline: the regression gate.

    All figures, NLLs of tokens, answers and bytes are compared. Times are compared relative to the yardstick of the same run,
    and a figure that is too good fails, too. Exit code 0: as good as the baseline; 1: a regression, or better than the noise
    explains; 3: something can't be compared; 5: too few checks apply on this machine.

    \b
    bench check --baseline leaderboard/baselines/quickstart
    bench check --baseline leaderboard/baselines/quickstart --results results
    bench check --baseline baselines/mine --model ~/models/mine --data ~/books
    """
    from kvbench.harness.report import baseline, gate
    from kvbench.harness.report.sources import open_records

    reference, records = baseline.load(Path(folder))
    if results is not None:
        with open_records(results, report_skipped) as (now, now_folder):
            findings = gate.check((records, Path(folder)), (now, now_folder), reference.bands)
    else:
        findings = _run(reference, (records, Path(folder)), keep, model, data)
    print_rows([vars(f) for f in findings] if as_json else _rows([f for f in findings if f.state != "ok"]), as_json)
    click.echo(gate.verdict(findings, allow_better), err=True)
    sys.exit(gate.exit_code(findings, allow_better))


def _rows(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return a row per finding. A finding that many cells share, such as a different device, gets one row."""
    return [
        {"state": state, "check": check, "cell": cell, "says": says}
        for (state, check, says), alike in grouped(findings, lambda f: (f.state, f.check, f.says)).items()
        for cell in ([f.cell for f in alike] if len(alike) < _MIN_MERGED_ROWS else [f"{len(alike)} cells"])
    ]


def _run(reference: Baseline, base: Measured, keep: str | None, model: str | None, data: str | None) -> list[Finding]:
    """Measure the baseline's suite and judge it. Cells that look slower or larger are measured again."""
    from kvbench.harness.report import gate

    request = request_from_baseline(reference, base[1], model, data)
    cells = cells_of_baseline(request, *base)
    click.echo(f"measuring the {len(cells)} cells of {base[1]}", err=True)
    with TemporaryDirectory() as scratch:
        target = writable(Path(keep)) if keep else Path(scratch) / "records"
        try:
            now = request.measure(target, cells, tracebacks=debugging())
        except RefusedModelError as error:
            return gate.check(base, ([], target), reference.bands, refused=str(error))
        tries = itertools.count(1)

        def again(ids: Collection[str]) -> list[Record]:
            click.echo(f"measuring {len(ids)} cells again, because their times or memory differ", err=True)
            folder, chosen = Path(scratch) / f"again{next(tries)}", with_groups(ids, cells)
            return request.measure(folder, chosen, tracebacks=debugging())

        return gate.remeasure(gate.check(base, (now, target), reference.bands), base[0], reference.bands, again)


@click.group()
def baseline() -> None:
    """Make the baselines of `bench check`.

    \b
    bench baseline update leaderboard/baselines/quickstart --suite quickstart --why "H2O's sums in float32"
    """


@baseline.command()
@click.argument("folder", type=FILLED)
@click.option("--suite", required=True, help="Suite to measure: a file, or the name of one that comes with the project.")
@suite_options
@click.option(
    "--runs",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="Number of measurements of the latency cells, from which their noise is learnt.",
)
@click.option("--why", required=True, help="Reason for the new baseline, written to it.")
@click.option("--who", help="Person who decided, written to it. Default: git's user.name.")
def update(folder: str, suite: str, runs: int, why: str, who: str | None, **options: Any) -> None:
    """Measure a suite, and make FOLDER a baseline.

    The baseline contains the records and the noise of their latency. FOLDER may be missing or empty. A baseline in FOLDER is
    replaced, if FOLDER contains nothing else.
    """
    from kvbench.harness.core import plugins
    from kvbench.harness.records.metrics import StepMetrics
    from kvbench.harness.report import baseline as baselines
    from kvbench.harness.report import gate_times
    from kvbench.harness.report.baseline import Baseline

    request = RunRequest(suite, fresh=True, **options)
    target = baselines.replaceable(Path(folder))
    portable_suite, portable_options = portable(request, target)
    with TemporaryDirectory(dir=writable(target.parent), prefix=".update-") as scratch:
        records = Path(scratch) / "records"
        cells = request.cells()
        first = request.measure(records, cells, tracebacks=debugging())
        latency = [c for c in cells if issubclass(plugins.task_class(c.task.name).metrics, StepMetrics)]
        repeats = range(1, runs) if latency else ()
        others = [request.measure(Path(scratch) / f"{n}", latency, tracebacks=debugging()) for n in repeats]
        learnt = gate_times.learn_bands([first, *others])
        reference = Baseline(
            suite=portable_suite,
            options=portable_options,
            who=who or _git_user(),
            why=why,
            bands=learnt,
            when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        baselines.store(target, reference, records)
    click.echo(f"{len(first)} records -> {folder}")
    failed = sum(r.status != "ok" for r in first)
    if failed:
        click.echo(f"{failed} cells failed; bench check does not compare them", err=True)


def _git_user() -> str:
    import getpass
    import subprocess

    try:
        name = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        name = ""
    return name or getpass.getuser()
