"""Heads that hold different numbers of tokens have their K and V in a pool: the tokens and logits of plain lists, and no more
memory than they hold, but a page a head."""

import pytest
import torch
from factories import CLOSE, MODES, check_streams_are_read_alone, needs_compiler
from helpers import DEVICE, H2O, CacheConfig, CachedDecoder, Random, SnapKV, adopt, model_of, tiny_model, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from listed_budgets import run
from test_budgets import DOUBLE, WORTH, AtPrompt, Pooled, SmallKeys, even, heads_of

from kvbench.harness.engine import pool
from kvbench.harness.engine import slots as slots_module
from kvbench.harness.engine.method import EAGER, PLAIN_WALK, TOKEN_BY_TOKEN, Method
from kvbench.policies import Policy
from kvbench.policies.adakv import AdaKV

LENGTH = 60
BY_KERNEL = Method(step_kernel=True)
BY_FAMILY = 1e-4  # the lists' keys are rotated by the family's function, whose angles are float32 in any model


def check_memory(read: CachedDecoder) -> None:
    """Every token of a row has a page, no page is held for more, none by two rows, and there are few that nobody holds."""
    for walk in read.walks:
        slots, table = walk.slots, walk.slots.tensors.pages
        assert table is not None
        rows, page = len(slots.tensors.rank), table.size
        held = (slots.tensors.rank < slots.empty_rank).sum(-1)
        in_use = torch.arange(slots.num_slots, device=DEVICE) < held[:, None]
        assert torch.equal(slots.tensors.rank < slots.empty_rank, in_use), "tokens lie in the first slots"
        pages = (table.table >= 0).sum(-1)
        assert (pages >= -(-held // page)).all()
        assert (pages <= held // page + 1).all()
        owned = table.table[table.table >= 0]
        assert len(owned.unique()) == len(owned)
        of_table = table.table.clamp(min=0)
        row, place = table.row[of_table], table.place[of_table]
        expected = torch.meshgrid(
            torch.arange(rows, device=DEVICE), torch.arange(table.table.shape[1], device=DEVICE), indexing="ij"
        )
        mine = table.table >= 0
        assert torch.equal(row[mine], expected[0][mine])
        assert torch.equal(place[mine], expected[1][mine])
        shape = slots.shape
        of_slot = (shape.key_dim + shape.value_dim) * slots.dtype.itemsize
        assert slots.kv_bytes <= 1.1 * slots.held_bytes + rows * page * of_slot


def step_by_step(read: CachedDecoder, tokens: torch.Tensor, size: int = 1) -> torch.Tensor:
    """All logits; memory is checked after every block."""
    logits = []
    for block in tokens.split(size, 1):
        logits.append(read(block))
        check_memory(read)
    return torch.cat(logits, 1)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    """Pages of 4, so that short streams fill several."""
    monkeypatch.setattr(slots_module, "PAGE", 4)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_close_up(data):
    """With and without waiting for the device: what is left lies in the first slots, and nothing is lost or copied twice."""
    rows, slots = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    count = torch.tensor([[data.draw(st.integers(1, slots))] for _ in range(rows)])
    victims = torch.tensor([[data.draw(st.booleans()) for _ in range(slots)] for _ in range(rows)]) & (
        torch.arange(slots) < count
    )
    left = count - victims.sum(-1, keepdim=True)
    last = torch.arange(slots) >= left
    holes, movers = victims & ~last, last & ~victims & (torch.arange(slots) < count)
    for row, into, out_of in (pool.moves(victims, count, slots), pool._padded_moves(holes, movers, count, slots)):
        held = torch.arange(slots).repeat(rows, 1)
        held[row, into] = held[row, out_of]
        for at in range(rows):
            assert sorted(held[at, : left[at]].tolist()) == [s for s in range(count[at]) if not victims[at, s]]


@pytest.mark.slow("many drawn cases")
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_heads_pages_capacity_prompt_and_batch_equal_the_lists(data):
    """At every step: the tokens kept, the logits, and the memory."""
    heads, streams = data.draw(st.sampled_from([2, 4]), "heads"), data.draw(st.integers(1, 3), "streams")
    model = adopt(tiny_model("llama", vocab_size=96, num_key_value_heads=heads).to(DEVICE, DOUBLE))
    capacity, floor = data.draw(st.integers(10, 17), "capacity"), data.draw(st.integers(5, 9), "floor")
    policy, of_lists = WORTH[data.draw(st.sampled_from(["h2o", "norm"]), "worth")]
    prompt = data.draw(st.sampled_from([0, 0, capacity + 4, 26]), "prompt")
    mode, size = data.draw(st.sampled_from(MODES), "mode"), data.draw(st.integers(1, 9), "block")
    tokens = tokens_of(LENGTH, streams, seed=data.draw(st.integers(0, 3), "seed"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots_module, "PAGE", data.draw(st.sampled_from([1, 2, 5, 16]), "page"))
        read = CachedDecoder(model, CacheConfig(Pooled(policy, floor), capacity, mode, 12), streams, method=EAGER)
        if prompt:
            read.read_prompt(tokens[:, :prompt], 7, once=True)
        logits = step_by_step(read, tokens[:, prompt:], size)
    for stream in range(streams):
        reference = run(
            model,
            tokens[stream : stream + 1],
            mode=mode,
            limit=12,
            worth=of_lists,
            table=even(capacity, 2, heads),
            floor=floor,
            prompt=prompt,
        )
        assert [layer[stream] for layer in read.kept()] == reference.kept[-1]
        torch.testing.assert_close(logits[stream : stream + 1], reference.logits[:, prompt:], atol=BY_FAMILY, rtol=0)


@pytest.mark.parametrize(("asks", "every"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("worth", WORTH)
def test_heads_that_compete_hold_no_more_than_a_page_a_head_at_every_step(worth, every, asks, monkeypatch):
    """On devices whose numbers the host may read, and as on those where it would have to wait."""
    for module in (pool, slots_module):
        monkeypatch.setattr(module, "MAY_ASK", {DEVICE.type} if asks else set())
    model, (policy, of_lists) = model_of("llama", DOUBLE), WORTH[worth]
    capacity, tokens = 20, tokens_of(90)
    read = CachedDecoder(model, CacheConfig(Pooled(policy, 6), capacity, evict=every), method=EAGER)
    reference = run(model, tokens, worth=of_lists, table=even(capacity, 2, heads_of(model)), floor=6, every=every)
    logits = step_by_step(read, tokens)
    torch.testing.assert_close(logits, reference.logits, atol=CLOSE[DOUBLE], rtol=0)
    assert [layer[0] for layer in read.kept()] == reference.kept[-1]
    assert len({len(head) for layer in read.kept() for head in layer[0]}) > 1, "some heads hold more than others"


@pytest.mark.parametrize("evict", [1, "prompt"])
@pytest.mark.parametrize("mode", MODES)
def test_budgets_that_a_prompt_decides(evict, mode):
    """Each head evicts its own, or all of them grow; a decoder that reads token by token does the same."""
    model, tokens = model_of("llama", DOUBLE), tokens_of(120)
    reads = [
        CachedDecoder(model, CacheConfig(AtPrompt(SmallKeys()), 14, mode, 30, evict=evict), method=method)
        for method in (EAGER, TOKEN_BY_TOKEN)
    ]
    for read in reads:
        read.read_prompt(tokens[:, :40], 9, once=True)
    logits = step_by_step(reads[0], tokens[:, 40:], 3), step_by_step(reads[1], tokens[:, 40:])
    torch.testing.assert_close(*logits, atol=CLOSE[DOUBLE], rtol=0)
    assert reads[0].kept() == reads[1].kept()
    grown = [len(head) for layer in reads[0].kept() for head in layer[0]]
    assert len(set(grown)) > 1
    assert sum(grown) == len(grown) * (14 + (80 if evict == "prompt" else 0))


@needs_compiler
@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        (AdaKV(), "stream"),
        (AdaKV(score=H2O()), "cache"),
        (AdaKV(score=SnapKV(group="max")), "clamped"),
        (Pooled(Random(), 2), "cache"),
        (Pooled(SmallKeys(), 3), "stream"),
    ],
)
def test_the_step_kernel_does_what_the_walk_does(policy: Policy, mode):
    """With and without statistics that see attention."""
    model, tokens = model_of("llama"), tokens_of(110, 2)
    fast, plain = (CachedDecoder(model, CacheConfig(policy, 24, mode, 40), 2, method) for method in (BY_KERNEL, PLAIN_WALK))
    assert all("step kernel" in walk.offers for walk in fast.walks)
    for token in tokens.split(1, 1):
        torch.testing.assert_close(fast(token), plain(token), atol=CLOSE[torch.float32], rtol=0)
        assert fast.kept() == plain.kept()
        check_memory(fast)
    for ours, theirs in zip(fast.walks, plain.walks, strict=True):
        held = ours.slots.tensors.rank < ours.slots.empty_rank
        for statistic, state in ours.slots.tensors.states.items():
            torch.testing.assert_close(state[held], theirs.slots.tensors.states[statistic][held], atol=1e-4, rtol=0)


@needs_compiler
@pytest.mark.parametrize("evict", [1, "prompt", 3])
def test_kernels_read_on_after_a_prompt_that_decided_budgets(evict):
    model, tokens = model_of("llama"), tokens_of(100)
    reads = [
        CachedDecoder(model, CacheConfig(AtPrompt(H2O(4)), 14, evict=evict), method=method) for method in (BY_KERNEL, PLAIN_WALK)
    ]
    for read in reads:
        read.read_prompt(tokens[:, :40], 9, once=True)
    for token in tokens[:, 40:].split(1, 1):
        torch.testing.assert_close(*(read(token) for read in reads), atol=CLOSE[torch.float32], rtol=0)
        assert reads[0].kept() == reads[1].kept()


@pytest.mark.parametrize("method", [EAGER, pytest.param(BY_KERNEL, marks=needs_compiler)], ids=["plain", "kernels"])
def test_forks_share_no_page(method):
    """Copies of streams read on as the streams themselves would have, and these as if there were no copies."""
    model, config, tokens = model_of("llama"), CacheConfig(AdaKV(score=H2O()), 20), tokens_of(70, 2)
    together, untouched = (CachedDecoder(model, config, 2, method) for _ in range(2))
    for read in (together, untouched):
        step_by_step(read, tokens[:, :40], 5)
    forked = together.fork([1, 0, 1])
    later = tokens_of(30, 3, seed=5)
    step_by_step(together, tokens[:, 40:])
    ours = step_by_step(forked, later)
    alone = untouched.fork([1])
    torch.testing.assert_close(ours[2:], step_by_step(alone, later[2:]), atol=CLOSE[torch.float32], rtol=0)
    theirs = step_by_step(untouched, tokens[:, 40:])
    assert together.kept() == untouched.kept()
    assert theirs.shape[1] == 30
    assert [layer[2] for layer in forked.kept()] == [layer[0] for layer in alone.kept()]


def test_sums_of_pages_are_rounded_once():
    """In 16 bits, nearly all outputs are those of one sum over the whole row; sums of rounded pages would differ in a third."""
    read = CachedDecoder(model_of("llama", torch.bfloat16), CacheConfig(AdaKV(score=H2O()), 40))
    read(tokens_of(90))
    walk = read.walks[0]
    rows = walk.rows(walk.slots.attended(90), 0)
    weights = torch.rand(len(rows.rank), 2, rows.rank.shape[1], device=DEVICE) * rows.used()
    into = rows.values.new_empty(len(rows.rank), 2, rows.values.shape[-1])
    rows.windows[1].mix(weights, into)
    expected = torch.bmm(weights.to(torch.bfloat16).float(), rows.values.float()).to(torch.bfloat16)
    assert (into != expected).float().mean() < 0.02


def test_streams_of_unequal_length_share_a_pool():
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[1, 12:17] = valid[0, 3] = valid[1, 39] = False
    check_streams_are_read_alone(CacheConfig(Pooled(H2O(3), 4), 9), valid)
