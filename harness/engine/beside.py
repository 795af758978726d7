"""One walk beside another: in every layer both take in the same query, key and value, so that rounding doesn't grow.

Axis letters: B streams, H KV heads, N = B * H, Q query heads, T tokens, S slots, Dv value dim.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.plan import Block, Plan
from kvbench.harness.engine.walk import Walk

_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-6}  # relative to the largest logit, or answer
_ROUNDING_16_BITS = 4e-2
_COUNTED = 0.75  # of a block's tokens, those with the smallest errors, where rounding may change the order of two evictions


class Verdict(NamedTuple):
    """What came of a comparison.

    Attributes:
        worst: largest error of the judged answers, over what is allowed; infinite if one is no number.
        noise: largest error of the plain walk's own, in units of rounding; 0 if its own count as exact.
        compared: whether heads of every layer could be compared; else `worst` is infinite.
    """

    worst: float
    noise: float
    compared: bool


class Beside(Walk):
    """A walk that lets others answer the same queries, keys and values, and returns its own answers.

    In 16 bits a policy that looks at attention may evict another token because of rounding. What a head answers from then on
    tells nothing, and how often that is so is judged by the tokens kept. Two evictions may also change places within a block,
    which can't be seen afterwards; so there a quarter of the tokens don't count. Single tokens all do.
    """

    def __init__(self, walk: Walk, other: Walk, wide: Walk | None = None) -> None:
        """other: to be judged; wide: a walk in float32 whose answers count as exact, or None: its own do."""
        vars(self).update(vars(walk))
        self._judged, self._wide = other, [] if wide is None else [wide]
        self._narrow = not is_exact(walk.slots.dtype)
        self._plans: list[Plan] = []
        self._swaps = False
        self._errors: dict[tuple[int, bool], list[Tensor]] = {}  # by layer, and whether of single tokens; [heads, 2]

    def verdict(self) -> Verdict:
        """The judgement over all that was read: an error may be one of rounding, or twice the plain walk's in that layer."""
        of_layers = [torch.cat(errors) for errors in self._errors.values()]
        if not all(map(len, of_layers)):
            return Verdict(torch.inf, 0.0, False)
        largest = [errors.amax(0).tolist() for errors in of_layers]
        worst = max((error / max(1.0, 2 * own) for error, own in largest), default=0.0)
        return Verdict(worst, max((own for _, own in largest), default=0.0), True)

    def begin(self, block: Block) -> Plan:
        """Plan the block, and let the others plan theirs."""
        capacity, end = self.slots.capacity, block.end
        evicts = capacity is not None and (end is None or end > capacity)
        self._swaps = self._narrow and block.tokens > 1 and evicts and bool(self.slots.sees)
        self._plans = [other.begin(block) for other in (self._judged, *self._wide)]
        return super().begin(block)

    def attend(self, plan: Plan, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms, place: int = 0) -> Tensor:
        """The plain walk's answer; the others' are compared."""
        answer = exact = super().attend(plan, layer, query, keys, values, terms, place)
        judged = self._judged.attend(self._plans[0], layer, query, keys, values, terms, place)
        for wide, its_plan in zip(self._wide, self._plans[1:], strict=True):
            sinks = terms.sink_logits
            widened = terms if sinks is None else terms._replace(sink_logits=sinks.float())
            exact = wide.attend(its_plan, layer, query.float(), keys.float(), values.float(), widened, place)
        errors = torch.stack([self._units(x, exact) for x in (judged, answer)], -1)
        if self._narrow:
            group = answer.shape[1] // keys.shape[1]
            errors = errors[self._alike(layer).view(len(answer), -1).repeat_interleave(group, 1)]
        self._errors.setdefault((layer, query.shape[2] == 1), []).append(errors.reshape(-1, 2))
        return answer

    def end(self, plan: Plan, block: Block) -> None:
        """After the last layer, of all walks."""
        super().end(plan, block)
        for other, its_plan in zip((self._judged, *self._wide), self._plans, strict=True):
            other.end(its_plan, block)

    def _units(self, x: Tensor, exact: Tensor) -> Tensor:
        """Error of each head's answers, in units of rounding. [B, Q, T, Dv] twice -> [B, Q]."""
        rounding = rounding_of(x.dtype) * exact.float().abs().amax()
        errors = ((x.float() - exact.float()).abs().amax(-1) / rounding).nan_to_num(torch.inf).sort(-1).values
        return errors[..., ceil(errors.shape[-1] * (_COUNTED if self._swaps else 1.0)) - 1]

    def _alike(self, layer: int) -> Tensor:
        """The rows of a layer that hold the same tokens in all walks. [N] bool."""
        ours, *others = [_held_positions(walk, layer) for walk in (self, self._judged, *self._wide)]
        return torch.stack([(theirs == ours).all(-1) for theirs in others]).all(0)


def is_exact(dtype: torch.dtype) -> bool:
    """Whether rounding decides next to nothing."""
    return dtype in _ROUNDING


def rounding_of(dtype: torch.dtype) -> float:
    """By how much two ways of computing the same logits, or attention, may differ, relative to the largest."""
    return _ROUNDING.get(dtype, _ROUNDING_16_BITS)


def _held_positions(walk: Walk, layer: int) -> Tensor:
    """Positions of the tokens that each row of a layer holds, in order; -1 for empty slots. [N, S]."""
    rows = walk.rows(walk.slots.num_slots, layer)
    return rows.position.masked_fill(rows.rank == walk.slots.empty_rank, -1).sort(-1).values
