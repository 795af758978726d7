"""The command `bench which`: which policy for a model, at a budget, in the time that there is."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbench.harness.cli.output import FILLED, debugging, print_rows, results_option, writable
from kvbench.harness.cli.pages import leaderboard
from kvbench.harness.cli.terminal import line_width, link
from kvbench.harness.core.durations import about
from kvbench.harness.core.errors import Exit
from kvbench.harness.run.request import RunRequest

if TYPE_CHECKING:
    from kvbench.harness.records import Record
    from kvbench.harness.run.estimate import Estimator
    from kvbench.harness.run.which_suite import Wish
    from kvbench.harness.suite import Cell


class _Budget(click.ParamType[int]):
    """Tokens per KV head."""

    name = "tokens"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number.

        Raises:
            click.BadParameter: it is a share, or no number of tokens.
        """
        text = str(value).replace(",", "").replace("_", "")
        if not re.fullmatch("[1-9][0-9]*", text):
            self.fail(f"{value}: expected tokens that a KV head keeps, such as 1024, not a share or bytes", param, ctx)
        return int(text)


class _Minutes(click.FloatRange):
    """A finite time."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number.

        Raises:
            click.BadParameter: it is too small, infinite or no number.
        """
        minutes = float(super().convert(value, param, ctx))
        if not math.isfinite(minutes):
            self.fail(f"{value}: expected minutes, such as 30", param, ctx)
        return minutes


@click.command()
@click.argument("model", type=FILLED)
@click.option("--budget", type=_Budget(), required=True, help="Tokens that a KV head keeps.")
@click.option(
    "--data", metavar="DIR", envvar="BENCH_DATA", type=FILLED, help="Your text, .txt or .parquet. Default: built-in prose."
)
@click.option("--minutes", type=_Minutes(min=0.1), default=30.0, show_default=True, help="Minutes that the command may take.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:1.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Type of the weights and the cache.",
)
@click.option("--threads", type=click.IntRange(1, 4096), help="CPU threads. Default: torch's.")
@results_option
@click.option("--fresh", is_flag=True, help="Choose the cells again, and measure finished cells again.")
@click.option("--dry-run", is_flag=True, help="List the cells with estimates of time; measure nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def which(
    model: str,
    budget: int,
    data: str | None,
    minutes: float,
    device: str,
    dtype: str,
    threads: int | None,
    results: str,
    fresh: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Find the policy for a model at a budget.

    MODEL is a directory, a hub id or builtin:NAME. Each policy is tried for a moment. Then cells are measured as by bench run,
    the most informative first, until the time is over. Records and the suite are kept, so that the same command continues.

    \b
    bench which builtin:recall --budget 96 --minutes 3
    bench which path/to/model --budget 1024 --data path/to/texts
    bench which builtin:recall --budget 96 --dry-run
    """
    seconds = 60 * minutes
    until = time.monotonic() + seconds  # loading torch takes seconds, too
    from kvbench.harness.models.load import device_of
    from kvbench.harness.run.estimate import Estimator
    from kvbench.harness.run.which_suite import TRIAL_SHARE, Deadline, Wish, ordered

    wish = Wish(model, budget, minutes, data, device, dtype)
    with tempfile.TemporaryDirectory() if dry_run else contextlib.nullcontext(results) as folder:
        suite = writable(Path(folder)) / "which" / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', model).strip('_')}-{budget}.yaml"
        request = RunRequest(str(suite), None, data, device=device, threads=threads)
        request.use_threads()
        estimator = Estimator(device_of(device), math.inf, until - (1 - TRIAL_SHARE) * seconds)
        if fresh or not _is_kept(suite, wish):
            _choose(suite, wish, estimator, until)
        cells = ordered(request.cells())
        if dry_run:
            _describe(cells, estimator, as_json)
            return
    deadline = Deadline(cells, until, estimator)
    del estimator  # the deadline frees its model
    records = request.measure(Path(results), cells, fresh, tracebacks=debugging(), wanted=deadline.wants, until=until)
    for note in deadline.notes:
        click.echo(note, err=True)
    _show(records, wish, results, as_json)
    if any(r.status == "failed" for r in records):
        sys.exit(Exit.FAILED_CELLS)


def _is_kept(suite: Path, wish: Wish) -> bool:
    """Whether a suite was chosen for the same wish, by an earlier call."""
    try:
        return suite.read_text(encoding="utf-8", errors="replace").startswith(wish.command)
    except OSError:
        return False


def _choose(suite: Path, wish: Wish, estimator: Estimator, until: float) -> None:
    """Write the suite, and say what it leaves out."""
    from kvbench.harness.run.which_suite import suite_for

    click.echo(f"trying policies on {wish.model}, to choose what fits into {wish.minutes:g} min", err=True)
    content, notes = suite_for(wish, estimator, until - time.monotonic())
    suite.parent.mkdir(parents=True, exist_ok=True)
    suite.write_text(content, encoding="utf-8")
    for note in notes:
        click.echo(note, err=True)


def _describe(cells: Sequence[Cell], estimator: Estimator, as_json: bool) -> None:
    """Print the cells in the order in which they would be measured, with estimates."""
    rows = estimator.estimates(cells)
    print_rows([{"task": row.cell.task.name} | row.cells() for row in rows], as_json)
    seconds = estimator.load_seconds + sum(row.seconds or 0.0 for row in rows)
    click.echo(f"{about(seconds)} in all; the last cells are left out if the time is too short", err=True)


def _show(records: Sequence[Record], wish: Wish, results: str, as_json: bool) -> None:
    """Print the sentence and the table, and write the page."""
    from kvbench.harness.report.best_policy import legend, which
    from kvbench.harness.report.closing import closing
    from kvbench.harness.report.doubts import with_doubts

    answer, troubles = which(records, wish.model, wish.budget), closing(with_doubts(records)).troubles if records else ()
    if as_json:
        fields = {"sentence": answer.sentence, "rows": list(answer.rows), "troubles": list(troubles)}
        click.echo(json.dumps(fields, indent=1, ensure_ascii=False))
    else:
        print_rows(list(answer.rows), False)
        click.echo()
        for text in (answer.sentence, legend(answer.rows)) if records else (answer.sentence,):
            click.echo(click.wrap_text(text, line_width()))
    for trouble in troubles:
        click.echo(trouble, err=True)
    if records:
        with contextlib.redirect_stdout(sys.stderr):
            click.get_current_context().invoke(leaderboard, results=results, out=None, paper=None, site="index.html")
        click.echo(f"Page: {link(Path(results) / 'index.html', sys.stderr.isatty())}", err=True)
