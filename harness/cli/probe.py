"""The command `bench probe`."""

from __future__ import annotations

from pathlib import Path

import click

from kvbench.harness.cli.output import FILLED
from kvbench.harness.core.errors import UserError


@click.command()
@click.argument("model", type=FILLED)
@click.option("--out", type=FILLED, required=True, help="File of the table, JSON.")
@click.option("--dtype", default="float32", show_default=True, help="Of the weights.")
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
    try:
        scores = write_head_table(loaded, Path(out))
    except OSError as error:
        raise UserError(f"{out}: can't be written ({error.strerror})") from error
    best = max(max(row) for row in scores)
    click.echo(f"{out}: {len(scores)} layers of {len(scores[0])} KV heads, the best retrieves {best:.0%}")
