"""The commands `bench run` and `bench probe`, and the options of every command that runs a suite."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from kvbench.harness.cli.output import FILLED, debugging, print_rows, results_option, show_closing, stdout_is_stderr
from kvbench.harness.core.errors import Exit
from kvbench.harness.core.files import writable
from kvbench.harness.core.shown import duration
from kvbench.harness.run.request import KeepSteps, RunRequest

_DTYPES = ("float32", "bfloat16", "float16")
_MACHINE_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--data",
        metavar="DIR",
        envvar="BENCH_DATA",
        type=FILLED,
        help="Directory of the text, .parquet or .txt, or of images (or BENCH_DATA).",
    ),
    click.option("--device", default="auto", show_default=True, help="Device: auto, cpu, cuda or cuda:1."),
    click.option("--dtype", type=click.Choice(_DTYPES), help="Type of the weights and the cache."),
    click.option("--threads", type=click.IntRange(1, 4096), help="CPU threads. Default: torch's."),
]
_SUITE_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--model", metavar="DIR|HUB_ID", type=FILLED, help="Use this model, or all models in a folder."),
    click.option(
        "--policy",
        "policies",
        multiple=True,
        metavar="POLICY",
        help="Measure only this policy: a name of the suite, with its parameters there; another name; file.py:Class; or "
        "'{name: h2o, window: 8}'; repeatable.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Change a value of the suite: --set tokens=20000 --set capacity=[128,256].",
    ),
]


def _adding(options: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Return a decorator that adds options to a command, in this order."""
    return lambda command: functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


machine_options = _adding(_MACHINE_OPTIONS)  # options of every command that measures
suite_options = _adding([*_SUITE_OPTIONS, *_MACHINE_OPTIONS])  # options of `bench run` and `bench baseline update`


@click.command()
@click.argument("suite")
@suite_options
@click.option("--only", "tasks", multiple=True, metavar="TASK", help="Measure only this task of the suite; repeatable.")
@click.option(
    "--block",
    type=click.IntRange(1, 10**9),
    help="Tokens that pass a layer at once; 1 = token by token. Default: chosen by method and free memory.",
)
@click.option("--walk", is_flag=True, help="Always read token by token inside the layers.")
@click.option(
    "--trace",
    "keep",
    metavar="kept[=STEPS]",
    type=FILLED,
    callback=lambda _, __, value: None if value is None else KeepSteps.from_option(value),
    help="Also write the kept positions: at 17 steps (kept), at some (kept=128,256,end), or at all (kept=all).",
)
@click.option(
    "--ray",
    metavar="[ADDRESS]",
    is_flag=False,
    flag_value="local",
    help="Measure with workers on Ray: here, or on the cluster at HOST:PORT (auto: this machine's).",
)
@click.option("--workers", type=click.IntRange(1, 4096), help="Number of workers on Ray. Default: as many as fit.")
@results_option
@click.option("--fresh", is_flag=True, help="Measure finished cells again.")
@click.option("--dry-run", is_flag=True, help="List the cells with estimates of time and memory; measure nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON.")
def run(suite: str, results: str, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Measure the cells of a suite.

    SUITE is a file, the name of a suite that comes with the project, or the cell id of a record.

    Cells that have a record are skipped. A run ends with a table, one row per policy. If stdout is piped, it gets one row per
    cell, tab-separated or as JSON, and the table goes to stderr. With 2>&1, only the table is printed. A row's perplexity is over
    the whole text.

    \b
    bench run quickstart
    bench run suites/pg19.yaml --model ./my-model --data ./books --set tokens=20000
    bench run quickstart --only perplexity
    bench run 128d93c6 --fresh
    bench run quickstart --trace kept=128,256,end
    bench run pg19 --ray --workers 4 --threads 2
    bench run smoke --policy sink_window --policy my_policy.py:MyPolicy --set capacity=64
    """
    request = RunRequest(suite, **options)
    cells = request.cells(Path(results))
    if dry_run:
        from kvbench.harness.run.estimate import estimate_rows, estimates

        request.use_threads()
        expected = estimates(cells, request.device, tried=True)
        print_rows(estimate_rows(expected), as_json)
        click.echo(f"{duration(sum(row.seconds or 0.0 for row in expected))} in all, without loading", err=True)
        return
    records = request.measure(writable(Path(results)), cells, tracebacks=debugging())
    from kvbench.harness.report.doubts import with_doubts

    on_terminal = sys.stdout.isatty() and not as_json
    shown = with_doubts(records)
    if as_json:
        click.echo(json.dumps([r.as_json() for r in records], indent=1, ensure_ascii=False))
    elif not on_terminal and not stdout_is_stderr():
        from kvbench.harness.report.export import summary_rows

        print_rows(summary_rows(shown), False)
    show_closing(shown, results, on_terminal)
    if any(r.status == "failed" for r in records):
        sys.exit(Exit.FAILED_CELLS)


@click.command()
@click.argument("model", type=FILLED)
@click.option("--out", type=FILLED, required=True, help="File of the table, JSON.")
@click.option("--dtype", type=click.Choice(_DTYPES), default="float32", show_default=True, help="Type of the weights.")
def probe(model: str, out: str, dtype: str) -> None:
    """Measure which heads of a model retrieve.

    MODEL is an id or a directory. Random tokens are read twice in a row; a head's score is the share of its attention that goes
    to the token that followed the same token before. The policies headkv and duo_attention read the table.

    \b
    bench probe builtin:sink_2 --out heads.json
    bench run quickstart --policy '{name: headkv, file: heads.json}'
    """
    import torch

    from kvbench.harness.models.hub import model_directory
    from kvbench.harness.models.load import load_model
    from kvbench.harness.run.head_table import write_head_table

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_model(model_directory(model, None, False), dtype, device)
    scores = write_head_table(loaded, Path(out))
    best = max(max(row) for row in scores)
    click.echo(f"{out}: {len(scores)} layers of {len(scores[0])} KV heads, the best retrieves {best:.0%}")
