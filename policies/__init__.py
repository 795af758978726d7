"""Cache policies, one file each, and the interface they implement."""

from policies.policy import CacheView, Policy, PositionMode, Scope
from policies.statistics import AttentionSum, Statistic

__all__ = ["AttentionSum", "CacheView", "Policy", "PositionMode", "Scope", "Statistic"]
