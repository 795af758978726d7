"""Our decode step beside a plain Hugging Face loop, and blocks beside single tokens, on one thread.

Side by side in one process, interleaved a few tokens at a time, medians: the machine may be busy, the ratios hold.
The yardstick is a `DynamicCache` loop without eviction whose cache is kept about as long as ours.

    python tests/benchmarks/decode_speed.py MODEL_DIR [CAPACITY]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from harness.engine.load import load_model
from harness.engine.loop import CacheConfig, decoder
from policies.h2o import H2O
from policies.sink_window import SinkWindow

STEP, ROUNDS, BLOCK = 4, 250, 256


def timed(work: Callable[[], object], tokens: int) -> float:
    """Seconds a token."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) / tokens


def main(directory: Path, capacity: int) -> None:
    torch.set_num_threads(1)
    model = load_model(directory, "float32", torch.device("cpu"))
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.randint(3, plain.config.vocab_size, (1, 4096), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=plain.config)
    ours = {
        name: decoder(model, CacheConfig(p, capacity), compiled=True)
        for name, p in (("sink_window", SinkWindow()), ("h2o", H2O()))
    }
    times: dict[str, list[float]] = {}

    def hf_steps(at: int) -> None:
        for t in range(at, at + STEP):
            plain(tokens[:, t : t + 1], past_key_values=cache, use_cache=True).logits  # noqa: B018

    with torch.inference_mode():
        plain(tokens[:, : capacity // 2], past_key_values=cache, use_cache=True)
        for read in ours.values():
            read(tokens[:, : 2 * capacity])
        for i in range(ROUNDS):
            at = STEP * i
            if cache.get_seq_length() > 3 * capacity // 2:
                cache.crop(capacity // 2 - cache.get_seq_length())
            times.setdefault("hugging face", []).append(timed(lambda at=at: hf_steps(at), STEP))
            for name, read in ours.items():
                steps = tokens[:, at : at + STEP].split(1, 1)
                times.setdefault(name, []).append(timed(lambda read=read, steps=steps: [read(s) for s in steps], STEP))
                if i % 25 == 0:
                    block = tokens[:, at : at + BLOCK]
                    times.setdefault(f"{name} in blocks", []).append(timed(lambda read=read, b=block: read(b), BLOCK))
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in median.items():
        print(f"{name:24s} {1e6 * seconds:8.0f} us/token {1 / seconds:8.0f} tokens/s")
    for name in ours:
        print(f"{name}: {median['hugging face'] / median[name]:.2f}x the speed of the plain loop token by token, "
              f"{median[name] / median[f'{name} in blocks']:.1f}x as fast again in blocks of {BLOCK}")  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} MODEL_DIR [CAPACITY]   (make microbench MODEL=dir)")
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 128)
