"""Compile the kernel of `triton_coded.py` for an H100 that need not be there, and hold what can be told from its code.

    python tests/compile_coded.py

`compile_kernels.py` does the same for the kernels of floats. Exits with 1 if registers are spilt to memory, or if one warp can
overtake another between loading and storing the same place. Beside registers it tells the warp instructions and the bytes that a
slot of a row takes, all branches run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from compile_kernels import DTYPES, FLOAT32, INT64, SHAPES
from compiled_code import dumped, instructions, loops, resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from warp_races import races

from kvbench.harness.core.codec import Codec
from kvbench.harness.kernels.cuda_attention import WARPS
from kvbench.harness.kernels.cuda_coded import constants
from kvbench.harness.kernels.triton_coded import attend_coded

CODECS = [Codec("int8"), Codec("int4"), Codec("int2"), Codec("int4", 32, 4, 32)]
NUMBERS = {"first", "slots", "attended", "part", "limit"}


def wanted() -> Iterator[tuple[str, str, str, Codec, dict[str, Any], dict[str, str]]]:
    """Every kernel as it is launched: model, dtype, codec, its constants, and the types of all its arguments."""
    for name, dtype, codec, mode in [
        *(("llama-3-8b", dtype, codec, 1) for dtype in ("bf16", "fp32") for codec in CODECS),
        *((name, "bf16", Codec("int4", 32, 4, 32), 3) for name in ("llama-2-7b", "falcon-7b", "deepseek", "stories260k")),
        ("llama-3-8b", "bf16", Codec("int4", keys="rotated"), 4),
    ]:
        made = constants(SHAPES[name], codec) | {"MODE": mode, "LEVEL": 0, "ASKED": True}
        kinds = {x: type_of(x, dtype, codec) for x in attend_coded.arg_names}
        yield (
            f"{name} {dtype} {codec}, mode {mode}",
            name,
            dtype,
            codec,
            made,
            {x: "constexpr" if x in made else t for x, t in kinds.items()},
        )


def type_of(argument: str, dtype: str, codec: Codec) -> str:
    """An argument's type in Triton's words."""
    if argument in NUMBERS:
        return "i32"
    if argument.endswith("codes"):
        return "*i16" if codec.bits == 8 and argument.startswith("key") else "*u8"
    if argument == "scaling":
        return "fp32"
    return "*i64" if argument in INT64 else "*fp32" if argument in FLOAT32 | {"out"} else f"*{dtype}"


def main() -> int:
    """Compile them all, or those whose titles begin so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="beginning of a title")
    only = parser.parse_args().only
    tools, faults = Path(triton.__file__).parent / "backends/nvidia/bin", 0
    triton.knobs.compilation.disable_line_info = True  # it takes time
    for title, model, dtype, codec, made_of, types in wanted():
        if not title.startswith(only):
            continue
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
        warps, shape = WARPS[DTYPES[dtype]], SHAPES[model]
        source = ASTSource(attend_coded, types, constexprs=made_of, attrs=aligned)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        used, code = (
            resources(dumped(tools, made.asm["cubin"], "-res-usage")),
            instructions(dumped(tools, made.asm["cubin"], "-sass")),
        )
        a_slot = sum(x.instructions for x in loops(code)) * warps / made_of["BLOCK"] * -(-shape.group // made_of["M"])
        itemsize = torch.empty(0, dtype=DTYPES[dtype]).itemsize
        read = sum(codec.bytes_of(x, itemsize) for x in (shape.key_dim, shape.value_dim))
        floats = (shape.key_dim + shape.value_dim) * itemsize
        found = list(races(made.asm["ttgir"], {}))
        print(
            f"{title}: {used.registers} registers a thread, {used.spilled} bytes spilt, {a_slot:.0f} instructions a slot, "
            f"{read} bytes a slot of {floats} in floats",
            *found,
            sep="\n",
            flush=True,
        )
        faults += bool(used.spilled or found)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
