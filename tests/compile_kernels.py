"""Compile every Triton kernel for a kind of GPU that need not be present, and hold what can be told from its code.

    python tests/compile_kernels.py [compute capability, 90 by default] [--models NAME ...]

Arguments are specialised as Triton's launcher would: on 1, and on multiples of 16. Held, or the exit code is 1: nothing is
spilt to memory; a slot of a row takes no more warp instructions than a limit; and no warp can overtake another one between
loading and storing the same place.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from compiled_code import Resources, dumped, instructions, loops, resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from warp_races import barriers, races, repeated

from kvbench.harness.engine.slots import LayerShape
from kvbench.harness.kernels import triton_kernels as kernels
from kvbench.harness.kernels.cuda import _policy_module
from kvbench.harness.kernels.cuda_attention import _JOINED_PARTS, BOOKKEEPING_BLOCK, WARPS, sizes
from kvbench.harness.kernels.tracing import TRITON, Formulas, traced
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
HELD = ("llama-2-7b", "llama-3-8b")  # shapes whose instructions are held
ATTEND_LIMIT, WALK_LIMIT = 60, 130  # warp instructions a slot and row in bf16
ROTATED_LIMIT = 40  # of `attend` if keys are rotated already
TWO_TABLES_LIMIT = 66  # of `attend` if it also joins two angles: Triton 3.6 needs six more than 3.9
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
        counted: kernels whose instructions are counted, which takes time.
    """

    model: str
    dtype: str
    policy: Any
    place: bool
    mode: int
    level: int = 0
    attended: int = SLOTS
    names: tuple[str, ...] = ALL
    counted: tuple[str, ...] = ()

    def __str__(self) -> str:
        way = "walk" if self.place else "step"
        what = f"{self.model} {self.dtype} {type(self.policy).__name__} {way}, mode {self.mode}"
        return what + ", two tables" * bool(self.level) + f", {self.attended} slots" * (self.attended != SLOTS)

    @property
    def shape(self) -> LayerShape:
        """Of the layer."""
        return SHAPES[self.model]

    @property
    def formulas(self) -> Formulas:
        """Of the policy."""
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


def cases(models: Collection[str]) -> Iterator[Case]:
    """These shapes in both dtypes, with and without a statistic; every mode of RoPE with one table and two."""
    for model in models:
        held = model in HELD
        yield Case(model, "bf16", H2O(), True, 1, counted=ALL if held else ("attend",))
        yield Case(model, "bf16", Random(), False, 2, 2**15, names=ALL[:2] if held else ("attend",), counted=("attend",) * held)
        yield Case(model, "fp32", H2O(), True, 3, names=("attend",))
    for model in (name for name in HELD if name in models):
        yield Case(model, "bf16", H2O(), True, 1, 2**15, names=("attend",), counted=("attend",))
        yield Case(model, "bf16", H2O(), True, 4, 2**15, names=("attend",), counted=("attend",))
    yield Case("phi-2", "fp32", H2O(), False, 4, 2**15, names=("attend",))
    yield Case("llama-2-7b", "fp32", Random(), False, 3, 2**15)
    yield Case("llama-3-8b", "fp16", H2O(), False, 1)
    yield Case("llama-3-8b", "bf16", Random(), True, 0)
    yield Case("gemma-2b", "bf16", H2O(), False, 0, attended=100)
    yield Case("llama-3-8b", "bf16", H2O(), False, 1, attended=128, names=("release",))
    yield Case("llama-3-8b", "bf16", Wide(), True, 1, counted=("release",))
    yield Case("llama-2-7b", "bf16", H2O(), True, 1, attended=4352)  # a multiple of 16: accesses are wider


@dataclass(frozen=True)
class Made:
    """A compiled kernel."""

    case: Case
    name: str
    code: Any
    warps: int

    def faults(self, used: Resources) -> Iterator[str]:
        """What is wrong with it."""
        text, ptx = self.code.asm["ttgir"], self.code.asm["ptx"]
        yield from (f"race: {x}" for x in races(text, ALIASES))
        if self.name == "release":
            yield from (f"several threads touch one element: {x}" for x in repeated(text))
        if ptx.count("bar.sync") < barriers(text):
            yield "the compiler dropped a barrier"
        if used.spilled:
            yield f"spills {used.spilled} bytes"

    def count(self, code: list[tuple[int, str]]) -> float:
        """Warp instructions a slot and row: in its loops, or in all of `join`, for each query head. code: its instructions."""
        constants, found = self.case.constants(self.name), loops(code)
        assert found or self.name == "join"
        assert self.name != "release" or not any(x.nested for x in found)
        passes = {"attend": -(-self.case.shape.group // constants.get("M", 1)), "join": self.case.shape.group, "release": 1}
        length = len(code) if self.name == "join" else sum(x.instructions for x in found)
        return length * self.warps / constants["BLOCK"] * passes[self.name]

    def copied(self, code: list[tuple[int, str]]) -> float:
        """Bytes a slot that a program copies to shared memory asynchronously. code: its instructions."""
        return sum(x.copied for x in loops(code)) * self.warps / self.case.constants(self.name)["BLOCK"]

    @property
    def limit(self) -> int | None:
        """The most instructions that it may take."""
        limit = ROTATED_LIMIT if self.case.mode == 4 else TWO_TABLES_LIMIT if self.case.level else ATTEND_LIMIT
        return limit if self.name == "attend" and self.case.model in HELD else None


def arguments(signature: dict[str, Any]) -> Iterator[tuple[tuple[int, ...], str, str]]:
    """The place, name and type of every argument, and of every member of a tuple."""
    for i, (name, kind) in enumerate(signature.items()):
        if isinstance(kind, tuple):
            yield from (((i, j), name, member) for j, member in enumerate(kind))
        else:
            yield (i,), name, kind


def compiled(case: Case, name: str, target: GPUTarget) -> Made:
    """Compile a kernel with its arguments specialised as the launcher would."""
    kernel, constants, numbers = getattr(kernels, name), case.constants(name), case.numbers()
    constants |= {x: 1 for x in kernel.arg_names if numbers.get(x) == 1}
    signature = {x: "constexpr" if x in constants else case.type_of(x, name) for x in kernel.arg_names}
    wide = [path for path, x, kind in arguments(signature) if x not in constants and case.divisible(x, kind)]
    source = ASTSource(kernel, signature, constexprs=constants, attrs={path: [["tt.divisibility", 16]] for path in wide})
    warps = WARPS[DTYPES[case.dtype]] if name == "attend" else 4
    return Made(case, name, triton.compile(source, target=target, options={"num_warps": warps}), warps)


def told(title: str, *columns: Any) -> str:
    """A row of the table."""
    return (f"{title:<66}" + "".join(f"{'' if x is None else x:>10}" for x in columns)).rstrip()


def examine(case: Case, target: GPUTarget, tools: Path, known: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Compile a case's kernels, but those in `known`. -> rows of the table, each with its faults."""
    counts = {}
    for name in case.names:
        made = compiled(case, name, target)
        if made.code.hash in known:
            continue
        known.add(made.code.hash)
        used = resources(dumped(tools, made.code.asm["cubin"], "-res-usage"))
        columns: list[Any] = [used.registers, used.spilled, made.code.metadata.shared]
        faults = list(made.faults(used))
        if name in case.counted:
            code = instructions(dumped(tools, made.code.asm["cubin"], "-sass"))
            counts[name] = count = made.count(code)
            columns += [sum(getattr(x, what) for x in loops(code)) for what in ("barriers", "shuffles")]
            columns += [f"{count:.1f}", made.limit]
            faults += [f"{count:.1f} instructions a slot"] * bool(made.limit and count > made.limit)
        yield told(f"{case}: {name}", *columns), [f"{case}: {name}: {x}" for x in faults]
    if tuple(counts) == ALL:
        count, limit = sum(counts.values()), WALK_LIMIT if case.model == HELD[1] else None
        row = told(f"{case}: a token", *[None] * 5, f"{count:.1f}", limit)
        yield row, [f"{case}: {count:.1f} instructions a slot"] * bool(limit and count > limit)


def main() -> int:
    """Compile all kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", type=int, nargs="?", default=90, help="of the GPU, times ten")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES, help="whose shapes; all by default")
    given = parser.parse_args()
    target = GPUTarget("cuda", given.capability, 32)
    triton.knobs.compilation.disable_line_info = True  # it takes time
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    print(told("kernel", "registers", "spilt, B", "shared, B", "barriers", "shuffles", "a slot", "limit"))
    known: set[str] = set()
    faults = []
    for case in cases(given.models):
        for row, found in examine(case, target, tools, known):
            print(row, flush=True)
            faults += found
    print(f"{len(known)} kernels by Triton {triton.__version__} for compute capability {target.arch}, {len(faults)} faults")
    print(*faults, sep="\n", end="\n" * bool(faults))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
