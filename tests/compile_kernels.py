"""Compile every Triton kernel for a kind of GPU that need not be present, and check its code.

    python tests/compile_kernels.py [compute capability, 90 by default] [--only TEXT ...]

Arguments are specialised as Triton's launcher would: on 1, and on multiples of 16. The exit code is 1 if registers are spilt to
memory, or if a warp can overtake another one between loading and storing the same place. --only: parts of titles.
"""

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from warp_races import barriers, races, repeated

from kvbench.harness.core.codec import Codec
from kvbench.harness.engine.slots import LayerShape
from kvbench.harness.kernels import rope, triton_rotate
from kvbench.harness.kernels import triton_kernels as kernels
from kvbench.harness.kernels.cuda import _policy_module
from kvbench.harness.kernels.cuda_attention import _JOINED_PARTS, BOOKKEEPING_BLOCK, WARPS, coded_constants, sizes
from kvbench.harness.kernels.tracing import TRITON, Formulas, traced
from kvbench.harness.kernels.triton_coded import attend_coded
from kvbench.policies import AttentionSum, KeyNorm, Policy, RecentAttention
from kvbench.policies.h2o import H2O
from kvbench.policies.random import Random

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = {
    name: LayerShape(*shape, None, None)
    for name, shape in {
        "llama-2-7b": (32, 1, 128, 128),
        "llama-3-8b": (8, 4, 128, 128),
        "llama-3-70b": (8, 8, 128, 128),
        "gemma-2b": (1, 8, 256, 256),
        "falcon-7b": (1, 71, 64, 64),
        "qwen2-1.5b": (2, 6, 128, 128),
        "phi-2": (32, 1, 80, 80),
        "deepseek": (128, 1, 192, 128),
        "stories260k": (4, 2, 8, 8),
    }.items()
}
ALL = ("attend", "join", "release")
SLOTS = 4097  # of a row, with a capacity of 4096
LARGE = ("llama-2-7b", "llama-3-8b")  # shapes of which every kernel is compiled
ALIASES = {"words": "keys"}  # `words` is a view
INT64 = {"rank", "position", "free", "order", "layers", "clock", "head_indices", "prompts"}  # arrays
FLOAT32 = {"cosine", "sine", "far_cosine", "far_sine", "most", "total", "scores", "mass", "written", "parted"}
ITEM_BYTES = {"*i64": 8, "*i32": 4, "*fp32": 4, "*bf16": 2, "*fp16": 2}
LAYER = 3  # its rows begin inside the tensors of all layers


@dataclass(frozen=True)
class Wide(Policy):
    """Several statistics, one of several numbers per slot, and everything that a view tells."""

    statistics = (RecentAttention(3), KeyNorm(), AttentionSum())

    def importance(self, view: Any) -> Any:
        """Attention over age and norm."""
        recent, norm, total = (view.state(s) for s in self.statistics)
        worth = (recent.amax(-1) + total / (view.age + 1).sqrt()) / norm + view.uniform() * view.head
        return worth.masked_fill((view.position < view.prompt) | (view.rank * 2 > view.count), torch.inf)


@dataclass(frozen=True)
class Case:
    """A way to launch the kernels.

    Attributes:
        place: for a token inside a block, which `attend` enters in its slot; else for a step.
        mode, level: of RoPE, as `attend` takes them.
        attended: slots.
        names: kernels that are compiled.
    """

    model: str
    dtype: str
    policy: Any
    place: bool
    mode: int
    level: int = 0
    attended: int = SLOTS
    names: tuple[str, ...] = ALL

    def __str__(self) -> str:
        way = "walk" if self.place else "step"
        what = f"{self.model} {self.dtype} {type(self.policy).__name__} {way}, mode {self.mode}"
        return what + ", two tables" * bool(self.level) + f", {self.attended} slots" * (self.attended != SLOTS)

    @property
    def shape(self) -> LayerShape:
        """Shape of the layer."""
        return SHAPES[self.model]

    @property
    def formulas(self) -> Formulas:
        """Traced formulas of the policy."""
        return traced(self.policy.bind(64), TRITON)

    @property
    def asked(self) -> bool:
        """A statistic sees softmax weights."""
        return any(s.sees for s in self.policy.statistics)

    def numbers(self) -> dict[str, int]:
        """The whole numbers that the launchers pass."""
        streams = 8 if self.place else 1
        rows, slots = streams * self.shape.heads, max(self.attended, SLOTS)
        return {
            "first": LAYER * rows * slots,
            "slots": slots,
            "attended": self.attended,
            "part": 1088,
            "parts": 4 if self.place else 1,
            "limit": 4095,
            "capacity": slots - 1,
            "tokens": 512 if self.place else 1,
            "window": 0,
            "heads": self.shape.heads,
            "rows_of_layer": rows,
            "full": int(self.attended == slots),
            "seed": 2**40 + 5,
            "num_layers": 32,
            "written_row": 0,
            "written_token": 0,
        }

    def constants(self, name: str) -> dict[str, Any]:
        """The constants that the launchers pass."""
        asked, constant = self.asked, sizes(self.shape, DTYPES[self.dtype])
        flags = {"PLACE": self.place, "ASKED": asked}
        if name == "attend":
            widths = self.formulas.widths if self.place else ()
            return constant | flags | {"MODE": self.mode, "LEVEL": self.level, "WIDTHS": widths}
        if name == "join":
            of_join = {"CHUNK": _JOINED_PARTS, "BLOCK": BOOKKEEPING_BLOCK, "ASKED": asked, "PLACE": self.place}
            return {k: constant[k] for k in ("G", "E", "WIDE")} | of_join
        own, reads = _policy_module(self.formulas), self.formulas.reads
        block = 128 if self.attended <= 128 else BOOKKEEPING_BLOCK
        read = {"MOST": "most" in reads, "HEAD": "head" in reads, "PROMPT": "prompt" in reads}
        sized = {"G": self.shape.group if asked else 1, "BLOCK": block, "WIDTHS": self.formulas.widths}
        return {"updated": own.updated, "importance": own.importance} | sized | read | flags

    def type_of(self, argument: str, name: str) -> Any:
        """An argument's type in Triton's words."""
        if argument in self.numbers():
            return "i64" if argument == "seed" else "i32"
        if argument == "scaling":
            return "fp32"
        if argument == "states":
            return ("*fp32",) * len(self.formulas.widths) or ("*i64",)
        unused = (argument == "mass" and not self.asked) or (argument == "written" and not self.place)  # `free` stands in
        if argument in INT64 or unused:
            return "*i64"
        if argument == "words":
            return "*i64" if self.dtype == "fp32" else "*i32"
        return "*fp32" if argument in FLOAT32 or (argument == "out" and name == "attend") else f"*{self.dtype}"

    def divisible(self, argument: str, kind: str) -> bool:
        """A number, or the address of an array, is a multiple of 16."""
        numbers = self.numbers()
        if argument in numbers:
            return numbers[argument] % 16 == 0
        rows = LAYER * numbers["rows_of_layer"]
        per_row = {"rank": numbers["slots"], "position": numbers["slots"], "states": numbers["slots"], "free": 1}.get(argument, 0)
        return kind in ITEM_BYTES and rows * per_row * ITEM_BYTES[kind] % 16 == 0


class Kernel(NamedTuple):
    """A kernel as it is launched.

    Attributes:
        title: name shown in output.
        function: Triton function.
        constants: values of constant arguments, by name.
        types: Triton's types of all arguments, by name.
        is_aligned: returns whether a number or an address is a multiple of 16, given the argument's name and type.
        warps: number of warps of a program; None: Triton's default.
        aliases: arguments that are views of other arguments.
        alone: whether each element must belong to a single thread.
    """

    title: str
    function: Any
    constants: dict[str, Any]
    types: dict[str, Any]
    is_aligned: Callable[[str, str], bool]
    warps: int | None = None
    aliases: Mapping[str, str] = {}
    alone: bool = False


def cases() -> Iterator[Case]:
    """Return all shapes in both dtypes, with and without a statistic; every mode of RoPE with one table and two."""
    for model in SHAPES:
        large = model in LARGE
        yield Case(model, "bf16", H2O(), True, 1)
        yield Case(model, "bf16", Random(), False, 2, 2**15, names=ALL[:2] if large else ("attend",))
        yield Case(model, "fp32", H2O(), True, 3, names=("attend",))
        if large:
            yield Case(model, "bf16", H2O(), True, 1, 2**15, names=("attend",))
            yield Case(model, "bf16", H2O(), True, 4, 2**15, names=("attend",))
    yield Case("phi-2", "fp32", H2O(), False, 4, 2**15, names=("attend",))
    yield Case("llama-2-7b", "fp32", Random(), False, 3, 2**15)
    yield Case("llama-3-8b", "fp16", H2O(), False, 1)
    yield Case("llama-3-8b", "bf16", Random(), True, 0)
    yield Case("gemma-2b", "bf16", H2O(), False, 0, attended=100)
    yield Case("llama-3-8b", "bf16", H2O(), False, 1, attended=128, names=("release",))
    yield Case("llama-3-8b", "bf16", Wide(), True, 1)
    yield Case("llama-2-7b", "bf16", H2O(), True, 1, attended=4352)  # a multiple of 16: accesses are wider


def walks() -> Iterator[Kernel]:
    """The kernels of a step and a walk over floats."""
    for case, name in ((x, name) for x in cases() for name in x.names):
        function, constants, numbers = getattr(kernels, name), case.constants(name), case.numbers()
        constants |= {x: 1 for x in function.arg_names if numbers.get(x) == 1}
        types = {x: "constexpr" if x in constants else case.type_of(x, name) for x in function.arg_names}
        warps = WARPS[DTYPES[case.dtype]] if name == "attend" else 4
        yield Kernel(f"{case}: {name}", function, constants, types, case.divisible, warps, ALIASES, name == "release")


def coded() -> Iterator[Kernel]:
    """The kernel that reads codes."""

    def type_of(argument: str, dtype: str, codec: Codec) -> str:
        if argument in {"first", "slots", "attended", "part", "limit"}:
            return "i32"
        if argument.endswith("codes"):
            return "*i16" if codec.bits == 8 and argument.startswith("key") else "*u8"
        if argument == "scaling":
            return "fp32"
        return "*i64" if argument in INT64 else "*fp32" if argument in FLOAT32 | {"out"} else f"*{dtype}"

    exempting = Codec("int4", 32, 4, 32)
    for model, dtype, codec, mode in [
        *(("llama-3-8b", t, c, 1) for t in ("bf16", "fp32") for c in (Codec("int8"), Codec("int4"), Codec("int2"), exempting)),
        *((model, "bf16", exempting, 3) for model in ("llama-2-7b", "falcon-7b", "deepseek", "stories260k")),
        ("llama-3-8b", "bf16", Codec("int4", keys="rotated"), 4),
    ]:
        constants = coded_constants(SHAPES[model], codec) | {"MODE": mode, "LEVEL": 0, "ASKED": True}
        types = {x: "constexpr" if x in constants else type_of(x, dtype, codec) for x in attend_coded.arg_names}
        title = f"{model} {dtype} {codec}, mode {mode}: attend_coded"
        yield Kernel(title, attend_coded, constants, types, lambda _, kind: kind[0] == "*", WARPS[DTYPES[dtype]])


def rotations() -> Iterator[Kernel]:
    """The kernels that rotate a block and merge sinks into its attention, by dims of a head and dims whose halves are pairs."""
    vectors, numbers = (
        {"x", "out", "query", "keys", "values", "near"},
        {"scaling": "fp32", "factors": "*fp32", "log_sum": "*fp32"},
    )
    one = {"heads": 1, "group": 1, "sinks": 1}  # numbers that Triton makes constants of

    def is_aligned(argument: str, kind: str) -> bool:
        return kind[0] == "*" or argument.endswith(("_stream", "_head", "_token"))

    for name, dim, halves, ones in (
        ("stories-260k", 8, 4, {}),
        ("pythia, partial RoPE", 64, 8, {}),
        ("llama-2-7b", 128, 64, {}),
        ("llama-2-7b, ones", 128, 64, one),
        ("interleaved", 128, 0, {}),
        ("gemma", 256, 128, {}),
    ):
        for dtype, which in itertools.product(("bf16", "fp32") if halves == dim // 2 else ("bf16",), ("rotate", "merge")):
            function = getattr(triton_rotate, which)
            constants = {"ROTATES": True, "HALVES": halves} | rope.sizes(dim) | ones
            constants = {x: value for x, value in constants.items() if x in function.arg_names}
            types = {x: f"*{dtype}" if x in vectors else numbers.get(x, "i32") for x in function.arg_names}
            types |= dict.fromkeys(constants, "constexpr")
            yield Kernel(f"{name} {dtype}: {which}", function, constants, types, is_aligned, aliases={"out": "near"})


def arguments(types: dict[str, Any]) -> Iterator[tuple[tuple[int, ...], str, str]]:
    """The place, name and type of every argument, and of every member of a tuple."""
    for i, (name, kind) in enumerate(types.items()):
        if isinstance(kind, tuple):
            yield from (((i, j), name, member) for j, member in enumerate(kind))
        else:
            yield (i,), name, kind


def compiled(kernel: Kernel, target: GPUTarget) -> Any:
    """Compile a kernel with its arguments specialised as the launcher would."""
    wide = [i for i, x, kind in arguments(kernel.types) if kind != "constexpr" and kernel.is_aligned(x, kind)]
    attributes = {i: [["tt.divisibility", 16]] for i in wide}
    source = ASTSource(kernel.function, kernel.types, constexprs=kernel.constants, attrs=attributes)
    return triton.compile(source, target=target, options={"num_warps": kernel.warps} if kernel.warps else {})


def resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes of its stack: only spilt registers lie there."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.findall(rf"\b{name}:(\d+)", text)[0]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def faults(kernel: Kernel, code: Any, spilled: int) -> Iterator[str]:
    """Describe what is wrong with a compiled kernel."""
    text = code.asm["ttgir"]
    yield from (f"race: {x}" for x in races(text, kernel.aliases))
    if kernel.alone:
        yield from (f"several threads touch one element: {x}" for x in repeated(text))
    if code.asm["ptx"].count("bar.sync") < barriers(text):
        yield "the compiler dropped a barrier"
    if spilled:
        yield f"spills {spilled} bytes"


def main() -> int:
    """Compile all kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", type=int, nargs="?", default=90, help="of the GPU, times ten")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of titles")
    given = parser.parse_args()
    triton.knobs.compilation.disable_line_info = True  # it takes time
    known: set[str] = set()
    wrong = 0
    for kernel in itertools.chain(walks(), coded(), rotations()):
        if not any(part in kernel.title for part in given.only):
            continue
        code = compiled(kernel, GPUTarget("cuda", given.capability, 32))
        if code.hash in known:
            continue
        known.add(code.hash)
        registers, spilled = resources(code.asm["cubin"])
        found = list(faults(kernel, code, spilled))
        wrong += len(found)
        print(f"{kernel.title}: {registers} registers, {code.metadata.shared} bytes shared", *found, sep="\n  ", flush=True)
    print(f"{len(known)} kernels by Triton {triton.__version__} for compute capability {given.capability}, {wrong} faults")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
