"""Speed at which the closed form and the compiled walk score text on a GPU, compared with a bound by the GPU's rates.

    python tests/gpu/speed.py [--row sink_window] [--rehearse]

Random weights of published shapes, random tokens, full caches: random K and V fill them. The device times every block. Prints
a line of JSON per row as soon as it is measured: tokens per second, and the bound computed from rates measured on the same
device.
"""

import argparse
import json
import statistics
import sys
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from kvbench.harness.core.device import Marks, bandwidth, device_name, multiply_rate
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.fastcheck import fast_method
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.model import Model
from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.load import load_model
from kvbench.policies.h2o import H2O
from kvbench.policies.sink_window import SinkWindow


class Row(NamedTuple):
    """A configuration to time."""

    name: str
    shape: str
    config: CacheConfig
    streams: int
    block: int
    blocks: int = 8  # timed


ROWS = {
    "sink_window": Row("perplexity, sink+window 4+2044", "llama-2-7b", CacheConfig(SinkWindow(4), 2048), 1, 2048),
    "h2o": Row("perplexity, H2O 1024+1024", "llama-3-8b", CacheConfig(H2O(1024), 2048), 8, 256, 4),
}
SMALL = {
    "sink_window": Row("perplexity, sink+window", "stories-260k", CacheConfig(SinkWindow(4), 64), 1, 128, 3),
    "h2o": Row("perplexity, H2O", "stories-260k", CacheConfig(H2O(32), 64), 2, 32, 3),
}


def operations(model: Model, capacity: int) -> float:
    """Operations for one token: two per weight except the embedding, and scores and values over a full cache."""
    weights = sum(p.numel() for p in model.hf.parameters()) - model.hf.get_input_embeddings().weight.numel()
    attention = sum(2 * x.heads * x.group * (x.key_dim + x.value_dim) * (capacity + 1) for x in model.layers)
    return 2.0 * weights + attention


def measured(row: Row, model: Model, device: torch.device) -> dict[str, Any]:
    """Time one row."""
    check = fast_method(model, row.config, row.streams)
    read = CachedDecoder(model, row.config, row.streams, check.method)
    vocabulary = model.hf.config.vocab_size
    capacity = row.config.capacity or 0
    read.fill_randomly(capacity + 1)
    draw = torch.Generator().manual_seed(0)
    marks = Marks(device)
    for _ in range(1 + row.blocks):  # the first one warms up
        tokens = torch.randint(vocabulary, (row.streams, row.block + 1), generator=draw).to(device)
        logits = read(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        marks.mark()
    milliseconds = statistics.median(marks.milliseconds())
    rate, memory = multiply_rate(device, model.dtype), bandwidth(device)
    count = row.streams * row.block
    by_operations = operations(model, capacity) * count / rate
    walked = model.kv_bytes(capacity, row.streams) * row.block / memory if check.blocks == "compiled walk" else 0.0
    bound = max(by_operations, walked)
    seconds = milliseconds / 1e3
    return {
        "row": row.name,
        "shape": row.shape,
        "streams": row.streams,
        "block": row.block,
        "method": check.blocks,
        "differs_from_walk": check.differs,
        "refused": check.refused,
        "device": device_name(device),
        "torch": torch.__version__,
        "tokens_per_second": count / seconds,
        "share_of_multiply_rate": by_operations / seconds,
        "times_bound": seconds / bound,
        "multiply_rate": rate,
        "bandwidth": memory,
    }


def main() -> int:
    """Time the rows. -> 1 if a row was not read with its method."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--row", choices=list(ROWS), help="only this one")
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU")
    arguments = parser.parse_args()
    rows = SMALL if arguments.rehearse else ROWS
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    wrong = 0
    for row in rows.values() if arguments.row is None else [rows[arguments.row]]:
        directory = model_directory(f"random:{row.shape}", None, False)
        model = load_model(directory, "float32" if arguments.rehearse else "bfloat16", device, random=True)
        with torch.inference_mode():
            result = measured(row, model, device)
        wrong += result["method"] == "walk"
        print(json.dumps({k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in result.items()}), flush=True)
        del model
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
