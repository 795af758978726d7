"""The equalities that the engine guarantees, on tiny random models, in float32 unless stated otherwise."""

from math import inf
from typing import ClassVar

import pytest
import torch
from factories import BOTH, CLOSE, MODES, POLICIES, SETTINGS, chooser
from helpers import DEVICE, FAMILIES, H2O, Dense, Random, SinkWindow, Window, adopt, in_blocks, model_of, nll, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ListBackend, MaskBackend
from transformers import AutoModelForCausalLM

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder, decoder
from kvbench.harness.engine.method import EAGER, TOKEN_BY_TOKEN
from kvbench.harness.engine.own_attention import own_attention
from kvbench.policies import CacheView, Policy, Statistic
from kvbench.policies.recompute_sink_window import RecomputeSinkWindow
from kvbench.policies.recompute_window import RecomputeWindow

pytestmark = pytest.mark.fast


def own_forward(family: str, tokens: torch.Tensor) -> torch.Tensor:
    """The Hugging Face model's own logits."""
    model = model_of(family)
    with own_attention(model.hf), torch.inference_mode():
        return model.hf(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "method"), [(1, EAGER), (7, EAGER), (300, EAGER), (300, TOKEN_BY_TOKEN)])
def test_dense_equals_the_models_own_forward_pass(family, size, method):
    tokens = tokens_of(300)  # more than one bucket of slots
    ours = in_blocks(decoder(model_of(family), CacheConfig(Dense()), method=method), tokens, size)
    torch.testing.assert_close(ours, own_forward(family, tokens), atol=1e-4, rtol=0)


@SETTINGS
def test_a_capacity_that_covers_the_stream_equals_dense(family, policy, mode):
    dtype = torch.float64
    tokens, model = tokens_of(40), model_of(family, dtype)
    dense = in_blocks(decoder(model, CacheConfig(Dense())), tokens, 1)
    ours = in_blocks(decoder(model, CacheConfig(policy, 40, mode, limit=40)), tokens, 9)
    torch.testing.assert_close(ours, dense, atol=CLOSE[dtype], rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_equals_the_models_own_forward_pass_over_the_window(family):
    tokens, capacity = tokens_of(30), 6
    ours = in_blocks(decoder(model_of(family), CacheConfig(RecomputeWindow(), capacity)), tokens, 11)
    theirs = [own_forward(family, tokens[:, max(0, t - capacity) : t + 1])[:, -1] for t in range(30)]
    torch.testing.assert_close(ours, torch.stack(theirs, 1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [1, 5, 30])
def test_recompute_with_sinks_equals_the_models_own_forward_pass_over_first_and_newest_tokens(size):
    tokens, capacity, sinks = tokens_of(30, 2), 6, 2
    read = decoder(model_of("llama"), CacheConfig(RecomputeSinkWindow(sinks), capacity), 2)
    ours = in_blocks(read, tokens, size)
    newest = [tokens[:, max(sinks, t - capacity + sinks) : t + 1] for t in range(30)]
    windows = [torch.cat([tokens[:, : min(sinks, t + 1)], x], 1)[:, : t + 1] for t, x in enumerate(newest)]
    theirs = [own_forward("llama", window)[:, -1] for window in windows]
    torch.testing.assert_close(ours, torch.stack(theirs, 1), atol=1e-4, rtol=0)
    assert [read.held([p]) for p in (0, 1, 2, 25, 26, 29, 30)] == [1, 1, 0, 0, 1, 1, 0]
    assert read.slots == (capacity + 1, capacity + 1)


@SETTINGS
def test_policies_equal_the_list_based_reference(family, policy, mode):
    """Exactly the same positions are kept at every step, and the logits are the same."""
    dtype = torch.float64
    model, tokens, capacity, limit = model_of(family, dtype), tokens_of(48), 9, 12
    reference = ListBackend(model, chooser(policy, capacity, 5), capacity, mode, limit)
    theirs = reference.run(tokens)
    read = CachedDecoder(model, CacheConfig(policy, capacity, mode, limit, seed=5))
    for t in range(48):
        ours = read(tokens[:, t : t + 1])
        torch.testing.assert_close(ours, theirs[:, t : t + 1], atol=CLOSE[dtype], rtol=0)
        assert [layer[0] for layer in read.kept()] == reference.kept[t], f"step {t}"


@pytest.mark.slow("many drawn cases")
@settings(max_examples=60)
@given(
    family=st.sampled_from(FAMILIES),
    policy=st.sampled_from(["window", "sink", "h2o", "random"]),
    mode=st.sampled_from(MODES),
    capacity=st.integers(1, 20),
    part=st.integers(0, 19),
    length=st.integers(2, 60),
    size=st.integers(2, 70),
    streams=st.integers(1, 3),
)
def test_any_block_size_equals_token_by_token(family, policy, mode, capacity, part, length, size, streams):
    """For random capacities, sinks, windows, lengths, blocks and batches: the same NLL and the same positions kept."""
    part = min(part, capacity - 1)
    made = {"window": Window(), "sink": SinkWindow(part), "h2o": H2O(part), "random": Random()}[policy]
    model, tokens = model_of(family), tokens_of(length, streams)
    config = CacheConfig(made, capacity, mode, limit=max(1, part))
    one, many = CachedDecoder(model, config, streams), CachedDecoder(model, config, streams)
    singly, blocks = in_blocks(one, tokens, 1), in_blocks(many, tokens, size)
    torch.testing.assert_close(nll(blocks, tokens), nll(singly, tokens), atol=1e-4, rtol=0)
    assert one.kept() == many.kept()
    assert all(len(p) == min(length, capacity) for layer in one.kept() for s in layer for p in s)


@pytest.mark.parametrize("family", ["deepseek_v3", "smollm3", "gpt_oss", "gemma2", "stablelm", "granite", "cohere2"])
@pytest.mark.parametrize("policy", [SinkWindow(2), H2O()], ids=str)  # a closed form, and a walk with a statistic
def test_any_block_size_equals_token_by_token_in_odd_families(family, policy):
    """Covers different K and V dims, layers without RoPE, sink logits, softcaps, partial and interleaved RoPE, mixed windows."""
    model, tokens = model_of(family), tokens_of(40, 2)
    one, many = (CachedDecoder(model, CacheConfig(policy, 20), 2) for _ in range(2))
    singly, blocks = in_blocks(one, tokens, 1), in_blocks(many, tokens, 13)
    torch.testing.assert_close(nll(blocks, tokens), nll(singly, tokens), atol=1e-4, rtol=0)
    assert one.kept() == many.kept()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@BOTH
def test_evicting_is_the_same_computation_as_masking(family, policy, dtype):
    model, tokens = model_of(family, dtype), tokens_of(40)
    read, kept, ours = CachedDecoder(model, CacheConfig(policy, 8, "stream")), [], []
    for t in range(40):
        ours.append(read(tokens[:, t : t + 1]))
        kept.append([layer[0] for layer in read.kept()])
    torch.testing.assert_close(torch.cat(ours, 1), MaskBackend(model, kept).run(tokens), atol=CLOSE[dtype], rtol=0)


@pytest.mark.parametrize("policy", [*POLICIES, RecomputeWindow(), RecomputeSinkWindow(sinks=2)], ids=str)
@pytest.mark.parametrize("size", [1, 8])
def test_streams_of_unequal_length_equal_each_alone(policy, size):
    """Invalid tokens change nothing, wherever they are, before and after the cache is full."""
    model, tokens = model_of("llama", torch.float64), tokens_of(48, 3)
    valid = torch.rand(3, 48, generator=torch.Generator().manual_seed(2)) < torch.tensor([[1.0], [0.6], [0.2]])
    valid = valid.to(DEVICE)
    config = CacheConfig(policy, 7, seed=3)
    read = decoder(model, config, 3)
    together = torch.cat([read(t, v) for t, v in zip(tokens.split(size, 1), valid.split(size, 1), strict=True)], 1)
    for b in range(3):
        alone = decoder(model, config)
        logits = in_blocks(alone, tokens[b : b + 1, valid[b]], 5)
        torch.testing.assert_close(together[b][valid[b]], logits[0], atol=1e-5, rtol=0)
        if policy.caches:
            assert [layer[b] for layer in read.kept()] == [layer[0] for layer in alone.kept()]


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral", "smollm3"])
@pytest.mark.parametrize("keep", [[], [0, 3, 4]], ids=str)
def test_windows_of_unequal_length_equal_each_alone_in_odd_families(family, keep):
    """Covers padded windows with softcaps, sink logits, a sliding window of 16 and no RoPE, also with few logits requested."""
    model, tokens = model_of(family), tokens_of(45, 2)
    valid = torch.rand(2, 45, generator=torch.Generator().manual_seed(4)) < torch.tensor([[0.9], [0.5]])
    valid[:, 0] = True
    config, wanted = CacheConfig(RecomputeWindow(), 24), torch.tensor(keep, device=DEVICE).long()
    read, some = decoder(model, config, 2), decoder(model, config, 2)
    blocks = list(zip(tokens.split(9, 1), valid.to(DEVICE).split(9, 1), strict=True))
    together = torch.cat([read(t, v) for t, v in blocks], 1)
    few = torch.cat([some(t, v, wanted) for t, v in blocks], 1)
    torch.testing.assert_close(few, together.unflatten(1, (5, 9))[:, :, keep].flatten(1, 2), atol=1e-4, rtol=0)
    for b in range(2):
        single, seen = decoder(model, config), range(int(valid[b].sum()))
        alone = in_blocks(single, tokens[b : b + 1, valid[b]], 5)
        torch.testing.assert_close(together[b][valid[b]], alone[0], atol=1e-4, rtol=0)
        assert read.fork([b]).held(seen) == single.held(seen)


@pytest.mark.parametrize("policy", [*POLICIES, RecomputeWindow()], ids=str)
@pytest.mark.parametrize("size", [1, 5, 40])
def test_streams_of_equal_length_equal_each_alone(policy, size):
    model, tokens = model_of("llama", torch.float64), tokens_of(40, 3)
    together = in_blocks(decoder(model, CacheConfig(policy, 7), 3), tokens, size)
    for b in range(3):
        alone = in_blocks(decoder(model, CacheConfig(policy, 7)), tokens[b : b + 1], size)
        torch.testing.assert_close(together[b : b + 1], alone, atol=1e-9, rtol=0)


@pytest.mark.parametrize("policy", [H2O(), RecomputeWindow()], ids=str)
@pytest.mark.parametrize("keep", [[], [3], [1, 2, 3], [0, 4, 9], [9]], ids=str)
def test_only_the_logits_that_are_wanted_are_given(policy, keep):
    model, tokens = model_of("llama"), tokens_of(30, 2)
    every, some = (decoder(model, CacheConfig(policy, 7), 2) for _ in range(2))
    for block in tokens.split(10, 1):
        whole, part = every(block), some(block, keep=torch.tensor(keep, device=DEVICE).long())
        torch.testing.assert_close(part, whole[:, keep], atol=1e-5, rtol=0)


def test_dense_streams_of_unequal_length_equal_each_alone():
    model, tokens = model_of("llama", torch.float64), tokens_of(30, 2)
    valid = torch.ones(2, 30, dtype=torch.bool, device=DEVICE)
    valid[1, 10:] = False
    together = decoder(model, CacheConfig(Dense()), 2)(tokens, valid)
    alone = decoder(model, CacheConfig(Dense()))(tokens[1:, :10])
    torch.testing.assert_close(together[1:, :10], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_fork_equals_a_replay_of_its_prefix(policy):
    model, tokens = model_of("llama"), tokens_of(30, 2)
    config = CacheConfig(policy, 8)
    read = CachedDecoder(model, config, 2)
    in_blocks(read, tokens[:, :20], 1)
    fork = read.fork([1, 0])
    replay = CachedDecoder(model, config, 2)  # the same batch size, because other shapes round differently
    in_blocks(replay, tokens[[1, 0], :20], 1)
    forked, replayed = in_blocks(fork, tokens[[1, 0], 20:], 1), in_blocks(replay, tokens[[1, 0], 20:], 1)
    torch.testing.assert_close(forked, replayed, atol=0, rtol=0)
    before = read.kept()
    assert fork.kept() == replay.kept()
    fork(tokens[[1, 0], :5])
    assert read.kept() == before, "a fork shares nothing with what it came from"


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "cohere2", "gpt_oss", "starcoder2"])
@pytest.mark.parametrize("policy", [Dense(), *POLICIES], ids=str)
def test_sliding_window_layers_hold_to_stream_positions(family, policy):
    """If the stream fits, layers with a window of 16 tokens give the model's own logits under every policy."""
    tokens = tokens_of(60)
    config = CacheConfig(policy) if isinstance(policy, Dense) else CacheConfig(policy, 60)
    ours = in_blocks(CachedDecoder(model_of(family), config), tokens, 7)
    torch.testing.assert_close(ours, own_forward(family, tokens), atol=2e-4, rtol=0)


def test_recompute_in_a_sliding_window_model_equals_its_own_forward_pass():
    tokens, capacity = tokens_of(50), 30  # wider than the layers' window of 16
    ours = in_blocks(decoder(model_of("gemma2"), CacheConfig(RecomputeWindow(), capacity)), tokens, 50)
    theirs = [own_forward("gemma2", tokens[:, max(0, t - capacity) : t + 1])[:, -1] for t in range(50)]
    torch.testing.assert_close(ours, torch.stack(theirs, 1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_float64_blocks_equal_token_by_token_to_the_last_digits(policy):
    model, tokens = model_of("qwen3", torch.float64), tokens_of(40)
    config = CacheConfig(policy, 8)
    one, many = in_blocks(CachedDecoder(model, config), tokens, 1), in_blocks(CachedDecoder(model, config), tokens, 16)
    torch.testing.assert_close(one, many, atol=1e-11, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", [Window(), SinkWindow(2), Random()], ids=str)
def test_16_bits_keep_the_same_positions_and_nearly_the_same_nll(policy, dtype):
    """If attention does not affect the choice, 16 bits change outputs only by rounding. The mean over tokens stays close."""
    tokens = tokens_of(60)
    wide, narrow = (CachedDecoder(model_of("llama", d), CacheConfig(policy, 8)) for d in (torch.float32, dtype))
    a, b = nll(in_blocks(wide, tokens, 20), tokens), nll(in_blocks(narrow, tokens, 20).float(), tokens)
    assert narrow.kept() == wide.kept()
    assert (a - b).mean().abs() < 0.02  # nats; NLL of these models is about 5


class Replay(Policy):
    """Keeps the tokens that another run kept: forced victims."""

    kept: dict[tuple[int, int], list[list[int]]]

    def importance(self, view: CacheView) -> torch.Tensor:
        out = torch.zeros(view.rank.shape, device=view.rank.device)
        for row in range(view.rank.shape[0]):
            step, layer = int(view.step[row]), int(view.layer[row])
            for head, positions in enumerate(self.kept[step, layer]):
                out[row, head] = torch.isin(view.position[row, head], torch.tensor(positions, device=out.device)).float()
        return out.masked_fill(out > 0, inf)


def test_16_bits_h2o_with_forced_victims_is_within_rounding():
    """Free victims may differ if importances differ only by rounding. The same victims give the same outputs."""
    tokens, size = tokens_of(40), 8
    wide, kept, logits = CachedDecoder(model_of("llama"), CacheConfig(H2O(), size)), {}, []
    for t in range(40):
        logits.append(wide(tokens[:, t : t + 1]))
        kept |= {(t, layer): heads[0] for layer, heads in enumerate(wide.kept())}
    policy = Replay()
    object.__setattr__(policy, "kept", kept)
    narrow = CachedDecoder(model_of("llama", torch.bfloat16), CacheConfig(policy, size))
    a, b = nll(torch.cat(logits, 1), tokens), nll(in_blocks(narrow, tokens, 10).float(), tokens)
    assert narrow.kept() == wide.kept()
    assert (a - b).abs().mean() < 0.1
    assert (a - b).mean().abs() < 0.03


class Recorder(H2O):
    """H2O that records every importance, at every step, layer and head."""

    seen: ClassVar[dict[tuple[int, int, int], dict[int, float]]]

    def importance(self, view: CacheView) -> torch.Tensor:
        out = super().importance(view)
        rows = zip(
            view.step.flatten().tolist(), view.layer.flatten().tolist(), view.position.tolist(), out.tolist(), strict=False
        )
        for step, layer, positions, worths in rows:
            for head, (at, worth) in enumerate(zip(positions, worths, strict=True)):
                self.seen[step, layer, head] = dict(zip(at, worth, strict=True))
        return out


@pytest.mark.slow("takes seconds")
def test_16_bits_h2o_chooses_another_victim_only_within_rounding(shared):
    """Token by token against blocks, in bfloat16, on a real model: the first differing victims have nearly equal importance."""
    model = adopt(AutoModelForCausalLM.from_pretrained(shared / "models/stories260K", dtype=torch.bfloat16).eval().to(DEVICE))
    tokens, runs = torch.randint(3, 512, (1, 500), generator=torch.Generator().manual_seed(0)).to(DEVICE), []
    for size in (1, 50):
        Recorder.seen = {}
        result = nll(in_blocks(CachedDecoder(model, CacheConfig(Recorder(), 64)), tokens, size).float(), tokens)
        runs.append((Recorder.seen, result))
    (one, a), (many, b) = runs
    assert one.keys() == many.keys()
    gaps = []
    for at in sorted(one):
        mine, other = (min(seen[at], key=lambda p: (seen[at][p], p)) for seen in (one, many))
        if mine != other:
            gaps.append((one[at][other] - one[at][mine]) / one[at][mine])
            break  # from here on the caches differ
    assert all(gap < 8 * torch.finfo(torch.bfloat16).eps for gap in gaps)
    assert (a - b).mean().abs() < 0.02
    if torch.equal(a, b):
        pytest.skip("token by token and in blocks, this CPU rounds alike: nothing was tested")


def test_k_and_v_are_stored_once_per_kv_head_and_capacity_plus_one():
    shape = model_of("llama").layers[0]
    read = CachedDecoder(model_of("llama"), CacheConfig(SinkWindow(4), 32), streams=3)
    assert (shape.heads, shape.group) == (2, 2)
    assert read.kv_bytes == 2 * 3 * 2 * (16 + 16) * 33 * 4  # layers, streams, KV heads, K and V dims, slots, bytes


def test_slots_stay_where_they_are():
    """After the cache is full, no memory is allocated or moved."""
    read = CachedDecoder(model_of("llama"), CacheConfig(H2O(), 16))
    read(tokens_of(40))
    tensors = read.walks[0].slots.tensors

    def places() -> list[int]:
        held = tensors.keys.tensor, tensors.values.tensor, tensors.rank, tensors.position, *tensors.states.values()
        return [x.data_ptr() for x in held]

    before = places()
    in_blocks(read, tokens_of(40), 1)
    assert read.walks[0].slots.tensors is tensors
    assert places() == before


def test_far_stream_positions_keep_their_precision():
    """At positions in the millions, float32 angles would be off by 0.1. Ours come from float64."""
    rotation = model_of("llama").layers[0].rotation
    far = torch.tensor([16_000_000, 9_999_999], device=DEVICE)
    factors = rotation.factors(far, torch.float32, 2**24)
    exact = torch.polar(torch.ones(2, 8, dtype=torch.float64), far.cpu().double()[:, None] * rotation.frequencies)
    torch.testing.assert_close(factors.cpu(), exact.to(torch.complex64), atol=1e-6, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: whether a step syncs with the host")
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_on_cuda_never_syncs_with_the_host(policy, mode):
    from kvbench.harness.models.families import tiny_model

    read = CachedDecoder(adopt(tiny_model("llama", vocab_size=96).cuda()), CacheConfig(policy, 16, mode, 20))
    tokens = tokens_of(64).cuda()
    for size in (1, 16):  # the tables are computed once
        in_blocks(read, tokens, size)
    torch.cuda.set_sync_debug_mode("error")
    try:
        in_blocks(read, tokens, 1)
        in_blocks(read, tokens, 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read.kept()


class Fading(Statistic):
    """Changes even without attention."""

    initial = 0.25

    def update(self, state, attention, view):
        return state * 0.5 + attention.weights.sum(2)


class Faded(H2O):
    """Evicts the token that faded most."""

    statistics = (Fading(),)

    def importance(self, view: CacheView) -> torch.Tensor:
        return view.state(Fading())


@pytest.mark.parametrize("size", [1, 6])
def test_a_statistic_begins_anew_with_every_token_also_in_a_slot_never_used(size):
    """A token's first state does not depend on whether its slot was empty or just freed."""
    model, tokens = model_of("llama"), tokens_of(30)
    read = CachedDecoder(model, CacheConfig(Faded(), 20))
    seen = []
    for block in tokens.split(size, 1):
        read(block)
        slots = read.walks[0].slots
        position, rank = slots.tensors.position, slots.tensors.rank
        newest = (position == position.amax(-1, keepdim=True)) & (rank < slots.empty_rank)
        seen.append(float(slots.tensors.states[Fading()][newest].min()))
    assert min(seen) >= 0.125, "its initial value, halved once, and attention on top"
