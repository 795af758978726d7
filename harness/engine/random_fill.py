"""Fill slots with random K and V, so that a full cache can be timed and checked without reading thousands of tokens.

Axis letters: N rows of one layer (streams x KV heads), S slots, n tokens held, D key dim, Dv value dim.
"""

from __future__ import annotations

import torch

from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import Slots


def fill_randomly(slots: Slots, tokens: int, generator: torch.Generator) -> None:
    """Put slots into the state after `tokens` tokens: K and V normal, statistics uniform in 0..1 above their initial value.

    K and V are exact in bfloat16, so that caches in two dtypes hold the same numbers.

    The slots hold the policy's band if it has one, otherwise the newest tokens; oldest first.

    Args:
        slots: empty slots with room for the tokens.
        tokens: number of tokens read.
        generator: generator of the random numbers, on the slots' device.
    """
    count = tokens if slots.capacity is None else min(tokens, slots.capacity)
    device = slots.device
    position = torch.arange(count, device=device)
    position = torch.where(position < _sinks(slots), position, position + tokens - count)
    for layer in slots.layers:
        rows = Rows(slots, slots.num_slots, layer)
        keys, values = rows.keys[:, :count], rows.values[:, :count]
        for x in (keys, values):
            x.copy_(torch.randn(x.shape, generator=generator, device=device).bfloat16())
        rows.put(keys, values, position.expand(len(keys), -1))
        for statistic, state in rows.states.items():
            if statistic.per == "head":
                continue
            held = state.flatten(0, 1)[:, :count]
            held += torch.rand(held.shape, generator=generator, device=device)


def _sinks(slots: Slots) -> int:
    """Return the number of tokens at the start of the stream that the policy's band keeps."""
    if slots.capacity is None or slots.shape.sliding_window is not None:
        return 0
    band = slots.policy.band(slots.capacity)
    return 0 if band is None else band[0]
