"""Translate a bound policy that compares slots or heads, or merges evicted tokens, to programs in C.

They compute the `update` of its statistics, its importance, and the merge.

A program computes the slots of one head, or of all heads of a layer under scope `layer`. Its arrays are those of walk.c, which
calls it: tokens are ordered oldest first, so that a token's index is its rank.

Axis letters: H KV heads of a program, G query heads of a KV head, S slots, D key dim, E value dim, K numbers of the statistics
per slot, M numbers of the statistics per head, V tokens evicted at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kvbench.harness.engine.held import writes
from kvbench.harness.kernels.expressions import NotTraceableError
from kvbench.harness.kernels.tensor_code import Source, source_of
from kvbench.harness.kernels.tensor_memory import without_copies
from kvbench.harness.kernels.tensor_program import Recorder
from kvbench.policies import Attention, CacheView, HeadSizes, Policy, Statistic
from kvbench.policies.merges import Evicted, Merging
from kvbench.policies.view import Rotate, unrotated

_MAX_NUMBERS = {"slot": 2**16, "head": 2**20}  # of a statistic
_OF_MODEL = ("keys", "rotated", "values", "outputs", "queries", "merged")  # arrays that have the model's dtype in PyTorch
ARRAYS = (  # in the order of `Arrays` in program.h
    "position", "rank", "step", "layer", "head", "prompt", "keys", "rotated", "values", "state", "sums", "weights", "logits",
    "outputs", "queries", "worth", "evicted", "merged",
)  # fmt: skip


class Layout(NamedTuple):
    """Sizes of the arrays of a program.

    Attributes:
        heads: H.
        slots: S.
        sizes: sizes of a KV head.
        num_layers: layers of the model.
        seed: seed of the cell.
        frequencies: of RoPE, in radians per position; empty without RoPE. P numbers.
        evicted: V.
        window: sliding window of the layer; None if there is none.
        uneven: heads hold different numbers of tokens, so that slots may be empty when tokens are evicted.
        dtype: dtype of the model. A program in 16 bits can't read arrays of this dtype.
    """

    heads: int
    slots: int
    sizes: HeadSizes
    num_layers: int
    seed: int
    frequencies: tuple[float, ...] = ()
    evicted: int = 1
    window: int | None = None
    uneven: bool = False
    dtype: torch.dtype = torch.float32


class Programs(NamedTuple):
    """Programs of a policy.

    Attributes:
        update: changes the arrays `state` and `sums`.
        importance: sets the array `worth`.
        merge: changes the arrays `values`, `state` and `sums` and, if it merges keys, sets `merged`, before the tokens at
            `evicted` leave; empty if nothing is merged.
        heads: KV heads that are computed together, H.
        numbers: numbers of the statistics per slot, K.
        sums: numbers of the statistics per head, M.
        widths: floats that are kept with every token: of its key, of its rotated key, and its terms of sums.
        terms: index in the sums of each term.
        frequencies: those of the layout.
    """

    update: Source
    importance: Source
    merge: Source
    heads: int
    numbers: int
    sums: int
    widths: tuple[int, ...]
    terms: tuple[int, ...]
    frequencies: tuple[float, ...]

    @property
    def merges_keys(self) -> bool:
        """Whether the merge changes keys."""
        return "merged" in self.merge.reads

    @property
    def reads(self) -> frozenset[str]:
        """Names of the arrays that a program reads or changes."""
        return self.update.reads | self.importance.reads | self.merge.reads


@dataclass
class _View(CacheView):
    """View of a program's arrays.

    Attributes:
        rotated: keys rotated to their positions in the stream, which the walk keeps. [1, H, S, D].
    """

    rotated: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def rotated_keys(self) -> Tensor:
        """Keys rotated to their positions in the stream. [1, H, S, D]."""
        return self.rotated

    @classmethod
    def of(cls, arrays: dict[str, Tensor], layout: Layout, states: dict[Statistic, Tensor], full: bool) -> Self:
        """View the arrays. full: every slot holds a token, so that ranks are a constant."""
        shape, sizes = (1, layout.heads, layout.slots), layout.sizes
        step, layer, prompt = (arrays[name].view(1, 1, 1) for name in ("step", "layer", "prompt"))
        return cls(
            rank=torch.arange(layout.slots).expand(shape) if full else arrays["rank"].view(shape),
            position=arrays["position"].view(shape),
            step=step,
            keys=arrays["keys"].view(*shape, sizes.key_dim),
            values=arrays["values"].view(1, layout.heads, sizes.value_dim, layout.slots).mT,
            states=states,
            layer=layer,
            head=arrays["head"].view(1, layout.heads, 1),
            prompt=prompt,
            num_layers=layout.num_layers,
            seed=layout.seed,
            rotate=_rotation(layout.frequencies),
            full=full,
            rotated=arrays["rotated"].view(*shape, sizes.key_dim),
        )


def _rotation(frequencies: Sequence[float]) -> Rotate:
    """Return RoPE as operations that can be compiled."""

    def rotate(x: Tensor, position: Tensor) -> Tensor:
        angle = position[..., None].double() * torch.tensor(frequencies, dtype=torch.float64)
        cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([real * cosine - imaginary * sine, real * sine + imaginary * cosine], -1).flatten(-2)

    return rotate if frequencies else unrotated


def programs(policy: Policy, layout: Layout) -> Programs:
    """Trace a bound policy.

    Raises:
        NotTraceableError: the policy can't be compiled; the message says why.
    """
    try:
        return _traced(policy, layout)
    except NotTraceableError:
        raise
    except Exception as error:  # a user's policy may raise anything
        reason = str(error).split("\n")[0][:200]
        raise NotTraceableError(f"{type(error).__name__}: {reason}") from error


@lru_cache(maxsize=64)
def _traced(policy: Policy, layout: Layout) -> Programs:
    heads, slots, sizes = layout.heads, layout.slots, layout.sizes
    shapes = {s: tuple(s.shape(sizes)) for s in dict.fromkeys(policy.statistics)}
    for statistic, shape in shapes.items():
        if prod(shape) > (most := _MAX_NUMBERS[statistic.per]):
            raise NotTraceableError(f"a statistic of more than {most} numbers")
    numbers, sums = (sum(prod(shape) for s, shape in shapes.items() if s.per == per) for per in ("slot", "head"))
    of_heads = {
        "keys": (slots, sizes.key_dim), "rotated": (slots, sizes.key_dim), "values": (sizes.value_dim, slots),
        "state": (numbers, slots), "weights": (sizes.group, slots), "logits": (sizes.group, slots),
        "outputs": (sizes.group, sizes.value_dim), "queries": (sizes.group, sizes.key_dim), "worth": (slots,),
        "merged": (slots, sizes.key_dim),
    }  # fmt: skip
    # Example values, as in a cache that is full: a policy may use them as indices.
    arrays = {name: torch.rand(heads, *shape) for name, shape in of_heads.items()}
    arrays |= {name: arrays[name].to(layout.dtype) for name in _OF_MODEL}
    arrays["sums"] = torch.rand(heads, sums, dtype=torch.float64)
    arrays |= {name: torch.arange(heads * slots) % slots for name in ("position", "rank")}
    arrays |= {"step": torch.tensor([slots - 1]), "layer": torch.tensor([0]), "prompt": torch.tensor([0])}
    arrays["head"], arrays["evicted"] = torch.arange(heads), torch.arange(layout.evicted).repeat(heads)
    states = _states(arrays, shapes)

    def update() -> None:
        view = _View.of(arrays, layout, states, full=False)
        for statistic, state in states.items():
            if statistic.sees:
                attention = Attention(**{name: arrays[name][None] for name in statistic.sees})
                state.copy_(statistic.update(state, attention, view))

    def importance() -> None:
        worth = policy.importance(_View.of(arrays, layout, states, full=not layout.uneven))
        arrays["worth"].copy_(worth.expand(1, heads, slots)[0])

    def merge() -> None:
        if isinstance(policy, Merging):
            _merge(policy, _View.of(arrays, layout, states, full=True), arrays, layout.window)

    programs = _recorded(update, arrays), _recorded(importance, arrays), _recorded(merge, arrays)
    reads = frozenset[str]().union(*(program.reads for program in programs))
    terms = _terms(shapes)
    widths = tuple(sizes.key_dim * (not reads.isdisjoint((name, "merged"))) for name in ("keys", "rotated"))
    return Programs(*programs, heads, numbers, sums, (*widths, len(terms)), terms, layout.frequencies)


def _merge(policy: Merging, view: CacheView, arrays: dict[str, Tensor], window: int | None) -> None:
    """Merge the tokens at `evicted` into the others. window: sliding window of the layer."""
    slots = arrays["evicted"].view(*view.rank.shape[:2], -1)
    all_real = torch.ones(slots.shape, dtype=torch.bool)
    kept = torch.ones(view.rank.shape, dtype=torch.bool).scatter(-1, slots, ~all_real)
    real = all_real if window is None else view.age.gather(-1, slots) < window - 1
    merged = policy.merge(view, Evicted(slots, real, kept))
    if merged.keys is not None:
        arrays["merged"].copy_(merged.keys[0])
    view.values.copy_(merged.values)
    for statistic, state in merged.states.items():
        view.states[statistic].copy_(state)


def _terms(shapes: dict[Statistic, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the indices of the sums to which every token adds a term."""
    first, terms = 0, list[int]()
    for statistic, shape in shapes.items():
        size = prod(shape) if statistic.per == "head" else 0
        if writes(statistic):
            terms += range(first, first + size)
        first += size
    return tuple(terms)


def _states(arrays: dict[str, Tensor], shapes: dict[Statistic, tuple[int, ...]]) -> dict[Statistic, Tensor]:
    """Return each statistic as the policy sees it, as a view of `state` or `sums`. [1, H, S, *k] or [1, H, *k]."""
    states, first = {}, {"slot": 0, "head": 0}
    for statistic, shape in shapes.items():
        size, per = prod(shape), statistic.per
        part = arrays["state" if per == "slot" else "sums"][None, :, first[per] : first[per] + size].unflatten(2, shape or (1,))
        part = part if shape else part.squeeze(2)
        states[statistic] = part.movedim(-1, 2) if per == "slot" else part
        first[per] += size
    return states


def _recorded(run: Callable[[], None], arrays: dict[str, Tensor]) -> Source:
    """Return what a function does with the arrays."""
    recorder = Recorder(arrays)
    with torch.no_grad(), recorder:
        run()
    recorder.operations = without_copies(recorder.operations)
    return source_of(recorder)
