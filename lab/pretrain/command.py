"""The command `bench pretrain`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("config")
@click.option(
    "--data", metavar="DIR", envvar="BENCH_DATA", help="Directory of PG-19 with a train split (or BENCH_DATA). Default: the hub."
)
@click.option("--out", metavar="DIR", help="Folder for checkpoints, log and model. Default: pretrained/NAME.")
@click.option("--device", default="auto", show_default=True, help="Device: auto, cpu, cuda or cuda:1.")
@click.option("--threads", type=click.IntRange(1, 4096), help="CPU threads. Default: torch's.")
@click.option("--steps", type=click.IntRange(1), help="Stop after this many steps, with a checkpoint; the next call goes on.")
@click.option("--tokens", type=click.IntRange(1), help="A shorter training: as many steps before running text, fewer of it.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a value: --set seed=1 --set shape.hidden=256.")
def pretrain(
    config: str,
    data: str | None,
    out: str | None,
    device: str,
    threads: int | None,
    steps: int | None,
    tokens: int | None,
    changes: tuple[str, ...],
) -> None:
    """Pretrain a reference model. CONFIG is a file, or a name like sink_1.

    If a run was stopped, the same command goes on from its last checkpoint.

    \b
    bench pretrain vanilla --data path/to/pg19
    bench pretrain path/to/recipe.yaml --data path/to/pg19 --steps 200
    bench pretrain recall --set name=wide --set seed=1 --set shape.hidden=256
    """
    from kvbench.lab.pretrain.config import load

    settings = load(config, changes)
    if tokens:
        settings = settings.shortened(tokens)
    import torch

    from kvbench.harness.models.load import device_of
    from kvbench.lab.pretrain.train import pretrain as train

    if threads:
        torch.set_num_threads(threads)
    folder = Path(out) if out else Path("pretrained") / settings.name
    tell = lambda line: click.echo(line, err=True)  # noqa: E731
    model = train(settings, folder, Path(data).expanduser() if data else None, device_of(device), tell, steps)
    if model.exists():
        click.echo(str(model))
    else:
        click.echo(f"stopped early: 'bench pretrain {config}' goes on from here", err=True)
