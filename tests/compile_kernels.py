"""Compile every Triton kernel for a kind of GPU that need not be present: its source is valid and it fits the chip.

    python tests/compile_kernels.py [compute capability, 90 by default]

Prints the registers and spills of each kernel. Exits with 1 if one does not compile.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvbench.harness.engine.kernels import triton_kernels as kernels
from kvbench.harness.engine.kernels.cuda import _policy_module
from kvbench.harness.engine.kernels.cuda_attention import WARPS, sizes
from kvbench.harness.engine.kernels.tracing import TRITON, traced
from kvbench.harness.engine.slots import LayerShape
from kvbench.policies.h2o import H2O
from kvbench.policies.random import Random

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHAPES = {"llama-2-7b": LayerShape(32, 1, 128, 128, None, None), "llama-3-8b": LayerShape(8, 4, 128, 128, None, None)}
POINTERS = {"rank", "position", "free", "order", "layers", "clock"}  # of int64
WIDE = {"seed"}  # int64
FLOATS = {"scaling", "initial"}
NUMBERS = {
    "first", "slots", "attended", "part", "parts", "limit", "capacity", "tokens", "window", "heads", "rows_of_layer", "full",
}  # fmt: skip
FLOAT32 = {"cosine", "sine", "far_cosine", "far_sine", "most", "total", "scores", "mass", "state", "parted"}


def signature(kernel: Any, constants: dict[str, Any], dtype: str) -> dict[str, str]:
    """The types of a kernel's arguments."""
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in NUMBERS:
            types[name] = "i32"
        elif name in WIDE:
            types[name] = "i64"
        elif name in FLOATS:
            types[name] = "fp32"
        elif name in POINTERS:
            types[name] = "*i64"
        elif name == "words":
            types[name] = "*i64" if dtype == "fp32" else "*i32"
        elif name in FLOAT32 or (name == "out" and kernel is kernels.attend):
            types[name] = "*fp32"
        else:
            types[name] = f"*{dtype}"
    return types


def usage(ptx: str) -> str:
    """A kernel's registers and spills, as the assembler reports them."""
    target = re.search(r"^\.target (\S+?)(?:,|$)", ptx, re.MULTILINE)
    assert target
    assemblers = sorted((Path(triton.__file__).parent / "backends/nvidia/bin").glob("ptxas*"))  # the newest supports this PTX
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = ["-v", f"--gpu-name={target[1]}", file.name, "-o", os.devnull]
        told = [subprocess.run([str(a), *command], capture_output=True, text=True) for a in assemblers]
    said = next((x.stderr for x in told if x.returncode == 0), "")
    registers, spills = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    return f"{registers[1]} registers a thread, {spills[1]} bytes spilt" if registers and spills else "compiled"


def main() -> int:
    """Compile all kernels."""
    target = GPUTarget("cuda", int(sys.argv[1]) if len(sys.argv) > 1 else 90, 32)
    failed = 0
    for (name, shape), dtype, policy in itertools.product(SHAPES.items(), DTYPES, (H2O(), Random())):
        constant, own = sizes(shape, DTYPES[dtype]), _policy_module(*traced(policy.bind(64), TRITON))
        asked = bool(policy.statistics)
        wanted = {
            "attend": constant | {"MODE": 1, "LEVEL": 0, "ASKED": asked, "PLACE": True, "STATE": asked},
            "join": {k: constant[k] for k in ("G", "E", "WIDE")} | {"CHUNK": 16, "BLOCK": 1024, "ASKED": asked, "PLACE": True},
            "release": {"update": own.update, "importance": own.importance, "G": shape.group, "BLOCK": 1024, "STATE": asked,
                        "PLACE": True},
        }  # fmt: skip
        for kernel_name, constants in wanted.items():
            kernel = getattr(kernels, kernel_name)
            try:
                source = ASTSource(kernel, signature(kernel, constants, dtype), constexprs=constants)
                warps = WARPS[DTYPES[dtype]] if kernel_name == "attend" else 4
                made = triton.compile(source, target=target, options={"num_warps": warps})
            except Exception as error:  # go on with the others
                failed += 1
                print(f"{name} {dtype} {type(policy).__name__} {kernel_name}: {type(error).__name__}: {str(error)[:1500]}")
                continue
            print(f"{name} {dtype} {type(policy).__name__} {kernel_name}: {usage(made.asm['ptx'])}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
