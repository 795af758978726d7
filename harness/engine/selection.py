"""Selection: a walk whose queries read some of the cached tokens, as a policy chooses.

A token's slot is its position, since nothing is evicted. A single query gathers the K and V that it reads. The queries of a block
attend under a mask, which gives the same numbers and is faster for many queries.

Axis letters: B streams, H KV heads, N = B * H, G query heads of a KV head, T queries, S slots, P pages, n slots read, D key dim.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms, attend_where, weights
from kvbench.harness.engine.method import Method
from kvbench.harness.engine.plan import Fill, Plan, Step
from kvbench.harness.engine.rotary import QueryFactors
from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import Slots
from kvbench.harness.engine.walk import Walk
from kvbench.policies import Queries, Seen, Selecting

_MAX_MASKED = 2**24  # pairs of a query and a key in one mask


class PageExtremes:
    """Smallest and largest keys of the pages of one layer, brought up to date whenever they are read.

    Attributes:
        low, high: [B, H, P, D].
    """

    def __init__(self) -> None:
        self.low = self.high = torch.empty(0)
        self._tokens = -1  # number of the layer's newest query when they were computed

    def __call__(self, keys: Tensor, step: Tensor, newest: int, size: int) -> tuple[Tensor, Tensor]:
        """Return the extremes of pages of `size` keys. [B, H, P, D] each.

        Args:
            keys: rotated. [B, H, S, D].
            step: positions of the queries. [B, T] int64.
            newest: number of queries that the layer has computed, these included.
            size: tokens of a page.
        """
        pages = -(-keys.shape[2] // size)
        if step.shape[1] == 1 and newest == self._tokens + 1 and self.low.shape[2] == pages:
            self._update_one(keys, step, size)
        elif newest != self._tokens:
            exists = (torch.arange(keys.shape[2], device=keys.device) <= step[:, -1:])[:, None, :, None]
            self.low, self.high = (_by_page(keys, exists, size, sign) for sign in (-1, 1))
        self._tokens = newest
        return self.low, self.high

    def _update_one(self, keys: Tensor, step: Tensor, size: int) -> None:
        """Compute the page of each stream's newest token again."""
        page = step // size  # [B, 1]
        slots = page * size + torch.arange(size, device=step.device)  # [B, size]
        index = slots.clamp(max=keys.shape[2] - 1)[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        of_page, exists = keys.gather(2, index), (slots <= step)[:, None, :, None]
        place = page[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        self.low.scatter_(2, place, _by_page(of_page, exists, size, -1))
        self.high.scatter_(2, place, _by_page(of_page, exists, size, 1))

    def fork(self, streams: Tensor) -> PageExtremes:
        """Return a copy for these streams. streams: [B'] int64."""
        other = PageExtremes()
        other.low, other.high, other._tokens = self.low[streams], self.high[streams], self._tokens
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.low.nbytes + self.high.nbytes


def _by_page(keys: Tensor, exists: Tensor, size: int, sign: int) -> Tensor:
    """Return the smallest (sign -1) or largest (1) existing keys of each page. [B, H, S, D] -> [B, H, P, D]."""
    least = torch.finfo(keys.dtype).min
    signed = (keys * sign).masked_fill(~exists, least)
    missing = -keys.shape[2] % size
    extreme = torch.nn.functional.pad(signed, (0, 0, 0, missing), value=least).unflatten(2, (-1, size)).amax(3)
    return extreme.masked_fill(extreme == least, 0) * sign


def _broadcasts(slots: torch.Size, queries: torch.Size) -> bool:
    """Return whether slots [B, H, G, T, n] have an entry for every query [B, H, G, T]. Axes of slots before T may be 1."""
    same = [size == full or (size == 1 and axis < 3) for axis, (size, full) in enumerate(zip(slots, queries, strict=False))]
    return len(slots) == 5 and all(same)


class SelectingWalk(Walk):
    """Walk whose policy selects the tokens that each query reads.

    Attributes:
        reads_all: queries read all tokens, as those of a prompt that is read under full attention.
    """

    def __init__(self, slots: Slots, method: Method, like: SelectingWalk | None = None) -> None:
        """Prepare for slots that keep every token. method: only `fill` applies."""
        super().__init__(slots, "stream", 0, Method(fill=method.fill, closed_form=False), like)
        assert isinstance(slots.policy, Selecting)
        self._policy: Selecting = slots.policy
        self.reads_all = False
        self._layer = slots.layers[0]  # of the attention that is being computed
        self._queries = dict.fromkeys(slots.layers, 0)  # number of queries that each layer has computed
        self._extremes: dict[tuple[int, int], PageExtremes] = {}  # by layer and page size
        self._newest: dict[int, Tensor | None] = {}  # slots read by each layer's newest query; None: all. [B, H, G, n]

    def attend(self, plan: Plan, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Read a block into one layer. Each token reads what the policy selects for it. Arguments as in `Walk.attend`."""
        self._layer = layer
        if isinstance(plan, Fill) and not self.reads_all:
            query, keys, values = self._shortcuts.enter_block(plan, layer, query, keys, values)
            return self._attend_block(plan.tokens_before, query, keys, values, terms).flatten(1, 2)
        if isinstance(plan, Step):  # its bookkeeping is that of all layers
            self.rows(plan.attended, layer).view.step = plan.places.now[0][: query.shape[0]]
        return super().attend(plan, layer, query, keys, values, terms)

    def _attend_one(
        self,
        rows: Rows,
        query: Tensor,
        terms: Terms,
        used: Tensor | None,
        key_factors: Tensor | None,
        query_factors: QueryFactors | None,
        into: Tensor,
    ) -> dict[Seen, Tensor]:
        """Attend with one query per row over the tokens that the policy selects. Arguments as in `Walk._attend_one`."""
        rotated = query if query_factors is None else query_factors.rotated(query, 1.0)
        step, keys = rows.view.step[:, :, 0], rows.keys.unflatten(0, (-1, rows.heads))
        slots = None if self.reads_all else self._selected(rotated.unflatten(0, (-1, rows.heads))[..., None, :], step, keys)
        if slots is None:
            return super()._attend_one(rows, query, terms, used, key_factors, query_factors, into)
        slots = slots[..., 0, :].expand(*keys.shape[:2], -1, -1).flatten(0, 1)  # [N, G or 1, n]
        visible = (slots >= 0) & (slots <= step.repeat_interleave(rows.heads, 0)[:, None])
        row = torch.arange(len(slots), device=slots.device)[:, None, None]
        index = slots.clamp(0, keys.shape[2] - 1)
        near_keys, near_values = rows.keys[row, index], rows.values[row, index]  # [N, G or 1, n, D]
        scores = torch.einsum("ngd,nxld->ngl" if index.shape[1] == 1 else "ngd,ngld->ngl", rotated * terms.scaling, near_keys)
        mass = weights(scores, terms, rows.heads, visible).to(near_values.dtype)
        into.copy_(torch.einsum("ngl,nxld->ngd" if index.shape[1] == 1 else "ngl,ngld->ngd", mass, near_values))
        return {}

    def _attend_block(self, tokens_before: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Attend with the queries of a block, under masks.

        Args:
            query: rotated. [B, H, G, T, D].
            keys: rotated, the block's included. [B, H, L, D].
            values: [B, H, L, Dv].

        Returns:
            [B, H, G, T, Dv].
        """
        streams, tokens, length = query.shape[0], query.shape[3], keys.shape[2]
        out: list[Tensor] = []
        most = max(1, _MAX_MASKED // (query.shape[:3].numel() * length))
        for part in torch.arange(tokens_before, tokens_before + tokens, device=query.device).split(most):
            first = len(out) * most
            end = tokens_before + first + len(part)
            queries, near_keys = query[..., first : first + len(part), :], keys[:, :, :end]
            slots = self._selected(queries, part.expand(streams, -1), near_keys)
            visible = torch.arange(end, device=query.device) <= part[:, None]  # [T, L]
            if slots is not None:
                mask = visible.new_zeros(*slots.shape[:-1], end + 1)  # the last place takes what is ignored
                mask = mask.scatter_(-1, slots.masked_fill((slots < 0) | (slots >= end), end), True)[..., :-1]
                visible = mask & visible
            out.append(attend_where(visible, queries, near_keys, values[:, :, :end], terms))
        return torch.cat(out, 3)

    def _selected(self, query: Tensor, step: Tensor, keys: Tensor) -> Tensor | None:
        """Let the policy select.

        Args:
            query: rotated. [B, H, G, T, D].
            step: [B, T] int64.
            keys: rotated. [B, H, S, D].

        Returns:
            Slots to read; None for all. [B, H, G, T, n] int64; axes may be 1, as in `Selecting.select`.

        Raises:
            ValueError: the policy returned a tensor of another shape.
        """
        layer, shape = self._layer, query.shape[:4]
        self._queries[layer] += query.shape[3]
        extremes = partial(self._extremes_of, keys, step, self._queries[layer], layer)
        slots = self._policy.select(Queries(query, step, keys, layer, self.slots.num_layers, self.slots.seed, extremes))
        if slots is not None and not _broadcasts(slots.shape, shape):
            name, expected = type(self._policy).__name__, [*shape, "n"]
            raise ValueError(f"{name}: select returned slots of shape {list(slots.shape)}, expected {expected}")
        self._newest[layer] = None if slots is None else slots[..., -1, :]
        return slots

    def _extremes_of(self, keys: Tensor, step: Tensor, newest: int, layer: int, size: int) -> tuple[Tensor, Tensor]:
        """Return the extremes of pages of `size` keys. [B, H, P, D] each."""
        return self._extremes.setdefault((layer, size), PageExtremes())(keys, step, newest, size)

    @property
    def state_bytes(self) -> int:
        """Bytes of everything besides K and V that is held between steps."""
        return super().state_bytes + sum(x.nbytes for x in self._extremes.values())

    @property
    def read_bytes(self) -> int:
        """Bytes that the newest query of each stream read: K and V of the selected tokens, and extremes of pages. Syncs."""
        slots, total = self.slots, 0
        per_slot = (slots.shape.key_dim + slots.shape.value_dim) * slots.dtype.itemsize
        rank = slots.tensors.rank.view(len(slots.layers), slots.streams, slots.shape.heads, -1)
        for index, layer in enumerate(slots.layers):
            held = rank[index] < slots.empty_rank  # [B, H, S]
            for size in (size for of_layer, size in self._extremes if of_layer == layer):
                pages = (held.sum(-1) + size - 1) // size
                total += int(pages.sum()) * 2 * slots.shape.key_dim * slots.dtype.itemsize
            selected = self._newest.get(layer)
            if selected is not None and not self.reads_all:
                selected = selected.expand(*held.shape[:2], -1, -1).flatten(2)
                outside = (selected < 0) | (selected >= held.shape[2])
                read = held.new_zeros(*held.shape[:2], held.shape[2] + 1)
                held = held & read.scatter_(-1, selected.masked_fill(outside, held.shape[2]), True)[..., :-1]
            total += int(held.sum()) * per_slot
        return total

    def fork(self, streams: Tensor) -> SelectingWalk:
        """Return a walk over copies of these streams. streams: [B'] int64."""
        other = SelectingWalk(self.slots.fork(streams), self._method, like=self)
        other.ordered, other.reads_all = self.ordered, self.reads_all
        other._queries = dict(self._queries)
        other._extremes = {key: extremes.fork(streams) for key, extremes in self._extremes.items()}
        for layer, slots in self._newest.items():
            other._newest[layer] = slots if slots is None or len(slots) == 1 else slots[streams]
        return other

    def clear(self) -> None:
        """Remove all tokens."""
        super().clear()
        self._extremes, self._newest = {}, {}
