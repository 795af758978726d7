"""Victims in pages: what goes, against plain lists; pages of one token are none; and what can't be had in pages."""

import pytest
import torch
from every_policy import instances
from factories import CLOSE, MODES, check_streams_are_read_alone
from helpers import H2O, CacheConfig, CachedDecoder, Random, SinkWindow, SnapKV, in_blocks, model_of, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from listed_budgets import run
from test_budgets import DOUBLE, WORTH, check, even, heads_of

from kvbench.harness.core.codec import Codec
from kvbench.harness.core.evict import Pages
from kvbench.harness.engine.method import EAGER, FASTEST, TOKEN_BY_TOKEN
from kvbench.policies.knorm import Knorm
from kvbench.policies.rkv import RKV

LENGTH = 44
HEADS_DIFFER = ["adakv", "duo_attention", "headkv", "pyramidkv"]  # how much they hold, even without a prompt


@pytest.mark.parametrize("worth", WORTH)
@pytest.mark.parametrize(("capacity", "size"), [(9, 3), (8, 4), (12, 1), (6, 6)])
def test_pages_equal_the_lists(worth, capacity, size):
    """Every two of a rule, a size and a way to judge a page occur together."""
    at = list(WORTH).index(worth) + size
    by, of_page = ("union", "per_head")[at % 2], ("mean", "max")[at // 2 % 2]
    model, tokens, (policy, of_lists) = model_of("llama", DOUBLE), tokens_of(LENGTH), WORTH[worth]
    pages = Pages(size, by, of_page)
    table = even(capacity, 2, heads_of(model))
    reference = run(model, tokens, worth=of_lists, table=table, every=size, pages=pages)
    for method, sizes in ((EAGER, (7, 1, 1, 12)), (FASTEST, (10, 1)), (TOKEN_BY_TOKEN, (11,))):
        check(model, tokens, CacheConfig(policy, capacity, evict=pages), reference, sizes, method)


@pytest.mark.parametrize("policy", [H2O(), Random(), SinkWindow(2), Knorm(), RKV(window=3), SnapKV(window=4)], ids=str)
def test_pages_of_one_token_are_none_exactly(policy):
    """Each head by itself."""
    model, tokens, got = model_of("llama"), tokens_of(LENGTH), []
    for evict in (1, Pages(1, "per_head")):
        read = CachedDecoder(model, CacheConfig(policy, 12, limit=30, seed=3, evict=evict), method=TOKEN_BY_TOKEN)
        got.append((in_blocks(read, tokens, 9), read.kept()))
    assert torch.equal(got[0][0], got[1][0])
    assert got[0][1] == got[1][1]


@pytest.mark.slow("many drawn cases")
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_pages_in_any_mode_any_block_and_any_batch(data):
    model, streams = model_of("llama", DOUBLE), data.draw(st.integers(1, 2), "streams")
    pages = Pages(
        data.draw(st.integers(1, 6), "size"),
        *data.draw(st.sampled_from([("union", "mean"), ("union", "max"), ("per_head", "mean"), ("per_head", "max")]), "by"),
    )
    least = -(-5 // pages.size)
    capacity = pages.size * data.draw(st.integers(least, least + 3), "pages")
    length, size = data.draw(st.integers(14, 40), "length"), data.draw(st.integers(1, 17), "block")
    policy, of_lists = WORTH[data.draw(st.sampled_from(list(WORTH)), "worth")]
    mode = data.draw(st.sampled_from(MODES), "mode")
    tokens = tokens_of(length, streams, seed=data.draw(st.integers(0, 3), "seed"))
    read = CachedDecoder(model, CacheConfig(policy, capacity, mode, 12, evict=pages), streams)
    ours = torch.cat([read(block) for block in tokens.split(size, 1)], 1)
    table = even(capacity, 2, heads_of(model))
    for stream in range(streams):
        alone = tokens[stream : stream + 1]
        reference = run(model, alone, mode=mode, limit=12, worth=of_lists, table=table, every=pages.size, pages=pages)
        assert [layer[stream] for layer in read.kept()] == reference.kept[-1]
        torch.testing.assert_close(ours[stream : stream + 1], reference.logits, atol=CLOSE[DOUBLE], rtol=0)


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    return instances(tmp_path_factory.mktemp("files"))


def test_what_goes_are_pages_of_the_stream_and_heads_of_a_union_hold_the_same():
    model, tokens = model_of("llama"), tokens_of(90)
    for by in ("union", "per_head"):
        read = CachedDecoder(model, CacheConfig(SinkWindow(2), 16, evict=Pages(8, by)))
        in_blocks(read, tokens, 13)
        assert read.kept() == [[[[*range(8), *range(80, 90)]] * heads_of(model)] * 1] * 2, "the sinks' page and the newest"
        read = CachedDecoder(model, CacheConfig(Random(window=4), 16, evict=Pages(8, by)))
        in_blocks(read, tokens, 13)
        kept = [head for layer in read.kept() for head in layer[0]]
        assert all(len(head) == 18 and all({*range(p // 8 * 8, p // 8 * 8 + 8)} <= {*head} for p in head[:16]) for head in kept)
        alike = all(head == layer[0][0] for layer in read.kept() for head in layer[0])
        assert alike == (by == "union")


def test_pages_go_from_a_coded_cache():
    """Blocks equal steps, and the bytes are those of whole pages."""
    model, config = model_of("llama", DOUBLE), CacheConfig(H2O(4), 16, evict=Pages(8), kv=Codec("int4", recent=4))
    reads = [CachedDecoder(model, config) for _ in range(2)]
    torch.testing.assert_close(*(in_blocks(read, tokens_of(60), size) for read, size in zip(reads, (1, 7), strict=True)))
    assert reads[0].kv_bytes == model.kv_bytes(16 + 7, 1, config.kv)


@pytest.mark.parametrize("name", HEADS_DIFFER)
def test_heads_that_hold_different_numbers_of_tokens_are_refused(name, policies):
    with pytest.raises(ValueError, match="whole pages need heads that keep equally many"):
        CachedDecoder(model_of("llama"), CacheConfig(policies[name], 12, evict=Pages(4)))


@pytest.mark.parametrize("worth", ["h2o", "norm"])
def test_a_prompt_is_cut_by_tokens_and_what_is_kept_makes_up_pages(worth):
    model, tokens, (policy, of_lists) = model_of("llama", DOUBLE), tokens_of(LENGTH), WORTH[worth]
    table, pages = even(9, 2, heads_of(model)), Pages(3, "union" if worth == "h2o" else "per_head")
    reference = run(model, tokens, worth=of_lists, table=table, every=3, pages=pages, prompt=26)
    check(model, tokens, CacheConfig(policy, 9, evict=pages), reference, (1, 4, 1), prompt=26)


def test_streams_of_unequal_length_evict_pages_of_their_own():
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[1, 12:17] = valid[0, 3] = valid[1, 39] = False
    check_streams_are_read_alone(CacheConfig(H2O(3), 8, evict=Pages(4)), valid)
