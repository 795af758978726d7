"""Decoder whose cache is emptied whenever it is full. Some tokens are then read again, as the start of a new stream.

Axis letters: B streams, T tokens, N tokens of a text, K tokens whose logits are returned, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from kvbench.harness.engine.decoder import CacheConfig, Decoder
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.recompute import RecomputeDecoder
from kvbench.policies.reset import Reset
from kvbench.policies.window import Window


class ClearableDecoder(Decoder, Protocol):
    """Decoder whose cache can be emptied."""

    @property
    def streams(self) -> int:
        """B."""

    def clear(self) -> None:
        """Remove all tokens."""

    def fork(self, streams: Sequence[int]) -> ClearableDecoder:
        """Return a decoder whose streams are copies of the given streams. The decoders share no cache."""


def between_resets(config: CacheConfig) -> CacheConfig | None:
    """Return the config of a resetting policy's cache between resets, which never evicts; None for other policies."""
    return CacheConfig(Window(), config.capacity, "stream") if isinstance(config.policy, Reset) else None


class ResetDecoder(RecomputeDecoder):
    """Decoder with full attention that restarts its streams whenever they are longer than the capacity.

    The logits of a token are those of a window that starts at the last reset. Streams of unequal length reset at different
    steps, so they are read as recomputed windows, without the cache.

    Attributes:
        reread: number of newest tokens that are read again at a reset.
        cache: cache of the tokens since the last reset, reread tokens included. The first token that does not fit empties it.
    """

    def __init__(self, model: Model, config: CacheConfig, cache: ClearableDecoder) -> None:
        """Wrap a cache. cache: empty decoder with the configuration of `between_resets`."""
        super().__init__(model, config, cache.streams)
        assert config.capacity is not None
        policy = config.policy.bind(config.capacity)
        assert isinstance(policy, Reset)
        assert policy.reread is not None
        self.sinks, self.reread, self.cache = policy.sinks, policy.reread, cache

    @property
    def _restart(self) -> int:
        """Number of tokens with which a stream restarts."""
        return self.sinks + self.reread

    @property
    def steps_to_reset(self) -> int:
        """Number of single tokens that can be read without a reset; 0 if the next token resets the cache."""
        return self.length - self._windowed(self._longest)

    def _windowed(self, tokens_read: int) -> int:
        """Return the number of tokens held after `tokens_read` tokens: the length of the last token's window."""
        past = tokens_read - self.length - 1
        return tokens_read if past < 0 else self._restart + 1 + past % (self.length - self._restart)

    def _window_lengths(self, tokens_read: Tensor) -> Tensor:
        """Return `_windowed` for numbers of tokens that only the device knows."""
        past = tokens_read - self.length - 1
        return tokens_read.where(past < 0, self._restart + 1 + past % (self.length - self._restart))

    def _read(self, tokens: Tensor, keep: Tensor | None) -> Tensor:
        """Read a block of streams of equal length, in one pass from each reset to the next."""
        count, before = tokens.shape[1], self._history.shape[1]
        wanted = None if keep is None else [0] * len(keep) if count == 1 else keep.tolist()
        text = torch.cat([self._history, tokens], 1)
        out, start, held = [], 0, self._windowed(self._longest)
        while start < count:
            again = tokens[:, :0]
            if held == self.length:
                self.cache.clear()
                again = torch.cat([text[:, : self.sinks], text[:, before + start - self.reread : before + start]], 1)
                held = self._restart
            stop = min(count, start + self.length - held)
            new = range(start, stop)
            inside = new if wanted is None else [t for t in wanted if t in new]
            if inside or stop == count:  # otherwise the next reset empties the cache before it is used
                part = torch.cat([again, tokens[:, start:stop]], 1)
                out.append(self.cache(part, keep=self._places(inside, start - again.shape[1], part.shape[1])))
            start, held = stop, held + stop - start
        self._remember(text)
        return torch.cat(out, 1)

    def _places(self, wanted: Sequence[int], first: int, count: int) -> Tensor | None:
        """Return the indices of wanted tokens in a part of `count` tokens that starts at `first`; None if all are wanted."""
        if len(wanted) == count:
            return None
        if isinstance(wanted, range):
            return torch.arange(wanted.start - first, wanted.stop - first, device=self.model.device)
        return torch.tensor([t - first for t in wanted], dtype=torch.int64, device=self.model.device)

    def held(self, positions: Sequence[int]) -> float:
        """Return the share of these positions of the first stream that the next token attends to."""
        tokens_read = self._longest if self._lengths is None else int(self._lengths[0])
        newest_outside = tokens_read - self._windowed(tokens_read + 1) + self.sinks
        return sum(p < tokens_read and (p < self.sinks or p > newest_outside) for p in positions) / len(positions)

    @property
    def slots(self) -> tuple[float, float]:
        """(tokens held, slots that a step attends over)."""
        return self.cache.slots

    def fork(self, streams: Sequence[int]) -> Self:
        """Return a decoder whose streams are copies of the given streams. The decoders share no cache."""
        other = super().fork(streams)
        other.cache = self.cache.fork(streams)
        return other

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache's K and V slots."""
        return self.cache.kv_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of K and V of the tokens held. Syncs with the host."""
        return self.cache.held_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the cache's ranks and positions, and of the token ids held for the next reset."""
        return self.cache.state_bytes + self._history.nbytes
