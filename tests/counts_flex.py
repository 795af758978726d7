"""Counts of the closed form's blocks on CUDA, from a machine without a GPU: FlexAttention's compilations and bytes moved.

    python tests/counts_flex.py

Takes half a minute. The bytes are those of plain PyTorch and of the kernels, side by side.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from factories import slots_for
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.closed_form import closed_form
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import Method
from kvbench.harness.engine.model import adopt
from kvbench.harness.engine.rotary import Rotation
from kvbench.harness.engine.rows import Rows
from kvbench.harness.engine.slots import LayerShape
from kvbench.harness.kernels import flex, rope
from kvbench.harness.models.families import tiny_model
from kvbench.policies import Policy
from kvbench.policies.sink_window import SinkWindow
from kvbench.policies.window import Window

CAPACITIES = [256, 512, 1024, 2048, 4096]  # of suites/latency.yaml
POLICIES: list[Policy] = [SinkWindow(4), Window()]
HEADS = [(4, 4), (5, 5), (4, 1)]  # query and KV heads: those of the suite's models, divided by 8
BY_FLEX = Method(flex=True)
SCORING_BLOCK = 2048
FAST_CHECK_BLOCK = 128
ODD_PROMPT = 77
OVERWRITES = ("copy_", "fill_", "zero_")  # what they write they don't read
PRODUCTS = ("bmm", "mm", "baddbmm", "linear", "addmm")
ALLOCATIONS = ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty")
GATHERS = ("index_select", "index", "gather", "embedding")  # read no more than they write


class Compilations(NamedTuple):
    """How often FlexAttention was compiled over a suite's cells, and for how many shapes of its arguments it was called."""

    compiled: int
    shapes: int
    calls: int
    ran: int  # calls that the compiled graphs served


def compilations(
    capacities: Sequence[int] = CAPACITIES, heads: Sequence[tuple[int, int]] = HEADS, block: int = SCORING_BLOCK
) -> Compilations:
    """Read blocks as the cells of `suites/latency.yaml` do: the fast check's, whole blocks, and blocks after an odd prompt.

    The models are tiny and their KV heads an eighth of the suite's. The compiled attention computes nothing.
    """
    compiled, shapes, calls, ran = [], set(), 0, 0

    def backend(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        (attention,) = (n for n in graph.graph.nodes if n.target is torch.ops.higher_order.flex_attention)
        out = torch.zeros(attention.args[0].meta["example_value"].shape)

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal ran
            ran += 1
            return out, out[..., 0]

        return run

    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        attend = flex._compiled.__wrapped__("cuda")

    def counted(query: torch.Tensor, keys: torch.Tensor, *rest: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        shapes.add((query.shape, keys.shape))
        return attend(query, keys, *rest, **more)

    torch._dynamo.reset()
    with patch.object(flex, "_DEVICES", {"cpu"}), patch.object(flex, "_compiled", lambda kind: counted), torch.inference_mode():
        for count, kv_heads in heads:
            shape = {"num_attention_heads": count, "num_key_value_heads": kv_heads, "hidden_size": 16 * count}
            model = adopt(tiny_model("llama", **shape, num_hidden_layers=1))
            for capacity, policy in itertools.product(capacities, POLICIES):
                for sizes in (
                    [capacity, FAST_CHECK_BLOCK, FAST_CHECK_BLOCK],
                    [block] * (capacity // block + 2),
                    [ODD_PROMPT, *[256] * (capacity // 256 + 1)],
                ):
                    read = CachedDecoder(model, CacheConfig(policy, capacity), method=BY_FLEX)
                    for size in sizes:
                        read(torch.zeros(1, size, dtype=torch.int64), keep=torch.zeros(1, dtype=torch.int64))
    torch._dynamo.reset()
    return Compilations(len(compiled), len(shapes), calls, ran)


class BytesMoved(TorchDispatchMode):
    """Sums the bytes that operations read and write: views, allocations and products are left out.

    A tensor that repeats its elements (stride 0) counts once; of a table that is gathered from, what is taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.by_operation: Counter[str] = Counter()

    def add(self, name: str, count: int) -> None:
        self.total += count
        self.by_operation[name] += count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        if is_view or name in PRODUCTS + ALLOCATIONS:
            return out
        written = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        read = [x for x in inputs if not (name in OVERWRITES and x is args[0])]
        if name in GATHERS:
            read = [*read[1:], *written]
        self.add(name, sum(map(bytes_of, read)) + sum(map(bytes_of, written)))
        return out


def bytes_of(x: torch.Tensor) -> int:
    return prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.dtype.itemsize


class Launch:
    """Stands in for a Triton kernel: counts its tensors, each of which it reads or writes once."""

    def __init__(self, name: str, bytes_moved: BytesMoved) -> None:
        self.name, self.bytes_moved = name, bytes_moved

    def __getitem__(self, grid: tuple[int, ...]) -> Launch:
        return self

    def __call__(self, first: torch.Tensor, factors: torch.Tensor, *rest: Any, ROTATES: bool, **constants: int) -> None:  # noqa: N803
        tensors = [first, *([factors] if ROTATES else []), *(x for x in rest if isinstance(x, torch.Tensor))]
        self.bytes_moved.add(self.name, sum(map(bytes_of, tensors)))


class Shape(NamedTuple):
    """A block of a full cache of sinks and window: by default Llama-2-7B's, in 16 bits."""

    heads: int = 32
    group: int = 1
    dim: int = 128
    tokens: int = 2048
    capacity: int = 2048
    sinks: int = 4
    seen: int = 8192


def bytes_of_a_block(with_kernels: bool, shape: Shape = Shape()) -> BytesMoved:  # noqa: B008
    """What the closed form of a block moves in one layer besides products and FlexAttention, with Triton's kernels or without."""
    half = torch.arange(shape.dim, device="meta").view(2, -1).T.reshape(-1)
    rotation = Rotation(torch.rand(shape.dim // 2), half, shape.dim // 2)
    rotation.prepare(torch.bfloat16)
    layer = LayerShape(shape.heads, shape.group, shape.dim, shape.dim, rotation, None)
    config, device = CacheConfig(SinkWindow(shape.sinks), shape.capacity), torch.device("meta")
    slots = slots_for(layer, config, [0], 1, 1, torch.bfloat16, device)
    form, rows, moved = (
        closed_form(slots, "cache", 4096, 2 * shape.capacity, flex=True),
        Rows(slots, slots.num_slots, 0),
        BytesMoved(),
    )
    assert form is not None

    def made(heads: int) -> torch.Tensor:  # as a model does: heads beside each other
        return torch.empty(1, shape.tokens, heads, shape.dim, dtype=torch.bfloat16, device="meta").transpose(1, 2)

    def attend(query: torch.Tensor, *rest: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)

    kernels = SimpleNamespace(rotate=Launch("rotate", moved), merge=Launch("merge", moved)) if with_kernels else None
    query, keys, values = (
        made(shape.heads * shape.group).unflatten(1, (shape.heads, shape.group)),
        made(shape.heads),
        made(shape.heads),
    )
    with (
        patch.object(flex, "_DEVICES", {"meta"}), patch.object(flex, "_compiled", lambda kind: attend),
        patch.object(rope, "_DEVICES", {"meta"}), patch.object(rope, "_kernels", lambda: kernels), moved,
    ):  # fmt: skip
        held = rows.oldest_first(shape.capacity, ordered=True)
        form(rows, query, keys, values, Terms(shape.dim**-0.5), held, shape.seen)
    return moved


def main() -> None:
    """Print the counts."""
    torch.set_num_threads(1)
    found = compilations()
    print(f"FlexAttention over suites/latency.yaml: {found.compiled} compilations for {found.shapes} shapes, {found.calls} calls")
    for name, with_kernels in (("plain PyTorch", False), ("with kernels", True)):
        moved = bytes_of_a_block(with_kernels)
        parts = ", ".join(f"{key} {count / 1e6:.0f}" for key, count in moved.by_operation.most_common(8))
        print(f"bytes of a block of sink+window, 7B, a layer, {name}: {moved.total / 1e6:.0f} MB ({parts})")


if __name__ == "__main__":
    main()
