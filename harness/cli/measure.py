"""The commands `bench run` and `bench pretrain`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from kvbench.harness.cli.closing import show_closing
from kvbench.harness.cli.output import FILLED, debugging, print_rows, results_option, writable
from kvbench.harness.cli.running import suite_options
from kvbench.harness.core.errors import Exit
from kvbench.harness.run.options import KeepSteps
from kvbench.harness.run.request import RunRequest


@click.command()
@click.argument("suite")
@suite_options
@click.option("--only", "tasks", multiple=True, metavar="TASK", help="Measure only this task of the suite; repeatable.")
@click.option(
    "--block",
    type=click.IntRange(1),
    help="Tokens that pass a layer at once; 1 = token by token. Default: chosen by method and free memory.",
)
@click.option("--walk", is_flag=True, help="Always read token by token inside the layers.")
@click.option(
    "--trace",
    metavar="kept[=STEPS]",
    type=FILLED,
    help="Also write which positions are kept: at 16 steps and the last, at kept=128,256,end, or at each: kept=all.",
)
@click.option(
    "--ray",
    metavar="[ADDRESS]",
    is_flag=False,
    flag_value="local",
    help="Measure with workers on Ray: on this machine, or on the cluster at HOST:PORT (auto: the one of this machine).",
)
@click.option("--workers", type=click.IntRange(1), help="Number of workers on Ray. Default: as many as find room.")
@results_option
@click.option("--fresh", is_flag=True, help="Measure finished cells again.")
@click.option("--dry-run", is_flag=True, help="List the cells with estimates of time and memory; measure nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON.")
def run(
    suite: str, block: int | None, walk: bool, trace: str | None, results: str, fresh: bool, dry_run: bool, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Measure the cells of a suite.

    SUITE is a file, the name of a suite that comes with the project, or the cell id of a record.

    Cells that have a record are skipped. A run ends with a table, one row per policy. If stdout is piped, it gets one row per
    cell, tab-separated or as JSON, and the table goes to stderr.

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
    keep = None if trace is None else KeepSteps.from_option(trace)
    cells = request.cells(Path(results))
    if dry_run:
        from kvbench.harness.run.estimate import estimates

        print_rows([row.cells() for row in estimates(cells, request.device)], as_json)
        return
    records = request.measure(writable(Path(results)), cells, fresh, block, walk, tracebacks=debugging(), keep=keep)
    from kvbench.harness.report.doubts import with_doubts

    on_terminal = sys.stdout.isatty() and not as_json
    shown = with_doubts(records)
    if as_json:
        click.echo(json.dumps([r.as_json() for r in records], indent=1, ensure_ascii=False))
    elif not on_terminal:
        from kvbench.harness.report.summary import rows

        print_rows(rows(shown), False)
    show_closing(shown, results, on_terminal)
    if any(r.status == "failed" for r in records):
        sys.exit(Exit.FAILED_CELLS)


@click.command()
@click.argument("config")
@click.option(
    "--data", metavar="DIR", envvar="BENCH_DATA", help="Directory of PG-19 with a train split (or BENCH_DATA). Default: the hub."
)
@click.option("--out", metavar="DIR", help="Folder for checkpoints, log and model. Default: pretrained/NAME.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:1.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads. Default: torch's.")
@click.option("--steps", type=click.IntRange(1), help="Stop after this many steps, with a checkpoint; the next call goes on.")
@click.option("--tokens", type=click.IntRange(1), help="A shorter training: as many steps before running text, fewer of it.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a value: --set seed=1 --set shape.hidden=256.")
def pretrain(
    config: str, data: str | None, out: str | None, device: str, threads: int | None, steps: int | None, tokens: int | None,
    changes: tuple[str, ...],
) -> None:  # fmt: skip
    """Pretrain a reference model. CONFIG is a file, or a name like sink_1.

    If a run was stopped, the same command goes on from its last checkpoint.

    \b
    bench pretrain vanilla --data path/to/pg19
    bench pretrain suites/pretrain/sink_1.yaml --data path/to/pg19 --steps 200
    bench pretrain recall --set name=wide --set seed=1 --set shape.hidden=256
    """
    from kvbench.harness.pretrain.config import find, load

    settings = load(find(config), changes)
    if tokens:
        settings = settings.shortened(tokens)
    import torch

    from kvbench.harness.models.load import device_of
    from kvbench.harness.pretrain.train import pretrain as train

    if threads:
        torch.set_num_threads(threads)
    folder = Path(out) if out else Path("pretrained") / settings.name
    tell = lambda line: click.echo(line, err=True)  # noqa: E731
    model = train(settings, folder, Path(data).expanduser() if data else None, device_of(device), tell, steps)
    if model.exists():
        click.echo(str(model))
    else:
        click.echo(f"stopped early: 'bench pretrain {config}' goes on from here", err=True)
