"""Attention of a block when what is kept is known beforehand: some first tokens, and the newest ones.

The closed form of the walk for policies that don't look at content. A key in the window stands at its true distance from
the query; a sink stands where the position mode puts it. So the same queries are rotated twice, and the two parts of one
softmax are put together by their log-sum-exp. No score matrix of a whole block is ever held.

Axis letters: B streams, H KV heads, G query heads of a KV head, T tokens of the block, L keys, E sinks, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from harness.engine.attention import Terms, weights

_ROWS = (64, 256)  # queries at once: as many as the window has tokens, within these


class Sinks(NamedTuple):
    """The first tokens of the stream, for queries whose window does not reach them."""

    query: Tensor  # the block's queries as the sinks see them, rotated. [B, H, G, T, D]
    keys: Tensor  # rotated. [B, H, E, D]
    values: Tensor  # [B, H, E, Dv]


def banded(query: Tensor, keys: Tensor, values: Tensor, window: int, sinks: Sinks | None, terms: Terms, first: int) -> Tensor:
    """Each query over itself, the `window` tokens before it, and those of the first tokens that lie before that.

    Args:
        query: rotated. [B, H, G, T, D].
        keys: of the block's tokens and of those before it, without a gap, rotated. [B, H, L, D].
        values: [B, H, L, Dv].
        window: tokens before a query that it sees.
        sinks: those of positions 0, 1, ...; None if there are none.
        terms: of this layer's attention; a sliding window is no concern here.
        first: position of the first key.

    Returns:
        [B, H, G, T, Dv], dtype of the query.
    """
    tokens, before = query.shape[3], keys.shape[2] - query.shape[3]
    rows = min(max(_ROWS[0], window), _ROWS[1])
    attend = _fused if _can_be_fused(query, values, terms) else _plain
    out = []
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        low = max(0, before + start - window)
        at = torch.arange(before + start, before + stop, device=query.device)[:, None]  # places among the keys
        age = at - torch.arange(low, before + stop, device=query.device)
        seen = (age >= 0) & (age <= window)
        part, some, hidden = slice(low, before + stop), None, None
        if sinks is not None and first + before + stop - 1 > window:  # a sink inside the window is seen there
            some = sinks._replace(query=sinks.query[:, :, :, start:stop])
            hidden = torch.arange(sinks.keys.shape[2], device=query.device) < first + at - window
        out.append(attend(query[:, :, :, start:stop], keys[:, :, part], values[:, :, part], seen, some, hidden, terms))
    return torch.cat(out, 3)


def _plain(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, sinks: Sinks | None, hidden: Tensor | None, terms: Terms
) -> Tensor:
    """With the scores of these queries in memory. seen: [T, L] bool; hidden: sinks that count, [T, E] bool."""
    tokens, heads = query.shape[3], query.shape[1]
    scores = torch.einsum("bhgtd,bhld->bhgtl", query * terms.scaling, keys)
    if sinks is not None and hidden is not None:
        far = torch.einsum("bhgtd,bhed->bhgte", sinks.query * terms.scaling, sinks.keys)
        scores, seen = torch.cat([far, scores], -1), torch.cat([hidden, seen], -1)
        values = torch.cat([sinks.values, values], 2)
    if terms.sink_logits is not None:  # one logit a row
        terms = terms._replace(sink_logits=terms.sink_logits.repeat_interleave(tokens))
    flat = scores.flatten(0, 1).flatten(1, 2)
    mass = weights(flat, terms, heads, seen.repeat(query.shape[2], 1)).view(scores.shape)
    return torch.einsum("bhgtl,bhld->bhgtd", mass.to(values.dtype), values)


def _can_be_fused(query: Tensor, values: Tensor, terms: Terms) -> bool:
    """Whether PyTorch's fused kernel that also tells the log-sum-exp takes this."""
    plain = terms.softcap is None and terms.sink_logits is None
    return plain and query.device.type == "cpu" and query.shape[-1] == values.shape[-1]


def _fused(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, sinks: Sinks | None, hidden: Tensor | None, terms: Terms
) -> Tensor:
    """As `_plain`, the window by PyTorch's fused kernel, query heads of a KV head side by side as rows."""
    group, tokens = query.shape[2:4]
    mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, -torch.inf).repeat(group, 1)
    near, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.flatten(2, 3), keys, values, 0.0, False, attn_mask=mask, scale=terms.scaling
    )
    near = near.unflatten(2, (group, tokens))
    if sinks is None or hidden is None:
        return near
    log_sum = log_sum.unflatten(2, (group, tokens))[..., None]
    far = torch.einsum("bhgtd,bhed->bhgte", sinks.query * terms.scaling, sinks.keys).to(log_sum.dtype)
    far = far.masked_fill(~hidden, -torch.inf)
    most = torch.maximum(log_sum, far.amax(-1, keepdim=True))
    mass_near, mass_far = (log_sum - most).exp(), (far - most).exp()
    answer = mass_near * near + torch.einsum("bhgte,bhed->bhgtd", mass_far, sinks.values.to(mass_far.dtype))
    return (answer / (mass_near + mass_far.sum(-1, keepdim=True))).to(query.dtype)
