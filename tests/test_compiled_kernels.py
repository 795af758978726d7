"""Compiled code of the Triton kernels: no race between warps, no spilled registers, few instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import DEVICE, tokens_of
from factories import needs_triton
from warp_races import barriers, races

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import KERNELS, PLAIN_WALK
from kvbench.harness.engine.model import adopt
from kvbench.harness.kernels import choose, cuda, cuda_attention
from kvbench.harness.models.families import tiny_model
from kvbench.policies.h2o import H2O

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


@pytest.fixture
def last_program_first(monkeypatch):
    """Triton's interpreter runs the programs of a grid in reverse order."""
    from triton.runtime.interpreter import interpreter_builder

    def set_index(x, y, z):
        sizes = interpreter_builder.grid_dim
        interpreter_builder.grid_idx = tuple(size - 1 - i for size, i in zip(sizes, (x, y, z), strict=True))

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_index)


def poison(read: CachedDecoder) -> None:
    """Leave in the free slots what an evicted token may have left there."""
    for walk in read.walks:
        tensors = walk.slots.tensors
        for flat in (tensors.keys.flat, tensors.values.flat, *tensors.flat_states.values()):
            flat[tensors.free] = float("nan")
        tensors.flat_rank[tensors.free], tensors.flat_position[tensors.free] = 0, 3


@needs_triton
@pytest.mark.parametrize(("group", "mode"), [(2, "cache"), (20, "clamped")])
def test_what_the_evicted_token_left_is_not_read(monkeypatch, last_program_first, group, mode):
    """A step and a block find NaN in the free slot. Groups of 20 are read by two programs, which may run in any order."""
    monkeypatch.setitem(choose._MODULES, DEVICE.type, cuda)
    monkeypatch.setattr(cuda_attention, "_MAX_TILE_BYTES", 16)  # blocks of 16 slots, so that a row has several parts
    shape = {"num_attention_heads": group, "num_key_value_heads": 1, "hidden_size": 8 * group, "num_hidden_layers": 1}
    model, tokens = adopt(tiny_model("llama", vocab_size=96, **shape).to(DEVICE)), tokens_of(22)
    config = CacheConfig(H2O(), 17, mode, 12)
    filling = replace(KERNELS, fill=True)  # walking until the cache is full would take the interpreter seconds
    fast, plain = CachedDecoder(model, config, 1, filling), CachedDecoder(model, config, 1, PLAIN_WALK)
    assert "step kernel" in fast.walks[0].offers
    for block in tokens.split([17, 1, 1, 2, 1], 1):
        if block.shape[1] < 17:
            poison(fast)
            poison(plain)
        torch.testing.assert_close(fast(block), plain(block), atol=2e-4, rtol=0)
    assert fast.kept() == plain.kept()
