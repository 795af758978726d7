"""The decode loop: read blocks of T >= 1 tokens with a model whose layers keep the tokens that the policy chooses.

A decode step has T = 1; a book is scored in blocks of hundreds of tokens. Both run the same code. This module contains no policy
name, no metric and no clock.

Axis letters: B streams, T tokens, V vocabulary, H KV heads, G query heads of a KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kvbench.harness.core.contestants import Contestant
from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.budgets import Layout, Table, static_table
from kvbench.harness.engine.decoder import CacheConfig, Decoder, read_blocks
from kvbench.harness.engine.foreign import ForeignDecoder
from kvbench.harness.engine.kernel_interface import StepGraphs, step_graphs
from kvbench.harness.engine.method import EAGER, Method
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.plan import Block
from kvbench.harness.engine.prompt import Whole, move
from kvbench.harness.engine.random_fill import fill_randomly
from kvbench.harness.engine.recompute import RecomputeDecoder
from kvbench.harness.engine.reset import ResetDecoder, between_resets
from kvbench.harness.engine.selection import SelectingWalk
from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import Slots
from kvbench.harness.engine.walk import Walk
from kvbench.policies import Selecting


def decoder(model: Model, config: CacheConfig, streams: int = 1, method: Method = EAGER) -> Decoder:
    """Create a decoder.

    Raises:
        ValueError: the policy can't serve this capacity.
    """
    if isinstance(config.policy, Contestant):
        return ForeignDecoder(model, config, streams, method)
    if (between := between_resets(config)) is not None:
        return ResetDecoder(model, config, CachedDecoder(model, between, streams))
    if not config.policy.caches:
        return RecomputeDecoder(model, config, streams)
    return CachedDecoder(model, config, streams, method)


def read_bytes(read: Decoder) -> int | None:
    """Return the bytes of the cache that the newest token of each stream read; None if it read all that is held. Syncs."""
    if not isinstance(read, CachedDecoder) or not isinstance(read.config.policy, Selecting):
        return None
    return sum(walk.read_bytes for walk in read.walks)


class Share(NamedTuple):
    """Heads of one layer whose attention one walk computes."""

    walk: int  # index of the walk
    heads: Tensor | None  # KV heads; all when None. [h] int64
    queries: Tensor | None  # query heads of `heads`; all when None. [h * G] int64


class BlockInLayers:
    """Attention backend for one block: computes the attention of every layer by the plans of its walks."""

    def __init__(self, walks: Sequence[Walk], shares: Sequence[Sequence[Share]], block: Block) -> None:
        """Plan the block. shares: walks and heads, by layer."""
        self.walks, self._shares = walks, shares
        device = block.steps.device
        self._blocks = [block if walk.slots.device == device else block.on(walk.slots.device) for walk in walks]
        self._plans = [walk.begin(own) for walk, own in zip(walks, self._blocks, strict=True)]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Compute one layer's attention over its cache."""
        shares = self._shares[layer]
        if len(shares) == 1:
            index = shares[0].walk
            return self.walks[index].attend(self._plans[index], layer, query, keys, values, terms)
        out = values.new_empty(*query.shape[:3], values.shape[-1])
        for index, heads, queries in shares:
            assert heads is not None
            assert queries is not None
            sinks = terms.sink_logits
            of_heads = terms if sinks is None else terms._replace(sink_logits=sinks[queries])
            parts = query[:, queries], keys[:, heads], values[:, heads]
            out[:, queries] = self.walks[index].attend(self._plans[index], layer, *parts, of_heads)
        return out

    def end(self) -> None:
        """Finish the block after the last layer."""
        for walk, plan, block in zip(self.walks, self._plans, self._blocks, strict=True):
            walk.end(plan, block)


class CachedDecoder:
    """Decoder that keeps K and V in slots.

    Attributes:
        walks: walks of the groups of heads that share tensors; empty before the prompt if eviction waits for its end.
        shares: walks and heads, by layer.
        graphs: captured steps; None if steps are not captured.
        around_bookkeeping: context of the bookkeeping at the end of every eager block, e.g. to time it.
    """

    def __init__(
        self, model: Model, config: CacheConfig, streams: int = 1, method: Method = EAGER, dtype: torch.dtype | None = None
    ) -> None:
        """Allocate the slots.

        Args:
            dtype: dtype of K and V; the model's when None.

        Raises:
            ValueError: the policy can't serve this capacity, mode `clamped` has no limit, or the model can't move kept tokens.
        """
        self._limit = config.limit if config.limit is not None else model.training_length
        if config.positions == "clamped" and self._limit is None:
            raise ValueError("positions 'clamped' need a limit: the model's config states no training length")
        if model.learned_positions and config.policy.evicts and config.positions != "stream":
            raise ValueError("the model's positions are learned, so kept tokens stay where they stood: positions must be stream")
        method = method if config.kv is None else method.without_unsupported_by_codec()
        self.model, self.config, self._method = model, config, method
        self._longest = model.longest  # tokens of a stream
        self._layout = Layout(model, config, streams, dtype)
        self._step = torch.zeros(streams, 1, dtype=torch.int64, device=model.device)  # tokens read, per stream
        self._tokens_read: int | None = 0  # `_step` on the host; None once streams differ in length
        self._max_tokens_read = 0  # upper bound for every stream
        self._fused = method.fused
        self.graphs = step_graphs() if method.captured and model.device.type == "cuda" and model.may_capture else None
        self.around_bookkeeping: Callable[[], AbstractContextManager[None]] = nullcontext
        self.walks: list[Walk] = []
        self.shares: list[list[Share]] = []
        if config.evict != "prompt" or not config.policy.evicts:
            self._hold(self._layout.for_stream(static_table(model, config, None)))

    def _hold(self, slots: Sequence[Slots]) -> None:
        """Create the walks of these slots, and use them from now on."""
        self.walks = [self._walk(group) for group in slots]
        self.shares = [[] for _ in self.model.layers]
        for index, group in enumerate(slots):
            for part in group.parts:
                heads = None if part.heads is None else torch.tensor(part.heads, device=group.device)
                queries = None
                if heads is not None:
                    within = torch.arange(group.shape.group, device=heads.device)
                    queries = (heads[:, None] * group.shape.group + within).flatten()
                self.shares[part.layer].append(Share(index, heads, queries))

    def _walk(self, slots: Slots) -> Walk:
        """Create the walk of these slots. A layer with a sliding window selects nothing: its queries read the window."""
        if not isinstance(slots.policy, Selecting):
            return Walk(slots, self.config.positions, self._limit or 0, self._method)
        return SelectingWalk(slots, self._method) if slots.capacity is None else Walk(slots, "stream", 0, self._method)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, valid: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """Read a block. [B, T] int64 -> logits [B, T or K, V]; `valid` and `keep` are those of `Decoder`."""
        count = tokens.shape[1]
        if not self.walks:
            raise ValueError("evict: prompt, but the stream has no prompt: nothing says when to evict")
        self._tokens_read = self._tokens_read if valid is None else None
        self._max_tokens_read += count
        if self._max_tokens_read > self._longest:
            raise ValueError(f"a stream of more than {self._longest:,} tokens")
        for walk in self.walks:
            if walk.slots.capacity is None or walk.slots.tensors.pages is not None:
                walk.slots.grow(self._max_tokens_read)
        if self.graphs is None or count > 1 or self._tokens_read is None or keep is not None:
            logits = self._run_eager(tokens, valid, keep)
        else:
            logits = self._run_captured(tokens, self.graphs, self._tokens_read)
        if self._tokens_read is not None:
            self._tokens_read += count
        return logits

    @torch.inference_mode()
    def read_prompt(self, tokens: Tensor, block: int, once: bool = False) -> Tensor:
        """Read the prompt of every stream, before anything else. [B, N] int64 -> logits after the last token, [B, V].

        The arguments are those of `Decoder`.

        Raises:
            ValueError: tokens were read before, or the policy's budgets don't add up.
        """
        if self._tokens_read != 0:
            raise ValueError("a prompt must come first")
        length, once = tokens.shape[1], once or self.config.evict == "prompt"
        if not once or not self.config.policy.evicts:
            return self._read_uncut_prompt(tokens, block, once)
        table = static_table(self.model, self.config, length)
        self._hold(self._layout.for_prompt(length, table))
        statistics = {s for walk in self.walks for s in walk.slots.tensors.states if s.sees}
        last = max((length if s.last is None else s.last for s in statistics), default=0)
        quiet = max(0, length - last)
        for walk in self.walks:
            walk.slots.begin_prompt(length, quiet)
        logits = read_blocks(self, tokens[:, :quiet], block) if quiet else None
        if quiet < length:
            logits = read_blocks(self, tokens[:, quiet:], block)
        self._cut(length, table)
        assert logits is not None
        return logits

    def _read_uncut_prompt(self, tokens: Tensor, block: int, in_full: bool) -> Tensor:
        """Read a prompt that is not cut at its end. -> logits after the last token, [B, V].

        in_full: policies that select read the prompt under full attention.
        """
        selecting = [walk for walk in self.walks if isinstance(walk, SelectingWalk)]
        for walk in selecting:
            walk.reads_all = in_full
        self.begin_prompt(tokens.shape[1])
        logits = read_blocks(self, tokens, block)
        for walk in selecting:
            walk.reads_all = False
        return logits

    def begin_prompt(self, tokens: int | Tensor) -> None:
        """Mark the next `tokens` tokens as the prompt of every stream. Read them afterwards. tokens: one length, or [B]."""
        for walk in self.walks:
            walk.slots.begin_prompt(tokens)

    def _cut(self, length: int, table: Table | None) -> None:
        """Evict all tokens of a fully cached prompt that the policy does not keep."""
        whole = Whole([walk.slots for walk in self.walks], length, self._layout.bound)
        kept, known = whole.cut(self.config.capacity, table, self.config.pages)
        if known is None:
            self._hold(self._layout.as_decided(length, [stays.sum(-1).view(self.streams, -1) for stays in kept]))
        else:
            self._hold(self._layout.after_prompt(length, known, table))
        for walk in self.walks:
            slots = walk.slots
            slots.begin_prompt(length)
            slots.grow(length)
            for part in slots.parts:
                longest = int(kept[part.layer].sum(-1).max()) if slots.uneven else slots.cadence.held(length)
                into = Rows(slots, slots.num_slots, part.layer)
                move(whole.rows[part.layer], kept[part.layer], into, self.streams, part.heads, longest)
        if self.graphs is not None:
            self.graphs = self.graphs.fresh()

    def _mark_filled(self, count: int) -> None:
        """Note that `count` tokens of every stream were read, and that the slots hold as many of them as fit."""
        for walk in self.walks:
            capacity = walk.slots.capacity
            walk.slots.cadence = walk.slots.cadence.after(count, count if capacity is None else min(count, capacity))
        self._step += count
        self._tokens_read = self._max_tokens_read = count

    @torch.inference_mode()
    def fill_randomly(self, tokens: int, seed: int = 0) -> None:
        """Put an empty decoder into the state after `tokens` tokens, with random K, V and statistics.

        Args:
            seed: decoders of one shape that are filled with the same seed hold the same numbers.

        Raises:
            ValueError: the decoder has read tokens already, or the stream would be too long.
        """
        if self._tokens_read != 0 or tokens > self._longest:
            raise ValueError(f"only a decoder that has read nothing can be filled, with up to {self._longest:,} tokens")
        devices = {walk.slots.device for walk in self.walks}
        generators = {d: torch.Generator(d if d.type == "cuda" else "cpu").manual_seed(seed) for d in devices}
        for walk in self.walks:
            walk.slots.grow(tokens)
            fill_randomly(walk.slots, tokens, generators[walk.slots.device])
        self._mark_filled(tokens)

    def clear(self) -> None:
        """Remove all tokens, in place."""
        for walk in self.walks:
            walk.clear()
        self._step.zero_()
        self._tokens_read = self._max_tokens_read = 0

    def _run_eager(self, tokens: Tensor, valid: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """Read a block without a CUDA graph."""
        count = tokens.shape[1]
        if count == 1:
            steps = self._step.clone()
        else:
            steps = self._step + (torch.arange(count, device=tokens.device) if valid is None else valid.cumsum(1) - valid.long())
        block = BlockInLayers(self.walks, self.shares, Block(steps, valid, self._tokens_read, tokens))
        logits = self.model(tokens, block, 0 if keep is None else keep, steps)
        with self.around_bookkeeping():
            block.end()
        self._step += count if valid is None else valid.sum(1, keepdim=True)
        return logits

    def _run_independent(self, tokens: Tensor) -> Tensor:
        """Read a token by a step that computes all of its inputs. A failed capture leaves tensors that were never computed."""
        for walk in self.walks:
            walk.forget_placement()
        return self._run_eager(tokens)

    def _run_captured(self, tokens: Tensor, graphs: StepGraphs, tokens_read: int) -> Tensor:
        """Read a token by a captured step if there is one."""
        slots, phase = tuple(walk.slots.version for walk in self.walks), tuple(walk.phase(tokens_read) for walk in self.walks)
        alive = [dict(walk.rows.cached) for walk in self.walks]
        around = partial(self.model.fused_steps, self.streams) if self._fused else nullcontext
        logits, replayed = graphs(slots, phase, alive, self._run_independent, tokens, around)
        for walk in self.walks if replayed else []:
            walk.note_replay(tokens_read)
        return logits

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K and V slots of all layers."""
        return sum(walk.slots.kv_bytes for walk in self.walks)

    @property
    def held_bytes(self) -> int:
        """Bytes of K and V of the tokens held, in all layers. Syncs with the host."""
        return sum(walk.slots.held_bytes for walk in self.walks)

    @property
    def tokens_held(self) -> float:
        """Mean number of tokens held, over streams, layers and KV heads. Syncs with the host."""
        held = [walk.slots.tensors.rank < walk.slots.empty_rank for walk in self.walks]
        return sum(int(x.sum()) for x in held) / (sum(map(len, held)) or 1)

    @property
    def state_bytes(self) -> int:
        """Bytes of ranks, positions and statistics of all layers."""
        return sum(walk.state_bytes for walk in self.walks)

    def kept(self) -> list[list[list[list[int]]]]:
        """Return the positions held, oldest first, by layer, stream and KV head. Syncs with the host."""
        layers = []
        for layer, shares in enumerate(self.shares):
            heads: list[list[list[int]]] = [[[] for _ in range(self.model.layers[layer].heads)] for _ in range(self.streams)]
            for share in shares:
                places = range(len(heads[0])) if share.heads is None else share.heads.tolist()
                for stream, kept in enumerate(self.walks[share.walk].slots.kept(layer)):
                    for head, positions in zip(places, kept, strict=True):
                        heads[stream][head] = positions
            layers.append(heads)
        return layers

    @torch.inference_mode()
    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more tokens now, so that no step has to allocate."""
        for walk in self.walks:
            walk.slots.grow(self._max_tokens_read + tokens)

    def held(self, positions: Sequence[int]) -> float:
        """Return the share of these positions of the first stream that is held, over layers and KV heads. Syncs with the host."""
        bits = torch.cat([w.slots.held(torch.tensor(positions, device=w.slots.device)).flatten().cpu() for w in self.walks])
        return int(bits.sum()) / bits.numel()

    @property
    def offers(self) -> frozenset[str]:
        """Names, as in `RAN`, of the shortcuts that at least one walk may take."""
        return frozenset().union(*(walk.offers for walk in self.walks))

    @property
    def streams(self) -> int:
        """B."""
        return len(self._step)

    @property
    def slots(self) -> tuple[float, float]:
        """(slots in use, slots that a decode step attends over), averaged over the KV heads of all layers."""
        longest = self._max_tokens_read
        parts = [
            (len(w.slots.layers) * w.slots.shape.heads, w.slots.used(longest), w.slots.attended(longest)) for w in self.walks
        ]
        heads = sum(n for n, _, _ in parts) or 1
        used, attended = (sum(part[0] * part[of] for part in parts) for of in (1, 2))
        return used / heads, attended / heads

    @torch.inference_mode()
    def fork(self, streams: Sequence[int]) -> Self:
        """Return a decoder whose streams are copies of the given streams: slots, ranks and statistics. Nothing is shared."""
        index = torch.tensor(streams, device=self.model.device)
        other = copy(self)
        other.walks = [walk.fork(index.to(walk.slots.device)) for walk in self.walks]
        other._step = self._step[index]
        other.graphs = None if self.graphs is None else self.graphs.fresh()
        return other
