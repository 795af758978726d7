"""Divides a number of tokens between heads or layers in proportion to real-valued shares.

Axis letters: n heads or layers that share, * any axes before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.policies.policy import Policy

_DECIMALS = 9  # fractions that differ by less are equal: float64 sums of the same shares differ in the last bits


def integer_shares(shares: Tensor, total: int, floor: int = 0, ceiling: Tensor | int | None = None) -> Tensor:
    """Return integers that add up to the total, by the method of largest remainders. [*, n] int64.

    The excess of shares over the floor is scaled so that all add up to the total. Shares above the ceiling are cut to it, and the
    rest is divided equally among the others. All are rounded down, and remaining tokens go to the largest fractions, the first
    among equals. The ceiling has precedence over the floor.

    Args:
        shares: real numbers, in tokens. [*, n].
        total: tokens to divide.
        floor: tokens of each, at least.
        ceiling: tokens of each, at most. Broadcasts to [*, 1]. If the total is more than all of them can hold, all are full.

    Raises:
        ValueError: the total is less than n * floor.
    """
    count = shares.shape[-1]
    if total < count * floor:
        raise ValueError(f"{total} tokens can't be divided into {count} budgets of at least {floor}")
    excess = (shares.double() - floor).clamp(min=0)
    whole = excess.sum(-1, keepdim=True)
    exact = floor + torch.where(whole > 0, excess * ((total - count * floor) / whole), (total - count * floor) / count)
    available = torch.full_like(whole, total)
    if ceiling is not None:
        exact = _capped(exact, ceiling)
        available = available.minimum(torch.as_tensor(ceiling, device=exact.device) * count)
    exact = exact.round(decimals=_DECIMALS)
    rounded = exact.floor()
    missing = (available - rounded.sum(-1, keepdim=True)).long()
    fractions = (exact - rounded).round(decimals=_DECIMALS)
    place = fractions.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return rounded.long() + (place < missing).long()


def window_of(policy: Policy) -> int:
    """Return the parameter `window` of a bound policy: its newest tokens that are never evicted; 0 if it has none."""
    return getattr(policy, "window", None) or 0


def _capped(exact: Tensor, ceiling: Tensor | int) -> Tensor:
    """Divide what exceeds the ceiling equally among the shares below it, until none exceeds it. [*, n] float64."""
    for _ in range(exact.shape[-1]):
        capped = exact.clamp(max=ceiling)
        over, below = (exact - capped).sum(-1, keepdim=True), capped < ceiling
        exact = capped + over * below / below.sum(-1, keepdim=True).clamp(min=1)
    return exact.clamp(max=ceiling)
