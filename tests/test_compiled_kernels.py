"""What the Triton kernels compile to: no race between warps, nothing spilt, few instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compiled_code import Loop, Resources, instructions, loops, resources
from conftest import DEVICE, tokens_of
from factories import needs_triton
from warp_races import barriers, races, repeated

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
    """Few groups, several passes over one, and values narrower than keys. A job of CI compiles all shapes."""
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/compile_kernels.py"), "--models"]
    command += ["llama-3-8b", "falcon-7b", "deepseek"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = done.stdout.splitlines()
    assert rows[-1].endswith(f"{len(rows) - 3} kernels by Triton {triton.__version__} for compute capability 90, 0 faults")
    for kernel in ("attend", "join", "release"):
        assert sum(f": {kernel} " in row for row in rows) > 5


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
    """As `release` does: all warps load a number, and at the end one stores it."""
    at = tl.load(x)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x, at + 1)


def neighbours(x, n, BLOCK: tl.constexpr, BARRIER: tl.constexpr):  # noqa: N803
    """A thread loads what the next one stores."""
    s = tl.arange(0, BLOCK)
    after = tl.load(x + 1 + s, mask=s < n, other=0)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + s, after, mask=s < n)


def in_one_branch(x, n, BLOCK: tl.constexpr, BARRIER: tl.constexpr):  # noqa: N803
    """The barrier is not passed if `n` is small."""
    at = tl.load(x)
    if n > 5:
        tl.debug_barrier()
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
@pytest.mark.parametrize(
    ("function", "block"), [(add_one, 16), (free_slot, 1024), (neighbours, 1024), (in_one_branch, 16)], ids=lambda x: str(x)[:16]
)
def test_a_race_is_found_and_a_barrier_ends_it(function, block):
    without, _ = compiled(function, block, False)
    with_barrier, ptx = compiled(function, block, True)
    assert races(without)
    assert all("(x)" in line for line in races(without))
    assert races(with_barrier) == []
    assert ptx.count("bar.sync") >= barriers(with_barrier) > 0


@needs_triton
def test_a_race_around_a_loop_is_found():
    """The barrier between loading and storing does not hold back the next iteration."""
    text, _ = compiled(add_one, 16, True)
    lines = text.splitlines()
    last = max(i for i, line in enumerate(lines) if barriers(line))
    assert len(races("\n".join(lines[:last] + lines[last + 1 :]))) == 1
    assert barriers(text) == 2


@needs_triton
def test_threads_with_places_of_their_own_need_no_barrier():
    text, _ = compiled(add_one, 1024, False)
    assert (races(text), repeated(text)) == ([], [])


@needs_triton
@pytest.mark.parametrize(("block", "accesses"), [(16, 2), (64, 2), (128, 0), (1024, 0)])
def test_elements_of_several_threads_are_found(block, accesses):
    """128 threads, of which all load, if there are fewer elements."""
    assert len(repeated(compiled(add_one, block, True)[0])) == accesses


@needs_triton
def test_a_race_with_a_view_of_the_array_is_found():
    text, _ = compiled(free_slot, 1024, False)
    apart = text.replace("tt.func public @free_slot(", "tt.func public @free_slot(%y: !tt.ptr<i64>, ")
    first = next(line for line in apart.splitlines() if "tt.load" in line)
    apart = apart.replace(first, first.replace("%x", "%y"))
    assert races(apart) == []
    assert len(races(apart, {"y": "x"})) == 1


@needs_triton
def test_an_operation_on_pointers_that_is_not_known_is_refused():
    text, _ = compiled(free_slot, 1024, False)
    with pytest.raises(ValueError, match="unknown operation on pointers"):
        races(text.replace("tt.store %x,", "tt.new_store %x,"))


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;              /* 0x00000a00ff017b82 */
        /*0010*/              @!P1 BRA 0x50 ;                          /* 0x0 */
        /*0020*/                   LDG.E R2, [R4.64] ;
        /*0030*/                   SHFL.BFLY PT, R3, R2, 0x1, 0x1f ;
        /*0040*/              @!P0 BRA 0x30 ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0060*/               @P2 BRA.U 0x10 ;
        /*0070*/                   LDG.E R2, [R4.64] ;
        /*0080*/               @P2 BRA 0x70 ;
        /*0090*/                   EXIT ;
        /*00a0*/                   BRA 0xa0;
        /*00b0*/                   NOP;
"""


def test_loops_are_counted():
    """A jump to itself, behind the end, is no loop; one inside another one counts once."""
    code = instructions(SASS)
    assert code[:2] == [(0, "LDC R1, c[0x0][0x28]"), (16, "@!P1 BRA 0x50")]
    assert len(code) == 11
    assert loops(code) == [Loop(6, 1, 1, True), Loop(2, 0, 0, False)]


def test_asynchronous_copies_are_counted():
    """A warp's 32 threads copy 16, 8 or 4 bytes each; a load that waits is no copy."""
    copies = ["@!P0 LDGSTS.E.BYPASS.LTC128B.128 [R5], desc[UR4][R2.64]", "LDGSTS.E.64 [R5], [R2.64]", "LDGSTS.E [R5], [R2.64]"]
    code = [*enumerate([*copies, "LDG.E.128 R2, [R4.64]"]), (4, "@P0 BRA 0x0")]
    assert [x.copied for x in loops(code)] == [32 * (16 + 8 + 4)]


def test_spills_are_read():
    told = "Resource usage:\n Common:\n  GLOBAL:0\n Function attend:\n  REG:180 STACK:{} SHARED:1024 LOCAL:0 CONSTANT[0]:744"
    assert [resources(told.format(x)) for x in (0, 48)] == [Resources(180, 0), Resources(180, 48)]


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
    assert fast.walks[0].steps_by_kernel
    for block in tokens.split([17, 1, 1, 2, 1], 1):
        if block.shape[1] < 17:
            poison(fast)
            poison(plain)
        torch.testing.assert_close(fast(block), plain(block), atol=2e-4, rtol=0)
    assert fast.kept() == plain.kept()


@needs_triton
def test_a_language_that_is_left_patched_is_mended(monkeypatch):
    from triton.runtime import interpreter

    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")  # not from its cache
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl}))  # and nobody restores it
    with pytest.raises(triton.compiler.errors.CompilationError):
        compiled(add_one, 16, True)
    mend()
    assert compiled(add_one, 16, True)
