"""Compile the kernels of `triton_rotate.py` for an H100 that need not be there, and hold what can be told from their code.

    python tests/compile_rope.py

`compile_kernels.py` does the same for the kernels of steps and walks. Exits with 1 if registers are spilt to memory, or if one
warp can overtake another between loading and storing the same place.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from compiled_code import dumped, resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from warp_races import races

from kvbench.harness.kernels import rope, triton_rotate

DIMS = {
    "stories-260k": (8, 4),
    "pythia, partial RoPE": (64, 8),
    "llama-2-7b": (128, 64),
    "interleaved": (128, 0),
    "gemma": (256, 128),
    "ones": (128, 64),
}
ONES = {"heads": 1, "group": 1, "sinks": 1}  # numbers that Triton makes constants of where they are 1
DTYPES = ("bf16", "fp32")
FLOAT32 = {"factors", "log_sum"}
VECTORS = {"x", "out", "query", "keys", "values", "near"}
FLOATS = {"scaling"}


def wanted() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, str]]]:
    """Every kernel as it is launched: a name, the kernel, its constants, and the types of all its arguments."""
    for (name, (dim, halves)), dtype, kernel in itertools.product(DIMS.items(), DTYPES, ("rotate", "merge")):
        if dtype == "fp32" and halves != dim // 2:
            continue
        made = getattr(triton_rotate, kernel)
        constants = rope.sizes(dim) | {"ROTATES": True, "HALVES": halves} | (ONES if name == "ones" else {})
        constants = {x: value for x, value in constants.items() if x in made.arg_names}
        types = {
            x: "constexpr"
            if x in constants
            else "*fp32"
            if x in FLOAT32
            else f"*{dtype}"
            if x in VECTORS
            else "fp32"
            if x in FLOATS
            else "i32"
            for x in made.arg_names
        }
        yield f"{name} {dtype} {kernel}", made, constants, types


def main() -> int:
    """Compile them all."""
    tools, faults = Path(triton.__file__).parent / "backends/nvidia/bin", 0
    for name, kernel, constants, types in wanted():
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, (x, kind) in enumerate(types.items())
            if kind.startswith("*") or x.endswith(("_stream", "_head", "_token"))
        }
        source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        used = resources(dumped(tools, made.asm["cubin"], "-res-usage"))
        found = list(races(made.asm["ttgir"], {"out": "near"}))  # they may be the same tensor
        print(f"{name}: {used.registers} registers a thread, {used.spilled} bytes spilt", *found, sep=", ")
        faults += bool(used.spilled or found)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
