"""Static patterns, held token by token to plain references on Python lists."""

from math import ceil

import pytest
import torch
from factories import uniform_number

from kvbench.harness.kernels.expressions import NotTraceableError
from kvbench.harness.kernels.tracing import traced
from kvbench.policies import CacheView, Policy
from kvbench.policies.bigbird_static import BigBirdStatic
from kvbench.policies.lacache import LaCache
from kvbench.policies.longformer import Longformer
from kvbench.policies.sparse_fixed import SparseFixed

pytestmark = pytest.mark.fast


LAYERS, HEADS, STREAMS, SEED = 4, 2, 2, 3


def view_of(held: list[int], step: int, layer: int, layers: int = LAYERS, empty: int = 0) -> CacheView:
    """A cache in which every head holds these positions, in shuffled slots, some of them empty and full of garbage."""
    slots = len(held) + empty
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(step))
    ranks = torch.tensor([*range(len(held)), *[slots] * empty])[order]
    positions = torch.tensor([*held, *[-1, step - 1, 2][:empty]])[order]
    rank, position = (x.expand(STREAMS, HEADS, -1) for x in (ranks, positions))
    one, nothing = torch.ones(STREAMS, 1, 1, dtype=torch.int64), torch.zeros(STREAMS, HEADS, slots, 2)
    return CacheView(
        rank, position, one * step, nothing, nothing, {}, one * layer, torch.arange(HEADS)[:, None], one * 0, layers, SEED
    )


def survivors(policy: Policy, view: CacheView, count: int, head: int = 0) -> list[int]:
    """Positions of the highest (importance, rank) among what a head holds, oldest first."""
    importance = policy.importance(view)
    assert importance.dtype == torch.float32
    assert not importance.isnan().any()
    assert torch.equal(importance[0], importance[-1])
    rank, position = (x[0, head].tolist() for x in (view.rank, view.position))
    worth = importance[0, head].tolist()
    held = sorted((i for i in range(len(rank)) if rank[i] < len(rank)), key=lambda i: (worth[i], rank[i]))
    return sorted(position[i] for i in held[max(0, len(held) - count) :])


def over_steps(policy: Policy, capacity: int, steps: int, layer: int, layers: int = LAYERS, burst: int = 1, head: int = 0):
    """Yield the positions held after every step. burst: the cache grows to capacity + burst, then evicts burst tokens at once."""
    held: list[int] = []
    for step in range(steps):
        held = [*held, step]
        if len(held) >= capacity + burst:
            held = survivors(policy, view_of(held, step, layer, layers, empty=step % 3), capacity, head)
        yield step, held


# Longformer


@pytest.mark.parametrize("chosen", [(0,), (0, 1, 2), (5, 9, 30), (30, 5, 5, 9), ()])
@pytest.mark.parametrize("capacity", [6, 11])
@pytest.mark.parametrize("burst", [1, 4])
def test_longformer_keeps_global_tokens_and_a_window(chosen, capacity, burst):
    policy = Longformer(chosen).bind(capacity)
    for step, held in over_steps(policy, capacity, 50, 0, burst=burst):
        if len(held) == capacity and step >= capacity:
            expected = [p for p in set(chosen) if p <= step]
            for p in range(step, -1, -1):
                expected += [p] * (len(expected) < capacity and p not in expected)
            assert held == sorted(expected)


def test_longformer_is_sink_window_where_it_can_be():
    assert Longformer((0, 1, 2, 3)).bind(20).band(20) == (4, 16)
    assert Longformer((0, 2)).bind(20).band(20) is None
    assert Longformer([2, 0, 2]) == Longformer((0, 2))
    assert Longformer((), 20).bind(20).band(20) == (0, 20)
    for policy, capacity in ((Longformer((0, 1)), 2), (Longformer((0,), 5), 20), (Longformer((-1,)), 20)):
        with pytest.raises(ValueError, match=f"capacity {capacity} can't hold"):
            policy.bind(capacity)


# BigBird


@pytest.mark.parametrize(("capacity", "sinks", "window"), [(12, 4, None), (12, 0, 6), (9, 2, 0), (20, 4, 3)])
@pytest.mark.parametrize(("layer", "head"), [(0, 0), (3, 1)])
def test_bigbird_static_is_a_sample_between_sinks_and_window(capacity, sinks, window, layer, head):
    policy = BigBirdStatic(sinks, window).bind(capacity)
    recent = (capacity - sinks) // 2 if window is None else window
    expected: list[int] = []
    for step, held in over_steps(policy, capacity, 80, layer, head=head):
        expected = [*expected, step]
        if len(expected) > capacity:
            loose = [p for p in expected if p >= sinks and step - p >= recent]
            expected.remove(min(loose, key=lambda p: uniform_number(layer, head, p, SEED)))
        assert held == expected


def test_bigbird_static_after_a_prompt():
    policy = BigBirdStatic(4, 8).bind(20)
    between = sorted(range(4, 92), key=lambda p: uniform_number(1, 1, p, SEED))[-8:]
    assert survivors(policy, view_of(list(range(100)), 99, 1, empty=2), 20, 1) == sorted([*range(4), *between, *range(92, 100)])
    with pytest.raises(ValueError, match=r"capacity 12 can't hold sinks 4 \+ window 8 \+ at least 1 random token"):
        policy.bind(12)


# Sparse Transformer, fixed


@pytest.mark.parametrize(("block", "summary"), [(8, 2), (8, 8), (7, 3), (12, 1), (1, 1)])
@pytest.mark.parametrize(("capacity", "burst"), [(12, 1), (20, 5), (35, 1)])
def test_sparse_fixed_keeps_the_block_and_the_newest_summaries(block, summary, capacity, burst):
    """A query attends to its own block and to summaries; what is dead goes first, then the oldest summary."""
    policy = SparseFixed(block, summary).bind(capacity)
    expected: list[int] = []
    for step, held in over_steps(policy, capacity, 100, 1, burst=burst):
        expected = [*expected, step]
        if len(expected) >= capacity + burst:
            dead = [p for p in expected if p // block < step // block and p % block < block - summary]
            old = [p for p in expected if p // block < step // block and p % block >= block - summary]
            gone = [*dead, *old, *(p for p in expected if p // block == step // block)][: len(expected) - capacity]
            expected = [p for p in expected if p not in gone]
        assert held == expected


@pytest.mark.parametrize("block", [1, 3, 7, 41, 100, 128, 1000, 12345])
def test_sparse_fixed_finds_blocks_far_into_a_stream(block):
    """The remainder is exact where float32 rounds the quotient."""
    position = torch.cat([torch.arange(3 * block), 2**23 + torch.arange(3 * block), 2**24 - 1 - torch.arange(3 * block)])
    view = view_of([0], int(position.max()), 0)
    view.position, view.step = position.expand(STREAMS, HEADS, -1), torch.full_like(view.step, 2**24 - 1)
    made = SparseFixed(block, 1).bind(2 * block).importance(view)[0, 0].tolist()
    own = (2**24 - 1) // block
    assert made == [2 if p // block == own else float(p % block == block - 1) for p in position.tolist()]


# LaCache


def ladder_of(layers: int, span: int, overlap: int) -> tuple[int, int]:
    """(tokens of a ladder, of which a layer keeps), as the official code has them."""
    before = 1 + ceil((layers - span) / (span - overlap))
    return before, min(ceil(span / (span - overlap)), before)


LADDERS = [(4, 2, 0), (6, 3, 1), (8, 3, 1), (5, 1, 0)]  # layers, span, overlap


def official_lacache(capacity: int, sinks: int, layers: int, span: int, overlap: int, steps: int):
    """The official code token by token, on lists of one list a layer; without its compensation of the size.

    Yields what every layer holds after each step; a ladder's tokens go at once.
    """
    before, after = ladder_of(layers, span, overlap)
    drop, cursor = before - after, sinks
    cache: list[list[int]] = [[] for _ in range(layers)]
    for step in range(steps):
        cache = [[*x, step] for x in cache]
        if len(cache[0]) > capacity:
            if (capacity - cursor - layers) // after == 0:
                cursor = sinks  # start over
            for i, held in enumerate(cache):
                at = cursor + i % (drop + 1)
                cache[i] = held[:cursor] + held[at : at + after] + held[cursor + before :]
            cursor += after
        yield step, cache


@pytest.mark.parametrize(("layers", "span", "overlap"), LADDERS)
@pytest.mark.parametrize(("capacity", "sinks"), [(24, 4), (31, 0)])
def test_lacache_is_the_official_code_if_a_ladder_goes_at_once(layers, span, overlap, capacity, sinks):
    """The official cache is cut, by a ladder's tokens, when it holds one more than its size."""
    before, after = ladder_of(layers, span, overlap)
    policy, drop = LaCache(sinks, span, overlap).bind(capacity), before - after
    walks = [over_steps(policy, capacity + 1 - drop, 90, layer, layers, drop) for layer in range(layers)]
    for step, cache in official_lacache(capacity, sinks, layers, span, overlap, 90):
        for layer, walk in enumerate(walks):
            assert next(walk) == (step, cache[layer])


def next_victim(evicted: int, capacity: int, sinks: int, layer: int, layers: int, span: int, overlap: int) -> int:
    """The rank of the next token to go, from how many went before."""
    before, after = ladder_of(layers, span, overlap)
    drop = before - after
    number = max(1, (capacity - sinks - layers) // after)
    ladder, gone = divmod(evicted % (number * drop), drop)
    return sinks + ladder * after + (after if gone >= layer % (drop + 1) else 0)


@pytest.mark.parametrize(("layers", "span", "overlap"), LADDERS)
@pytest.mark.parametrize(("capacity", "sinks"), [(16, 4), (29, 0)])
@pytest.mark.parametrize("burst", [1, 10])
def test_lacache_one_by_one_in_bursts_and_after_a_prompt(layers, span, overlap, capacity, sinks, burst):
    """However many go at once, they are those that would have gone one by one."""
    policy = LaCache(sinks, span, overlap).bind(capacity)
    for layer in (0, 1, layers - 1):
        expected: list[int] = []
        evicted = 0
        for _, held in over_steps(policy, capacity, 70, layer, layers, burst):
            expected = [*expected, len(expected) + evicted]
            while len(expected) > len(held):
                del expected[next_victim(evicted, capacity, sinks, layer, layers, span, overlap)]
                evicted += 1
            assert held == expected
        expected = list(range(100))
        for evicted in range(100 - capacity):
            del expected[next_victim(evicted, capacity, sinks, layer, layers, span, overlap)]
        assert survivors(policy, view_of(list(range(100)), 99, layer, layers, empty=2), capacity) == expected


def test_lacache_refuses_what_it_cannot_do():
    for policy, message in (
        (LaCache(sinks=7), r"sinks 7 \+ room of at least 2"),
        (LaCache(room=3), r"sinks 4 \+ room 3"),
        (LaCache(span=2, overlap=2), "span 2 must be larger than overlap 2"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.bind(8)
    one_layer = LaCache().bind(8)
    assert [len(held) for _, held in over_steps(one_layer, 8, 20, 0, 1)][-1] == 8


# How they are read


@pytest.mark.parametrize("policy", [Longformer((0, 7)), BigBirdStatic(), SparseFixed(), SparseFixed(7, 2)])
def test_patterns_of_single_slots_are_compiled(policy):
    assert policy.scope == "slot"
    assert traced(policy.bind(16)).importance


def test_lacache_is_not_compiled():
    with pytest.raises(NotTraceableError, match="scope 'head'"):
        traced(LaCache().bind(16))
