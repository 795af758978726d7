"""Times reading a prompt that is cut at its end (`evict: prompt`) against reading it with a dense cache.

Both run in one process, in turn. Ratios of pairs hold even on a busy machine.

    python tests/benchmarks/prefill_speed.py [--policy NAME] [--tokens N] [--capacity N] [--threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from perplexity_speed import SHAPES, made

from kvbench.harness.core.plugins import policy_class
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import FASTEST
from kvbench.harness.engine.model import Model, adopt
from kvbench.policies.dense import Dense

_BLOCK = 2048  # tokens


def timed(model: Model, config: CacheConfig, tokens: torch.Tensor) -> float:
    """Seconds to read the prompt."""
    start = time.perf_counter()
    CachedDecoder(model, config, method=FASTEST).read_prompt(tokens, _BLOCK)
    return time.perf_counter() - start


def main() -> None:
    """Print seconds, and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="snapkv")
    parser.add_argument("--shape", choices=SHAPES, default="100m")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--capacity", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    model = adopt(made(asked.shape, torch.float32, "eager"))
    tokens = torch.randint(3, model.hf.config.vocab_size, (1, asked.tokens), generator=torch.Generator().manual_seed(0))
    cut = CacheConfig(policy_class(asked.policy)(), asked.capacity, evict="prompt")
    ratios = []
    for _ in range(asked.rounds):
        dense, ours = timed(model, CacheConfig(Dense()), tokens), timed(model, cut, tokens)
        ratios.append(ours / dense)
        print(f"dense {dense:.2f} s, {asked.policy} {ours:.2f} s: {ratios[-1]:.3f}", flush=True)
    print(f"median of {asked.rounds} pairs: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
