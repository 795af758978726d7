"""Compare the reading speed of policies with each other and with the model's own forward pass.

    python tests/benchmarks/zoo_speed.py [POLICY ...] [--model smollm2] [--capacity 256] [--tokens 4096] [--threads 2]
                                         [--dtype float32]

Every reader keeps its cache and reads the same text, a piece of 512 tokens in turn, so that load on the machine falls on all
alike. Prints, per policy, the method, the median tokens per second of the pieces after the cache filled, two ratios of
medians over the same pieces (to H2O, and to the fastest of the model's own forward passes with a `DynamicCache`), and the
milliseconds per token in attention and the policy's code. Their bound is the time to read `capacity + 1` slots once from memory.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import kvbench
from kvbench.harness.core.device import bandwidth
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.plugins import policy_class
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.fastcheck import remembered_check
from kvbench.harness.engine.loop import decoder
from kvbench.harness.engine.model import adopt
from kvbench.harness.engine.walk import Walk
from kvbench.policies.merges import Merging

PIECE = 512  # tokens
POLICIES = ("dense", "window", "sink_window", "h2o", "tova", "snapkv", "keydiff", "roco", "rkv", "lagkv", "knorm", "adakv")
TEXT = "The cache of a language model holds a key and a value for every token that the model has read. "

Reader = Callable[[Tensor], object]


def own_forward(hf: torch.nn.Module, block: int) -> Reader:
    """Return a reader that passes blocks through the model with one `DynamicCache`."""
    cache = DynamicCache(config=hf.config)

    def read(piece: Tensor) -> None:
        for part in piece.split(block, 1):
            hf(part, past_key_values=cache, use_cache=True)

    return read


class WalkClock:
    """Sums the seconds in the methods of every `Walk`: attention, statistics and evictions."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("begin", "attend", "end"):
            setattr(Walk, name, self._timed(getattr(Walk, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            out = method(*args)
            self.seconds += time.perf_counter() - start
            return out

        return run


def main() -> None:
    """Parse the command line, time the readers in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", default=POLICIES, metavar="POLICY", help="names, or file.py:Class")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    for name, value in (("capacity", 256), ("tokens", 4096), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    if options.tokens <= PIECE:
        parser.error(f"--tokens must be more than {PIECE}: the first piece is not timed")
    torch.set_num_threads(options.threads)
    own, tokenizer = kvbench.load(options.model, dtype=options.dtype)
    own.set_attn_implementation("sdpa")
    model = adopt(kvbench.load(options.model, dtype=options.dtype)[0])
    tokens = tokenizer(TEXT * (options.tokens // 8), return_tensors="pt").input_ids[:, : options.tokens]
    readers: dict[str, Reader] = {f"own forward, {block}": own_forward(own, block) for block in (128, 256, 512)}
    methods: dict[str, str] = {}
    for name in options.policies:
        policy = policy_class(name)()
        capacity = options.capacity if policy.evicts and not policy.outcome else None
        merges_keys = isinstance(policy, Merging) and policy.merges_keys
        config = CacheConfig(policy, capacity, "stream" if merges_keys else "cache")
        check = remembered_check(model, config)
        block = 256 if check.blocks == "walk" else PIECE
        methods[name] = check.blocks + (f" ({check.refused or check.plain_because})" if check.blocks == "walk" else "")
        read = decoder(model, config, 1, check.method)
        readers[name] = lambda piece, read=read, block=block: [read(part) for part in piece.split(block, 1)]
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    in_walk: dict[str, list[float]] = {name: [] for name in readers}
    clock = WalkClock()
    with torch.inference_mode():
        for piece in tokens.split(PIECE, 1):
            for name, read in readers.items():
                start, clock.seconds = time.perf_counter(), 0.0
                read(piece)
                seconds[name].append((time.perf_counter() - start) / piece.shape[1])
                in_walk[name].append(clock.seconds / piece.shape[1])
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    forward = min((name for name in medians if name.startswith("own")), key=medians.__getitem__)
    rate = max(bandwidth(model.device) for _ in range(8))  # one may fall into a busy moment
    bound = model.kv_bytes(options.capacity) / rate
    print(f"{options.model}, {options.dtype}, capacity {options.capacity}, {tokens.shape[1]} tokens, {options.threads} threads")
    print(f"attention over {options.capacity + 1} slots, at {rate / 1e9:.1f} GB/s: {1e3 * bound:.2f} ms")
    print(f"{'':22} {'tokens/s':>8} {'of h2o':>7} {'of own forward':>14} {'ms in the walk':>14}  method")
    for name, median in medians.items():
        ratios = [
            statistics.median(b / a for a, b in zip(seconds[name][1:], seconds[base][1:], strict=True)) if base in seconds else 0
            for base in ("h2o", forward)
        ]
        walked = 1e3 * statistics.median(in_walk[name][1:])
        print(f"{name:22} {1 / median:8.0f} {ratios[0]:7.2f} {ratios[1]:14.2f} {walked:14.2f}  {methods.get(name, '')}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
