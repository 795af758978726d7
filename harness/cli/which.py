"""The command `bench which`: which policy for a model, at a budget, in the time that there is."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvbench.harness.cli.closing import line_width, link
from kvbench.harness.cli.output import FILLED, debugging, print_rows, results_option, writable
from kvbench.harness.cli.pages import leaderboard
from kvbench.harness.core.errors import Exit
from kvbench.harness.run.request import RunRequest

if TYPE_CHECKING:
    from kvbench.harness.records import Record
    from kvbench.harness.run.which import Asked, Plan


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


@click.command()
@click.argument("model", type=FILLED)
@click.option("--budget", type=_Budget(), required=True, help="Tokens that a KV head keeps.")
@click.option(
    "--data", metavar="DIR", envvar="BENCH_DATA", type=FILLED, help="Your text, .txt or .parquet. Default: built-in prose."
)
@click.option("--minutes", type=click.FloatRange(min=0.1), default=30.0, show_default=True, help="That measuring may take.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:1.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Type of the weights and the cache.",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads. Default: torch's.")
@results_option
@click.option("--fresh", is_flag=True, help="Choose and measure again what is finished.")
@click.option("--dry-run", is_flag=True, help="Say what would be measured and how long it takes; measure nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def which(
    model: str, budget: int, data: str | None, minutes: float, device: str, dtype: str, threads: int | None, results: str,
    fresh: bool, dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    """Find the policy for a model at a budget.

    MODEL is a directory, a hub id or builtin:NAME. Each policy is tried for a moment; then as many policies, streams of text and
    questions are chosen as the time allows, measured as bench run does, and compared. The suite that was chosen is kept beside
    the records, and the same command goes on with it.

    \b
    bench which builtin:recall --budget 96 --minutes 3
    bench which path/to/model --budget 1024 --data path/to/texts
    bench which builtin:recall --budget 96 --dry-run
    """
    from kvbench.harness.run.which import Asked

    if threads:
        import torch

        torch.set_num_threads(threads)
    asked = Asked(model, budget, minutes, data, device, dtype)
    folder = Path(results) if dry_run else writable(Path(results))
    suite = folder / "which" / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', model).strip('_')}-{budget}.yaml"
    if dry_run:
        _say(_chosen(asked), as_json)
        return
    if fresh or not _is_kept(suite, asked):
        chosen = _chosen(asked)
        for line in [*chosen.notes, chosen.says]:
            click.echo(line, err=True)
        chosen.write(suite, asked.command)
    request = RunRequest(str(suite), None, data, device=device, threads=threads)
    records = _measure(request, suite, folder, fresh)
    _show(records, asked, results, as_json)
    if any(r.status == "failed" for r in records):
        sys.exit(Exit.FAILED_CELLS)


def _is_kept(suite: Path, asked: Asked) -> bool:
    """Whether a suite was made for the same, by an earlier call."""
    try:
        return suite.read_text(encoding="utf-8", errors="replace").startswith(asked.command)
    except OSError:
        return False


def _chosen(asked: Asked) -> Plan:
    """What is measured, after a trial of each policy."""
    from kvbench.harness.run.which import plan

    click.echo(f"trying policies on {asked.model}, to see what fits into {asked.minutes:g} min", err=True)
    return plan(asked)


def _say(chosen: Plan, as_json: bool) -> None:
    """Say what would be measured."""
    if as_json:
        click.echo(json.dumps({"suite": chosen.suite, "seconds": chosen.seconds, "notes": list(chosen.notes)}, indent=1))
    else:
        click.echo("\n".join([*chosen.notes, chosen.says]))


def _measure(request: RunRequest, suite: Path, folder: Path, fresh: bool) -> list[Record]:
    """Measure the suite, dense first: what dense itself can't answer is left out."""
    from kvbench.harness.run.which import without_hopeless

    dense = [c for c in request.cells() if c.name == "dense" and c.task.name in ("lm_eval", "streameval")]
    if dense:
        for note in without_hopeless(suite, request.measure(folder, dense, fresh, tracebacks=debugging())):
            click.echo(note, err=True)
    finished = {cell.id for cell in dense}
    cells = request.cells()
    if fresh:  # those of dense are
        request.measure(folder, [c for c in cells if c.id not in finished], True, tracebacks=debugging())
    return request.measure(folder, cells, tracebacks=debugging())


def _show(records: list[Record], asked: Asked, results: str, as_json: bool) -> None:
    """Print the sentence and the table, and write the page."""
    from kvbench.harness.report.closing import closing
    from kvbench.harness.report.doubts import with_doubts
    from kvbench.harness.report.which import LEGEND, which

    found, troubles = which(records, asked.budget), closing(with_doubts(records)).troubles
    if as_json:
        answer = {"sentence": found.sentence, "rows": list(found.rows), "troubles": list(troubles)}
        click.echo(json.dumps(answer, indent=1, ensure_ascii=False))
    else:
        print_rows(list(found.rows), False)
        click.echo()
        click.echo(click.wrap_text(found.sentence, line_width()))
        click.echo(click.wrap_text(LEGEND, line_width()))
    for trouble in troubles:
        click.echo(trouble, err=True)
    with contextlib.redirect_stdout(sys.stderr):
        click.get_current_context().invoke(leaderboard, results=results, out=None, paper=None, site="index.html")
    click.echo(f"Page: {link(Path(results) / 'index.html', sys.stderr.isatty())}", err=True)
