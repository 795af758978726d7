"""CUDA kernels (`triton_kernels.py`) with the interfaces that the walk calls, and with a policy's expressions.

The kernels need Triton, which comes with CUDA builds of PyTorch. Without Triton, PyTorch code is used.

Axis letters: B streams, H KV heads, N = B * H, R rows of all layers, G query heads of a KV head, T tokens, S slots, D key dim,
E value dim.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvbench.harness.core.files import atomic_write
from kvbench.harness.core.user_cache import private_folder
from kvbench.harness.engine.method import RAN
from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import Slots
from kvbench.harness.kernels import cuda_attention, states
from kvbench.harness.kernels.captured import replayable
from kvbench.harness.kernels.cuda_attention import (
    BOOKKEEPING_BLOCK,
    AttentionKernels,
    CodedAttentionKernels,
    arrays_of,
    next_power,
)
from kvbench.harness.kernels.states import FirstValues, first_values, heads_of, prompts_of, sees_weights, widths_of
from kvbench.harness.kernels.tracing import TRITON, Formulas, NotTraceableError, traced
from kvbench.policies import Policy, PositionMode
from kvbench.policies.view import mixed_seed

_NO_TRITON = "Triton is not installed"
_THREADS = 128  # per program of `release`
_GRAPH_DEVICES = {"cuda"}
CHUNK_TOKENS = 16  # per CUDA graph of a walk

_POLICY = '''"""Made by kv-bench from a policy's `importance` and its statistics' `update`."""

import triton
import triton.language as tl

from kvbench.harness.kernels.triton_kernels import floor_quotient, floor_remainder, uniform


@triton.jit
def importance(state, rank, position, step, layer, head, count, prompt, group, num_layers, seed):
    return tl.broadcast_to(tl.cast(IMPORTANCE, tl.float32), rank.shape)


@triton.jit
def updated(state, mass, most, rank, position, step, layer, head, count, prompt, group, num_layers, seed):
    return (UPDATES)
'''


@lru_cache
def _policy_module(formulas: Formulas) -> Any:
    """Import a module with a policy's expressions as Triton functions. It is a file, because Triton reads source code."""
    updates = "".join(f"tl.broadcast_to(tl.cast({x}, tl.float32), rank.shape), " for x in formulas.updates)
    source = _POLICY.replace("IMPORTANCE", formulas.importance).replace("UPDATES", updates)
    name = f"policy_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    path = private_folder("kernels") / f"{name}.py"
    with atomic_write(path) as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def why_not(policy: Policy) -> str:
    """Return the reason that a bound policy has no compiled walk on CUDA; empty if it has one."""
    return why_untraced(policy) or ("" if cuda_attention.kernels() else _NO_TRITON)


def why_untraced(policy: Policy) -> str:
    """Return the reason that a bound policy can't be traced; empty if it can."""
    try:
        traced(policy, TRITON)
    except NotTraceableError as error:
        return f"{error} can't be compiled"
    return ""


def why_not_walked(slots: Slots) -> str:
    """Return the reason that no walk can be compiled for the policy of some slots; empty if one can be."""
    return why_untraced(slots.policy) or why_unserved(slots)


def why_unserved(slots: Slots) -> str:
    """Return the reason that no kernel does the bookkeeping of these slots under any policy; empty if a kernel may."""
    several = f"no kernel for CUDA evicts {slots.every} tokens at once" if slots.every > 1 else ""
    return several or states.why_unserved(slots)


def lost(slots: Slots, mode: PositionMode, limit: int) -> str:  # noqa: ARG001
    """Return the reason that kernels for these layers can't be used; empty if they can."""
    return "" if cuda_attention.kernels() or not slots.shape.plain_softmax or slots.state_dtype != torch.float32 else _NO_TRITON


def _serves(slots: Slots) -> bool:
    fits = slots.shape.plain_softmax and slots.state_dtype == torch.float32 and slots.shape.key_dim % 2 == 0
    return fits and slots.tensors.pool is None and not states.may_outlive_window(slots) and cuda_attention.kernels() is not None


class CudaStepKernel:
    """Decode step in the layers of one `Slots`."""

    gives_logits = False

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> None:
        kernels = AttentionKernels if slots.codec is None else CodedAttentionKernels
        self._attention = kernels(slots, mode, limit, longest)

    @classmethod
    def from_slots(cls, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> Self | None:
        """Return the kernel if layers have a plain softmax, up to 32 bits and a supported codec or none; otherwise None."""
        served = _serves(slots) and (slots.codec is None or cuda_attention.serves_coded(slots))
        return cls(slots, mode, limit, longest) if served else None

    def __call__(
        self, slots: Slots, rows: Rows, query: Tensor, key: Tensor, value: Tensor, scaling: float,
        mass: Tensor | None, logits: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Read a token of each stream in one layer. Arguments and result are those of `kernel_interface.StepKernel`."""
        shape, size = slots.shape, len(rows.rank)
        out = query.new_empty(*query.shape[:3], shape.value_dim)
        q, k, v = (x.contiguous() for x in (query, key, value))
        flat = (q.view(size, shape.group, 1, -1), k.view(size, 1, -1), v.view(size, 1, -1))
        self._attention.launcher(slots, rows, *flat, scaling, mass, out)()
        return out


class CudaReleaseKernel:
    """Bookkeeping after a token, for all layers of one `Slots` at once, or for one layer."""

    updates = True  # the kernel also updates the statistics

    def __init__(self, formulas: Formulas) -> None:
        self._policy, self._reads = _policy_module(formulas), formulas.reads

    @classmethod
    def from_slots(cls, slots: Slots) -> Self | None:
        """Return the kernel for a policy that can be traced and evicts one token at a time; None for other policies."""
        fits = slots.capacity is not None and slots.state_dtype == torch.float32
        fits = fits and not why_unserved(slots) and not why_not(slots.policy)
        return cls(traced(slots.policy, TRITON)) if fits else None

    def __call__(self, slots: Slots, rows: Rows, mass: Tensor | None, step: Tensor, full: bool) -> None:
        """Update the statistics and choose the next token's slot. Arguments are those of `kernel_interface.ReleaseKernel`."""
        self.launcher(slots, rows, mass, slots.layer_index)(full)

    def launcher(
        self, slots: Slots, rows: Rows, mass: Tensor | None, layers: Tensor, clock: Tensor | None = None
    ) -> Callable[[bool], None]:
        """Return a function that launches the kernel. Its argument tells whether every row evicts.

        Args:
            mass: softmax weights, if a statistic sees them. [R, G, S].
            layers: indices of the layers in the model. [L] int64.
            clock: clock of `AttentionKernels.launcher`, which the kernel advances; None without a clock. [2] int64.
        """
        heads, attended, reads, unused = slots.shape.heads, rows.rank.shape[1], self._reads, rows.free
        block = min(BOOKKEEPING_BLOCK, max(_THREADS, next_power(attended)))  # at least one slot per thread
        kernel = cuda_attention.kernels().release[(len(rows.rank),)]
        arrays = (
            unused if mass is None else mass,
            arrays_of(rows),
            rows.rank,
            rows.position,
            rows.free,
            layers,
            heads_of(rows) if "head" in reads else unused,
            prompts_of(rows) if "prompt" in reads else unused,
            unused if clock is None else clock,
        )
        options = {"ASKED": mass is not None, "MOST": "most" in reads, "HEAD": "head" in reads, "PROMPT": "prompt" in reads}
        window, seed = slots.shape.sliding_window or 0, mixed_seed(slots.seed)
        begin = (*arrays, rows.base, slots.num_slots, attended, slots.streams * heads, heads)
        end = (window, slots.num_layers, seed, self._policy.updated, self._policy.importance)
        constants = {"G": slots.shape.group, "BLOCK": block, "WIDTHS": widths_of(rows), "PLACE": clock is not None} | options

        def launch(full: bool) -> None:
            kernel(*begin, int(full), *end, **constants)

        return launch


class _Buffers:
    """Buffers from which the kernels read a block in every layer. All blocks use the same tensors.

    Attributes:
        query, key, value, first, out: arguments of `AttentionKernels.launcher`, for blocks of up to T tokens.
        mass: softmax weights of a token; None if no statistic sees them. [N * G * S] float32.
        clock: steps of a token and of the block's first token. [2] int64.
    """

    def __init__(self, query: Tensor, keys: Tensor, values: Tensor, first: Tensor, slots: int | None) -> None:
        """Allocate buffers for blocks of this shape. slots: S; None without `mass`."""
        (streams, heads, group, tokens, _), rows = query.shape, len(first)
        self.query, self.key, self.value = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, keys, values)
        )
        self.first = torch.empty_like(first, memory_format=torch.contiguous_format)
        self.out = values.new_empty(streams, heads, group, tokens, values.shape[-1])
        self.mass = None if slots is None else query.new_empty(rows * group * slots, dtype=torch.float32)
        self.clock = torch.zeros(2, dtype=torch.int64, device=query.device)

    def fit(self, query: Tensor) -> bool:
        """Return whether the buffers have room for a block with these queries."""
        return query.shape[:3] == self.query.shape[:3] and query.shape[3] <= self.query.shape[3]

    def fill(self, query: Tensor, keys: Tensor, values: Tensor, first: Tensor, tokens_before: int) -> None:
        """Copy a block to the buffers. tokens_before: tokens before the block."""
        for buffer, x in ((self.query, query), (self.key, keys), (self.value, values)):
            buffer[..., : x.shape[-2], :] = x
        self.first[:, : first.shape[1]] = first
        self.clock.fill_(tokens_before)


class _LayerWalk:
    """Kernels of a token in one layer, and CUDA graphs of chunks of tokens: one with evictions, and one without.

    Attributes:
        buffers: buffers that the kernels read.
        scaling: scaling of the scores.
    """

    def __init__(
        self, buffers: _Buffers, scaling: float, attend: Callable[[], None], release: Callable[[bool], None], in_graphs: bool
    ) -> None:
        self.buffers, self.scaling, self._attend, self._release, self._in_graphs = buffers, scaling, attend, release, in_graphs
        self._chunks: dict[bool, Callable[[], None] | None] = {}

    def __call__(self, evicts: Sequence[bool]) -> None:
        """Walk the next tokens of the block. evicts: whether a token is evicted after each token."""
        uniform = self._in_graphs and len(evicts) == CHUNK_TOKENS and len(set(evicts)) == 1
        if not uniform or evicts[0] not in self._chunks:
            self._launch(evicts)  # the first launch compiles the kernels
            if uniform:
                self._chunks[evicts[0]] = None
            return
        replay = self._chunks[evicts[0]] or replayable(partial(self._launch, evicts), self.buffers.clock.device)
        self._chunks[evicts[0]] = replay
        if replay is None:
            self._launch(evicts)
        else:
            RAN["walk in graphs"] += 1
            replay()

    def _launch(self, evicts: Sequence[bool]) -> None:
        for full in evicts:
            self._attend()
            self._release(full)


class CudaWalkKernel:
    """Walk of one policy over the layers of one `Slots`: the kernels of a step, for every token of a block inside one layer.

    The index of the current token is kept on the device, and all other arguments are the same for every token. The launches of a
    chunk of tokens can therefore be captured as one CUDA graph per layer. Single launches take the host longer than the device.
    """

    leaves_ordered = False  # tokens stay in their slots
    rotates = True  # takes queries and keys as the model computes them

    def __init__(self, attention: AttentionKernels, release: CudaReleaseKernel, in_graphs: bool) -> None:
        self._attention, self._release, self.in_graphs = attention, release, in_graphs
        self._buffers: _Buffers | None = None
        self._layers: WeakKeyDictionary[Rows, _LayerWalk] = WeakKeyDictionary()

    @classmethod
    def from_slots(
        cls, slots: Slots, mode: PositionMode, limit: int, longest: int | None, in_graphs: bool = False
    ) -> Self | None:
        """Return the kernel if layers have a plain softmax, up to 32 bits and a traceable policy; otherwise None."""
        release = CudaReleaseKernel.from_slots(slots)
        if release is None or slots.codec is not None or not _serves(slots):
            return None
        return cls(AttentionKernels(slots, mode, limit, longest), release, in_graphs and slots.device.type in _GRAPH_DEVICES)

    def __call__(
        self,
        slots: Slots,
        rows: Rows,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        ordered: bool,
        tokens_before: int,
        written: FirstValues | None = None,
        unrotated: Tensor | None = None,
    ) -> Tensor:
        """Walk a block of streams of equal length. Arguments and result are those of `kernel_interface.WalkKernel`."""
        tokens = keys.shape[2]
        first = first_values(rows, written, tokens)
        if self._buffers is None or not self._buffers.fit(query):
            self._buffers = _Buffers(query, keys, values, first, slots.num_slots if sees_weights(rows) else None)
        buffers, walk = self._buffers, self._layers.get(rows)
        if walk is None or walk.buffers is not buffers or walk.scaling != scaling:
            walk = self._layers[rows] = self._layer_walk(slots, rows, layer, scaling, buffers)
        buffers.fill(query, keys, values, first, tokens_before)
        evicts = [slots.cadence.evicts(step + 1) for step in range(tokens_before, tokens_before + tokens)]
        for begin in range(0, tokens, CHUNK_TOKENS):
            walk(evicts[begin : begin + CHUNK_TOKENS])
        return buffers.out[:, :, :, :tokens].clone()

    def _layer_walk(self, slots: Slots, rows: Rows, layer: int, scaling: float, buffers: _Buffers) -> _LayerWalk:
        """Return the kernels of one layer, which read from buffers."""
        (size, attended), group, index = rows.rank.shape, slots.shape.group, slots.layers.index(layer)
        mass = None if buffers.mass is None else buffers.mass[: size * group * attended].view(size, group, attended)
        query, key, value, out = (x.flatten(0, 1) for x in (buffers.query, buffers.key, buffers.value, buffers.out))
        clock = buffers.clock
        attend = self._attention.launcher(slots, rows, query, key, value, scaling, mass, out, clock, buffers.first)
        release = self._release.launcher(slots, rows, mass, slots.layer_index[index : index + 1], clock)
        return _LayerWalk(buffers, scaling, attend, release, self.in_graphs)


KERNELS = CudaStepKernel, CudaReleaseKernel, CudaWalkKernel  # read by `choose`
