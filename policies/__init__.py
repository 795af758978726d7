"""Cache policies, one file each, and the interface they implement."""

if __name__ != "kvbench.policies":
    raise ImportError("policies is kvbench.policies")

from kvbench.policies.merges import Evicted, Merged, Merging, Nearest
from kvbench.policies.policy import Composed, Policy, PositionMode, Scope
from kvbench.policies.selects import Queries, Selecting
from kvbench.policies.statistic import Attention, HeadSizes, Seen, Statistic, Written
from kvbench.policies.statistics import AttentionSum, KeyNorm, Recent, RecentAttention, TokenId, ValueNorm
from kvbench.policies.view import CacheView

__all__ = [
    "Attention", "AttentionSum", "CacheView", "Composed", "Evicted", "HeadSizes", "KeyNorm", "Merged", "Merging", "Nearest",
    "Policy", "PositionMode", "Queries", "Recent", "RecentAttention", "Scope", "Seen", "Selecting", "Statistic", "TokenId",
    "ValueNorm", "Written",
]  # fmt: skip
