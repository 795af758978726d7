"""Four regressions, injected on purpose: what a gate has to see. Each is a context in which the engine is broken that way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from harness.engine.loop import CachedDecoder
from harness.engine.slots import Slots
from harness.engine.walk import Walk
from harness.tasks import perplexity
from policies.h2o import H2O


@contextmanager
def slowdown(share: float = 0.3) -> Iterator[None]:
    """H2O's steps take so much longer."""
    plain = CachedDecoder.__call__

    def slower(self, tokens, valid=None, keep=None):
        started = time.perf_counter()
        result = plain(self, tokens, valid, keep)
        if isinstance(self.config.policy, H2O):
            until = time.perf_counter() + share * (time.perf_counter() - started)
            while time.perf_counter() < until:
                pass
        return result

    with patch.object(CachedDecoder, "__call__", slower):
        yield


@contextmanager
def wrong_rank() -> Iterator[None]:
    """Keys of a full cache are turned to their neighbour's rank. Not dense's: the check at load would refuse that model."""
    plain = Walk._key_turns

    def turns(self, rows, rotation):
        right = plain(self, rows, rotation)
        return right if self.slots.capacity is None else right.roll(1, -2)

    with patch.object(Walk, "_key_turns", turns):
        yield


@contextmanager
def larger_cache() -> Iterator[None]:
    """A bounded cache has one slot more."""
    plain = Slots.__init__

    def larger(self, shape, layers, total, policy, capacity, *rest):
        plain(self, shape, layers, total, policy, capacity if capacity is None else capacity + 1, *rest)

    with patch.object(Slots, "__init__", larger):
        yield


@contextmanager
def worse(nats: float = 0.005) -> Iterator[None]:
    """Every token's NLL is so much higher: half a percent of perplexity."""
    plain = perplexity.cross_entropy
    with patch.object(perplexity, "cross_entropy", lambda *args, **kwargs: plain(*args, **kwargs) + nats):
        yield
