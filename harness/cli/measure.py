"""Verbs that measure and train."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from harness.cli.output import RESULTS, print_rows, writable


@click.command()
@click.argument("suite")
@click.option("--model", metavar="DIR|HUB_ID", help="Use this model instead of the suite's.")
@click.option("--data", metavar="DIR", envvar="BENCH_DATA", help="Directory of the text: .parquet or .txt (or BENCH_DATA).")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help="Only these: a name, file.py:Class, or '{name: h2o, window: 8}'.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change the suite, e.g. --set tokens=20000 --set capacity=[128,256].",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of the weights and the cache.")
@click.option(
    "--block",
    type=click.IntRange(1),
    help="Tokens that pass a layer at once; 1 = token by token. Chosen from memory if not given.",
)
@click.option("--walk", is_flag=True, help="Walk token by token inside the layers even where nothing is evicted.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; torch's default when not given.")
@click.option("--results", default=RESULTS, show_default=True, help="Folder of the records.")
@click.option("--fresh", is_flag=True, help="Measure finished cells again.")
@click.option("--dry-run", is_flag=True, help="List the cells with an estimate of time and memory, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON.")
def run(suite: str, model: str | None, data: str | None, policies: tuple[str, ...], settings: tuple[str, ...], device: str,
        dtype: str | None, block: int | None, walk: bool, threads: int | None, results: str, fresh: bool, dry_run: bool,
        as_json: bool) -> None:  # fmt: skip
    """Measure the cells of SUITE: a file, or the name of a suite that comes with the project.

    \b
    bench run suites/pg19.yaml
    bench run suites/pg19.yaml --model ./my-model --data ./books --set tokens=20000
    bench run smoke --policy sink_window --policy my_policy.py:MyPolicy --set capacity=64
    """
    from harness import suite as suites
    from harness.overrides import Overrides

    overrides = Overrides(model, dtype, policies, settings)
    _, cells = suites.load(suites.find(suite), overrides)
    directory = Path(data).expanduser() if data else None
    if dry_run:
        from harness.estimate import estimates

        print_rows([row.cells() for row in estimates(cells, device)], as_json)
        return
    import torch
    from rich.console import Console

    from harness.engine.load import device_of
    from harness.progress import ProgressView
    from harness.records import RecordStore
    from harness.runner import RunOptions
    from harness.runner import run as run_cells

    if threads:
        torch.set_num_threads(threads)
    options = RunOptions(device_of(device), directory, block, walk, fresh)
    store = RecordStore(writable(Path(results)))
    with ProgressView(Console(stderr=True)) as view:
        records = run_cells(cells, store, options, view)
    if as_json:
        click.echo(json.dumps([vars(r) for r in records], indent=1, ensure_ascii=False))
    else:
        from harness.report.summary import rows

        print_rows(rows(records), False)
        click.echo(f"Records are in {results}; 'bench leaderboard' makes the page.", err=True)
    if any(r.status == "failed" for r in records):
        sys.exit(1)


@click.command()
@click.argument("config")
@click.option("--data", metavar="DIR", envvar="BENCH_DATA", help="Directory of PG-19 with a train split; the hub if not given.")
@click.option("--out", metavar="DIR", help="Folder of checkpoints, log and model; pretrained/NAME if not given.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; torch's default when not given.")
@click.option("--steps", type=click.IntRange(1), help="Stop after so many, with a checkpoint; the next call goes on.")
def pretrain(config: str, data: str | None, out: str | None, device: str, threads: int | None, steps: int | None) -> None:
    """Pretrain a reference model: CONFIG is a file, or a name like sink_1. Called again, it goes on from its last checkpoint.

    \b
    bench pretrain vanilla --data path/to/pg19
    bench pretrain suites/pretrain/sink_1.yaml --data path/to/pg19 --steps 200
    """
    from harness.pretrain.config import find, load

    settings = load(find(config))
    import torch

    from harness.engine.load import device_of
    from harness.pretrain.train import pretrain as train

    if threads:
        torch.set_num_threads(threads)
    folder = Path(out) if out else Path("pretrained") / settings.name
    tell = lambda line: click.echo(line, err=True)  # noqa: E731
    model = train(settings, folder, Path(data).expanduser() if data else None, device_of(device), tell, steps)
    if model.exists():
        click.echo(str(model))
    else:
        click.echo(f"stopped early; 'bench pretrain {config}' goes on", err=True)
