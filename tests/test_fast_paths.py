"""The closed form and the compiled walk give the numbers of the plain walk, alone and mixed with single steps."""

import pytest
import torch
from factories import MODES, Odd, needs_compiler
from helpers import DEVICE, FAMILIES, H2O, CacheConfig, Dense, Random, SinkWindow, Window, in_blocks, model_of, nll, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.harness.engine import closed_form, fastcheck, walk
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import FASTEST, KERNELS, PLAIN_WALK, TOKEN_BY_TOKEN, Method
from kvbench.harness.engine.trial import MethodCheck
from kvbench.harness.kernels import compiler, cpu_walk, flex
from kvbench.harness.kernels.tracing import traced
from kvbench.policies import AttentionSum, CacheView

pytestmark = pytest.mark.fast


CAPACITIES = [4, 5, 9, 16, 24]  # few, because a compiler builds a walk for each


def read_in(read: CachedDecoder, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """All logits, read in blocks whose sizes repeat."""
    out, at = [], 0
    while at < tokens.shape[1]:
        size = sizes[len(out) % len(sizes)]
        out.append(read(tokens[:, at : at + size]))
        at += size
    return torch.cat(out, 1)


@pytest.mark.slow("many drawn cases")
@settings(max_examples=60)
@given(
    family=st.sampled_from(FAMILIES),
    mode=st.sampled_from(MODES),
    capacity=st.integers(1, 24),
    sinks=st.integers(0, 8),
    limit=st.integers(1, 40),
    length=st.integers(2, 90),
    sizes=st.lists(st.sampled_from([1, 2, 3, 7, 20, 64, 90]), min_size=1, max_size=4),
    streams=st.integers(1, 3),
)
def test_the_closed_form_is_the_walk(family, mode, capacity, sinks, limit, length, sizes, streams):
    """For all blocks, single steps between them, sinks and positions: the same NLL and the same tokens kept."""
    policy = SinkWindow(min(sinks, capacity - 1)) if sinks else Window()
    model, tokens = model_of(family), tokens_of(length, streams)
    config = CacheConfig(policy, capacity, mode, limit)
    closed, walked = CachedDecoder(model, config, streams), CachedDecoder(model, config, streams, TOKEN_BY_TOKEN)
    assert all("closed form" in w.offers for w in closed.walks)
    assert not any("closed form" in w.offers for w in walked.walks)
    ours, theirs = read_in(closed, tokens, sizes), read_in(walked, tokens, [5])
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=1e-4, rtol=0)
    assert closed.kept() == walked.kept()
    torch.testing.assert_close(closed(tokens[:, :1]), walked(tokens[:, :1]), atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", ["deepseek_v3", "smollm3", "gpt_oss", "gemma2", "stablelm", "cohere2", "mistral"])
@pytest.mark.parametrize("capacity", [6, 15, 40])
def test_the_closed_form_is_the_walk_in_odd_families(family, capacity):
    """Covers windows of 16, no RoPE, sink logits, softcaps, K and V of different dims, with the fused and the plain code."""
    dtype, close = (torch.float32, 1e-4) if family == "gpt_oss" else (torch.float64, 1e-6)  # its experts don't support float64
    model, tokens = model_of(family, dtype), tokens_of(70, 2)
    config = CacheConfig(SinkWindow(3), capacity)
    closed, walked = CachedDecoder(model, config, 2), CachedDecoder(model, config, 2, TOKEN_BY_TOKEN)
    ours, theirs = in_blocks(closed, tokens, 23), in_blocks(walked, tokens, 23)
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=close, rtol=0)
    assert closed.kept() == walked.kept()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", [H2O(), Dense()], ids=str)
def test_layers_of_a_large_cache_compute_their_own_rope(monkeypatch, policy, mode):
    """A step of a small cache computes RoPE for all layers at once."""
    model, tokens = model_of("llama"), tokens_of(40, 3)
    config = CacheConfig(policy, 12 if policy.evicts else None, mode, 9)
    at_once = in_blocks(CachedDecoder(model, config, 3), tokens, 1)
    monkeypatch.setattr(walk, "_MAX_BATCHED_ROPE_ELEMENTS", 0)
    by_layer = in_blocks(CachedDecoder(model, config, 3), tokens, 1)
    torch.testing.assert_close(by_layer, at_once, atol=0, rtol=0)


def test_the_closed_form_is_exact_in_float64():
    model, tokens = model_of("llama", torch.float64), tokens_of(300)
    for policy, mode in [(SinkWindow(4), "cache"), (Window(), "stream"), (SinkWindow(2), "clamped")]:
        config = CacheConfig(policy, 70, mode, 80)
        ours = in_blocks(CachedDecoder(model, config), tokens, 150)
        theirs = in_blocks(CachedDecoder(model, config, method=TOKEN_BY_TOKEN), tokens, 150)
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_closed_form_in_16_bits_differs_by_rounding(dtype):
    model, tokens = model_of("llama", dtype), tokens_of(120)
    config = CacheConfig(SinkWindow(4), 20)
    ours = nll(in_blocks(CachedDecoder(model, config), tokens, 40).float(), tokens)
    theirs = nll(in_blocks(CachedDecoder(model, config, method=TOKEN_BY_TOKEN), tokens, 40).float(), tokens)
    assert (ours - theirs).abs().mean() < 0.05
    assert (ours - theirs).mean().abs() < 0.01


@pytest.mark.slow("many drawn cases")
@needs_compiler
@settings(max_examples=40)
@given(
    family=st.sampled_from([*FAMILIES, "mistral"]),
    policy=st.sampled_from([H2O(), Random(), H2O(3)]),
    capacity=st.sampled_from(CAPACITIES),
    length=st.integers(2, 90),
    sizes=st.lists(st.sampled_from([1, 2, 7, 20, 64, 90]), min_size=1, max_size=4),
    streams=st.integers(1, 3),
    seed=st.integers(-3, 2**40),
    mode=st.sampled_from(MODES),
    limit=st.integers(1, 40),
)
def test_the_compiled_walk_is_the_plain_one(family, policy, capacity, length, sizes, streams, seed, mode, limit):
    """Exactly the same tokens kept, the same NLL, and single steps can follow."""
    model, tokens = model_of(family), tokens_of(length, streams)
    config = CacheConfig(policy, capacity, mode, limit, seed)
    fast, plain = CachedDecoder(model, config, streams, FASTEST), CachedDecoder(model, config, streams, TOKEN_BY_TOKEN)
    # A layer whose sliding window fits has a closed form.
    assert not any(w.offers.isdisjoint(("compiled walk", "closed form")) for w in fast.walks)
    ours, theirs = read_in(fast, tokens, sizes), read_in(plain, tokens, [5])
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=1e-4, rtol=0)
    assert fast.kept() == plain.kept()
    for slots, other in zip((w.slots for w in fast.walks), (w.slots for w in plain.walks), strict=True):
        held = min(length, slots.capacity)
        for x, y in zip(slots.tensors.states.values(), other.tensors.states.values(), strict=True):
            ours, theirs = (
                z.take_along_dim(r.argsort(-1), 1)[:, :held] for z, r in ((x, slots.tensors.rank), (y, other.tensors.rank))
            )
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)
    fork = fast.fork(range(streams))
    torch.testing.assert_close(fork(tokens[:, :9]), plain(tokens[:, :9]), atol=3e-4, rtol=0)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
def test_the_compiled_walk_does_not_depend_on_threads(threads):
    model, tokens = model_of("llama"), tokens_of(80, 3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = in_blocks(CachedDecoder(model, CacheConfig(H2O(), 16), 3, FASTEST), tokens, 40)
    finally:
        torch.set_num_threads(before)
    again = in_blocks(CachedDecoder(model, CacheConfig(H2O(), 16), 3, FASTEST), tokens, 40)
    torch.testing.assert_close(found, again, atol=1e-5, rtol=0)


@pytest.mark.slow("many drawn cases")
@needs_compiler
@settings(max_examples=40)
@given(
    family=st.sampled_from([*FAMILIES, "mistral", "deepseek_v3", "smollm3"]),
    policy=st.sampled_from([H2O(), Random(), SinkWindow(2), Window(), Dense()]),
    capacity=st.sampled_from(CAPACITIES),
    length=st.integers(2, 60),
    streams=st.integers(1, 3),
    mode=st.sampled_from(MODES),
    limit=st.integers(1, 40),
    begun=st.integers(0, 30),
)
def test_the_decode_step_by_kernels_is_the_plain_one(family, policy, capacity, length, streams, mode, limit, begun):
    """Token by token, also after a block: the same logits, and exactly the same tokens kept."""
    model, tokens = model_of(family), tokens_of(begun + length, streams)
    config = CacheConfig(policy, capacity if policy.evicts else None, mode, limit, seed=3)
    fast, plain = CachedDecoder(model, config, streams, FASTEST), CachedDecoder(model, config, streams)
    assert all("step kernel" in w.offers for w in fast.walks)
    assert not any("step kernel" in w.offers for w in plain.walks)
    sizes = [begun] * bool(begun) + [1] * length
    ours, theirs = (torch.cat([read(block) for block in tokens.split(sizes, 1)], 1) for read in (fast, plain))
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=1e-4, rtol=0)
    assert fast.kept() == plain.kept()


@needs_compiler
@pytest.mark.parametrize("policy", [H2O(), SinkWindow(2), Dense()], ids=lambda p: type(p).__name__)
def test_the_decode_step_by_kernels_with_streams_of_unequal_length(policy):
    model, tokens = model_of("llama"), tokens_of(40, 3)
    valid = torch.rand(3, 40, generator=torch.Generator().manual_seed(1)) < 0.7
    config = CacheConfig(policy, 9 if policy.evicts else None)
    fast, plain = CachedDecoder(model, config, 3, FASTEST), CachedDecoder(model, config, 3)
    for t in range(40):
        ours, theirs = (read(tokens[:, t : t + 1], valid[:, t : t + 1]) for read in (fast, plain))
        torch.testing.assert_close(ours[valid[:, t]], theirs[valid[:, t]], atol=2e-4, rtol=0)
    assert fast.kept() == plain.kept()


@pytest.mark.slow("takes seconds")
@pytest.mark.parametrize(("family", "mode"), [*zip(FAMILIES, ["stream", "clamped", "cache"], strict=True)])
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_the_closed_form_by_flex_attention_is_the_walk(monkeypatch, family, mode):
    """The path of CUDA, with FlexAttention uncompiled."""
    monkeypatch.setattr(flex, "_DEVICES", {DEVICE.type})
    model, tokens = model_of(family), tokens_of(300, 2)
    config = CacheConfig(SinkWindow(3), 70, mode, 90)
    closed, walked = CachedDecoder(model, config, 2, Method(flex=True)), CachedDecoder(model, config, 2, TOKEN_BY_TOKEN)
    ours, theirs = read_in(closed, tokens, [128]), read_in(walked, tokens, [50])
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=1e-4, rtol=0)
    assert closed.kept() == walked.kept()


@needs_compiler
def test_a_users_own_policy_is_compiled_too():
    model, tokens = model_of("llama"), tokens_of(90, 2)
    config = CacheConfig(Odd(), 12, seed=5)
    fast, plain = CachedDecoder(model, config, 2, FASTEST), CachedDecoder(model, config, 2)
    assert "compiled walk" in fast.walks[0].offers
    ours, theirs = in_blocks(fast, tokens, 30), in_blocks(plain, tokens, 30)
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=1e-4, rtol=0)
    assert fast.kept() == plain.kept()


class Solved(Window):
    def importance(self, view: CacheView):
        return torch.linalg.pinv(view.keys.float()).sum(2)


class Branching(Window):
    def importance(self, view: CacheView):
        return view.position.float() if view.position.max() > 3 else -view.position.float()


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Solved(), "'linalg_pinv' of a tensor"),
        (Branching(), "a branch that depends on a tensor"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_can_not_be_traced_is_walked_plainly_and_says_why(policy, why):
    assert why in compiler.why_not(policy.bind(8))
    walk = CachedDecoder(model_of("llama"), CacheConfig(policy, 8), method=KERNELS).walks[0]
    assert "compiled walk" not in walk.offers
    assert why in walk.plain_because
    assert walk.lost == ""


def test_what_is_traced_reads_like_the_policy():
    importance, updates, widths, reads = traced(H2O(3).bind(8))
    assert importance == "(((step - position) < 3LL) ? INFINITY : state.of[0LL])"
    assert (updates, widths) == (("(state.of[0LL] + mass)",), (1,))
    assert reads == {"state", "mass", "step", "position"}
    assert traced(Random().bind(8))[:2] == ("uniform(position, head, layer, seed)", ())
    assert AttentionSum() in H2O.statistics
    for policy in (Random(sinks=2, window=3), Random(keep_prompt=True), H2O(normalise="age"), H2O(normalise="visible")):
        assert traced(policy.bind(8)).importance


@pytest.mark.skipif(DEVICE.type != "cpu", reason="Triton's kernels need no C compiler")
def test_without_a_compiler_the_plain_code_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no C compiler" in compiler.why_not(H2O().bind(8))
    walk = CachedDecoder(model_of("llama"), CacheConfig(H2O(), 8), method=FASTEST).walks[0]
    assert "compiled walk" not in walk.offers
    assert "step kernel" not in walk.offers
    monkeypatch.setenv("CC", "false")  # a compiler that fails
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    walk = CachedDecoder(model_of("llama"), CacheConfig(H2O(), 8), method=FASTEST).walks[0]
    assert "compiled walk" not in walk.offers
    assert "step kernel" not in walk.offers


def test_the_check_refuses_a_closed_form_that_differs(monkeypatch):
    model, config = model_of("llama"), CacheConfig(SinkWindow(4), 20)
    assert fastcheck.fast_method(model, config).blocks == "closed form"
    attend = closed_form.banded
    monkeypatch.setattr(closed_form, "banded", lambda q, k, v, window, *rest, **more: attend(q, k, v, window - 1, *rest, **more))
    found = fastcheck.fast_method(model, config)
    assert found.blocks in ("compiled walk", "walk")
    assert not found.method.closed_form
    assert found.refused.startswith("closed form: its attention differs from the plain walk's")
    assert found.differs > 1


@needs_compiler
def test_the_check_refuses_a_compiled_walk_that_differs(monkeypatch):
    model, config = model_of("llama"), CacheConfig(H2O(), 20)
    assert fastcheck.fast_method(model, config).blocks == "compiled walk"
    kernel = compiler.built_of(Random().bind(20), "walk.c", "walk")
    real = compiler.built_of
    monkeypatch.setattr(cpu_walk, "built_of", lambda *asked: kernel if asked[2] == "walk" else real(*asked))
    assert fastcheck.fast_method(model, config).blocks == "walk"


@needs_compiler
def test_dense_is_checked_only_where_kernels_take_its_steps(monkeypatch):
    """Its blocks are the plain computation, so without kernels there is nothing to compare."""
    model, compared, plain = model_of("llama"), [], MethodCheck._differs
    monkeypatch.setattr(MethodCheck, "_differs", lambda *asked: compared.append(asked) or plain(*asked))
    found = fastcheck.fast_method(model, CacheConfig(Dense()))
    assert (found.method, found.blocks, found.step) == (Method(closed_form=False, step_kernel=True), "closed form", "compiled")
    assert len(compared) == 1
    monkeypatch.setenv("CC", "no-such-compiler")
    found = fastcheck.fast_method(model, CacheConfig(Dense()))
    assert found == fastcheck.FastCheck(PLAIN_WALK, "closed form", "plain", 0.0, "no C compiler (no-such-compiler)")
    assert len(compared) == 1
