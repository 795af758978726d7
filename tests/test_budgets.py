"""Budgets, cadence and prompts against plain lists: the same kept positions at every step, and the same logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import pytest
import torch
from factories import CLOSE, MODES, uniform_number
from helpers import H2O, CacheConfig, CachedDecoder, Dense, Random, model_of, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from listed_budgets import by_distance_from_mean, by_key_norm, by_mass, run
from torch import Tensor

from kvbench.harness.engine.method import EAGER, FASTEST, PLAIN_WALK, TOKEN_BY_TOKEN
from kvbench.policies import CacheView, Composed, HeadSizes, KeyNorm, Policy, RecentAttention, Seen, Statistic, Written

pytestmark = pytest.mark.fast


LENGTH, CAPACITY = 44, 9
DOUBLE = torch.float64


@dataclass(frozen=True)
class SmallKeys(Policy):
    """Knorm, from norms that are computed when a token is written."""

    statistics = (KeyNorm(),)

    def importance(self, view: CacheView) -> Tensor:
        return -view.state(KeyNorm())


@dataclass(frozen=True)
class UnitKeys(Statistic):
    """The sum of the unit keys that a head holds."""

    sees: ClassVar[tuple[Seen, ...]] = ()
    per = "head"

    def shape(self, sizes: HeadSizes) -> tuple[int, ...]:
        return (sizes.key_dim,)

    def written(self, token: Written) -> Tensor:
        return torch.nn.functional.normalize(token.keys.double(), dim=-1)


@dataclass(frozen=True)
class Apart(Policy):
    """KeyDiff on unrotated keys, the newest token apart."""

    statistics = (UnitKeys(),)
    scope = "head"

    def importance(self, view: CacheView) -> Tensor:
        mean = torch.nn.functional.normalize(view.state(UnitKeys()), dim=-1)
        unit = torch.nn.functional.normalize(view.keys.double(), dim=-1)
        return (-(unit * mean[:, :, None]).sum(-1).float()).masked_fill(view.age < 1, inf)


@dataclass(frozen=True)
class Tabled(Composed):
    """Budgets from a table."""

    table: tuple[tuple[int, ...], ...] = ()

    def budgets(self, capacity: int, layers: int, heads: int, prompt: int | None) -> Sequence[Sequence[int]]:
        return self.table


@dataclass(frozen=True)
class Pooled(Composed):
    """The heads of a layer compete."""

    floor: int = 1
    scope = "layer"

    def pool_floor(self, capacity: int) -> int:
        return min(self.floor, capacity)


@dataclass(frozen=True)
class AtPrompt(Composed):
    """Budgets that the prompt decides: the more a head's newest query attends to its first token, the more it keeps."""

    def prompt_budgets(self, views: Sequence[CacheView], capacity: int | None) -> Tensor:
        streams, heads = views[0].rank.shape[:2]
        uneven = torch.arange(len(views) * heads).view(1, len(views), heads).expand(streams, -1, -1) % 3 - 1
        total = uneven.sum((1, 2), keepdim=True)
        last = torch.zeros_like(uneven)
        last[:, -1, -1] = 1
        return capacity + uneven - total * last


WORTH = {"h2o": (H2O(4), by_mass(4)), "norm": (SmallKeys(), by_key_norm), "apart": (Apart(), by_distance_from_mean)}


def in_pairs(values: Sequence[int] | Sequence[str]) -> list[tuple]:
    """Every two of a rule, a value and a position mode occur together, but not all three."""
    return [(list(WORTH)[(i + j) % 3], value, mode) for i, value in enumerate(values) for j, mode in enumerate(MODES)]


def even(capacity: int, layers: int = 2, heads: int = 2) -> list[list[int]]:
    return [[capacity] * heads for _ in range(layers)]


def check(model, tokens: Tensor, config: CacheConfig, reference, sizes: Sequence[int], method=EAGER, prompt: int = 0) -> None:
    """A decoder keeps what the lists keep after every block, and has their logits."""
    read, start = CachedDecoder(model, config, method=method), prompt
    if prompt:
        logits = read.read_prompt(tokens[:, :prompt], 7, once=True)
        torch.testing.assert_close(logits, reference.logits[:, prompt - 1], atol=CLOSE[model.dtype], rtol=0)
        assert [layer[0] for layer in read.kept()] == reference.kept[prompt - 1]
    while start < tokens.shape[1]:
        for size in sizes:
            block = tokens[:, start : start + size]
            if not block.shape[1]:
                break
            logits, end = read(block), start + block.shape[1]
            torch.testing.assert_close(logits, reference.logits[:, start:end], atol=CLOSE[model.dtype], rtol=0)
            assert [layer[0] for layer in read.kept()] == reference.kept[end - 1], f"after {end} tokens"
            start = end


def heads_of(model) -> int:
    return model.layers[0].heads


@pytest.mark.parametrize(("worth", "every", "mode"), in_pairs([1, 2, 5, 16]))
def test_evicting_several_at_once_equals_the_lists(worth, every, mode):
    model, tokens, (policy, of_lists) = model_of("llama", DOUBLE), tokens_of(LENGTH), WORTH[worth]
    reference = run(model, tokens, mode=mode, limit=12, worth=of_lists, table=even(CAPACITY, 2, heads_of(model)), every=every)
    for method, sizes in ((EAGER, (7, 1, 1, 12)), (TOKEN_BY_TOKEN, (10,))):
        check(model, tokens, CacheConfig(policy, CAPACITY, mode, 12, evict=every), reference, sizes, method)


@pytest.mark.parametrize("worth", WORTH)
@pytest.mark.parametrize("every", [1, 3])
def test_a_table_of_budgets_equals_the_lists(worth, every):
    model, tokens, (policy, of_lists) = model_of("llama", DOUBLE), tokens_of(LENGTH), WORTH[worth]
    heads = heads_of(model)
    table = [[CAPACITY + 4, *[CAPACITY] * (heads - 1)], [CAPACITY - 3, *[CAPACITY] * (heads - 2), CAPACITY - 1]]
    reference = run(model, tokens, worth=of_lists, table=table, every=every)
    config = CacheConfig(Tabled(policy, tuple(map(tuple, table))), CAPACITY, evict=every)
    for method, sizes in ((EAGER, (7, 1, 1, 12)), (FASTEST, (7, 1, 1, 12))):
        check(model, tokens, config, reference, sizes, method)
    read = CachedDecoder(model, config)
    assert read.kv_bytes <= 1.1 * sum(map(sum, table)) * 2 * model.layers[0].key_dim * 8 * (CAPACITY - 3 + every) / (CAPACITY - 3)


@pytest.mark.parametrize(
    ("worth", "every", "mode"),
    [(worth, every, MODES[(i + j) % 2]) for i, worth in enumerate(WORTH) for j, every in enumerate([1, 4])],
)
@pytest.mark.parametrize("floor", [4, 8])
def test_heads_that_compete_equal_the_lists(worth, every, floor, mode):
    model, tokens, (policy, of_lists) = model_of("llama", DOUBLE), tokens_of(LENGTH), WORTH[worth]
    table = even(CAPACITY, 2, heads_of(model))
    reference = run(model, tokens, mode=mode, worth=of_lists, table=table, every=every, floor=floor)
    counts = {len(head) for kept in reference.kept[CAPACITY + every :: every] for layer in kept for head in layer}
    assert worth == "h2o" or len(counts) > 1, "nobody won"
    check(model, tokens, CacheConfig(Pooled(policy, floor), CAPACITY, mode, evict=every), reference, (7, 1, 1, 12))


@pytest.mark.parametrize(("worth", "kind", "mode"), in_pairs(["even", "table", "pooled", "at prompt"]))
def test_a_prompt_that_is_cut_once_and_grows_equals_the_lists(worth, mode, kind):
    model, tokens, (policy, of_lists) = model_of("llama", DOUBLE), tokens_of(LENGTH), WORTH[worth]
    heads, prompt = heads_of(model), 30
    table, floor = even(CAPACITY, 2, heads), None
    if kind == "table":
        table[0][0], table[1][-1] = CAPACITY + 3, CAPACITY - 3
        policy = Tabled(policy, tuple(map(tuple, table)))
    elif kind == "pooled":
        policy, floor = Pooled(policy, 4), 4
    elif kind == "at prompt":
        policy = AtPrompt(policy)
        table = policy.prompt_budgets([CacheView(torch.zeros(1, heads, 1), *[None] * 8)] * 2, CAPACITY)[0].tolist()
        assert len({n for row in table for n in row}) > 1
    how = {"mode": mode, "limit": 40, "worth": of_lists, "table": table, "floor": floor, "prompt": prompt}
    reference = run(model, tokens, **how, grows=True)
    config = CacheConfig(policy, CAPACITY, mode, 40, evict="prompt")
    check(model, tokens, config, reference, (1, 4, 1), prompt=prompt)
    check(model, tokens, config, reference, (5,), TOKEN_BY_TOKEN, prompt=prompt)
    going_on = run(model, tokens, **how)
    check(model, tokens, CacheConfig(policy, CAPACITY, mode, 40), going_on, (1, 4, 1), prompt=prompt)


@pytest.mark.slow("many drawn cases")
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_budgets_any_cadence_any_block_in_any_batch(data):
    """Streams side by side keep what each keeps alone, and that is what the lists keep."""
    model, streams = model_of("llama", DOUBLE), data.draw(st.integers(1, 2), "streams")
    capacity, every = data.draw(st.integers(5, 12), "capacity"), data.draw(st.integers(1, 9), "every")
    length, size = data.draw(st.integers(14, 40), "length"), data.draw(st.integers(1, 17), "block")
    policy, of_lists = WORTH[data.draw(st.sampled_from(list(WORTH)), "worth")]
    heads, floor = heads_of(model), None
    table = even(capacity, 2, heads)
    kind = data.draw(st.sampled_from(["even", "table", "pooled"]), "kind")
    if kind == "table":
        shift = data.draw(st.integers(0, capacity - 5), "shift")
        table[0][0], table[1][0] = capacity + shift, capacity - shift
        policy = Tabled(policy, tuple(map(tuple, table)))
    elif kind == "pooled":
        floor = data.draw(st.integers(4, capacity), "floor")
        policy = Pooled(policy, floor)
    tokens = tokens_of(length, streams, seed=data.draw(st.integers(0, 3), "seed"))
    read = CachedDecoder(model, CacheConfig(policy, capacity, evict=every), streams)
    ours = torch.cat([read(block) for block in tokens.split(size, 1)], 1)
    for stream in range(streams):
        reference = run(model, tokens[stream : stream + 1], worth=of_lists, table=table, every=every, floor=floor)
        assert [layer[stream] for layer in read.kept()] == reference.kept[-1]
        torch.testing.assert_close(ours[stream : stream + 1], reference.logits, atol=CLOSE[DOUBLE], rtol=0)


@pytest.mark.parametrize("policy", [H2O(4), SmallKeys(), Apart(), Random()], ids=str)
def test_equal_budgets_and_every_1_are_the_same_cell(policy):
    model, tokens = model_of("llama"), tokens_of(LENGTH)
    table = tuple(map(tuple, even(CAPACITY, 2, heads_of(model))))
    plain, same = (CachedDecoder(model, CacheConfig(p, CAPACITY), method=PLAIN_WALK) for p in (policy, Tabled(policy, table)))
    for block in tokens.split(6, 1):
        assert torch.equal(plain(block), same(block))
    assert plain.kept() == same.kept()


def test_random_numbers_belong_to_the_head_of_the_model_also_where_heads_live_apart():
    model, tokens, heads = model_of("llama"), tokens_of(LENGTH), heads_of(model_of("llama"))
    table = [[CAPACITY + 2, *[CAPACITY] * (heads - 1)], [*[CAPACITY] * (heads - 1), CAPACITY - 2]]
    read = CachedDecoder(model, CacheConfig(Tabled(Random(), tuple(map(tuple, table))), CAPACITY, seed=3), method=FASTEST)
    read(tokens)
    for layer, of_layer in enumerate(read.kept()):
        for head, kept in enumerate(of_layer[0]):
            number = {p: uniform_number(layer, head, p, 3) for p in range(LENGTH)}
            assert kept == sorted(sorted(number, key=number.get)[-table[layer][head] :])


@pytest.mark.parametrize("size", [1, 5, 44])
def test_streams_of_unequal_length_are_each_alone(size):
    """Also where several tokens go at once, and where heads compete."""
    model, tokens = model_of("llama", DOUBLE), tokens_of(LENGTH, 2)
    valid = torch.ones(2, LENGTH, dtype=torch.bool)
    valid[1, 3:9] = valid[1, 30:] = False
    for policy, every in ((H2O(4), 3), (Pooled(Apart(), 4), 1), (Pooled(SmallKeys(), 4), 5)):
        both = CachedDecoder(model, CacheConfig(policy, CAPACITY, evict=every), 2)
        logits = torch.cat([both(t, v) for t, v in zip(tokens.split(size, 1), valid.split(size, 1), strict=True)], 1)
        for stream in range(2):
            alone = CachedDecoder(model, CacheConfig(policy, CAPACITY, evict=every))
            expected = alone(tokens[stream : stream + 1, valid[stream]])
            torch.testing.assert_close(logits[stream : stream + 1, valid[stream]], expected, atol=1e-8, rtol=0)
            assert [layer[stream] for layer in both.kept()] == [layer[0] for layer in alone.kept()]


class Recent(Policy):
    """SnapKV without pooling."""

    statistics = (RecentAttention(6),)

    def importance(self, view: CacheView) -> Tensor:
        return view.state(RecentAttention(6)).sum(-1).masked_fill(view.age < 2, inf)


class RecentFromTheStart(RecentAttention):
    """`RecentAttention` without the declaration that only the last steps matter."""

    last = None


class Slow(Recent):
    """`Recent` with the statistic of all steps."""

    statistics = (RecentFromTheStart(6),)

    def importance(self, view: CacheView) -> Tensor:
        return view.state(RecentFromTheStart(6)).sum(-1).masked_fill(view.age < 2, inf)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_prompt_in_closed_form_up_to_its_last_tokens_is_the_walked_one(family):
    model, tokens = model_of(family), tokens_of(40, 2)
    fast, slow = (CachedDecoder(model, CacheConfig(policy, CAPACITY, evict="prompt"), 2) for policy in (Recent(), Slow()))
    torch.testing.assert_close(fast.read_prompt(tokens[:, :33], 8), slow.read_prompt(tokens[:, :33], 8), atol=1e-5, rtol=0)
    assert fast.kept() == slow.kept()
    torch.testing.assert_close(fast(tokens[:, 33:]), slow(tokens[:, 33:]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("policy", [H2O(4), Apart(), Pooled(SmallKeys(), 4), Dense()], ids=str)
def test_a_prompt_that_fits_is_dense(policy):
    model, tokens, capacity = model_of("llama"), tokens_of(LENGTH), None if policy == Dense() else 30
    expected = CachedDecoder(model, CacheConfig(Dense()))(tokens)
    read = CachedDecoder(model, CacheConfig(policy, capacity, evict="prompt"))
    torch.testing.assert_close(read.read_prompt(tokens[:, :30], 9), expected[:, 29], atol=1e-5, rtol=0)
    torch.testing.assert_close(read(tokens[:, 30:]), expected[:, 30:], atol=1e-5, rtol=0)


def test_a_fork_of_uneven_heads_goes_on_as_they_would():
    model, tokens = model_of("llama"), tokens_of(LENGTH, 2)
    for config in (CacheConfig(Pooled(Apart(), 4), CAPACITY), CacheConfig(AtPrompt(SmallKeys()), CAPACITY, evict="prompt")):
        read = CachedDecoder(model, config, 2)
        read.read_prompt(tokens[:, :30], 8)
        fork = read.fork([1, 0, 1])
        logits = read(tokens[:, 30:])
        assert torch.equal(fork(tokens[[1, 0, 1], 30:]), logits[[1, 0, 1]])
        assert [layer[1] for layer in read.kept()] == [layer[2] for layer in fork.kept()]


def test_memory_shrinks_at_a_prompts_end_and_held_is_told_from_allocated():
    model, tokens = model_of("llama"), tokens_of(700)
    whole = CachedDecoder(model, CacheConfig(Dense()))
    whole.read_prompt(tokens, 64)
    read = CachedDecoder(model, CacheConfig(H2O(), 64, evict="prompt"))
    read.read_prompt(tokens, 64)
    per_token = sum(shape.kv_bytes(1, model.dtype) for shape in model.layers)
    assert read.held_bytes == 64 * per_token
    assert read.kv_bytes == 80 * per_token < whole.kv_bytes == 768 * per_token
    assert read.state_bytes < whole.state_bytes


@pytest.mark.parametrize(("capacity", "evict"), [(200, 1), (300, "prompt")])
def test_what_is_allocated_for_a_static_table_is_hardly_more_than_what_is_held(capacity, evict):
    model, tokens = model_of("llama"), tokens_of(2 * capacity + 40)
    heads, layers = heads_of(model), len(model.layers)
    table = tuple(tuple(capacity + (20 if (layer + head) % 2 else -20) for head in range(heads)) for layer in range(layers))
    assert sum(map(sum, table)) == heads * layers * capacity
    read = CachedDecoder(model, CacheConfig(Tabled(H2O(2), table), capacity, evict=evict))
    read.read_prompt(tokens[:, :-40], 256)
    assert read.held_bytes < read.kv_bytes < 1.1 * read.held_bytes
    expected = model.kv_bytes(capacity + 40) if evict == "prompt" else model.kv_bytes(capacity)
    read(tokens[:, -40:])
    assert read.kv_bytes < 1.1 * expected


def test_what_cannot_be_is_said_in_one_line():
    model, tokens = model_of("llama"), tokens_of(20)
    heads = heads_of(model)
    for table, word in (
        ([[9] * heads], "table of budgets"),
        ([[9] * heads, [8] * heads], f"add up to {17 * heads} tokens"),
        ([[18] * heads, [0] * heads], "below 1"),
    ):
        with pytest.raises(ValueError, match=word):
            CachedDecoder(model, CacheConfig(Tabled(H2O(2), tuple(map(tuple, table))), CAPACITY))
    with pytest.raises(ValueError, match="no prompt"):
        CachedDecoder(model, CacheConfig(H2O(), CAPACITY, evict="prompt"))(tokens)
    with pytest.raises(ValueError, match="1 or more"):
        CacheConfig(H2O(), CAPACITY, evict=0)
    read = CachedDecoder(model, CacheConfig(H2O(), CAPACITY))
    read(tokens)
    with pytest.raises(ValueError, match="must come first"):
        read.read_prompt(tokens, 8)
