"""Times the attention of a decode step over a coded cache: by its kernel, decoded first, and beside a cache of floats.

All run in one process, interleaved. What is timed is all that the cache does for one token in all layers: write, attend, update,
evict; the model's own products are left out.

    python tests/benchmarks/coded_speed.py [--heads 8] [--group 4] [--dim 64] [--layers 4] [--dtype bfloat16] [--policy h2o]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from kvbench.harness.core import plugins
from kvbench.harness.core.codec import Codec
from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import BlockInLayers, CachedDecoder
from kvbench.harness.engine.method import FASTEST, PLAIN_WALK, Method
from kvbench.harness.engine.model import Model, adopt
from kvbench.harness.engine.plan import Block
from kvbench.harness.models.families import tiny_model

METHODS = {"plain": PLAIN_WALK, "kernel": FASTEST}


def step_of(model: Model, config: CacheConfig, slots: int, method: Method) -> Callable[[], float]:
    """A function that reads one token into a full cache, and says how many milliseconds it took."""
    read, shape = CachedDecoder(model, config, method=method), model.layers[0]
    read.fill_randomly(slots - 128)
    read.reserve(128)
    queries, heads = shape.heads * shape.group, shape.heads
    new = [torch.randn(1, h, 1, shape.key_dim, dtype=model.dtype) for h in (queries, heads, heads)]
    seen, terms = [slots - 128], Terms(shape.key_dim**-0.5)

    def step() -> float:
        token = torch.full((1, 1), seen[0])
        start = time.perf_counter()
        block = BlockInLayers(read.walks, read.shares, Block(token, None, seen[0], token * 0))
        for layer in range(len(model.layers)):
            block.attend(layer, *new, terms)
        block.end()
        seen[0] += 1
        return 1e3 * (time.perf_counter() - start)

    return step


@torch.inference_mode()
def main() -> None:
    """Print milliseconds a token and layer: medians."""
    parser = argparse.ArgumentParser()
    for name, default in (("heads", 8), ("group", 4), ("dim", 64), ("layers", 4), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--policy", default="dense")
    parser.add_argument("--positions", choices=["cache", "stream", "clamped"], default="cache")
    parser.add_argument("--keys", choices=["unrotated", "rotated"], default="unrotated")
    parser.add_argument("--slots", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--codecs", nargs="+", default=["int8", "int4", "int2"])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"num_attention_heads": asked.heads * asked.group, "num_key_value_heads": asked.heads, "head_dim": asked.dim}
    sizes |= {"num_hidden_layers": asked.layers, "max_position_embeddings": 2**20}
    model, policy = adopt(tiny_model("llama", **sizes).to(getattr(torch, asked.dtype))), plugins.policy_class(asked.policy)()
    group = 32 if asked.dim % 32 == 0 else asked.dim
    codecs = {"dtype": None} | {name: Codec(name, group, keys=asked.keys) for name in asked.codecs}
    print("ms of a layer, median  ", *(f"{name} {how}".rjust(13) for name in codecs for how in METHODS))
    for slots in asked.slots:
        configs = [
            CacheConfig(policy, slots - 128 if policy.evicts else None, asked.positions, 4096, kv=c) for c in codecs.values()
        ]
        steps = [step_of(model, config, slots, method) for config in configs for method in METHODS.values()]
        times: list[list[float]] = [[] for _ in steps]
        for _ in range(asked.rounds + 2):
            for step, of_step in zip(steps, times, strict=True):
                of_step.append(step() / asked.layers)
        print(f"{slots:>8,} slots         ", *(f"{statistics.median(x[2:]):13.3f}" for x in times))


if __name__ == "__main__":
    main()
