"""Times `model.generate` with a `kvbench.Cache` beside a `DynamicCache`, and prints how much each holds.

Both generate in turn, in one process, a piece at a time. Ratios of medians hold even on a busy machine.

    python tests/benchmarks/generate_speed.py [--policy sink_window] [--capacity 256] [--tokens 20000]
"""

import argparse
import statistics
import time

import torch
from transformers import DynamicCache

import kvbench
from kvbench.harness.models.families import tiny_model

PROMPT, PIECE, SHOWN = 8, 250, 8  # tokens at the start; tokens generated at once; rows


def main() -> None:
    """Print a row per stretch of the text: tokens, medians of milliseconds per token, megabytes of K and V."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="sink_window")
    parser.add_argument("--capacity", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=20_000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_model("llama", eos_token_id=None, max_position_embeddings=asked.tokens + PROMPT, num_hidden_layers=4)
    caches = {"ours": kvbench.Cache(model, asked.policy, asked.capacity), "DynamicCache": DynamicCache(config=model.config)}
    texts = dict.fromkeys(caches, torch.full((1, PROMPT), 3))
    times: dict[str, list[float]] = {name: [] for name in caches}
    print("  tokens | ms per token: ours, DynamicCache, ratio | MB of K and V: ours, DynamicCache")
    pieces = asked.tokens // PIECE
    for piece in range(1, pieces + 1):
        for name, cache in caches.items():
            start = time.perf_counter()
            text = texts[name]
            mask = torch.ones_like(text)  # without one, generate takes every pad token for padding, even one that was generated
            texts[name] = model.generate(text, attention_mask=mask, past_key_values=cache, max_new_tokens=PIECE, do_sample=False)
            times[name].append(1e3 * (time.perf_counter() - start) / PIECE)
        if piece % max(1, pieces // SHOWN) == 0:
            ours, theirs = (statistics.median(of_cache) for of_cache in times.values())
            held = sum(x.nbytes for layer in caches["DynamicCache"].layers for x in (layer.keys, layer.values))
            bytes_of = caches["ours"].report()["allocated_bytes"], held
            speed = f"{ours:.2f} {theirs:.2f} {ours / theirs:.2f}"
            print(f"{piece * PIECE:8,d} | {speed} | {bytes_of[0] / 1e6:.2f} {bytes_of[1] / 1e6:.2f}", flush=True)
            times = {name: [] for name in caches}


if __name__ == "__main__":
    main()
