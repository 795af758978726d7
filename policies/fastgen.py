"""FastGen: every head keeps the smallest of five sets of tokens that holds enough of its attention.

Source: Ge et al. 2023, arXiv:2310.01801, Section 3 and Algorithm 1. The authors released no code; cold-compress was read, too:
AnswerDotAI/cold-compress 15bb300, cache.py (`KVCacheHybrid`) and cache_configs/fastgen.yaml.
Differs: heavy hitters are the tokens with the most attention in sum; cold-compress divides by the number of queries that could
    see a token, and keeps the first 4 tokens in every kind (here: `sinks`, 0 unless asked for). Special tokens of several ids are
    not recognised. If nothing holds enough, `full` does; cold-compress takes the first kind instead when `full` is not in its
    list. Nothing is evicted while decoding; the paper continues to evict within a head's set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.statistic import Attention, Statistic
from kvbench.policies.statistics import AttentionSum, TokenId
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class LocalAttentionSum(Statistic):
    """Attention a token has received while it was among the newest, summed over steps and the query group."""

    share: float  # of the prompt that counts as newest

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Add the group's attention if the token is still local. [B, H, S] float32."""
        return state + attention.weights.sum(2) * (view.age < _tokens(self.share, view.prompt))


@dataclass(frozen=True)
class FastGen(Policy):
    """Keep the first of five sets that is enough: special tokens; + punctuation; + heavy hitters; + newest tokens; all tokens.

    Raises:
        ValueError: a share is not between 0 and 1, or `sinks` is negative.
    """

    outcome = True
    scope = "head"

    threshold: float = 0.9  # share of a head's attention that must be kept
    heavy_hitters: float = 0.3  # share of the prompt
    recent: float = 0.3  # share of the prompt
    sinks: int = 0  # tokens that open the stream and belong to every kind
    special: tuple[int, ...] = ()  # ids of special tokens
    punctuation: tuple[int, ...] = ()  # ids of punctuation

    def __post_init__(self) -> None:
        for name in ("threshold", "heavy_hitters", "recent"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)} must be between 0 and 1")
        if self.sinks < 0:
            raise ValueError(f"sinks {self.sinks} must not be negative")
        for name in ("special", "punctuation"):  # a file gives lists, which can't be hashed
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Attention received, in all and while new, and token ids."""
        return AttentionSum(), LocalAttentionSum(self.recent), TokenId()

    def importance(self, view: CacheView) -> Tensor:
        """The share of attention received; 2 more for tokens of the head's kind. [B, H, S] float32."""
        received = _received(view, AttentionSum())
        share = received / received.sum(-1, keepdim=True).clamp(min=1e-30)
        return share + 2 * self._chosen(view).float()

    def prompt_budgets(self, views: Sequence[CacheView], capacity: int | None) -> Tensor:
        """Count the tokens of each head's kind. [B, L, H] int64."""
        return torch.stack([self._chosen(view).sum(-1) for view in views], 1)

    def _chosen(self, view: CacheView) -> Tensor:
        """Tokens of the first kind that holds enough of the head's attention. [B, H, S] bool."""
        received, local = _received(view, AttentionSum()), _received(view, LocalAttentionSum(self.recent))
        special = (view.position < self.sinks) | _is_any(view.tokens, self.special)
        punctuation = special | _is_any(view.tokens, self.punctuation)
        frequent = punctuation | self._heavy_hitters(view, received, punctuation)
        newest = frequent | (view.age < _tokens(self.recent, view.count))
        held = [received * kind for kind in (special, punctuation, frequent)] + [torch.where(frequent, received, local)]
        chosen = torch.ones_like(special)
        for kind, mass in reversed(list(zip((special, punctuation, frequent, newest), held, strict=True))):
            enough = mass.double().sum(-1, keepdim=True) >= self.threshold * received.double().sum(-1, keepdim=True)
            chosen = torch.where(enough, kind, chosen)
        return chosen & view.valid

    def _heavy_hitters(self, view: CacheView, received: Tensor, others: Tensor) -> Tensor:
        """The most attended tokens of those that are not kept anyway, and of these if there are too few. [B, H, S] bool."""
        oldest_first = view.by_rank(received.masked_fill(others | ~view.valid, -1))
        place = view.by_slot(oldest_first.argsort(dim=-1, stable=True).argsort(-1))  # 0: the least attended
        count = (self.heavy_hitters * view.count.double()).ceil()
        return place >= place.shape[-1] - count


def _tokens(share: float, length: Tensor) -> Tensor:
    """A share of a length in whole tokens, at least one."""
    return (share * length.double()).long().clamp(min=1)


def _received(view: CacheView, statistic: Statistic) -> Tensor:
    """A sum of attention; 0 in empty slots. [B, H, S] float32."""
    return view.state(statistic).masked_fill(~view.valid, 0)


def _is_any(tokens: Tensor, ids: tuple[int, ...]) -> Tensor:
    """Which tokens have one of these ids. [B, H, S] bool."""
    return reduce(torch.logical_or, (tokens == i for i in ids), torch.zeros_like(tokens, dtype=torch.bool))
