"""Compare our decode step with the same model in Hugging Face, whose `DynamicCache` holds as many tokens and evicts none.

Both run in one process, interleaved a few tokens at a time, so ratios of medians hold on a busy machine, too.
Dense grows by 240 tokens meanwhile. The row "weights" is the time to read the weights once at the bandwidth of one large product
of a matrix and a vector; the row "products" is the time of the model's own linear layers alone.

    python tests/benchmarks/decode_speed.py [--shape 5m|100m] [--model smollm2] [--capacity N] [--threads N]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from frozen import SHAPES, made
from transformers import DynamicCache

import kvbench
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import decoder
from kvbench.harness.engine.method import EAGER, FASTEST
from kvbench.harness.engine.model import adopt
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O
from kvbench.policies.sink_window import SinkWindow

STEP, ROUNDS = 4, 60


def timed(work: Callable[[], object]) -> float:
    """Seconds per token."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) / STEP


def bandwidth() -> float:
    """Bytes per second of a product of a matrix and a vector, too large for the caches of the processor: the best of five."""
    matrix, vector = torch.ones(16384, 8192), torch.ones(8192)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        torch.mv(matrix, vector)
        seconds.append(time.perf_counter() - start)
    return matrix.nbytes / min(seconds)


def products(model: torch.nn.Module) -> float:
    """Seconds that the linear layers of the model take for one token, without anything between them: the median of nine."""
    layers = [(layer, torch.ones(1, 1, layer.in_features)) for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        for layer, x in layers:
            layer(x)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    """Print microseconds per token, and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="5m")
    parser.add_argument("--model", help="a name or a directory, in place of random weights of a shape")
    parser.add_argument("--capacity", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    capacity = options.capacity
    if options.model:
        plain, own = (kvbench.load(options.model)[0] for _ in range(2))
        plain.set_attn_implementation("sdpa")
    else:
        plain, own = (made(options.shape, torch.float32, attention) for attention in ("sdpa", "eager"))
    model = adopt(own)
    tokens = torch.randint(3, plain.config.vocab_size, (1, capacity + 4096), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=plain.config)
    bounded = CacheConfig(H2O(), capacity)
    ours = {
        "dense": decoder(model, CacheConfig(Dense(), None), method=FASTEST),
        "sink+window": decoder(model, CacheConfig(SinkWindow(), capacity), method=FASTEST),
        "H2O": decoder(model, bounded, method=FASTEST),
        "H2O, plain": decoder(model, bounded, method=EAGER),
    }
    times: dict[str, list[float]] = {}

    def hf_steps(steps: list[torch.Tensor]) -> None:
        for token in steps:
            plain(token, past_key_values=cache, use_cache=True).logits  # noqa: B018

    with torch.inference_mode():
        plain(tokens[:, :capacity], past_key_values=cache, use_cache=True)
        for name, read in ours.items():
            for block in tokens[:, : capacity if name == "dense" else capacity + 64].split(256, 1):
                read(block)
        for i in range(ROUNDS):
            steps = list(tokens[:, STEP * i : STEP * (i + 1)].split(1, 1))
            cache.crop(capacity - cache.get_seq_length())
            times.setdefault("Hugging Face", []).append(timed(lambda steps=steps: hf_steps(steps)))
            for name, read in ours.items():
                times.setdefault(name, []).append(timed(lambda read=read, steps=steps: [read(s) for s in steps]))
    median = {name: statistics.median(values) for name, values in times.items()}
    name = options.model or f"{options.shape} shape"
    print(f"decode step, {name}, capacity {capacity}, {options.threads} threads; medians of {ROUNDS}")
    for name, seconds in median.items():
        print(f"{name:28s} {1e6 * seconds:9.1f} us/token {1 / seconds:10,.0f} tokens/s {median['Hugging Face'] / seconds:7.2f}x")
    with torch.inference_mode():
        of_products = products(plain)
    weights = sum(p.nbytes for p in plain.parameters())  # tied ones once
    print(f"{'weights / bandwidth':28s} {1e6 * weights / bandwidth():9.1f} us/token")
    print(f"{'products':28s} {1e6 * of_products:9.1f} us/token")
    print(f"H2O takes {median['H2O'] / median['sink+window']:.2f} times what sink+window takes")


if __name__ == "__main__":
    main()
