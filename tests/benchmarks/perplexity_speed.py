"""Times perplexity: our blocks against the frozen token-by-token loops, interleaved in one process, medians.

python tests/benchmarks/perplexity_speed.py [--shape 5m|100m] [--dtype float32|bfloat16] [--threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from frozen import h2o_nll, sink_window_nll
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import decoder
from kvbench.harness.engine.method import EAGER, FASTEST, Method
from kvbench.harness.engine.model import Model, adopt
from kvbench.policies import Policy
from kvbench.policies.h2o import H2O
from kvbench.policies.sink_window import SinkWindow
from kvbench.policies.window import Window

SHAPES = {
    "5m": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
    },
    "100m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 16384,
    },
}


def made(shape: str, dtype: torch.dtype, attention: str) -> LlamaForCausalLM:
    """A model with the same random weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=4096, attn_implementation=attention)
    return LlamaForCausalLM(config).to(dtype).eval()


def ours(
    model: Model, config: CacheConfig, tokens: torch.Tensor, block: int, clock: list[float], method: Method = EAGER
) -> torch.Tensor:
    """NLL of every token but the first. `clock` gets the time at the end of every block."""
    read, losses = decoder(model, config, len(tokens), method), []
    for part, targets in zip(tokens[:, :-1].split(block, 1), tokens[:, 1:].split(block, 1), strict=True):
        losses.append(cross_entropy(read(part).flatten(0, 1).float(), targets.flatten(), reduction="none"))
        clock.append(time.perf_counter())
    return torch.cat(losses)


def seconds_a_token(clock: list[float], first: int) -> float:
    """Mean time of a block after the first ones, which fill the cache."""
    return (clock[-1] - clock[first]) / (len(clock) - 1 - first)


def main() -> None:
    """Print ratios of the time per token with a full cache."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="5m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--capacity", type=int, default=1024)
    parser.add_argument("--block", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["band", "h2o"])
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    dtype, capacity, half = getattr(torch, asked.dtype), asked.capacity, asked.capacity // 2
    plain, eager = made(asked.shape, dtype, "sdpa"), made(asked.shape, dtype, "eager")
    model = adopt(made(asked.shape, dtype, "eager"))
    length = 1 + max(16 * capacity, 8 * asked.block)
    stream = torch.randint(plain.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    short = stream[:, : capacity + 200]

    def read(policy: Policy, tokens: torch.Tensor, block: int, method: Method = EAGER) -> float:
        clock: list[float] = []
        first = math.ceil(capacity / block)  # blocks that fill the cache
        ours(model, CacheConfig(policy, capacity), tokens, block, clock, method)
        return seconds_a_token(clock, first) / block / len(tokens)

    def frozen(loop: Callable[..., object], hf: LlamaForCausalLM, first: int, second: int) -> float:
        clock: list[float] = []
        loop(hf, short, first, second, clock)
        return seconds_a_token(clock, capacity)

    loops: dict[str, Callable[[], float]] = {}
    if asked.only != "h2o":
        loops["frozen sink+window"] = lambda: frozen(sink_window_nll, plain, 4, capacity - 4)
        loops["sink+window, closed form"] = lambda: read(SinkWindow(), stream[:, : 1 + 8 * asked.block], asked.block)
        loops["window, closed form"] = lambda: read(Window(), stream[:, : 1 + 8 * asked.block], asked.block)
        loops["sink+window, token by token"] = lambda: read(SinkWindow(), short, 1, method=FASTEST)
    if asked.only != "band":
        loops["frozen H2O"] = lambda: frozen(h2o_nll, eager, capacity - half, half)
        some = stream[:, : 1 + 256 * (2 + math.ceil(capacity / 256))]
        loops["H2O, plain walk"] = lambda: read(H2O(), some, 256)
        long = stream[:, : 1 + 4 * asked.block]
        loops["H2O, compiled walk"] = lambda: read(H2O(), long, asked.block, method=FASTEST)
        loops["H2O, compiled, blocks of 256"] = lambda: read(H2O(), some, 256, method=FASTEST)
        loops["H2O, compiled, 16 streams"] = lambda: read(H2O(), some.repeat(16, 1), 256, method=FASTEST)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(asked.rounds):
        for name, timed in loops.items():
            times[name].append(timed())
    how = f"{asked.threads} threads; medians of {asked.rounds}, cache full"
    print(f"{asked.shape} shape, {asked.dtype}, capacity {capacity}, {how}")
    for name, values in times.items():
        seconds = statistics.median(values)
        base = statistics.median(times["frozen H2O" if "H2O" in name else "frozen sink+window"])
        print(f"{name:28s} {1e6 * seconds:9.1f} us/token {1 / seconds:10,.0f} tokens/s {base / seconds:7.1f}x")


if __name__ == "__main__":
    main()
