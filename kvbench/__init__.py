"""KV Bench: what an LLM loses, and gains, when part of its KV cache is thrown away."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["AttentionSum", "CacheView", "Policy", "PositionMode", "Scope", "Statistic"]

if TYPE_CHECKING:
    from kvbench.policies import AttentionSum, CacheView, Policy, PositionMode, Scope, Statistic
else:

    def __getattr__(name: str) -> object:
        """The names above, imported on first use: they need torch, and `bench --help` should not wait for it."""
        if name in __all__:
            from kvbench import policies

            return getattr(policies, name)
        raise AttributeError(f"module 'kvbench' has no attribute '{name}'")
