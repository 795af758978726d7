"""Cache policies, one file each, and the interface they implement."""

if __name__ != "kvbench.policies":
    raise ImportError("policies is kvbench.policies")

from kvbench.policies.policy import CacheView, Policy, PositionMode, Scope, Statistic
from kvbench.policies.statistics import AttentionSum

__all__ = ["AttentionSum", "CacheView", "Policy", "PositionMode", "Scope", "Statistic"]
