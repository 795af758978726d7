"""The command `bench`: a verb a job. Results on stdout, everything else on stderr; nothing heavy is imported early."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from harness import __version__
from harness.errors import UserError

_RESULTS = "leaderboard/results"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bench")
def cli() -> None:
    """KV Bench: what an LLM loses, and gains, when part of its KV cache is thrown away.

    \b
    bench run suites/pg19.yaml      measure, one record a cell
    bench leaderboard               records -> leaderboard/README.md
    """


@cli.command()
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
@click.option("--results", default=_RESULTS, show_default=True, help="Folder of the records.")
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

        _print_rows([row.cells() for row in estimates(cells, device)], as_json)
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
    store = RecordStore(_writable(Path(results)))
    with ProgressView(Console(stderr=True)) as view:
        records = run_cells(cells, store, options, view)
    if as_json:
        click.echo(json.dumps([vars(r) for r in records], indent=1, ensure_ascii=False))
    else:
        from harness.report.summary import rows

        _print_rows(rows(records), False)
        click.echo(f"Records are in {results}; 'bench leaderboard' makes the page.", err=True)
    if any(r.status == "failed" for r in records):
        sys.exit(1)


@cli.command()
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


@cli.command()
@click.option("--results", default=_RESULTS, show_default=True, help="Folder of the records.")
@click.option("--out", default="leaderboard/README.md", show_default=True, help="The page; - for stdout.")
@click.option("--paper", default=None, help="The page of published figures beside ours; paper.md beside --out if not given.")
def leaderboard(results: str, out: str, paper: str | None) -> None:
    """Render the leaderboard, and published figures beside ours, from the records; pictures go beside the page.

    \b
    bench leaderboard
    bench leaderboard --results my/results --out -
    bench leaderboard --results my/results --out - --paper -
    """
    from harness.records import RecordStore
    from harness.report import chart
    from harness.report import leaderboard as board
    from harness.report import paper as published

    records, problems = RecordStore(Path(results)).read_all()
    for problem in problems:
        click.echo(f"bench: {problem.path}: skipped, {problem.reason}", err=True)
    pages = {}
    if paper != "-":
        pages[out] = board.render(records)
    if paper is not None or out != "-":
        pages[paper or str(Path(out).with_name("paper.md"))] = published.render(records)
    for path, page in pages.items():
        _page(page.text, path, len(records))
    for folder in {Path(path).parent for path in pages if path != "-"}:
        shown = [c for path, page in pages.items() if path != "-" and Path(path).parent == folder for c in page.charts]
        chart.write(shown, folder / chart.FOLDER)
        click.echo(f"{len(shown)} pictures -> {folder / chart.FOLDER}")


def _page(text: str, out: str, records: int) -> None:
    """Write a page, whole or not at all."""
    if out == "-":
        click.echo(text, nl=False)
        return
    path = Path(out)
    _writable(path.parent)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    click.echo(f"{records} records -> {out}")


@cli.command("list")
@click.argument("what", type=click.Choice(["policies", "suites", "tasks", "models"]))
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def list_(what: str, as_json: bool) -> None:
    """Show what there is. For models: tiny random models of many families, each put through the self-check.

    \b
    bench list policies
    bench list models
    """
    from harness import listing

    _print_rows(getattr(listing, what)(), as_json)


@cli.group()
def policy() -> None:
    """Work on policies.

    \b
    bench policy check my_policy.py:MyPolicy
    """


@policy.command("check")
@click.argument("name")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A parameter of the policy.")
def check(name: str, settings: tuple[str, ...]) -> None:
    """Hold a policy to the interface's rules, and say in words what is wrong.

    \b
    bench policy check h2o
    bench policy check my_policy.py:MyPolicy --set window=8
    """
    from harness.policy_check import run_checks

    findings = run_checks(name, settings)
    for finding in findings:
        click.echo(f"{'ok   ' if finding.ok else 'WRONG'} {finding.rule}" + (f": {finding.problem}" if finding.problem else ""))
    if not all(f.ok for f in findings):
        sys.exit(1)


@cli.command()
def schema() -> None:
    """Print the JSON schema of suite files, for editors.

    \b
    bench schema > suite.schema.json
    """
    from harness import suite as suites

    click.echo(json.dumps(suites.schema(), indent=1))


def _writable(folder: Path) -> Path:
    """The folder, made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: can't be made ({error.strerror})") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder}: can't be written to")
    return folder


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Rows as a table for people, as tab-separated lines for pipes, or as JSON."""
    if as_json:
        click.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    if not sys.stdout.isatty():
        for line in ([list(rows[0])] if rows else []) + [list(r.values()) for r in rows]:
            click.echo("\t".join("" if v is None else str(v) for v in line))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*(rows[0] if rows else ()), box=None, header_style="bold")
    for row in rows:
        table.add_row(*("" if v is None else escape(str(v)) for v in row.values()))
    Console().print(table)


def main() -> None:
    """The console script: a user's mistake is one line and exit code 2; Ctrl-C is 130."""
    try:
        result = cli.main(standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        click.echo(f"bench: {error.format_message()}", err=True)
        sys.exit(2)
    except UserError as error:
        click.echo(f"bench: {error}", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("bench: stopped; finished cells are kept, run the same command again to go on", err=True)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
