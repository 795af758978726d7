"""Decoder without a cache, the reference for quality: it runs every token's window through the model again.

Axis letters: B streams, T tokens, N tokens of a text, K tokens whose logits are returned, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms, causal
from kvbench.harness.engine.decoder import CacheConfig, read_blocks
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.rotary import rotate

MAX_BATCH_TOKENS = 8192  # tokens of all windows that run at once


@dataclass(frozen=True)
class CausalAttention:
    """Attention backend with causal attention, for streams that start with the given tokens.

    Attributes:
        model: model whose attention is computed.
        longest: maximum number of tokens of a stream.
        padding: number of padding tokens at the start of each stream; none when None. [B] int64.
    """

    model: Model
    longest: int
    padding: Tensor | None = None

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Compute the attention of one layer. [B, H * G, T, D], [B, H, T, D], [B, H, T, Dv] -> [B, H * G, T, Dv]."""
        shape = self.model.layers[layer]
        if shape.rotation is not None:
            query, keys = shape.rotation.pair(query), shape.rotation.pair(keys)
            positions = torch.arange(keys.shape[2], device=keys.device)
            rope_factors = shape.rotation.factors(positions, keys.dtype, self.longest + 1)
            query, keys = rotate(query, rope_factors), rotate(keys, rope_factors)
        return causal(query.unflatten(1, (shape.heads, -1)), keys, values, terms, self.padding).flatten(1, 2)


class RecomputeDecoder:
    """Decoder that keeps no cache. It recomputes the window of every token, many windows at once."""

    def __init__(self, model: Model, config: CacheConfig, streams: int = 1) -> None:
        assert config.capacity is not None
        self.model, self.config = model, config
        band = config.policy.bind(config.capacity).band(config.capacity)
        self.sinks = 0 if band is None else band[0]  # first tokens of the stream, part of every window
        self.length = config.capacity + 1  # tokens of a full window
        self._history = torch.zeros(streams, 0, dtype=torch.int64, device=model.device)  # sinks and newest tokens. [B, N]
        self._lengths: Tensor | None = None  # tokens read, per stream; None while all have read `_longest`. [B]
        self._longest = 0  # tokens read by the longest stream
        for shape in model.layers:
            if shape.rotation is not None:
                shape.rotation.prepare(model.dtype)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, valid: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """Read a block. Only the logits in `keep` are computed; reading `keep` syncs with the host, once per block."""
        if valid is None and self._lengths is None:
            logits = self._read(tokens, keep)
        else:
            logits = self._read_ragged(tokens, torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid, keep)
        self._longest += tokens.shape[1]
        return logits

    def _read(self, tokens: Tensor, keep: Tensor | None) -> Tensor:
        """Read a block of streams of equal length."""
        count = tokens.shape[1]
        wanted = list(range(count)) if keep is None else [0] * len(keep) if count == 1 else keep.tolist()
        before = self._history.shape[1]
        text = torch.cat([self._history, tokens], 1)
        logits = self._logits(text, [before + t + 1 for t in wanted])
        self._remember(text)
        return logits

    def _remember(self, text: Tensor) -> None:
        """Keep the tokens of a text that later windows may contain."""
        self._history = text if text.shape[1] < self.length else self._window(text, self.length - 1)

    def _window(self, text: Tensor, length: int) -> Tensor:
        """Return the sinks and the newest tokens of each stream, `length` tokens in total. [B, N] -> [B, length]."""
        return torch.cat([text[:, : self.sinks], text[:, text.shape[1] - length + self.sinks :]], 1)

    def _read_ragged(self, tokens: Tensor, valid: Tensor, keep: Tensor | None) -> Tensor:
        """Read a block of streams whose lengths only the device knows. Short windows are padded at the start."""
        if self._lengths is None:
            self._lengths = torch.full((len(tokens),), self._longest, device=tokens.device)
        ends = self._lengths.clamp(max=self.length - 1)[:, None] + valid.cumsum(1)  # end of each token's window in `text`
        sizes = self._window_lengths(self._lengths[:, None] + valid.cumsum(1))
        self._lengths = self._lengths + valid.sum(1)
        text = torch.cat([self._history, tokens, tokens[:, :1]], 1)  # the last column takes the invalid tokens
        text = text.scatter(1, (ends - 1).masked_fill(~valid, text.shape[1] - 1), tokens)
        wanted = torch.stack([ends, sizes]) if keep is None else torch.stack([ends, sizes]).index_select(2, keep)
        nonempty = wanted if wanted.shape[2] else torch.stack([ends, sizes])[..., :1]  # models reject an empty batch
        width = min(self.length, text.shape[1] - 1)
        out = []
        for end, size in nonempty.split(max(1, MAX_BATCH_TOKENS // (width * len(text))), 2):
            padding = width - size
            windows = self._gathered(text, end, width, padding).flatten(0, 1)
            padded = padding.flatten()
            ranks = (torch.arange(width, device=text.device) - padded[:, None]).clamp(min=0)
            out.append(self.model(windows, CausalAttention(self.model, self.length, padded), 1, ranks).view(*end.shape, -1))
        width = min(self.length - 1, text.shape[1] - 1)
        self._history = self._gathered(text, ends[:, -1:], width, torch.zeros_like(ends[:, -1:]))[:, 0]
        return torch.cat(out, 1)[:, : wanted.shape[2]]

    def _window_lengths(self, tokens_read: Tensor) -> Tensor:
        """Return the length of the last token's window after `tokens_read` tokens. Any shape, int64."""
        return tokens_read.clamp(max=self.length)

    def _gathered(self, text: Tensor, ends: Tensor, width: int, padding: Tensor) -> Tensor:
        """Return the padded window that ends at each of `ends`: sinks and newest tokens. [B, N], [B, K] -> [B, K, width]."""
        place = (torch.arange(width, device=text.device) - padding[..., None]).clamp(min=0)
        place = torch.where(place < self.sinks, place, place + (ends - width + padding).clamp(min=0)[..., None])
        return text.gather(1, place.flatten(1)).view(place.shape)

    def _logits(self, text: Tensor, ends: list[int]) -> Tensor:
        """Return each stream's logits after the windows that end at `ends` (exclusive, ascending). [B, N] -> [B, K, V]."""
        short = [e for e in ends if e < self.length]  # these windows start with the stream, so one forward pass computes all
        full = [e - self.length for e in ends[len(short) :]]
        out = []
        if short or not ends:
            last = short[-1] if short else 1
            keep: Tensor | int = len(short)
            if not short or not _consecutive(short):
                keep = torch.tensor([e - 1 for e in short], device=text.device).long()
            out.append(self.model(text[:, :last], CausalAttention(self.model, self.length), keep))
        windows = text[:, self.sinks :].unfold(1, self.length - self.sinks, 1) if full else text
        opening = text[:, None, : self.sinks]
        at_once = max(1, MAX_BATCH_TOKENS // (self.length * len(text)))
        for starts in [full[i : i + at_once] for i in range(0, len(full), at_once)]:
            chosen = windows[:, starts[0] : starts[-1] + 1] if _consecutive(starts) else windows[:, starts]
            chosen = torch.cat([opening.expand(-1, len(starts), -1), chosen], 2)
            out.append(
                self.model(chosen.flatten(0, 1), CausalAttention(self.model, self.length), 1).view(len(text), len(starts), -1)
            )
        return torch.cat(out, 1)

    def read_prompt(self, tokens: Tensor, block: int, once: bool = False) -> Tensor:
        """Read prompts in blocks; only the last windows are run. [B, N] int64 -> logits after the last token, [B, V]."""
        return read_blocks(self, tokens, block)

    def reserve(self, tokens: int) -> None:
        """Do nothing: there is no cache to grow."""

    def held(self, positions: Sequence[int]) -> float:
        """Return the share of these positions of the first stream that is in the next token's window."""
        tokens_read = self._longest if self._lengths is None else int(self._lengths[0])
        newest_outside = tokens_read - self.length + self.sinks
        return sum(p < tokens_read and (p < self.sinks or p > newest_outside) for p in positions) / len(positions)

    @property
    def slots(self) -> tuple[float, float]:
        """(tokens of the window, tokens attended), which are equal."""
        return (float(min(self._longest, self.length)),) * 2

    def fork(self, streams: Sequence[int]) -> Self:
        """Return a decoder whose streams are copies of the given streams. The decoders share no state."""
        other = copy(self)
        index = torch.tensor(streams, device=self.model.device)
        other._history = self._history[index]
        other._lengths = None if self._lengths is None else self._lengths[index]
        return other

    @property
    def kv_bytes(self) -> int:
        """0: no K or V is held between steps."""
        return 0

    @property
    def held_bytes(self) -> int:
        """0: no K or V is held between steps."""
        return 0

    @property
    def state_bytes(self) -> int:
        """Bytes of the token ids held for the next window."""
        return self._history.nbytes


def _consecutive(places: list[int]) -> bool:
    """Return whether ascending places have no gaps, so that a slice can select them without an index tensor."""
    return not places or places[-1] - places[0] == len(places) - 1
