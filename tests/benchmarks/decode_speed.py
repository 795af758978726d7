"""Times our decode step against the same model in Hugging Face with a `DynamicCache` of the same length, without eviction.

Both run in one process, interleaved a few tokens at a time. Ratios of medians hold even on a busy machine.

    python tests/benchmarks/decode_speed.py [--shape 5m|100m] [--model DIR] [--capacity N] [--threads N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from perplexity_speed import SHAPES, made
from transformers import AutoModelForCausalLM, DynamicCache

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import decoder
from kvbench.harness.engine.method import EAGER, FASTEST
from kvbench.harness.engine.model import adopt
from kvbench.policies.h2o import H2O
from kvbench.policies.sink_window import SinkWindow

STEP, ROUNDS = 4, 60


def timed(work: Callable[[], object]) -> float:
    """Seconds per token."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) / STEP


def main() -> None:
    """Print microseconds per token, and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="5m")
    parser.add_argument("--model", help="a directory, in place of random weights of a shape")
    parser.add_argument("--capacity", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    capacity = asked.capacity
    if asked.model:
        load = AutoModelForCausalLM.from_pretrained
        plain, own = (load(asked.model, dtype=torch.float32, attn_implementation=a).eval() for a in ("sdpa", "eager"))
    else:
        plain, own = (made(asked.shape, torch.float32, attention) for attention in ("sdpa", "eager"))
    model = adopt(own)
    tokens = torch.randint(3, plain.config.vocab_size, (1, capacity + 4096), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=plain.config)
    asked_for = {"sink+window": (SinkWindow(), FASTEST), "H2O": (H2O(), FASTEST), "H2O, plain": (H2O(), EAGER)}
    ours = {name: decoder(model, CacheConfig(p, capacity), method=m) for name, (p, m) in asked_for.items()}
    times: dict[str, list[float]] = {}

    def hf_steps(steps: list[torch.Tensor]) -> None:
        for token in steps:
            plain(token, past_key_values=cache, use_cache=True).logits  # noqa: B018

    with torch.inference_mode():
        plain(tokens[:, :capacity], past_key_values=cache, use_cache=True)
        for read in ours.values():
            for block in tokens[:, : capacity + 64].split(256, 1):
                read(block)
        for i in range(ROUNDS):
            steps = list(tokens[:, STEP * i : STEP * (i + 1)].split(1, 1))
            cache.crop(capacity - cache.get_seq_length())
            times.setdefault("Hugging Face", []).append(timed(lambda steps=steps: hf_steps(steps)))
            for name, read in ours.items():
                times.setdefault(name, []).append(timed(lambda read=read, steps=steps: [read(s) for s in steps]))
    median = {name: statistics.median(values) for name, values in times.items()}
    print(
        f"decode step, {asked.model or asked.shape + ' shape'}, capacity {capacity}, {asked.threads} threads; medians of {ROUNDS}"
    )
    for name, seconds in median.items():
        print(f"{name:28s} {1e6 * seconds:9.1f} us/token {1 / seconds:10,.0f} tokens/s {median['Hugging Face'] / seconds:7.2f}x")
    print(f"H2O takes {median['H2O'] / median['sink+window']:.2f} times what sink+window takes")


if __name__ == "__main__":
    main()
