"""Perplexity of a mean NLL, and the change of perplexity that a difference in NLL means. Neither overflows."""

from __future__ import annotations

import math

_MAX_NATS = 700.0  # largest argument of the exponential without overflow


def perplexity(nll: float) -> float:
    """Return the perplexity of a mean NLL in nats per token."""
    return math.exp(min(nll, _MAX_NATS))


def percent_lost(nats: float) -> float:
    """Convert a difference in nats per token to % of perplexity."""
    return 100 * math.expm1(min(nats, _MAX_NATS))
