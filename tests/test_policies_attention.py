"""Policies that score by attention, and the probe for retrieval heads, against plain rules over a model's dense attention."""

import copy
import re
from functools import cache

import attention_rules as rules
import pytest
import torch
from attention_rules import best, lists_of, walk_lists, walk_policy
from helpers import H2O, Random, SnapKV, model_of, tokens_of
from prompt_views import dense_pass, kept, prompt_views

from kvbench.harness.run.head_table import retrieval_scores
from kvbench.policies.chunkkv import ChunkKV
from kvbench.policies.d2o import D2O
from kvbench.policies.finch import Finch
from kvbench.policies.rkv import RKV
from kvbench.policies.roco import RoCo
from kvbench.policies.scissorhands import Scissorhands
from kvbench.policies.tova import Tova

pytestmark = pytest.mark.fast


LENGTH, SEED, PROMPT = 44, 3, 10
CASES = {
    "tova": (Tova(), rules.tova(False)),
    "tova kvpress": (Tova("kvpress"), rules.tova(True)),
    "snapkv max": (SnapKV(window=5), rules.snapkv(5, 7, "max", "sum")),
    "snapkv avg": (SnapKV(window=3, kernel=5, pool="avg"), rules.snapkv(3, 5, "avg", "sum")),
    "snapkv group max": (SnapKV(window=4, kernel=3, pool="avg", group="max"), rules.snapkv(4, 3, "avg", "max")),
    "snapkv kvpress": (SnapKV("kvpress", window=6), rules.kvpress_snapkv(6, 5)),
    "random": (Random(), rules.random_tokens(False, 0, 0)),
    "random prompt": (Random(keep_prompt=True), rules.random_tokens(True, 0, 0)),
    "random all": (Random(keep_prompt=True, sinks=2, window=3), rules.random_tokens(True, 2, 3)),
    "h2o none": (H2O(window=3), rules.h2o(3, "none")),
    "h2o age": (H2O(window=3, normalise="age"), rules.h2o(3, "age")),
    "h2o visible": (H2O(window=0, normalise="visible"), rules.h2o(0, "visible")),
    "scissorhands exact": (Scissorhands(4, 12, 12), rules.scissorhands(4, 12, 1, 1.0)),
    "scissorhands buckets": (Scissorhands(2, 20, 4, 0.7), rules.scissorhands(2, 20, 5, 0.7)),
    "roco": (RoCo(protected=4, window=2), rules.roco(4, 2)),
    "roco window first": (RoCo(protected=3, window=10), rules.roco(3, 10)),
    "finch": (Finch(window=6), rules.finch(6, None)),
    "finch delimiter": (Finch(window=8, delimiter=95), rules.finch(8, 95)),
    "chunkkv": (ChunkKV(SnapKV(window=5, pool="avg"), 4), rules.chunks(rules.snapkv(5, 7, "avg", "sum"), 4, False)),
    "chunkkv kvpress": (ChunkKV(SnapKV("kvpress", 6), 4, "kvpress"), rules.chunks(rules.kvpress_snapkv(6, 5), 4, True)),
    "rkv": (RKV(window=4), rules.rkv(4, 7, 0.1, 0.5, False)),
    "rkv official": (RKV("official", 3, 5, similar=0.2), rules.rkv(3, 5, 0.07, 0.2, False)),
    "rkv prompt": (RKV(window=4, attention=0.9, keep_prompt=True), rules.rkv(4, 7, 0.9, 0.5, True)),
}
every_case = pytest.mark.parametrize("case", CASES)


def stream(seed: int) -> torch.Tensor:
    """Two streams. Token 95 is the delimiter: 5 before the end in one, absent from the other."""
    tokens = tokens_of(LENGTH, streams=2, seed=seed) % 95
    tokens[0, -6] = 95
    return tokens


@cache
def dense(family: str, seed: int):
    return dense_pass(model_of(family), stream(seed))


@cache
def whole_pasts(family: str, seed: int, prompt: int):
    """Pasts of every layer after a prompt that nothing was evicted from."""
    out = []
    for layer, seen in sorted(dense(family, seed).items()):
        pasts = lists_of(model_of(family), layer, seen, stream(seed), prompt, SEED)
        walk_lists(pasts, seen, lambda past: [], LENGTH)
        out.append(pasts)
    return out


@pytest.mark.parametrize(("family", "seed"), [("llama", 0), ("qwen3", 2)])
@every_case
def test_after_a_prompt_it_keeps_what_the_rule_keeps(case, family, seed):
    policy, rule = CASES[case]
    views = prompt_views(model_of(family), stream(seed), policy.bind(30), SEED)
    for view, pasts in zip(views, whole_pasts(family, seed, LENGTH), strict=True):
        for capacity in (11, 17, 30):
            assert kept(policy.bind(capacity), view, capacity) == [best(past, rule, capacity) for past in pasts]


@pytest.mark.parametrize(("family", "seed", "layer", "capacity"), [("llama", 0, 0, 11), ("qwen3", 1, 1, 20)])
@every_case
def test_step_by_step_it_evicts_what_the_rule_evicts(case, family, seed, layer, capacity):
    policy, rule = CASES[case]
    model, seen, tokens = model_of(family), dense(family, seed)[layer], stream(seed)
    pasts = lists_of(model, layer, seen, tokens, PROMPT, SEED)
    walk_lists(pasts, seen, rule, capacity)
    ours = walk_policy(model, layer, seen, tokens, policy.bind(capacity), capacity, PROMPT, SEED)
    assert ours == [past.held for past in pasts]


@every_case
def test_of_a_prompt_only_the_last_steps_matter_to_a_statistic_that_says_so(case):
    """States at the end are the same if a statistic sees no step before its last."""
    policy = CASES[case][0].bind(11)
    whole = prompt_views(model_of("llama"), stream(0), policy)[0].states

    def late(statistic):
        class Late(type(statistic)):
            def update(self, state, attention, view):
                seen = self.last is None or view.step[0, 0, 0] >= LENGTH - self.last
                return super().update(state, attention, view) if seen else state

        return Late(**vars(statistic))

    class Shown:
        statistics = tuple(late(s) for s in policy.statistics)

    parts = prompt_views(model_of("llama"), stream(0), Shown())[0].states
    for state, part in zip(whole.values(), parts.values(), strict=True):
        torch.testing.assert_close(part, state, atol=0, rtol=0)


class Given:
    """A policy whose importance is known."""

    def __init__(self, importance: torch.Tensor) -> None:
        self.importance = lambda view: importance


@every_case
def test_slots_in_any_order_and_garbage_in_empty_ones_change_nothing(case):
    policy = CASES[case][0].bind(17)
    view = prompt_views(model_of("llama"), stream(0), policy, SEED)[0]
    draw, empty = torch.Generator().manual_seed(1), 4
    order = torch.stack([torch.randperm(LENGTH + empty, generator=draw) for _ in range(4)]).view(2, 2, -1)

    def moved(x: torch.Tensor, garbage: float) -> torch.Tensor:
        x = torch.cat([x, torch.full_like(x[:, :, :empty], garbage)], 2)
        return x.take_along_dim(order.view(*order.shape, *[1] * (x.dim() - 3)), 2)

    other = copy.copy(view)
    other.rank, other.position = moved(view.rank, LENGTH + empty), moved(view.position, LENGTH - 2)
    other.keys, other.values = moved(view.keys, 1e6), moved(view.values, 1e6)
    other.states = {s: moved(x, 50.0) for s, x in view.states.items()}
    importance = policy.importance(other)
    assert not importance.isnan().any()
    by_rank = importance.take_along_dim(other.rank.argsort(-1), 2)[..., :LENGTH]
    assert kept(Given(by_rank), view, 17) == kept(policy, view, 17)


def test_a_prompt_longer_than_the_cache_is_sampled():
    """Its tokens rank above all others, but may go."""
    policy = Random(keep_prompt=True).bind(5)
    (view, *_) = prompt_views(model_of("llama"), stream(0), policy, SEED)
    assert torch.equal(policy.importance(view), view.uniform())
    view.prompt = view.prompt * 0 + 7
    importance = policy.importance(view)
    assert torch.equal(importance[..., :7], view.uniform()[..., :7])
    assert importance[..., 7:].max() < 0


def test_h2o_by_age_keeps_what_is_attended_to_while_the_prompt_is_still_read():
    policy = H2O(window=0, normalise="age").bind(4)
    view = prompt_views(model_of("llama"), stream(0)[:, :8], policy)[0]
    view.prompt = torch.full_like(view.step, 100)
    assert torch.equal(policy.importance(view), view.state(policy.statistics[0]))


@pytest.mark.parametrize(
    ("policy", "capacity", "word"),
    [
        (SnapKV(window=8), 8, "window 8"),
        (SnapKV(kernel=4), 8, "kernel 4"),
        (Random(sinks=4, window=5), 8, "sinks 4 + window 5"),
        (Scissorhands(history=10, buckets=4), 8, "multiple of buckets 4"),
        (RoCo(protected=9), 8, "9 protected tokens"),
        (Finch(window=9), 8, "question of 9"),
        (ChunkKV(SnapKV(window=8)), 8, "window 8"),
        (RKV(attention=2.0), 8, "attention 2.0"),
        (D2O(), 6, "sinks 4 + window 3"),
    ],
)
def test_what_a_capacity_can_not_hold_is_refused(policy, capacity, word):
    with pytest.raises(ValueError, match=re.escape(word)):
        policy.bind(capacity)


def test_the_defaults_of_a_variant_are_those_of_its_code():
    resolved = [(p.window, p.kernel, p.pool) for p in (SnapKV(v).bind(200) for v in ("paper", "official", "kvpress"))]
    assert resolved == [(32, 7, "max"), (32, 7, "max"), (64, 5, "avg")]
    assert (ChunkKV().bind(99).chunk, ChunkKV(variant="kvpress").bind(99).chunk) == (10, 20)
    assert (RKV().bind(99).attention, RKV("official").bind(99).attention) == (0.1, 0.07)
    assert RoCo().bind(100).protected == 31


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_scores_are_attention_to_the_token_after_the_earlier_copy(family):
    model, copy, streams = model_of(family), 12, 3
    scores = retrieval_scores(model, copy, streams, seed=5)
    first = torch.randint(96, (streams, copy), generator=torch.Generator().manual_seed(5))
    assert [len(row) for row in scores] == [shape.heads for shape in model.layers]
    if family != "llama":  # the plain pass knows no sink logits, soft caps or windows
        assert all(0 <= x <= 1 for row in scores for x in row)
        return
    seen = dense_pass(model, torch.cat([first, first], 1))
    for layer, row in enumerate(scores):
        weights = seen[layer].weights  # [B, H, G, T, T]
        found = torch.stack([weights[:, :, :, copy + i, i + 1] for i in range(copy - 1)]).mean((0, 1)).amax(-1)
        torch.testing.assert_close(torch.tensor(row), found, atol=1e-5, rtol=0)
