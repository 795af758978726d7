"""Policies of scope `slot` that use everything the compiled walk can trace."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch

from kvbench.policies import (
    Attention,
    AttentionSum,
    CacheView,
    HeadSizes,
    KeyNorm,
    Policy,
    RecentAttention,
    Statistic,
    TokenId,
    ValueNorm,
    Written,
)


class SquareSum(Statistic):
    def update(self, state, attention: Attention, view: CacheView):
        mass = attention.weights.sum(2)
        return state + mass * mass


class Last(Statistic):
    """Attention at the last step, the mean over the group."""

    def update(self, state, attention: Attention, view: CacheView):
        return attention.weights.mean(2)


class Lows(Statistic):
    """Number of times that a token got less than an even share."""

    def update(self, state, attention: Attention, view: CacheView):
        return state + (attention.weights.sum(2) < 0.8 / view.count).float()


class Peak(Statistic):
    """The highest weight so far, of any query head, and how many steps ago about it was seen. [B, H, S, 2]."""

    initial: ClassVar[float] = 0.125

    def shape(self, sizes: HeadSizes) -> tuple[int, ...]:
        return (2,)

    def update(self, state, attention: Attention, view: CacheView):
        most = attention.weights.amax(2)
        peak, since = state.unbind(-1)
        return torch.stack([torch.maximum(peak, most), torch.where(most >= peak, 0.0, since + 1)], -1)


class Decayed(Statistic):
    """The norm of the key, to which attention is added, both of which fade."""

    def written(self, token: Written):
        return token.keys.float().norm(dim=-1)

    def update(self, state, attention: Attention, view: CacheView):
        return state * 0.9 + attention.weights.sum(2)


class Ends(Statistic):
    """Two dims of the key, and the position. [*n, 3]."""

    sees = ()

    def shape(self, sizes: HeadSizes) -> tuple[int, ...]:
        return (3,)

    def written(self, token: Written):
        position = token.position.expand(token.keys.shape[:-1])
        return torch.stack([token.keys[..., 0].float(), token.keys[..., 1].float(), position.float()], -1)


class Deviation(Policy):
    """Mean plus deviation of attention: statistics over age, and a root."""

    statistics = (AttentionSum(), SquareSum())

    def importance(self, view: CacheView):
        total, squares = (view.state(s) for s in self.statistics)
        mean = total / (view.age + 1)
        variance = (squares / (view.age + 1) - mean**2).clamp(min=0)
        return (mean + variance.sqrt()).masked_fill(view.age < 2, inf)


class Counted(Policy):
    """A counter, whose many ties rank decides."""

    statistics = (Lows(),)

    def importance(self, view: CacheView):
        return torch.where(view.rank > view.count - 3, torch.inf, -view.state(Lows()))


class Newest(Policy):
    """The last query alone decides, and the sinks stay."""

    statistics = (Last(),)

    def importance(self, view: CacheView):
        return view.state(Last()).where(view.position >= 2, inf)


class Window(Policy):
    """Mean of the last three queries' attention, like a decoding SnapKV without pooling."""

    statistics = (RecentAttention(3),)

    def importance(self, view: CacheView):
        return view.state(RecentAttention(3)).mean(-1).masked_fill(view.age < 3, inf)


class Peaks(Policy):
    """A statistic with two numbers beside one with one, logarithms, and where the head and the layer are."""

    statistics = (Peak(), AttentionSum())

    def importance(self, view: CacheView):
        peak, since = view.state(Peak())[..., 0], view.state(Peak())[..., 1]
        odd = (view.head % 2 == 1) | (view.layer * 2 + 1 > view.num_layers)
        fading = (peak + 1e-3).log() - since * 0.05
        return torch.where(odd, fading, view.state(AttentionSum()).exp()) + view.uniform() * 1e-3


class Norms(Policy):
    """Values that are computed when a token is written, and nothing else: never updated."""

    statistics = (KeyNorm(), ValueNorm())

    def importance(self, view: CacheView):
        return view.state(ValueNorm()) / (view.state(KeyNorm()) + 1e-3)  # an empty slot is 0, and no NaN


class Mixed(Policy):
    """Statistics that are written, updated, both or neither: eight numbers. Some depend on the token id and the prompt."""

    statistics = (Ends(), Decayed(), TokenId(), AttentionSum(), Peak())

    def importance(self, view: CacheView):
        ends = view.state(Ends())
        kind = (view.tokens // 7 % 3).float()
        worth = view.state(Decayed()) + ends[..., :2].abs().sum(-1) + kind * 0.5 + (ends[..., 2] == view.position.float()) * 2
        return torch.minimum(worth, view.state(AttentionSum()) + 20).masked_fill(view.position < view.prompt // 2, 50.0)


@dataclass(frozen=True)
class Group(Policy):
    """The maximum over the group, and a clamp by tensors."""

    statistics = (Peak(), Lows())

    def importance(self, view: CacheView):
        peak = view.state(Peak()).amin(-1) + view.state(Peak()).sum(-1, keepdim=True).mean(-1)
        return peak.clamp(view.state(Lows()) * 0.01, view.age.float() + 1).square()


PLAIN = [Deviation(), Counted(), Newest(), Window(), Peaks(), Group()]  # every number starts from a constant
WRITTEN = [Norms(), Mixed()]
