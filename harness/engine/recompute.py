"""A decoder without a cache: the window of every token run afresh, the yardstick of quality.

Axis letters: B streams, T tokens, N tokens of a text, K tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor

from harness.engine.attention import Terms, causal
from harness.engine.decoder import CacheConfig
from harness.engine.model import Model
from harness.engine.rotary import rotate

_PREFILL = 8192  # tokens that recompute-window runs at once


class RecomputeDecoder:
    """A decoder that keeps no cache: every token's window is run afresh, many windows at once."""

    def __init__(self, model: Model, config: CacheConfig, streams: int = 1) -> None:
        """As `decoder`."""
        assert config.capacity is not None
        self.model, self.config = model, config
        band = config.policy.bind(config.capacity).band(config.capacity)
        self.sinks = 0 if band is None else band[0]  # tokens of the stream's beginning that open every window
        self.length = config.capacity + 1
        self._history = [torch.zeros(0, dtype=torch.int64, device=model.device) for _ in range(streams)]
        self._alike = True  # streams have the same length, so that their windows are run together
        self._seen = 0  # tokens taken in by the first stream

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, valid: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """See `Decoder`. Only what is kept is computed."""
        wanted = range(tokens.shape[1]) if keep is None else keep.tolist()
        self._alike = self._alike and valid is None
        streams, rows = len(tokens), []
        for part in [slice(0, streams)] if self._alike else [slice(b, b + 1) for b in range(streams)]:
            new, counts = tokens[part], list(range(1, tokens.shape[1] + 1))  # tokens that count, up to and with each
            if valid is not None:
                new, counts = tokens[part.start, valid[part.start]][None], valid[part.start].cumsum(0).tolist()
            before = torch.stack(self._history[part])
            text = torch.cat([before, new], 1)
            rows.append(self._logits(text, [max(1, before.shape[1] + counts[t]) for t in wanted]))
            self._history[part] = text if text.shape[1] < self.length else self._window(text, self.length - 1)
            self._seen += counts[-1] if part.start == 0 else 0
        return torch.cat(rows)

    def _window(self, text: Tensor, length: int) -> Tensor:
        """The sinks and the newest tokens of each stream, as many as that. [B, N] -> [B, length]."""
        return torch.cat([text[:, : self.sinks], text[:, text.shape[1] - length + self.sinks :]], 1)

    def _logits(self, text: Tensor, ends: list[int]) -> Tensor:
        """Logits after the windows of each stream that end before these places, ascending. [B, N] -> [B, K, V]."""
        short = [e for e in ends if e < self.length]  # the first windows begin with the stream and share one run
        full = [e - self.length for e in ends[len(short) :]]
        out = []
        if short or not ends:
            last = short[-1] if short else 1
            kept = len(short) if _in_a_row(short) and short else torch.tensor([e - 1 for e in short], device=text.device).long()
            out.append(self.model(text[:, :last], self, kept))
        windows = text[:, self.sinks :].unfold(1, self.length - self.sinks, 1) if full else text
        opening = text[:, None, : self.sinks]
        at_once = max(1, _PREFILL // (self.length * len(text)))
        for starts in [full[i : i + at_once] for i in range(0, len(full), at_once)]:
            chosen = windows[:, starts[0] : starts[-1] + 1] if _in_a_row(starts) else windows[:, starts]
            chosen = torch.cat([opening.expand(-1, len(starts), -1), chosen], 2)
            out.append(self.model(chosen.flatten(0, 1), self, 1).view(len(text), len(starts), -1))
        return torch.cat(out, 1)

    def reserve(self, tokens: int) -> None:
        """See `Decoder`: there is nothing to make room in."""

    def held(self, positions: Sequence[int]) -> float:
        """See `Decoder`: what the window of the next token has."""
        first = self._seen - self.length + self.sinks  # the last that the window has no more
        return sum(p < self._seen and (p < self.sinks or p > first) for p in positions) / len(positions)

    @property
    def slots(self) -> tuple[float, float]:
        """See `Decoder`: the tokens of the window."""
        return (float(min(self._seen, self.length)),) * 2

    def fork(self, streams: Sequence[int]) -> Self:
        """See `Decoder`."""
        other = copy(self)
        other._history = [self._history[b] for b in streams]  # replaced at every block, never written to
        return other

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Plain causal attention of the windows themselves."""
        shape = self.model.layers[layer]
        if shape.rotation is not None:
            query, keys = shape.rotation.pair(query), shape.rotation.pair(keys)
            at = torch.arange(keys.shape[2], device=keys.device)
            turns = shape.rotation.turns(at, keys.dtype, self.length + 1)
            query, keys = rotate(query, turns), rotate(keys, turns)
        return causal(query.unflatten(1, (shape.heads, -1)), keys, values, terms).flatten(1, 2)

    @property
    def kv_bytes(self) -> int:
        """Nothing is held between steps."""
        return 0

    @property
    def state_bytes(self) -> int:
        """The tokens of the window."""
        return sum(text.nbytes for text in self._history)


def _in_a_row(places: list[int]) -> bool:
    """Whether they follow each other without a gap: then a slice takes them, and nothing waits for an index."""
    return not places or places[-1] - places[0] == len(places) - 1
