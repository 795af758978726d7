"""A policy's statistics as arguments of kernels: the numbers of each slot, and their first values.

Axis letters: B streams, H KV heads, N = B * H, R rows, S slots, T tokens, k numbers of a statistic, K numbers of all
statistics per slot, M numbers of all statistics per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import Slots
from kvbench.policies import Statistic

FirstValues = Mapping[Statistic, Tensor]  # first values of a block's tokens, for statistics that compute them. [N, T, *k]


def may_outlive_window(slots: Slots) -> bool:
    """Return whether a token may be held although a sliding window hides it. Kernels ignore ages."""
    return slots.shape.sliding_window is not None and not slots.evicts_each_step


def why_unserved(slots: Slots, competing: bool = False) -> str:
    """Return the reason that no kernel does the bookkeeping of these slots under any policy; empty if a kernel may.

    competing: whether the kernel serves heads that compete for the tokens of their layer.
    """
    if slots.budget.pages is not None:
        return "no kernel evicts whole pages"
    if slots.uneven and not (competing and slots.budget.of_rows is None):
        return "heads that hold different numbers of tokens have no kernel"
    if may_outlive_window(slots):
        return "no kernel evicts several tokens at once, or from heads that compete, in a layer with a sliding window"
    if list(slots.tensors.states) != list(dict.fromkeys(slots.policy.statistics)):
        return "no kernel keeps the statistics of several budgets"
    return ""


def numbers_of(rows: Rows) -> list[Tensor]:
    """Return views of the statistics per slot of some rows, one view per number. [R, S] each."""
    flat = [x.flatten(0, 1) for s, x in rows.states.items() if s.per == "slot"]
    return [number for x in flat for number in x.reshape(*x.shape[:2], prod(x.shape[2:])).unbind(-1)]


def sums_of(rows: Rows) -> Tensor:
    """Return a copy of the statistics per head of some rows. [R, M] float64."""
    parts = [x.flatten(0, 1).flatten(1) for s, x in rows.states.items() if s.per == "head"]
    return torch.cat(parts, 1) if parts else torch.empty(len(rows.rank), 0, dtype=torch.float64)


def put_sums(rows: Rows, sums: Tensor) -> None:
    """Set the statistics per head of some rows. sums: [R, M] float64."""
    states = [x for s, x in rows.states.items() if s.per == "head"]
    for state, part in zip(states, sums.split([x.shape[2:].numel() for x in states], 1), strict=True):
        state.copy_(part.view(state.shape))


def widths_of(rows: Rows) -> tuple[int, ...]:
    """Return, for each number, the count of numbers in its statistic, which is the stride of its view."""
    return tuple(x.stride(1) for x in numbers_of(rows))


def first_values(rows: Rows, written: FirstValues | None, tokens: int) -> Tensor:
    """Return the first numbers of each token of a block. [N, T, K] float32; strides are 0 if all numbers are constant."""
    size = len(rows.rank)
    parts = {s: (s.initial, x.shape[3:].numel()) for s, x in rows.states.items() if s.per == "slot"}
    if not written or not any(s in written for s in parts):
        device = rows.rank.device  # created on the device, not copied from the host
        constants = [torch.full((width,), initial, device=device) for initial, width in parts.values()]
        return torch.cat(constants or [torch.zeros(0, device=device)]).float().expand(size, tokens, -1)
    values = [
        written[s].reshape(size, tokens, width).float() if s in written else _constant(rows, initial, tokens, width)
        for s, (initial, width) in parts.items()
    ]
    return torch.cat(values, -1)


def _constant(rows: Rows, value: float, tokens: int, width: int) -> Tensor:
    return torch.full((len(rows.rank), tokens, width), value, device=rows.rank.device)


def sees_weights(rows: Rows) -> bool:
    """Return whether a statistic is updated with attention."""
    return any(s.sees for s in rows.states)


def heads_of(rows: Rows) -> Tensor:
    """Return the index of each row's KV head in the model's layer. [R] int64."""
    blocks, heads = rows.view.rank.shape[:2]
    return rows.view.head.expand(blocks, heads, 1).flatten().contiguous()


def prompts_of(rows: Rows) -> Tensor:
    """Return the prompt length of each stream, repeated for each layer. [L * B] int64."""
    return rows.view.prompt.expand(rows.view.rank.shape[0], 1, 1).flatten().contiguous()
