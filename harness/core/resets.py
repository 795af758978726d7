"""Facts about policies that empty the cache and read the text anew."""

from __future__ import annotations

from kvbench.policies import Policy
from kvbench.policies.reset import Reset


def holds_kv(policy: Policy) -> bool:
    """Whether K and V are held from one step to the next, either in slots with eviction or between two resets."""
    return policy.caches or isinstance(policy, Reset)


def read_per_token(policy: Policy, capacity: int) -> float:
    """Return the tokens that the model processes for each new token of a long stream, tokens read again included."""
    if not isinstance(policy, Reset):
        return 1.0
    bound = policy.bind(capacity)
    return (capacity + 1) / (capacity + 1 - bound.sinks - (bound.reread or 0))
