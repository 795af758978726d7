"""Counts of the closed form's blocks on CUDA, from a machine without a GPU: FlexAttention's compilations.

    python tests/counts_flex.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn.attention import flex_attention as module

from kvbench.harness.engine import flex
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.model import adopt
from kvbench.harness.models.families import tiny_model
from kvbench.policies import Policy
from kvbench.policies.sink_window import SinkWindow
from kvbench.policies.window import Window

CAPACITIES = [256, 512, 1024, 2048, 4096]  # of suites/latency.yaml
POLICIES: list[Policy] = [SinkWindow(4), Window()]
HEADS = [(4, 4), (5, 5), (4, 1)]  # query and KV heads: those of the suite's models, divided by 8
SCORING_BLOCK = 2048
FAST_CHECK_BLOCK = 128
ODD_PROMPT = 77


class Compilations(NamedTuple):
    """How often FlexAttention was compiled over a suite's cells, and for how many shapes of its arguments it was called."""

    compiled: int
    shapes: int
    calls: int
    ran: int  # calls that the compiled graphs served


def compilations(
    capacities: Sequence[int] = CAPACITIES, heads: Sequence[tuple[int, int]] = HEADS, block: int = SCORING_BLOCK
) -> Compilations:
    """Read blocks as the cells of `suites/latency.yaml` do: the fast check's, whole blocks, and blocks after an odd prompt.

    The models are tiny and their KV heads an eighth of the suite's. The compiled attention computes nothing.
    """
    compiled, shapes, calls, ran = [], set(), 0, 0

    def backend(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        (attention,) = (n for n in graph.graph.nodes if n.target is torch.ops.higher_order.flex_attention)
        out = torch.zeros(attention.args[0].meta["example_value"].shape)

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal ran
            ran += 1
            return out, out[..., 0]

        return run

    options = {"return_aux": module.AuxRequest(lse=True)} if hasattr(module, "AuxRequest") else {"return_lse": True}
    attend = partial(torch.compile(module.flex_attention, dynamic=False, fullgraph=True, backend=backend), **options)

    def counted(query: torch.Tensor, keys: torch.Tensor, *rest: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        shapes.add((query.shape, keys.shape))
        return attend(query, keys, *rest, **more)

    torch._dynamo.reset()
    with patch.object(flex, "_DEVICES", {"cpu"}), patch.object(flex, "_compiled", lambda kind: counted), torch.inference_mode():
        for count, kv_heads in heads:
            shape = {"num_attention_heads": count, "num_key_value_heads": kv_heads, "hidden_size": 16 * count}
            model = adopt(tiny_model("llama", **shape, num_hidden_layers=1))
            for capacity, policy in itertools.product(capacities, POLICIES):
                for sizes in (
                    [capacity, FAST_CHECK_BLOCK, FAST_CHECK_BLOCK],
                    [block] * (capacity // block + 2),
                    [ODD_PROMPT, *[256] * (capacity // 256 + 1)],
                ):
                    read = CachedDecoder(model, CacheConfig(policy, capacity))
                    for size in sizes:
                        read(torch.zeros(1, size, dtype=torch.int64), keep=torch.zeros(1, dtype=torch.int64))
    torch._dynamo.reset()
    return Compilations(len(compiled), len(shapes), calls, ran)


def main() -> None:
    """Print the counts."""
    torch.set_num_threads(1)
    found = compilations()
    print(f"FlexAttention over suites/latency.yaml: {found.compiled} compilations for {found.shapes} shapes, {found.calls} calls")


if __name__ == "__main__":
    main()
