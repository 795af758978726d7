"""Compiled code of the Triton kernels: no race between warps, no spilled registers, few instructions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from factories import needs_triton
from warp_races import barriers, races

pytestmark = pytest.mark.slow("Triton's compiler")

try:
    import triton
    import triton.language as tl
except ImportError:  # the tests that need it are skipped
    triton = None

ROOT = Path(__file__).parents[1]
OWNERS = () if triton is None else (tl, tl.core, tl.tensor, tl.math, tl.dtype, tl.condition, tl.core.tensor_descriptor_base)
CLEAN = [dict(vars(owner)) for owner in OWNERS]  # before any test has run


@pytest.fixture(autouse=True)
def clean_language():
    mend()


def mend():
    """Triton's interpreter patches its language, and two kernels at once, in threads, leave it patched: nothing compiles then."""
    for owner, clean in zip(OWNERS, CLEAN, strict=True):
        for name in [x for x in vars(owner) if x not in clean]:
            delattr(owner, name)
        for name, value in clean.items():
            if vars(owner)[name] is not value:
                setattr(owner, name, value)


@needs_triton
def test_the_kernels_compile_for_a_gpu_that_is_not_there():
    """Few groups, several passes over one, values narrower than keys, codes and rotations. A job of CI compiles all kernels."""
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/compile_kernels.py"), "--only"]
    command += ["falcon-7b bf16 H2O", "deepseek bf16 H2O", "llama-3-8b bf16 Wide", "llama-3-8b bf16 int4", "llama-2-7b bf16: "]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row.split(": ")[1] for row in done.stdout.splitlines()[:-1]} == {
        "attend",
        "join",
        "release",
        "attend_coded",
        "rotate",
        "merge",
    }


def add_one(x, n, BLOCK: tl.constexpr, BARRIER: tl.constexpr):  # noqa: N803
    """Every place is loaded and stored, and moves on with the loop."""
    for begin in range(0, n, BLOCK):
        s = begin + tl.arange(0, BLOCK)
        one = tl.load(x + s, mask=s < n, other=0)
        if BARRIER:
            tl.debug_barrier()
        tl.store(x + s, one + 1, mask=s < n)
        if BARRIER:
            tl.debug_barrier()


def free_slot(x, n, BLOCK: tl.constexpr, BARRIER: tl.constexpr):  # noqa: N803
    """Load a number in all warps and store it in one warp at the end, as `release` does."""
    at = tl.load(x)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x, at + 1)


def compiled(function, block: int, barrier: bool) -> tuple[str, str]:
    """A kernel's TTGIR and PTX."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    constants = {"BLOCK": block, "BARRIER": barrier}
    types = {"x": "*i64", "n": "i32", "BLOCK": "constexpr", "BARRIER": "constexpr"}
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(2)}
    source = ASTSource(JITFunction(function), types, constexprs=constants, attrs=attributes)
    options = {"num_warps": 4, "enable_fp_fusion": True}  # unset, it warns
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return made.asm["ttgir"], made.asm["ptx"]


@needs_triton
@pytest.mark.parametrize(("function", "block"), [(add_one, 16), (free_slot, 1024)], ids=["a loop", "a slot"])
def test_a_race_is_found_and_a_barrier_ends_it(function, block):
    without, _ = compiled(function, block, False)
    with_barrier, ptx = compiled(function, block, True)
    assert races(without)
    assert all("(x)" in line for line in races(without))
    assert races(with_barrier) == []
    assert ptx.count("bar.sync") >= barriers(with_barrier) > 0
