"""Victims in pages: what goes, against plain lists; pages of one token are none; and what can't be had in pages."""

from __future__ import annotations

import pytest
import torch
from conftest import in_blocks, model_of, tokens_of
from factories import MODES, check_streams_are_read_alone
from reference import budgeted
from test_budgets import DOUBLE, WORTH, check, even, heads_of

from kvbench.harness.core.codec import Codec
from kvbench.harness.core.evict import Pages
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import EAGER, FASTEST, TOKEN_BY_TOKEN
from kvbench.policies.h2o import H2O
from kvbench.policies.random import Random
from kvbench.policies.sink_window import SinkWindow

LENGTH = 44
HEADS_DIFFER = ["adakv", "duo_attention", "headkv", "pyramidkv"]  # how much they hold, even without a prompt


@pytest.mark.parametrize("worth", WORTH)
@pytest.mark.parametrize(("capacity", "size"), [(9, 3), (8, 4), (12, 1), (6, 6)])
def test_pages_equal_the_lists(worth, capacity, size):
    """Every two of a rule, a size, a position mode and a way to judge a page occur together."""
    at = list(WORTH).index(worth) + size
    by, of_page, mode = ("union", "per_head")[at % 2], ("mean", "max")[at // 2 % 2], MODES[at % 3]
    model, tokens, (policy, of_lists) = model_of("llama", DOUBLE), tokens_of(LENGTH), WORTH[worth]
    pages = Pages(size, by, of_page)
    table = even(capacity, 2, heads_of(model))
    reference = budgeted(model, tokens, mode=mode, limit=12, worth=of_lists, table=table, every=size, pages=pages)
    for method, sizes in ((EAGER, (7, 1, 1, 12)), (FASTEST, (10, 1)), (TOKEN_BY_TOKEN, (11,))):
        check(model, tokens, CacheConfig(policy, capacity, mode, 12, evict=pages), reference, sizes, method)


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
    reference = budgeted(model, tokens, worth=of_lists, table=table, every=3, pages=pages, prompt=26)
    check(model, tokens, CacheConfig(policy, 9, evict=pages), reference, (1, 4, 1), prompt=26)


def test_streams_of_unequal_length_evict_pages_of_their_own():
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[1, 12:17] = valid[0, 3] = valid[1, 39] = False
    check_streams_are_read_alone(CacheConfig(H2O(3), 8, evict=Pages(4)), valid)
