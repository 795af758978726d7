"""The command `bench shared-kv`: perplexity of a text under policies, in a model whose layers share K and V."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from kvbench.harness.cli.output import print_rows
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.parameters import policy_from
from kvbench.harness.core.perplexity import percent_lost, perplexity
from kvbench.harness.data.texts import Source, texts
from kvbench.harness.suite import yaml_value
from kvbench.policies import Policy, PositionMode

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvbench.lab.shared_kv.decoder import Setting


@click.command("shared-kv")
@click.argument("model")
@click.option(
    "--policy", "policies", multiple=True, default=["h2o"], help="Policy: a name, or '{name: h2o, window: 8}'; repeatable."
)
@click.option("--capacity", type=click.IntRange(1), default=32, show_default=True, help="Tokens per KV head kept between steps.")
@click.option(
    "--positions",
    type=click.Choice(["cache", "stream"]),
    default="stream",
    show_default=True,
    help="Position that RoPE gives a kept token: its rank, or its place in the text.",
)
@click.option(
    "--text", type=click.Choice(get_args(Source)), default="prose", show_default=True, help="Text that the model reads."
)
@click.option("--data", metavar="DIR", envvar="BENCH_DATA", help="Directory of the text (or BENCH_DATA). Default: the hub.")
@click.option("--tokens", type=click.IntRange(2), default=2048, show_default=True, help="Tokens of all streams.")
@click.option("--streams", type=click.IntRange(1), default=16, show_default=True, help="Streams that the text is cut into.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the policies' random numbers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def shared_kv(
    model: str,
    policies: Sequence[str],
    capacity: int,
    positions: PositionMode,
    text: Source,
    data: str | None,
    tokens: int,
    streams: int,
    seed: int,
    as_json: bool,
) -> None:
    """Measure the perplexity of MODEL under policies, if its layers share K and V (CLA, YOCO, LCKV, Gemma 3n).

    The engine refuses such models. A plain decoder reads them on the CPU, token by token, and evicts after every step. Tokens
    are scored once the caches are full.

    \b
    bench shared-kv pretrained/lckv/model --text backcopy --tokens 32768 --streams 256 --policy tova --policy keydiff
    """
    import torch

    from kvbench.harness.data.stream import stream
    from kvbench.harness.models.load import load
    from kvbench.lab.shared_kv.decoder import Setting

    if tokens // streams <= capacity:
        raise UserError(f"streams of {tokens // streams} tokens fill no cache of {capacity}: set --tokens higher")
    chosen = {given: _policy(given) for given in ("dense", *policies)}
    hf, tokenizer = load(model)
    source, pieces = texts(text, "test", None, 0, tokens, Path(data).expanduser() if data else None)
    read = stream(pieces, source, tokenizer, tokens - tokens % streams)
    ids = torch.from_numpy(read.ids[:]).long()
    opening, body = ids[: read.prefix].expand(streams, -1), ids[read.prefix :].view(streams, -1)
    settings = {
        name: Setting(policy, capacity if policy.evicts else None, positions, seed=seed) for name, policy in chosen.items()
    }
    print_rows(list(_rows(hf, settings, torch.cat([opening, body], 1), max(read.prefix, capacity + 1))), as_json)


def _policy(given: str) -> Policy:
    """The policy that an option names.

    Raises:
        UserError: there is none, or it has no such parameters.
    """
    value = yaml_value(given, "--policy")
    parameters: dict[str, Any] = dict(value) if isinstance(value, dict) else {"name": value}
    try:
        return policy_from(str(parameters.pop("name", "")), parameters)
    except (ValueError, TypeError) as error:
        raise UserError(f"--policy {given}: {error}") from None


def _rows(hf: PreTrainedModel, settings: Mapping[str, Setting], tokens: Tensor, first: int) -> Iterator[dict[str, Any]]:
    """Measure each setting, the first of which is the reference. tokens: [B, T] int64; first: index of the first scored token."""
    reference = None
    for name, setting in settings.items():
        nll, kv_bytes = measured(hf, setting, tokens, first)
        reference = nll if reference is None else reference
        yield {
            "policy": name,
            "capacity": setting.capacity,
            "nll": round(nll, 5),
            "perplexity": round(perplexity(nll), 4),
            "% lost": round(percent_lost(nll - reference), 1),
            "kv_bytes": kv_bytes,
        }


def measured(hf: PreTrainedModel, setting: Setting, tokens: Tensor, first: int) -> tuple[float, int]:
    """Read streams, and return the mean NLL of their tokens from index `first` on, and the bytes of K and V held.

    Raises:
        UserError: the decoder can't serve the model or the policy.
    """
    from torch.nn.functional import cross_entropy

    from kvbench.lab.shared_kv.decoder import PlainDecoder

    try:
        read = PlainDecoder(hf, setting, len(tokens))
    except (ValueError, LookupError) as error:
        raise UserError(f"shared-kv: {error}") from None
    logits = read(tokens[:, :-1])[:, first - 1 :]
    nll = cross_entropy(logits.flatten(0, 1).double(), tokens[:, first:].flatten())
    return float(nll), read.kv_bytes
