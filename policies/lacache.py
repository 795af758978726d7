"""LaCache: layers keep different tokens of the past, so that together they cover more of it than any of them.

Source: Shi et al. 2025, arXiv:2507.14204, Sections 3.2 and 3.3. The rule was read in GATECH-EIC/LaCache 0f27c33,
ppl/lacache/kv_cache.py.
Differs: a ladder's tokens are evicted one at a time, oldest first; the code evicts all that a ladder drops at once and lets the
    cache grow again, and adds half of that number to the capacity to make up for it. The ladders are the same. A prompt is cut to
    what eviction at every token would keep; the code has another, wider-spaced pattern for caches that must shrink by several
    rounds at once. A ladder drops at least one token, even if span and overlap leave none.

Words: tokens after the sinks are divided into ladders of equal length, from the oldest on. A layer keeps consecutive tokens of
every ladder, at an offset that depends on the layer. When the eviction reaches the newest tokens, it starts again with the
oldest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.view import CacheView


class _Ladder(NamedTuple):
    """A round of ladders."""

    rungs: int  # tokens of a ladder
    kept: int  # of them, by a layer
    number: int  # of ladders before it starts over
    offset: Tensor  # rungs below those that a layer keeps. [B, 1, 1]

    @property
    def dropped(self) -> int:
        """Tokens that a ladder drops."""
        return self.rungs - self.kept


@dataclass(frozen=True)
class LaCache(Policy):
    """Keep the first `sinks` tokens, the newest, and between them groups of tokens that shift from layer to layer."""

    scope = "head"

    sinks: int = 4  # tokens
    span: int | None = None  # layers that keep a token; half of them when None
    overlap: int = 0  # layers by which the spans of neighbours overlap
    room: int | None = None  # tokens beside the sinks; capacity - sinks when None

    def bind(self, capacity: int) -> Self:
        """Resolve the room, which needs at least two tokens."""
        room = capacity - self.sinks if self.room is None else self.room
        if self.sinks < 0 or room < 2 or self.sinks + room != capacity:
            raise ValueError(f"capacity {capacity} can't hold sinks {self.sinks} + room {self.room or 'of at least 2'}")
        if self.overlap < 0 or (self.span is not None and self.span <= self.overlap):
            raise ValueError(f"span {self.span} must be larger than overlap {self.overlap}, which must not be negative")
        return replace(self, room=room)

    def importance(self, view: CacheView) -> Tensor:
        """When the token's turn to go comes, in evictions from now. The sinks are never evicted. [B, H, S] float32."""
        assert self.room is not None, "bind first"
        ladder = self._ladder(view)
        cycle = ladder.number * ladder.dropped  # evictions of a round
        rounds = (view.rank.shape[-1] - self.sinks - self.room) // cycle + 2
        done = (view.step + 1 - view.count) % cycle  # evictions of this round so far
        place, due, waited = view.rank - self.sinks, torch.full_like(view.rank, -1), torch.zeros_like(view.step)
        for _ in range(rounds):
            rung = _rung(place, done, ladder)
            goes = (rung >= 0) & (rung < ladder.number * ladder.rungs) & (_below(rung, ladder) != _below(rung + 1, ladder))
            due = torch.where(goes & (due < 0), waited + _below(rung, ladder) - done, due)
            place = place - torch.where(rung < 0, 0, (_below(rung, ladder) - done).clamp(min=0))
            waited, done = waited + cycle - done, torch.zeros_like(done)
        never = waited + view.rank
        return torch.where(due < 0, never, due).float().masked_fill(view.rank < self.sinks, inf)

    def _ladder(self, view: CacheView) -> _Ladder:
        """The ladders of the model's layers."""
        assert self.room is not None
        span = max(self.overlap + 1, view.num_layers // 2) if self.span is None else self.span
        shift = span - self.overlap
        rungs = 1 + max(0, ceil((view.num_layers - span) / shift))
        kept = min(ceil(span / shift), rungs)
        rungs = max(rungs, kept + 1)
        number = max(1, (self.room - view.num_layers) // kept)
        return _Ladder(rungs, kept, number, view.layer % (rungs - kept + 1))


def _rung(place: Tensor, done: Tensor, ladder: _Ladder) -> Tensor:
    """A token's rung, counted through all ladders of the round; -1 if the round has passed it.

    Args:
        place: of the token after the sinks. [B, H, S] int64.
        done: evictions of this round so far. [B, H, 1] int64.
        ladder: of the round.
    """
    current, gone = done // ladder.dropped, done % ladder.dropped
    above = place - current * ladder.kept  # place in what is left of the current ladder
    passed = gone.minimum(ladder.offset)  # rungs of it that went from below those kept
    rung = torch.where((gone > passed) & (above >= ladder.kept), above + gone, above + passed)
    return torch.where(above < 0, -1, rung + current * ladder.rungs)


def _below(rung: Tensor, ladder: _Ladder) -> Tensor:
    """Rungs below this one that are dropped, in all ladders of the round."""
    ladders = (rung // ladder.rungs).clamp(max=ladder.number)
    inside = (rung - ladders * ladder.rungs).clamp(max=ladder.rungs)
    partly = inside.minimum(ladder.offset) + (inside - ladder.offset - ladder.kept).clamp(min=0)
    return ladders * ladder.dropped + torch.where(ladders < ladder.number, partly, 0)
