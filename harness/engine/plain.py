"""The plain walk, which defines what every other way of reading computes: one token after the other, in plain PyTorch.

Axis letters: L layers, B streams, H KV heads, N = B * H, R = L * N, G query heads of a KV head, S slots, T tokens, D key dim,
Dv value dim, P pairs of dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms, weights
from kvbench.harness.engine.placement import Placement
from kvbench.harness.engine.plan import Places, PlainWalk, QueryFactors, Step
from kvbench.harness.engine.rotary import rotate
from kvbench.harness.engine.rows import Rows, writes
from kvbench.harness.engine.runs import logits_of
from kvbench.harness.engine.slots import Slots
from kvbench.policies import Seen


class Plain:
    """Reads the layers of one `Slots` token by token."""

    def __init__(self, slots: Slots, placement: Placement) -> None:
        """slots: of the layers; placement: their RoPE."""
        self._slots, self._placement = slots, placement
        self._writes = any(writes(s) for s in slots.tensors.states)

    def walk(self, plan: PlainWalk, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """The definition, token by token inside one layer. -> [B, H, G, T, Dv]."""
        streams, heads = query.shape[:2]
        places, rows = plan.places, self._slots.rows(plan.attended, layer)
        parts = [x.movedim(-2, 0).flatten(1, 2).contiguous().unbind(0) for x in (query, keys, values)]
        out = values.new_empty(values.shape[2], *parts[0][0].shape[:2], values.shape[3])  # one tensor: many small ones are slow
        for t, (q, k, v) in enumerate(zip(*parts, strict=True)):
            rank, step, valid = places.ranks[t], places.steps[t], places.valid[t]
            if rank is None:
                rank = rows.count()
                if valid is not None:
                    rank = rank.masked_fill(~valid.expand(-1, heads, 1).flatten(), self._slots.empty_rank)
            rows.place(rank, step, places.now[t])
            own = self._placement.of_step(rank, step)
            rows.write(self._placement.kept(k, own), v)
            if self._writes:
                self.note_written(rows, places, t, rows.free, k[:, None], v[:, None])
            full = places.evicts[t] and self._slots.evicts_each_step
            seen = self._attend_one(
                rows,
                q,
                terms,
                None if full else rows.used(),
                self._placement.of_keys(rows, step),
                own,
                out[t],
            )
            if seen:
                rows.update(seen, valid)
            rows.release(valid, places.evicts[t], places.ragged)
        return out.unflatten(1, (streams, heads)).movedim(0, 3)

    def step(self, plan: Step, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms, place: int = 0) -> Tensor:
        """One token in one layer, in plain PyTorch. [B, H * G, 1, D], [B, H, 1, D], [B, H, 1, Dv] -> [B, H * G, 1, Dv].

        G is the group of one layer; `place` is the layer's among those that read the cache, of which the first one writes.
        """
        at, rows = self._slots.layers.index(layer), self._slots.rows(plan.attended, layer)
        streams, size, group = query.shape[0], len(rows.keys), self._slots.shape.group_of_reader
        query, keys, values = query.reshape(size, group, -1), keys.reshape(size, -1), values.reshape(size, -1)
        if place == 0:
            rows.write(self._placement.kept(keys, plan.query_factors[at]), values)
        if place == 0 and self._writes:
            self.note_written(rows, plan.places, 0, rows.free, keys[:, None], values[:, None])
        factors = plan.key_factors[at]
        if factors is None:
            factors = self._placement.of_keys(rows, plan.places.steps[0])
        out = values.new_empty(size, group, values.shape[-1])
        seen = self._attend_one(rows, query, terms, plan.used[at], factors, plan.query_factors[at], out)
        for name, x in plan.seen_of_layer[at].items():
            x[:, place * group : (place + 1) * group] = seen[name]
        return out.view(streams, -1, 1, self._slots.shape.value_dim)

    def note_written(self, rows: Rows, places: Places, t: int, free: Tensor, keys: Tensor, values: Tensor) -> None:
        """Tell statistics of a token that was written. free: [N] int64; keys, values: [N, 1, D]."""
        size, valid = len(rows.rank), places.valid[t]
        counted = None if valid is None else valid[: size // rows.heads].expand(-1, rows.heads, 1).flatten()[:, None]
        rows.note_written(free[:, None], keys, values, places.steps[t][:size, None], places.ids[t][:size, None], counted)

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
        """One query a row over all that is held.

        Args:
            rows: of the layer.
            query: unrotated. [N, G, D].
            terms: of this layer's attention.
            used: slots that hold a token; all when None. [N, 1, S] bool.
            key_factors: RoPE that the cached keys still need; None if they need none. [N, S, P].
            query_factors: RoPE of the query; None without RoPE. [N, 1, P].
            into: where to put the output. [N, G, Dv].

        Returns:
            What statistics read. [N, G, ...] each.
        """
        keys = rows.keys if key_factors is None else rotate(rows.keys, key_factors)
        scores = torch.bmm(rotated_and_scaled(query, query_factors, terms), keys.transpose(1, 2))
        mass = weights(scores, terms, self._slots.shape.heads, used)
        torch.bmm(mass.to(rows.values.dtype), rows.values, out=into)
        seen: dict[Seen, Tensor] = {"weights": mass, "queries": query, "outputs": into}
        if "logits" in rows.asked:
            logits = logits_of(scores, terms)
            seen["logits"] = logits if used is None else logits.masked_fill(~used, -torch.inf)
        return {name: seen[name] for name in rows.asked}


def rotated_and_scaled(query: Tensor, factors: QueryFactors | None, terms: Terms) -> Tensor:
    """Queries as scores take them. [..., T, D]."""
    return query * terms.scaling if factors is None else rotate(query, factors.scaled(terms.scaling))
