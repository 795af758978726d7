"""The C kernel that reads codes against the plain reading, and the check that stands before it."""

from dataclasses import replace

import pytest
import torch
from factories import MODES, needs_compiler
from helpers import DEVICE, H2O, CacheConfig, Dense, Model, SinkWindow, SnapKV, adopt, model_of, tiny_model, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.harness.core.codec import Codec, Kivi
from kvbench.harness.engine.comparison import ReferenceComparison, record_inputs
from kvbench.harness.engine.fastcheck import fast_method
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import FASTEST, PLAIN_WALK, RAN, TOKEN_BY_TOKEN
from kvbench.harness.engine.trial import MethodCheck
from kvbench.harness.engine.walk import Walk
from kvbench.harness.kernels import compiler
from kvbench.policies import Policy
from kvbench.policies.knorm import Knorm

BY_KERNEL = replace(PLAIN_WALK, step_kernel=True)
NAMES = ["int8", "int4", "int2"]
POLICIES: list[Policy] = [H2O(), Dense(), SinkWindow(2), Knorm()]

pytestmark = needs_compiler


def parts_of(read: CachedDecoder) -> list[torch.Tensor]:
    """Codes, scales, zeros and exempt tokens of all slots."""
    tensors = [walk.slots.tensors for walk in read.walks]
    return [x for t in tensors for store in (t.keys, t.values) for x in (store.codes, store.scale, store.zero, store.exact)]


def model_with(dims: int, group: int, dtype: torch.dtype = torch.float32, **options) -> Model:
    sizes = {"head_dim": dims, "num_attention_heads": 2 * group, "num_key_value_heads": 2, "hidden_size": 48}
    return adopt(tiny_model("llama", **sizes, **options).to(DEVICE, dtype))


def refuse_unequal(
    model: Model, policy: Policy, mode: str, capacity: int, tokens: int, codec: Codec, most: float = 0.2, block: int = 1
) -> None:
    """Each layer, given the same query, key and value, attends alike, up to `most` roundings, and keeps the same tokens."""
    config = CacheConfig(policy, capacity if policy.evicts else None, mode, 12, kv=codec)
    fast, plain = CachedDecoder(model, config, method=BY_KERNEL), CachedDecoder(model, config, method=PLAIN_WALK)
    assert all("step kernel" in walk.offers for walk in fast.walks)
    comparison = ReferenceComparison(record_inputs(model, tokens_of(tokens)), {plain: model.dtype, fast: model.dtype}, 0)
    for read in (plain, fast):
        read.reserve(tokens)
    for part in tokens_of(tokens).split(block, 1):
        comparison.read(part)
    assert comparison.verdict().max_error < most
    assert fast.kept() == plain.kept()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("codec", [Codec("int8", 8), Codec("int4", 16, 2, 6), Codec("int2", recent=3)], ids=str)
def test_the_kernel_reads_blocks_token_by_token(policy, codec):
    before = RAN["coded walk"]
    refuse_unequal(model_with(32, 2), policy, "cache", 9, 30, codec, block=13)
    assert (RAN["coded walk"] > before) == isinstance(policy, H2O | SinkWindow)  # dense reads runs, Knorm looks at keys


@pytest.mark.slow("many drawn cases")
@settings(max_examples=25)
@given(
    policy=st.sampled_from(POLICIES),
    mode=st.sampled_from(MODES),
    capacity=st.integers(8, 30),
    tokens=st.integers(1, 40),
    name=st.sampled_from(NAMES),
    group=st.sampled_from([4, 8, 16, 32]),
    sinks=st.integers(0, 5),
    recent=st.integers(0, 20),
    dims=st.sampled_from([16, 32, 96]),
    queries=st.sampled_from([1, 3]),
)
def test_any_coded_step_is_the_plain_one(policy, mode, capacity, tokens, name, group, sinks, recent, dims, queries):
    refuse_unequal(model_with(dims, queries), policy, mode, capacity, tokens, Codec(name, group, sinks, recent))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", [*(Codec(name, 8) for name in NAMES), Codec("int4", sinks=2, recent=6)], ids=str)
def test_a_token_is_coded_as_plain_code_does_digit_for_digit(codec, dtype):
    """Compares the first layer, whose keys and values do not depend on attention."""
    reads = [CachedDecoder(model_of("llama", dtype), CacheConfig(H2O(), 9, kv=codec), method=m) for m in (BY_KERNEL, PLAIN_WALK)]
    for token in tokens_of(30).split(1, 1):
        for read in reads:
            read(token)
    slots = reads[0].walks[0].slots
    first = slice(0, slots.streams * slots.shape.heads)
    assert reads[0].kept()[0] == reads[1].kept()[0]
    for ours, theirs in zip(*map(parts_of, reads), strict=True):
        assert torch.equal(ours[first], theirs[first])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("policy", "evict"),
    [(Dense(), 1), (H2O(), 1), (SinkWindow(2), 5), (SnapKV(window=4), "prompt")],
    ids=["dense", "h2o", "every 5", "prompt"],
)
def test_single_tokens_of_a_coded_cache_are_read_by_the_kernel(policy, evict, dtype):
    """In 16 bits of a model whose scores are small: plain code rounds them to its dtype, the kernel doesn't."""
    config = CacheConfig(policy, 32 if policy.evicts else None, evict=evict, kv=Codec("int8", recent=4))
    check = fast_method(model_with(32, 2, dtype, initializer_range=0.1), config)
    assert (check.step, check.method.step_kernel, check.refused) == ("compiled", True, "")
    walked = policy.evicts and evict == 1
    assert check.blocks == ("compiled walk" if walked else "full attention" if evict == "prompt" else "walk")
    assert check.plain_because == ("" if walked else "K and V are stored as int8")


@pytest.mark.parametrize("codec", [Kivi("kivi4"), Kivi("kivi2", residual=32)], ids=str)
def test_kivi_is_decoded_plainly(codec):
    check = fast_method(model_of("llama"), CacheConfig(Dense(), kv=codec))
    assert (check.method, check.step, check.refused) == (PLAIN_WALK, "plain", "")
    assert check.plain_because == f"K and V are stored as {codec.name}"


@pytest.mark.parametrize(
    ("right", "wrong", "group"),
    [("pair >> BITS & most", "pair >> (BITS - 1) & most", 16), ("(d * BITS % 8) & most", "((d + 1) * BITS % 8) & most", 8)],
    ids=["of a lane", "of a byte"],
)
def test_a_wrong_shift_is_refused_by_the_check(monkeypatch, tmp_path, right, wrong, group):
    """In the code for groups of whole vectors, and in that for others."""
    assert (compiler._HERE / "coded_step.c").read_text().count(right) == 1
    for file in (*compiler._HERE.glob("*.h"), *compiler._HERE.glob("*.c")):
        (tmp_path / file.name).write_text(file.read_text().replace(right, wrong))
    monkeypatch.setattr(compiler, "_HERE", tmp_path)
    check = fast_method(model_with(32, 2), CacheConfig(H2O(), 20, kv=Codec("int4", group)))
    assert (check.step, check.method.step_kernel) == ("plain", False)
    assert check.refused.startswith("step kernels: ")


def test_one_head_that_is_wrong_in_some_steps_is_found(monkeypatch):
    right, calls = Walk._step_by_kernel, []

    def wrong(*given):
        out = right(*given)
        calls.append(1)
        if len(calls) < 7:
            out[:, 0] += 1000
        return out

    config = CacheConfig(H2O(), 32, kv=Codec("int8", recent=4))
    assert fast_method(model_of("llama"), config).step == "compiled"
    monkeypatch.setattr(Walk, "_step_by_kernel", wrong)
    check = fast_method(model_of("llama"), config)
    assert (check.step, check.refused) == ("plain", "step kernels: its attention differs from the plain walk's")


def test_a_kernel_that_did_not_answer_is_not_used(monkeypatch):
    monkeypatch.setattr(MethodCheck, "trial_of_codes", lambda bench, method: MethodCheck.trial(bench, TOKEN_BY_TOKEN))
    check = fast_method(model_of("llama"), CacheConfig(H2O(), 20, kv=Codec("int4")))
    assert (check.step, check.method) == ("plain", PLAIN_WALK)
    assert check.refused == "step kernels: it did not answer"


def test_a_coded_cache_is_never_walked_by_the_kernel_of_floats():
    read = CachedDecoder(model_of("llama"), CacheConfig(H2O(), 20, kv=Codec("int4")), method=FASTEST)
    assert "compiled walk" not in read.walks[0].offers
    assert read.walks[0]._kernels.walk is None
