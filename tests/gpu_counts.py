"""What the engine would ask of a GPU, counted without one, beside what it asked for before and the limits that tests hold.

    python tests/gpu_counts.py

Takes two or three minutes. "Before" was counted at commit 605c920 by the same rules; of the host, it is the walk without
graphs. Exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported

import compile_kernels
import counts_flex
import counts_step
import host_time
import torch
import transformers
import triton
from compiled_code import dumped, instructions
from factories import slots_for
from triton.backends.compiler import GPUTarget

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.kernels.cuda_attention import AttentionKernels
from kvbench.policies.h2o import H2O


class Count(NamedTuple):
    """A row of the table. None: there was none, or it is not held."""

    what: str
    before: float | None
    now: float
    limit: float | None


def instructions_a_slot(model: str) -> dict[str, float]:
    """Warp instructions a slot and row of a token that is walked under H2O in bf16, by kernel."""
    case = compile_kernels.Case(model, "bf16", H2O(), True, 1)
    tools, counts = Path(triton.__file__).parent / "backends/nvidia/bin", {}
    for name in case.names:
        made = compile_kernels.compiled(case, name, GPUTarget("cuda", 90, 32))
        counts[name] = made.count(instructions(dumped(tools, made.code.asm["cubin"], "-sass")))
    return counts


def copied_a_slot(model: str, mode: int) -> float:
    """Bytes a slot that `attend` copies asynchronously under H2O in bf16, at positions of a long stream."""
    case, tools = (
        compile_kernels.Case(model, "bf16", H2O(), False, mode, 2**15),
        Path(triton.__file__).parent / "backends/nvidia/bin",
    )
    made = compile_kernels.compiled(case, "attend", GPUTarget("cuda", 90, 32))
    return made.copied(instructions(dumped(tools, made.code.asm["cubin"], "-sass")))


def programs(streams: int, capacity: int) -> int:
    """Programs of `attend` for one token of the 8B shape."""
    shape, config = compile_kernels.SHAPES["llama-3-8b"], CacheConfig(H2O(), capacity)
    slots = slots_for(shape, config, [0], 1, streams, torch.bfloat16, torch.device("meta"))
    rows = streams * shape.heads
    return rows * AttentionKernels(slots, "cache", 0, None).parts(rows, slots.num_slots)[0]


def counts() -> Iterator[Count]:
    """All rows."""
    yield Count("attend, 7B shape: warp instructions a slot and row", 227, instructions_a_slot("llama-2-7b")["attend"], 60)
    copied = [copied_a_slot("llama-2-7b", mode) for mode in (2, 4)]  # keys rotated as they are read, and as they are written
    yield Count("the same, positions stream: bytes copied a slot (before: keys rotated in it)", *copied, 560)
    walked = sum(instructions_a_slot("llama-3-8b").values())
    yield Count("a token walked under H2O, 8B shape: warp instructions a slot and row", 498, walked, 130)
    yield Count("the same: programs for 8 streams, on 132 multiprocessors", 64, programs(8, 2048), None)
    one_by_one, walked = host_time.walked(in_graphs=False), host_time.walked(in_graphs=True)
    yield Count("the same: launches by the host, a layer", one_by_one.launches, walked.launches, 0.1)
    yield Count("the same: us of the host beside the driver's, a layer", one_by_one.microseconds, walked.microseconds, 5)
    compiled = counts_step.compiled_per_layer("llama", **counts_step.LLAMA_8B).total() / 2
    yield Count("kernels in a captured decode step, a layer of Llama", 39, compiled, 12)
    own = counts_flex.bytes_of_a_block(with_kernels=True).total
    moved = own + counts_step.bytes_of_a_layer(2048, False, **counts_step.LLAMA_7B)
    yield Count("MB moved by sink+window's block beside products, a layer, 7B, T = 2,048", 2247, moved / 1e6, 1124)
    found = counts_flex.compilations()
    yield Count("compilations of FlexAttention a shape, over suites/latency.yaml", None, found.compiled / found.shapes, 1)


def main() -> int:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    exceeded = 0
    print(f"{'what':<80}{'before':>10}{'now':>10}{'limit':>10}")
    for count in counts():
        numbers = ("" if x is None else f"{x:.5g}" for x in count[1:])
        print(f"{count.what:<80}" + "".join(f"{x:>10}" for x in numbers), flush=True)
        exceeded += count.limit is not None and count.now > count.limit
    return int(exceeded > 0)


if __name__ == "__main__":
    sys.exit(main())
