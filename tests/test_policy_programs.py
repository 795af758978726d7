"""Policies that compare slots or heads, whatever they compute: the compiled walk gives what the plain walk gives."""

from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

import pytest
import torch
from every_policy import instances
from factories import MODES, needs_compiler
from test_traced_policies import check
from torch import Tensor
from torch.nn import functional

from kvbench.harness.engine.kernel_interface import why_not_compiled
from kvbench.harness.kernels.expressions import NotTraceableError
from kvbench.harness.kernels.policy_program import Layout, programs
from kvbench.policies import Attention, CacheView, HeadSizes, Policy, Statistic
from kvbench.policies.adakv import AdaKV
from kvbench.policies.d2o import D2O
from kvbench.policies.expected_attention import ExpectedAttention
from kvbench.policies.h2o import H2O
from kvbench.policies.merges import Evicted, Merged, Merging, positions_for
from kvbench.policies.rkv import RKV
from kvbench.policies.statistic import Written
from kvbench.policies.statistics import AttentionSum

FAST = ["adakv", "keydiff", "merging", "tova"]
COMPILED = [
    *FAST, "cake", "cam", "chunkkv", "criticalkv", "cur", "d2o", "expected_attention", "finch", "lacache", "lagkv", "rkv", "roco",
    "snapkv", "triattention",
]  # fmt: skip


@pytest.mark.parametrize("name", [*COMPILED, "duo_attention", "fastgen", "headkv", "pyramidkv"])
def test_shipped_policies_that_compare_slots_or_heads_are_compiled(tmp_path, name):
    assert why_not_compiled(instances(tmp_path, [name])[name].bind(64)) == ""


@needs_compiler
def test_keys_are_merged_in_layers_without_rope():
    """The second layer rotates nothing."""
    check(D2O(H2O(window=4)), 12, [20, 9, 5, 1, 6], 2, mode="stream", family="smollm3", offers=["compiled walk"])


def test_queries_of_llama_3_are_not_too_many_numbers():
    """Their moments are 66,564 numbers a head."""
    assert programs(ExpectedAttention().bind(64), Layout(1, 64, HeadSizes(4, 128, 128), 32, 0)).sums == 4 * 129**2


def test_what_programs_lack_is_named(tmp_path):
    """Leverage solves equations."""
    because = why_not_compiled(instances(tmp_path, ["leverage"])["leverage"].bind(64))
    assert because == "'linalg_cholesky_ex' of a tensor can't be compiled"


@needs_compiler
@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in FAST else pytest.mark.slow("builds it")) for x in COMPILED])
def test_programs_of_shipped_policies_keep_what_the_plain_walk_keeps(tmp_path, name):
    """A prompt, blocks and single tokens, in all position modes, with evictions of one and of several tokens at once."""
    policy = instances(tmp_path, [name])[name]
    for number, mode in enumerate(MODES if positions_for(policy) == "cache" else ["stream"] * 2):
        many = number % 2
        check(policy, 20, [15, 18, 1, 20, 12], 1 + many, mode, 1 + 2 * many, prompt=25 * many, offers=["compiled walk"])


@dataclass(frozen=True)
class Favoured(Policy):
    """One head of a layer keeps nearly everything for 40 steps, then the next one. Many tokens are worth the same."""

    scope = "head"

    def pool_floor(self, capacity: int) -> int:
        """Three tokens."""
        return 3

    def importance(self, view: CacheView) -> Tensor:
        """The favoured head's tokens come first; every head keeps its two newest tokens."""
        worth = view.position % 9 + 6.0 * (view.head == view.step // 40 % 2)
        return worth.masked_fill(view.rank >= view.count - 2, inf)


@needs_compiler
@pytest.mark.parametrize("policy", [Favoured(), AdaKV(H2O(2), 0.1)], ids=["by rank", "by slot"])
@pytest.mark.parametrize(("every", "mode"), [(1, "cache"), (4, "clamped")])
def test_heads_that_compete_keep_what_the_plain_walk_keeps(policy, every, mode):
    """In two streams; by the second block, the head that held most tokens holds fewest."""
    check(policy, 20, [30, 45, 1, 9], 2, mode, every, offers=["compiled walk"])


@dataclass(frozen=True)
class FarFromMean(Favoured):
    """The heads of a layer compete. A token is worth its value's distance from the mean value, weighted by attention."""

    statistics = (AttentionSum(),)

    def importance(self, view: CacheView) -> Tensor:
        """[B, H, S] float32."""
        mean = (view.state(AttentionSum()) * view.valid)[:, :, None] @ view.values
        return (view.values - mean).norm(dim=-1)


@needs_compiler
def test_empty_slots_of_heads_that_compete_hold_numbers():
    """Memory that nobody wrote is NaN here, and 0 times NaN is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        check(FarFromMean(), 12, [20, 9, 1, 6], 2, offers=["compiled walk"])
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class ReadsBothValues(Merging):
    """A merge that changes the second token's value, and then reads all values as they were."""

    score: Policy = field(default_factory=lambda: H2O(2))

    def merge(self, view: CacheView, evicted: Evicted) -> Merged:
        """The attention received grows by the sum of a value."""
        second = (view.rank == 1).float().argmax(-1, keepdim=True)[..., None].expand(-1, -1, -1, view.values.shape[-1])
        values = view.values.scatter(2, second, torch.full(second.shape, 0.5))
        statistic = self.statistics[0]
        return Merged(values, None, {statistic: view.state(statistic) + view.values.sum(-1)})


@needs_compiler
def test_a_merge_that_reads_what_it_replaces():
    check(ReadsBothValues(), 12, [20, 9, 1, 6], 2, offers=["compiled walk"])


@needs_compiler
def test_products_of_several_tiles_are_the_plain_ones():
    """With 41 slots: a tile has 32, and of the product of keys with themselves one half is computed."""
    check(RKV(), 40, [45, 20, 1, 9], 2, offers=["compiled walk"])


# Each takes the attention received [B, H, S] in order of rank, 0 where there is no token.
IN_ORDER = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "places": lambda x: x.argsort(dim=-1, stable=True).argsort(-1).float(),
    "descending": lambda x: x.sort(-1, descending=True).values,
    "topk": lambda x: x.topk(3).values.sum(-1, keepdim=True).expand(x.shape),
    "deviation": lambda x: x - x.mean(-1, keepdim=True) / (x.std(-1, keepdim=True) + 1),
    "variance": lambda x: x + torch.var_mean(x, -1, keepdim=True)[0],
    "norms": lambda x: x * x.norm(dim=-1, keepdim=True) + functional.normalize(x, dim=-1) + x.norm(1, dim=-1, keepdim=True),
    "extremes": lambda x: x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True) + x,
    "pooled": lambda x: functional.max_pool1d(x, 3, 1, 1) + functional.avg_pool1d(x, 5, 1, 2),
    "shifted": lambda x: functional.pad(x, (2, -2), value=0.5) - x.roll(1, -1),
    "joined": lambda x: torch.cat([x[..., 3:], x[..., :3]], -1) + torch.stack([x, x * 2], -1).sum(-1),
    "scattered": lambda x: torch.zeros_like(x).scatter(-1, x.argsort(dim=-1, stable=True), x),
    "added": lambda x: torch.zeros_like(x).scatter_add(-1, (x > 0.1).long(), x),
    "selected": lambda x: x.index_select(-1, torch.arange(x.shape[-1] - 1, -1, -1)),
    "counted": lambda x: (x > 0.2).sum(-1, keepdim=True) + (x > 0.1).any(-1, keepdim=True) - x.bool().all(-1, keepdim=True) * 1.0,
    "largest": lambda x: x + x.max(-1, keepdim=True).indices + x.min(-1).values[..., None] + x.argmax(-1, keepdim=True),
    "middle": lambda x: x - x.median(-1, keepdim=True).values + x.kthvalue(3, -1).values[..., None],
    "convolved": lambda x: functional.conv1d(x.flatten(0, 1)[:, None], torch.full((1, 1, 3), 0.25), padding=1).view(x.shape),
    "indexed": lambda x: x[..., torch.tensor([3, 0, 2])].sum(-1, keepdim=True) * x + x.flip(-1),
    "product": lambda x: (1 + x).prod(-1, keepdim=True).expand(x.shape),
    "pairs": lambda x: (x[..., None] @ x[..., None, :]).amax(-1) + (x[..., None] * x[..., None, :] > 0.01).sum(-2),
    "whole": lambda x: ((x * 9).long() // 2 * 2 + (-3 * x).floor() % 2 - ((x * 50).long() % 7 << 1)).float(),
    "chosen": lambda x: torch.where(x > x.mean(-1, keepdim=True), x, -x).masked_fill(x == 0, 0.25).clamp(-0.5, 0.5),
    "functions": lambda x: (1 + x).log() + x.exp().sqrt() + x.tanh() + x.sigmoid() + (x + 1).rsqrt() + x**3 + (1 - x).abs(),
    "finite": lambda x: (x / 0).nan_to_num(posinf=3.0),
    "in_place": lambda x: (x * 2).add_(1).masked_fill_(x > 0.3, 7).clamp_min_(1.5),
}  # fmt: skip


@dataclass(frozen=True)
class Rule(Statistic):
    """One of IN_ORDER, of the attention received by a head's tokens at this step."""

    name: str

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """The rule's result, where there is a token. [B, H, S] float32."""
        received = view.by_rank(attention.weights.sum(2).masked_fill(~view.valid, 0))
        if self.name == "whole":  # rounding to whole numbers would make steps of the last digits
            received = (received * 64).round() / 64 + 1 / 200
        return torch.where(view.valid, view.by_slot(IN_ORDER[self.name](received)), 0.0)


@dataclass(frozen=True)
class Relative(Statistic):
    """Numbers of which each depends on the first: they change in place only after all of them were read. [B, H, S, 3]."""

    def shape(self, sizes: HeadSizes) -> tuple[int, ...]:
        """Three numbers."""
        return (3,)

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """[B, H, S, 3] float32."""
        return state * 0.5 + attention.weights.sum(2)[..., None] - state[..., :1] * torch.tensor([0.25, 0.5, 1])


@dataclass(frozen=True)
class Sum(Statistic):
    """A head's values, summed over its tokens. [B, H, E] float64."""

    sees: ClassVar = ()
    per: ClassVar = "head"

    def shape(self, sizes: HeadSizes) -> tuple[int, ...]:
        """One number per dim of a value."""
        return (sizes.value_dim,)

    def written(self, token: Written) -> Tensor:
        """[*n, E] float32."""
        return token.values.float()


@dataclass(frozen=True)
class OfHead(Policy):
    """Evicts by the values' distance from their mean, with a statistic for each rule."""

    statistics = (Sum(), *map(Rule, IN_ORDER))
    scope = "head"

    def importance(self, view: CacheView) -> Tensor:
        """[B, H, S] float32."""
        mean = (view.state(Sum()) / view.count).float()[:, :, None]
        return (view.values - mean).square().sum(-1) + view.keys.abs().amax(-1) + view.rotated_keys[..., 0]


@dataclass(frozen=True)
class OfLayer(OfHead):
    """Also compares heads: the token that is worth least in all of them goes."""

    statistics = (Sum(), Relative(), *map(Rule, ("softmax", "places", "pairs", "counted")))
    scope = "layer"

    def importance(self, view: CacheView) -> Tensor:
        """[B, H, S] float32."""
        worth = view.by_rank(super().importance(view))
        return view.by_slot((worth.mean(1, keepdim=True) + worth.amin(1, keepdim=True)).expand(worth.shape))


@pytest.mark.slow("builds a long program")
@needs_compiler
def test_a_users_rule_of_any_operations_is_compiled():
    check(OfHead(), 12, [9, 14, 1, 15], 2, offers=["compiled walk"])


@needs_compiler
def test_a_users_rule_that_compares_heads_is_compiled():
    check(OfLayer(), 12, [9, 14, 1, 15], 2, every=2, offers=["compiled walk"])


def hashed(view: CacheView) -> Tensor:
    """Whole numbers, changed in place, that become importance only at the end."""
    x = view.position.clone()
    x *= 2654435761
    x %= 1009
    x += view.count * 0
    return x


def made(importance, *statistics: Statistic) -> Policy:
    """A policy of scope head."""
    members = {"statistics": statistics, "importance": lambda self, view: importance(view), "scope": "head"}
    return type("Made", (Policy,), members)()


UNUSUAL = {
    "whole numbers changed in place": made(hashed),
    "a column of equal numbers": made(
        lambda view: view.state(AttentionSum()) - view.state(AttentionSum()) @ torch.full((12, 1), 0.125), AttentionSum()
    ),
}


@needs_compiler
@pytest.mark.parametrize("policy", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_programs_keep_what_the_plain_walk_keeps(policy):
    check(policy, 11, [20, 9, 1, 6], offers=["compiled walk"])


class Undeclared(Statistic):
    """Reads what the walk does not pass."""

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """[B, H, S] float32."""
        return state + attention.queries.sum((2, 3))[..., None]


REFUSED = {
    "a statistic that reads attention.queries must name it": made(lambda view: view.age.float(), Undeclared()),
    "a branch that depends on a tensor": made(lambda view: view.age.float() if view.layer > 1 else -view.age.float()),
    "'_linalg_svd'": made(lambda view: view.keys.svd()[0][..., 0]),
    "a tensor of float16": made(lambda view: view.keys.half().sum(-1).float()),
    "a change in place of a tensor that was put in order": made(lambda view: view.by_rank(view.age.float()).mul_(2)),
    "more than 256 MiB": made(lambda view: (view.keys[..., None, :] * view.values[:, :, None]).repeat(1, 1, 1, 1, 9).sum((3, 4))),
    "ZeroDivisionError": made(lambda view: view.age * (1 // 0)),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_program_is_refused_and_says_why(why):
    with pytest.raises(NotTraceableError) as found:
        programs(REFUSED[why], Layout(1, 1024, HeadSizes(2, 8, 8), 2, 0))
    assert why in str(found.value)
