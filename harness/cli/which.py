"""The command `bench which`: find the policy for a model at a budget, within a time limit."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbench.harness.cli.output import FILLED, debugging, line_width, results_option, show_closing
from kvbench.harness.cli.pages import leaderboard
from kvbench.harness.cli.run import machine_options
from kvbench.harness.core.errors import Exit
from kvbench.harness.core.files import writable
from kvbench.harness.run.request import RunRequest

if TYPE_CHECKING:
    from kvbench.harness.records import Record


@click.command()
@click.argument("model", type=FILLED)
@click.option("--budget", "tokens", metavar="TOKENS", required=True, help="Tokens that a KV head keeps.")
@click.option(
    "--minutes", type=click.FloatRange(0.1, 1e6), default=30, show_default=True, help="Minutes that the command may take."
)
@machine_options
@results_option
@click.option("--fresh", is_flag=True, help="Choose the cells again, and measure finished cells again.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def which(
    model: str,
    tokens: str,
    minutes: float,
    data: str | None,
    dtype: str | None,
    results: str,
    fresh: bool,
    as_json: bool,
    **machine: Any,
) -> None:
    """Find the policy for a model at a budget.

    MODEL is a directory, a hub id or builtin:NAME. Built-in prose is read, or the text of --data. Each policy is tried for a
    moment. Then cells are measured as by bench run, the most informative first, until the time is over. Records and the suite
    are kept, so that the same command continues.

    \b
    bench which builtin:recall --budget 96 --minutes 3
    bench which path/to/model --budget 1024 --data path/to/texts
    """
    budget = _budget(tokens)
    if math.isnan(minutes):  # which no range excludes
        raise click.BadParameter("nan: expected minutes, such as 30")
    until = time.monotonic() + 60 * minutes  # loading torch takes seconds, too
    from kvbench.harness.models.hub import model_directory
    from kvbench.harness.models.load import device_of
    from kvbench.harness.report.doubts import with_doubts
    from kvbench.harness.run.estimate import Estimator
    from kvbench.harness.run.which_suite import TRIAL_SHARE, Deadline, ordered, suite_for
    from kvbench.harness.suite import ModelSpec

    suite = writable(Path(results)) / "which" / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', model).strip('_')}-{budget}.yaml"
    request = RunRequest(str(suite), None, data, fresh=fresh, **machine)
    request.use_threads()
    estimator = Estimator(device_of(machine["device"]), math.inf, until - 60 * minutes * (1 - TRIAL_SHARE))
    options = {"budget": budget, "minutes": minutes, "device": machine["device"], "dtype": dtype, "data": data}
    made_by = f"# Made by: bench which {model}{''.join(f' --{name} {value}' for name, value in options.items() if value)}\n"
    if fresh or not suite.is_file() or not suite.read_text(encoding="utf-8", errors="replace").startswith(made_by):
        model_directory(model, None, allow_pickle=False)  # a mistyped name is refused before anything is announced
        click.echo(f"trying policies on {model}, to choose what fits into {minutes:g} min", err=True)
        content, notes = suite_for(
            ModelSpec(id=model, dtype=dtype or "float32"), budget, data, estimator, until - time.monotonic()
        )
        suite.parent.mkdir(parents=True, exist_ok=True)
        suite.write_text(made_by + content, encoding="utf-8")
        click.echo("".join(f"{note}\n" for note in notes), err=True, nl=False)
    cells = ordered(request.cells())
    deadline = Deadline(cells, until, estimator)
    del estimator  # the deadline frees its model
    records = with_doubts(request.measure(Path(results), cells, tracebacks=debugging(), wanted=deadline.wants, until=until))
    click.echo("".join(f"{note}\n" for note in deadline.notes), err=True, nl=False)
    _show(records, model, budget, results, as_json)
    if any(r.status == "failed" for r in records):
        sys.exit(Exit.FAILED_CELLS)


def _budget(tokens: str) -> int:
    """Parse a number of tokens, which may have separators.

    Raises:
        click.BadParameter: it is no positive integer.
    """
    digits = tokens.replace(",", "").replace("_", "")
    if not re.fullmatch("[1-9][0-9]*", digits):
        expected = "expected tokens that a KV head keeps, such as 1024, not a share or bytes"
        raise click.BadParameter(f"{tokens}: {expected}", param_hint="'--budget'")
    return int(digits)


def _show(records: Sequence[Record], model: str, budget: int, results: str, as_json: bool) -> None:
    """Print the answer, a table for each question and the problems of the run, and write the pages."""
    from kvbench.harness.report.best_policy import best_policy

    sentence, findings = best_policy(records, model, budget)
    if as_json:
        click.echo(json.dumps({"sentence": sentence, "findings": findings}, indent=1, ensure_ascii=False))
    else:
        click.echo(click.wrap_text(sentence, line_width()))
    if records:
        show_closing(records, results, to_stdout=not as_json)
        with contextlib.redirect_stdout(sys.stderr):
            click.get_current_context().invoke(leaderboard, results=results, out=None, paper=None, site="index.html")
