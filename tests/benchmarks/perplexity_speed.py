"""Perplexity: our blocks beside the frozen token-by-token loops, side by side in one process, interleaved, medians of five.

python tests/benchmarks/perplexity_speed.py [--shape 5m|100m] [--dtype float32|bfloat16] [--threads N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from frozen import h2o_nll, sink_window_nll
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from harness.engine.loop import CacheConfig, decoder
from harness.engine.model import Model, adopt
from policies.h2o import H2O
from policies.sink_window import SinkWindow
from policies.window import Window

SHAPES = {
    "5m": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8,
           "num_key_value_heads": 4, "vocab_size": 4096},
    "100m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
             "num_key_value_heads": 12, "vocab_size": 16384},
}  # fmt: skip
ROUNDS = 5


def made(shape: str, dtype: torch.dtype, attention: str) -> LlamaForCausalLM:
    """The same random weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=4096, attn_implementation=attention)
    return LlamaForCausalLM(config).to(dtype).eval()


def ours(model: Model, config: CacheConfig, tokens: torch.Tensor, block: int, *, walk: bool = False) -> torch.Tensor:
    """NLL of every token but the first."""
    read, losses = decoder(model, config, walk=walk), []
    for part, targets in zip(tokens[:, :-1].split(block, 1), tokens[:, 1:].split(block, 1), strict=True):
        losses.append(cross_entropy(read(part)[0].float(), targets[0], reduction="none"))
    return torch.cat(losses)


def seconds_a_token(work: Callable[[], object], tokens: int) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) / tokens


def main() -> None:
    """Ratios; each loop reads enough tokens past its cache's filling that filling is a small part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="5m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--capacity", type=int, default=1024)
    parser.add_argument("--block", type=int, default=1024)
    parser.add_argument("--only", choices=["band", "h2o"])
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    dtype, capacity = getattr(torch, asked.dtype), asked.capacity
    plain = made(asked.shape, dtype, "sdpa")
    eager = made(asked.shape, dtype, "eager")
    model = adopt(made(asked.shape, dtype, "eager"))
    stream = torch.randint(plain.config.vocab_size, (1, 16 * capacity), generator=torch.Generator().manual_seed(0))
    short = stream[:, : capacity + min(capacity, 512)]
    loops: dict[str, tuple[Callable[[], object], int]] = {}
    if asked.only != "h2o":
        loops["frozen sink+window"] = (lambda: sink_window_nll(plain, short, 4, capacity - 4), short.shape[1])
        for policy in (SinkWindow(), Window()):
            config = CacheConfig(policy, capacity)
            loops[f"{type(policy).__name__}, closed form"] = (
                lambda config=config: ours(model, config, stream, asked.block), stream.shape[1],
            )  # fmt: skip
        loops["SinkWindow, token by token"] = (lambda: ours(model, CacheConfig(SinkWindow(), capacity), short, 1), short.shape[1])
    if asked.only != "band":
        half = capacity // 2
        loops["frozen H2O"] = (lambda: h2o_nll(eager, short, capacity - half, half), short.shape[1])
        loops["H2O, walk"] = (lambda: ours(model, CacheConfig(H2O(), capacity), stream[:, : 4 * capacity], 256), 4 * capacity)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, (work, tokens) in loops.items():
            times[name].append(seconds_a_token(work, tokens))
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in median.items():
        base = median["frozen H2O" if "H2O" in name else "frozen sink+window"]
        print(f"{name:28s} {1e6 * seconds:9.1f} us/token {1 / seconds:10,.0f} tokens/s {base / seconds:7.1f}x")


if __name__ == "__main__":
    main()
