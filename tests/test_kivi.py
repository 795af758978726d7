"""KIVI's codec against its authors' rule, written with lists: on given tensors, in a dense cache, and after a cut prompt."""

from dataclasses import dataclass

import pytest
import torch
from factories import check_streams_are_read_alone
from helpers import H2O, CacheConfig, CachedDecoder, Dense, Random, SnapKV, in_blocks, model_of, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Held, WideLists
from torch import Tensor

from kvbench.harness.core.codec import Kivi
from kvbench.harness.engine.kivi import KiviKeys, KiviValues
from kvbench.harness.engine.method import FASTEST, TOKEN_BY_TOKEN
from kvbench.policies.adakv import AdaKV

SMALL = Kivi("kivi2", 4, residual=8)
CODECS = [SMALL, Kivi("kivi4", 2, residual=2), Kivi("kivi4", 8, residual=24)]


def quantised(x: Tensor, codec: Kivi, dim: int) -> Tensor:
    """Code groups along `dim` and decode them, as the authors' `quant_and_pack_*cache` does."""
    parts = []
    for part in x.split(min(codec.group, x.shape[dim]), dim):
        least, most = part.amin(dim, keepdim=True), part.amax(dim, keepdim=True)
        scale = (most - least) / (2**codec.bits - 1)
        codes = ((part - least) / scale).clamp(0, 2**codec.bits - 1).round()
        parts.append(torch.where(scale > 0, codes * scale + least, least))
    return torch.cat(parts, dim)


def after_prompt(keys: Tensor, values: Tensor, codec: Kivi) -> tuple[Tensor, Tensor]:
    """Return keys and values of a head after a prompt, coded and decoded as in the authors' code. [n, D], [n, Dv]."""
    whole, old = len(keys) - len(keys) % codec.residual, max(0, len(values) - codec.residual)
    if whole:
        keys = torch.cat([quantised(keys[:whole], codec, 0), keys[whole:]])
    return keys, torch.cat([quantised(values[:old], codec, 1), values[old:]])


def after_step(held: list[Held], codec: Kivi) -> None:
    """Code a full residual of keys, and the value that leaves the residual, as the authors' code does after a step."""
    block, old = held[-codec.residual :], held[: -codec.residual][-1:]
    if len(held) % codec.residual == 0:
        for token, key in zip(block, quantised(torch.stack([t.key for t in block]), codec, 0), strict=True):
            token.key = key
    for token in old:
        token.value = quantised(token.value[None], codec, 1)[0]


def bytes_held(count: int, codec: Kivi, dims: int, itemsize: int) -> int:
    """Bytes of K and V that the authors hold of one head between steps: packed numbers, scales and zeros, and floats."""
    keys, values = count % codec.residual, min(count, codec.residual)
    packed = (2 * count - keys - values) * dims * codec.bits // 8
    pairs = (count - keys) // codec.group * dims + (count - values) * max(1, dims // codec.group)
    return packed + (2 * pairs + (keys + values) * dims) * itemsize


@dataclass
class KiviLists(WideLists):
    """The list-based reference, whose keys lie in the lists as they are coded: before RoPE, or after it."""

    codec: Kivi = SMALL

    def attend(self, layer, query, keys, values, terms):
        if self.codec.keys == "rotated":
            here = torch.full((keys.shape[1],), self.step, device=keys.device)
            keys = super()._rotated(keys[0, :, 0], here)[None, :, None]
        out = super().attend(layer, query, keys, values, terms)
        for head in range(keys.shape[1]):
            after_step(self.held[layer, head], self.codec)
        return out

    def _rotated(self, x, places):
        is_query = len(places) > 1 and bool((places == places[0]).all())
        return x if self.codec.keys == "rotated" and not is_query else super()._rotated(x, places)


@settings(max_examples=25)
@given(
    name=st.sampled_from(["kivi4", "kivi2"]),
    group=st.sampled_from([4, 8]),
    groups=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    spread=st.sampled_from([0.0, 1e-6, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_keys_and_values_are_read_as_the_authors_hold_them_exactly(name, group, groups, sizes, spread, seed):
    """In float32, whatever blocks they come in; and their bytes are the authors'."""
    codec, total, (rows, slots, dims) = Kivi(name, group, residual=groups * group), sum(sizes), (3, 192, 16)
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(rows, total, dims, generator=generator) * spread + 1 for _ in range(2))
    rank = torch.full((rows, slots), slots)
    stores = KiviKeys.empty(codec, torch.zeros(rows, slots, dims)), KiviValues.of_kivi(codec, torch.zeros(rows, slots, dims))
    windows = [store.window(slice(0, rows), slots, rank, rank) for store in stores]
    done = 0
    for size in sizes:
        at = torch.arange(done, done + size)
        rank[:, at] = at
        flat = (torch.arange(rows)[:, None] * slots + at).flatten()
        for window, x in zip(windows, (keys, values), strict=True):
            window.write(flat, x[:, done : done + size].flatten(0, 1))
        done += size
        for row in range(rows):
            before = after_prompt(keys[row, : done - 1], values[row, : done - 1], codec)
            for window, coded, x in zip(windows, before, (keys, values), strict=True):
                assert torch.equal(window.read()[row, :done], torch.cat([coded, x[row, done - 1 : done]]))
    held = sum(store.held_bytes(rank < slots, rank) for store in stores)
    assert held == rows * bytes_held(total, codec, dims, 4)
    assert sum(store.nbytes for store in stores) == rows * codec.allocated(slots, dims, dims, 4)


def refuse_unequal(codec: Kivi, length: int, size: int) -> None:
    """Compare a dense cache, read in steps, in blocks and by the plain walk, with lists."""
    model, tokens = model_of("llama", torch.float64), tokens_of(length)
    mode = "stream" if codec.keys == "rotated" else "cache"
    lists = KiviLists(model, lambda *_: 0, length, mode, codec=codec)
    theirs = lists.run(tokens)
    held = sum(bytes_held(len(x), codec, model.layers[0].key_dim, 8) for x in lists.held.values())
    for method, block in ((FASTEST, 1), (FASTEST, size), (TOKEN_BY_TOKEN, size)):
        read = CachedDecoder(model, CacheConfig(Dense(), positions=mode, kv=codec), method=method)
        torch.testing.assert_close(in_blocks(read, tokens, block), theirs, atol=1e-6, rtol=0)
        assert read.held_bytes == held


@pytest.mark.parametrize("keys", ["unrotated", "rotated"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_dense_cache_equals_the_authors_rule(codec, keys):
    """Tokens are coded when the residual is full, not when a block ends."""
    refuse_unequal(Kivi(codec.name, codec.group, keys=keys, residual=codec.residual), 40, 7)


@pytest.mark.slow("many drawn cases")
@settings(max_examples=15)
@given(
    name=st.sampled_from(["kivi4", "kivi2"]),
    group=st.sampled_from([4, 8]),
    groups=st.integers(1, 3),
    length=st.integers(2, 60),
    size=st.integers(2, 60),
    keys=st.sampled_from(["unrotated", "rotated"]),
)
def test_any_dense_cache_equals_the_authors_rule(name, group, groups, length, size, keys):
    refuse_unequal(Kivi(name, group, keys=keys, residual=groups * group), length, size)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("policy", [SnapKV(window=4), Random(), AdaKV(SnapKV(window=4))], ids=lambda p: type(p).__name__)
def test_what_is_kept_of_a_prompt_is_coded_in_the_order_of_arrival(policy, codec):
    """Also covers heads that keep different numbers of tokens. Later tokens are coded as in the authors' code."""
    model, tokens, capacity = model_of("llama", torch.float64), tokens_of(60), 21
    plain, coded, split = (
        CachedDecoder(model, CacheConfig(policy, capacity, evict="prompt", seed=1, kv=kv)) for kv in (None, codec, codec)
    )
    for read in (plain, coded, split):
        read.read_prompt(tokens[:, :40], 7 if read is split else 40)
    assert coded.kept() == plain.kept()
    held = 0
    lists = KiviLists(model, lambda *_: 0, 1000, "cache", codec=codec)
    for at in range(len(model.layers)):
        ours, exact = (next(w for w in read.walks if at in w.slots.layers) for read in (coded, plain))
        ours, exact = (w.rows(w.slots.num_slots, at) for w in (ours, exact))
        for head, positions in enumerate(plain.kept()[at][0]):
            count = len(positions)
            theirs = after_prompt(exact.keys[head, :count], exact.values[head, :count], codec)
            order, last = model.layers[at].rotation.order, count - 1
            block = last // codec.residual * codec.residual
            for got, expected, end in ((ours.keys, theirs[0], block), (ours.values, theirs[1], max(0, last - codec.residual))):
                torch.testing.assert_close(got[head, :end], expected[:end])  # the last step still reads the others as floats
            lists.held[at, head] = [
                Held(p, torch.empty_like(k).index_copy_(0, order, k), v) for p, k, v in zip(positions, *theirs, strict=True)
            ]
            held += bytes_held(count, codec, model.layers[at].key_dim, 8)
    assert coded.held_bytes == held
    later = tokens[:, 40:]
    expected = _run_on(lists, later, 40)
    torch.testing.assert_close(in_blocks(coded, later, 1), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(in_blocks(split, later, 5), expected, atol=1e-6, rtol=0)


def _run_on(lists: KiviLists, tokens: Tensor, seen: int) -> Tensor:
    """Logits of what comes after a prompt. [1, T] -> [1, T, V]."""
    out = []
    with torch.inference_mode():
        for t in range(tokens.shape[1]):
            lists.step = seen + t
            out.append(lists.model(tokens[:, t : t + 1], lists))
    return torch.cat(out, 1)


def test_streams_of_unequal_length_and_forks_are_coded_alone():
    """An invalid token is in nobody's group."""
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[1, 12:17] = valid[0, 3] = valid[1, 39] = valid[0, 8] = False
    check_streams_are_read_alone(CacheConfig(Dense(), kv=SMALL), valid)


def test_allocated_bytes_are_the_formula_as_a_cache_grows():
    model, codec = model_of("llama"), Kivi("kivi4", 32, residual=96)  # the last slots of a bucket make up no block
    read = CachedDecoder(model, CacheConfig(Dense(), kv=codec), 2)
    for tokens in (40, 300):
        read(tokens_of(tokens, 2))
        slots = read.walks[0].slots.num_slots
        assert read.kv_bytes == model.kv_bytes(slots - 1, 2, codec)
    assert slots == 512
    tensors = read.walks[0].slots.tensors
    stored = [x for store in (tensors.keys, tensors.values) for x in (store.codes, store.scale, store.zero, store.exact)]
    assert read.kv_bytes == sum(x.untyped_storage().nbytes() for x in stored)


@pytest.mark.parametrize(("evict", "policy"), [(1, Dense()), ("prompt", SnapKV(window=4))])
def test_a_residual_that_is_never_full_is_the_float_cache_exactly(evict, policy):
    model, tokens, logits = model_of("llama"), tokens_of(40), []
    for kv in (None, Kivi("kivi2", residual=64)):
        config = CacheConfig(policy, 12 if policy.evicts else None, evict=evict, kv=kv)
        read = CachedDecoder(model, config, method=TOKEN_BY_TOKEN)
        first = read.read_prompt(tokens[:, :24], 24)
        logits.append(torch.cat([first[:, None], in_blocks(read, tokens[:, 24:], 1)], 1))
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        ("llama", {"policy": H2O(), "capacity": 9}, "can't lose one: it needs evict: prompt, or dense"),
        ("llama", {"policy": H2O(), "capacity": 9, "evict": 8}, "can't lose one: it needs evict: prompt, or dense"),
        ("mistral", {"policy": Dense()}, "a layer with a sliding window would"),
    ],
)
def test_nothing_is_evicted_out_of_a_group(model, config, message):
    with pytest.raises(ValueError, match=message):
        CachedDecoder(model_of(model), CacheConfig(**config, kv=SMALL))
