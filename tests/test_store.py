"""Coded K and V: packing against the published formula, and a cache of them against plain lists."""

from dataclasses import dataclass

import pytest
import torch
from factories import MODES, check_streams_are_read_alone, chooser
from helpers import H2O, CacheConfig, CachedDecoder, Dense, Random, SinkWindow, SnapKV, Window, in_blocks, model_of, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Held, WideLists
from torch import Tensor

from kvbench.harness.core.codec import BITS, Codec
from kvbench.harness.engine.fastcheck import fast_method
from kvbench.harness.engine.method import FASTEST, TOKEN_BY_TOKEN
from kvbench.harness.engine.slot_stores import decoded, encoded
from kvbench.policies import Policy
from kvbench.policies.keydiff import KeyDiff
from kvbench.policies.knorm import Knorm
from kvbench.policies.recompute_window import RecomputeWindow

pytestmark = pytest.mark.fast


EVERY: list[Policy] = [Window(), SinkWindow(sinks=2), H2O(), Random()]
LENGTH = 40
NAMES = ["int8", "int4", "int2"]


def published(vector: list[float], bits: int, group: int) -> tuple[list[int], list[float]]:
    """Codes of a vector, and what they stand for: KIVI's and FlexGen's formula, number by number, in float32."""
    codes, numbers = [], []
    for first in range(0, len(vector), group):
        part = torch.tensor(vector[first : first + group])
        zero, scale = part.min(), (part.max() - part.min()) / (2**bits - 1)
        for x in part:
            code = int(torch.round((x - zero) / scale)) if scale > 0 else 0
            codes.append(code)
            numbers.append(float(code * scale + zero))
    return codes, numbers


@settings(max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    group=st.sampled_from([4, 8, 16, 32]),
    groups=st.integers(1, 3),
    seed=st.integers(0, 99),
    spread=st.sampled_from([0.0, 1e-6, 1.0, 1e4]),
)
def test_packing_is_the_published_formula_exactly(name, group, groups, seed, spread):
    codec, bits = Codec(name, group), BITS[name]
    x = torch.randn(3, groups * group, generator=torch.Generator().manual_seed(seed)) * spread + 1
    packed, scale, zero = encoded(x, codec)
    assert packed.shape[-1] * 8 == x.shape[-1] * bits
    assert scale.shape == zero.shape == (3, groups)
    back = decoded(packed, scale, zero, bits)
    for row, vector in enumerate(x.tolist()):
        codes, numbers = published(vector, bits, group)
        per = 8 // bits
        assert packed[row].tolist() == [
            sum(c << (bits * i) for i, c in enumerate(codes[at : at + per])) for at in range(0, len(codes), per)
        ]
        assert back[row].tolist() == numbers


def test_scale_and_zero_have_the_models_dtype():
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    packed, scale, zero = encoded(x, Codec("int4"))
    assert (packed.dtype, scale.dtype, zero.dtype) == (torch.uint8, torch.bfloat16, torch.bfloat16)
    assert decoded(packed, scale, zero, 4).dtype == torch.bfloat16
    assert sum(y.nbytes for y in (packed, scale, zero)) == 5 * Codec("int4").bytes_of(64, 2) == 5 * (32 + 2 * 2 * 2)


@dataclass
class CodedLists(WideLists):
    """The list-based reference, which codes each token in its list when it grows too old to be exempt."""

    codec: Codec | None = None

    def attend(self, layer, query, keys, values, terms):
        new = [[] for _ in range(keys.shape[1])]
        for head in range(keys.shape[1]):
            key, value = keys[0, head, 0], values[0, head, 0]
            new[head] = [self._stored(key, self.step, True), self._stored(value, self.step, False)]
            for held in self.held.get((layer, head), []):
                if held.position == self.step - self.codec.recent:
                    held.key, held.value = (self._stored(x, held.position, x is held.key) for x in (held.key, held.value))
        stacked = [torch.stack([pair[i] for pair in new])[None, :, None] for i in (0, 1)]
        return super().attend(layer, query, *stacked, terms)

    def _stored(self, x: Tensor, position: int, is_key: bool) -> Tensor:
        codec = self.codec
        if position < codec.sinks or self.step - position < codec.recent:
            return x
        order = self.model.layers[0].rotation.order if is_key else torch.arange(len(x))  # slots hold pairs of dims side by side
        size, result = min(codec.group, len(x)), torch.empty_like(x)
        for group in order.split(size):
            part = x[group]
            scale, levels = (part.max() - part.min()) / (2**codec.bits - 1), 2**codec.bits - 1
            codes = ((part - part.min()) / scale).round().clamp(0, levels) if scale > 0 else 0  # those of padding are all 0
            result[group] = codes * scale + part.min()
        return result


def bytes_of(held: list[Held], step: int, codec: Codec, dims: int, itemsize: int) -> int:
    """Bytes of K and V of the tokens of one head."""
    exempt = sum(t.position < codec.sinks or step - t.position < codec.recent for t in held)
    coded = dims * codec.bits // 8 + 2 * max(1, dims // codec.group) * itemsize
    return 2 * (exempt * dims * itemsize + (len(held) - exempt) * coded)


def refuse_unequal(policy: Policy, mode: str, capacity: int, length: int, codec: Codec, size: int) -> None:
    """Compare a coded cache, read in steps, in blocks and by the plain walk, with lists."""
    model, tokens, bound = model_of("llama", torch.float64), tokens_of(length), capacity if policy.evicts else None
    lists = CodedLists(model, chooser(policy, capacity, 5) if bound else None, bound or length, mode, 12, codec=codec)
    theirs = lists.run(tokens)
    config = CacheConfig(policy, bound, mode, 12, seed=5, kv=codec)
    steps, blocks, walked = (CachedDecoder(model, config, method=m) for m in (FASTEST, FASTEST, TOKEN_BY_TOKEN))
    for t in range(length):
        torch.testing.assert_close(steps(tokens[:, t : t + 1]), theirs[:, t : t + 1], atol=1e-8, rtol=0)
        assert [layer[0] for layer in steps.kept()] == lists.kept[t]
    held = sum(bytes_of(x, length - 1, codec, model.layers[0].key_dim, 8) for x in lists.held.values())
    for read in (blocks, walked):
        torch.testing.assert_close(in_blocks(read, tokens, size), theirs, atol=1e-8, rtol=0)
        assert read.kept() == steps.kept()
        assert read.held_bytes == steps.held_bytes == held


@pytest.mark.parametrize("policy", [*EVERY, Dense()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("codec", [Codec("int4", 8), Codec("int2", 32, 2, 6)], ids=str)
def test_a_coded_cache_equals_lists(policy, codec):
    """Logits, kept positions and bytes are equal, in steps and in blocks. A token is coded when it is too old to be exempt."""
    refuse_unequal(policy, "cache", 9, 30, codec, 7)


@pytest.mark.slow("many drawn cases")
@settings(max_examples=15)
@given(
    policy=st.sampled_from([*EVERY, Dense()]),
    mode=st.sampled_from(MODES),
    capacity=st.integers(4, 14),
    length=st.integers(2, 30),
    name=st.sampled_from(NAMES),
    group=st.sampled_from([4, 8, 32]),
    sinks=st.integers(0, 5),
    recent=st.integers(0, 20),
    size=st.integers(2, 30),
)
def test_any_coded_cache_equals_lists(policy, mode, capacity, length, name, group, sinks, recent, size):
    refuse_unequal(policy, mode, capacity, length, Codec(name, group, sinks, recent), size)


@pytest.mark.parametrize("codec", [Codec("int2", recent=5), Codec("int4", sinks=3), Codec("int8", 4, 1, 2)], ids=str)
def test_streams_of_unequal_length_and_forks_are_coded_alone(codec):
    """An invalid token takes no exempt token's place."""
    valid = torch.ones(2, 30, dtype=torch.bool)
    valid[1, 12:17] = valid[0, 3] = valid[1, 29] = False
    check_streams_are_read_alone(CacheConfig(H2O(), 9, kv=codec), valid)


@pytest.mark.parametrize(
    ("policy", "evict"),
    [(Dense(), 1), *((policy, evict) for policy in (*EVERY, SnapKV(window=4)) for evict in (1, 5, "prompt"))],
    ids=lambda x: type(x).__name__ if isinstance(x, Policy) else None,
)
def test_a_cache_whose_tokens_are_all_exempt_is_the_float_cache_exactly(policy, evict):
    model, tokens = model_of("llama"), tokens_of(LENGTH)
    config = CacheConfig(policy, 12 if policy.evicts else None, evict=evict if policy.evicts else 1, seed=1)
    coded = CacheConfig(**{**vars(config), "kv": Codec("int2", recent=LENGTH)})
    logits = []
    for one in (config, coded):
        read = CachedDecoder(model, one, method=TOKEN_BY_TOKEN)
        first = read.read_prompt(tokens[:, :24], 24)
        logits.append(torch.cat([first[:, None], in_blocks(read, tokens[:, 24:], 1)], 1))
    assert torch.equal(*logits)


@pytest.mark.parametrize("policy", [SnapKV(window=4), H2O(), Random()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("codec", [Codec("int4"), Codec("int2", sinks=2, recent=6)], ids=str)
def test_a_cut_prompt_is_coded_at_the_cut(policy, codec):
    """The prompt is read in the model's dtype, so kept tokens are equal. Kept tokens that are not exempt are coded at the cut."""
    model, tokens = model_of("llama", torch.float64), tokens_of(LENGTH)
    plain, coded, split = (
        CachedDecoder(model, CacheConfig(policy, 12, evict="prompt", seed=1, kv=kv)) for kv in (None, codec, codec)
    )
    for read in (plain, coded, split):
        read.read_prompt(tokens[:, :24], 7 if read is split else 24)
    assert coded.kept() == plain.kept()
    rows, theirs = coded.walks[0].rows(coded.walks[0].slots.num_slots, 0), plain.walks[0].rows(plain.walks[0].slots.num_slots, 0)
    held = theirs.rank < 12
    exempt = ((theirs.position < codec.sinks) | (theirs.position.amax(-1, keepdim=True) - theirs.position < codec.recent))[held]
    for ours, exact in ((rows.keys, theirs.keys), (rows.values, theirs.values)):
        x = exact[held]
        torch.testing.assert_close(ours[held], torch.where(exempt[:, None], x, decoded(*encoded(x, codec), codec.bits)))
    later = tokens[:, 24:]
    torch.testing.assert_close(in_blocks(coded, later, 1), in_blocks(split, later, 5), atol=1e-6, rtol=0)


@pytest.mark.parametrize("tokens", [0, 5, 30])
@pytest.mark.parametrize("policy", [H2O(), Dense()], ids=lambda p: type(p).__name__)
def test_a_coded_cache_that_is_filled_reads_on_in_blocks_as_in_steps(policy, tokens):
    config = CacheConfig(policy, 20 if policy.evicts else None, kv=Codec("int4", 32, 2, 6))
    reads = [CachedDecoder(model_of("llama", torch.float64), config) for _ in range(2)]
    for read in reads:
        read.fill_randomly(tokens)
    torch.testing.assert_close(*(in_blocks(read, tokens_of(12), size) for read, size in zip(reads, (1, 5), strict=True)))


def test_statistics_of_a_written_token_are_of_what_is_stored():
    read = CachedDecoder(model_of("llama"), CacheConfig(Knorm(), 9, kv=Codec("int2", sinks=2)))
    in_blocks(read, tokens_of(LENGTH), 7)
    rows = read.walks[0].rows(read.walks[0].slots.num_slots, 0)
    (state,) = rows.states.values()
    held = rows.rank < rows.rank.shape[1]
    torch.testing.assert_close(state.flatten(0, 1)[held], rows.keys.norm(dim=-1)[held])


@pytest.mark.parametrize("keys", ["rotated", "unrotated"])
@pytest.mark.parametrize(("evict", "once"), [(1, True), (1, False), (5, True)])
@pytest.mark.parametrize("codec", [Codec("int2"), Codec("int4", sinks=2)], ids=str)
def test_a_sum_over_keys_is_of_the_keys_that_are_stored(keys, evict, once, codec):
    """At the cut of a prompt that was read as floats, and as its tokens are evicted."""
    model, tokens = model_of("llama", torch.float64), tokens_of(LENGTH)
    read = CachedDecoder(model, CacheConfig(KeyDiff(keys), 9, evict=evict, kv=codec))
    read.read_prompt(tokens[:, :20], 7, once=once)
    for token in tokens[:, 20:].split(1, 1):
        for walk in read.walks:
            for layer in walk.slots.layers:
                rows = walk.rows(walk.slots.num_slots, layer)
                stored = rows.view.rotated_keys if keys == "rotated" else rows.view.keys
                unit = torch.nn.functional.normalize(stored.float(), dim=-1).double() * rows.view.valid[..., None]
                (state,) = rows.states.values()
                torch.testing.assert_close(state, unit.sum(2), atol=1e-5, rtol=0)
        read(token)


@pytest.mark.parametrize("codec", [Codec("int4", sinks=4, recent=16), Codec("int2", 8)], ids=str)
@pytest.mark.parametrize("policy", [H2O(), Dense()], ids=lambda p: type(p).__name__)
def test_allocated_bytes_are_the_formula(codec, policy):
    model = model_of("llama")
    read = CachedDecoder(model, CacheConfig(policy, 20 if policy.evicts else None, kv=codec), 2)
    slots = read.walks[0].slots.num_slots
    read(tokens_of(LENGTH, 2))
    assert read.kv_bytes == model.kv_bytes(slots - 1, 2, codec)
    tensors = read.walks[0].slots.tensors
    stored = [x for store in (tensors.keys, tensors.values) for x in (store.codes, store.scale, store.zero, store.exact)]
    assert read.kv_bytes == sum(x.untyped_storage().nbytes() for x in stored)


def test_rotated_keys_are_coded_as_they_are_rotated():
    """With rotated keys and nothing else changed, values are the same and keys are the code of the rotated ones."""
    model, tokens = model_of("llama", torch.float64), tokens_of(20)
    reads = [
        CachedDecoder(model, CacheConfig(Dense(), positions="stream", kv=kv))
        for kv in (None, Codec("int4", keys="rotated"), Codec("int4"))
    ]
    for read in reads:
        read(tokens[:, :1])
        in_blocks(read, tokens[:, 1:], 4)
    exact, rotated, unrotated = (read.walks[0].rows(256, 0) for read in reads)
    expected = decoded(*encoded(exact.keys[:, :20], Codec("int4")), 4)  # a dense cache at stream positions keeps them rotated
    torch.testing.assert_close(rotated.keys[:, :20], expected)
    assert not torch.allclose(unrotated.keys[:, :20], expected)
    torch.testing.assert_close(rotated.values, unrotated.values)


@pytest.mark.parametrize("name", ["int8", "int2"])
def test_a_prompt_that_is_coded_once_it_is_cut_is_read_in_one_go(name):
    """Rounding flips a code here and there, and a flipped code is no reason to read a prompt token by token."""
    check = fast_method(model_of("llama"), CacheConfig(SinkWindow(2), 64, evict="prompt", kv=Codec(name)))
    assert (check.blocks, check.refused) == ("full attention", "")
    assert check.differs < 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"policy": RecomputeWindow(), "capacity": 9, "kv": Codec("int4")}, "keeps no cache"),
        ({"policy": H2O(), "capacity": 9, "kv": Codec("int4", keys="rotated")}, "needs positions: stream"),
        ({"policy": KeyDiff(), "capacity": 9, "kv": Codec("int4", recent=4)}, "leave exempt.recent out"),
        (
            {"policy": KeyDiff(), "capacity": 9, "positions": "stream", "kv": Codec("int4", keys="rotated")},
            "leave keys: rotated out",
        ),
        ({"policy": H2O(), "capacity": 9, "kv": Codec("int4", 6)}, "groups of 6"),
    ],
)
def test_what_cannot_be_coded_is_refused_in_one_line(config, message):
    with pytest.raises(ValueError, match=message):
        CachedDecoder(model_of("llama"), CacheConfig(**config))
