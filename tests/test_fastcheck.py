"""Choosing the fastest way of reading that agrees with the plain walk, and filling caches for it with random K and V."""

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from factories import needs_compiler
from helpers import DEVICE, H2O, CacheConfig, CachedDecoder, Dense, Random, SinkWindow, Window, model_of, tiny_model, tokens_of

from kvbench.harness.core import device
from kvbench.harness.engine import fastcheck, trial
from kvbench.harness.engine.closed_form import ClosedForm
from kvbench.harness.engine.fastcheck import fast_method
from kvbench.harness.engine.method import EAGER, FASTEST, PLAIN_WALK
from kvbench.harness.engine.model import _COMPILED, Model, adopt
from kvbench.harness.engine.runs import RunReader
from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.trial import MethodCheck
from kvbench.harness.engine.walk import Walk
from kvbench.harness.kernels import cpu_walk, fused
from kvbench.harness.kernels.captured import CapturedSteps
from kvbench.harness.kernels.compiler import built_of
from kvbench.harness.kernels.cpu import CpuStepKernel, CpuWalkKernel


def filled(config: CacheConfig, tokens: int, family: str = "llama", method=EAGER, seed: int = 0) -> CachedDecoder:
    read = CachedDecoder(model_of(family), config, 2, method)
    read.fill_randomly(tokens, seed)
    return read


@pytest.mark.parametrize("tokens", [5, 21, 300], ids=lambda n: f"{n} tokens")
@pytest.mark.parametrize("config", [CacheConfig(SinkWindow(4), 20), CacheConfig(Window(), 20), CacheConfig(Dense())], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_filled_decoder_is_in_the_state_of_one_that_has_read(family, config, tokens):
    """Ranks, positions and free slots are equal if a policy's kept positions are known beforehand."""
    read, ours = CachedDecoder(model_of(family), config, 2), filled(config, tokens, family)
    read(tokens_of(tokens, 2))
    for theirs, slots in zip((w.slots.tensors for w in read.walks), (w.slots.tensors for w in ours.walks), strict=True):
        held = theirs.rank < theirs.rank.shape[1]
        assert torch.equal(slots.rank, theirs.rank)
        assert torch.equal(slots.free, theirs.free)
        assert torch.equal(slots.position[held], theirs.position[held])
        assert slots.keys.tensor[held].std() > 0.9
        assert not slots.keys.tensor[~held].any()
    assert ours.kept() == read.kept()
    assert (ours._tokens_read, ours._max_tokens_read, ours.slots) == (read._tokens_read, read._max_tokens_read, read.slots)
    assert torch.equal(ours._step, read._step)


@pytest.mark.parametrize("policy", [H2O(), Random()], ids=lambda p: type(p).__name__)
def test_a_filled_cache_is_full_where_what_is_kept_depends_on_the_tokens(policy):
    """Every rank occurs once, one slot is free and has the rank of an empty slot, and no position occurs twice."""
    config = CacheConfig(policy, 12)
    read, ours = CachedDecoder(model_of("llama"), config, 2), filled(config, 40)
    read(tokens_of(40, 2))
    for tensors in (d.walks[0].slots.tensors for d in (read, ours)):
        assert tensors.rank.sort(-1).values.tolist() == [[*range(12), 13]] * len(tensors.rank)
        assert (tensors.flat_rank[tensors.free] == 13).all()
    for row in (row for layer in ours.kept() for stream in layer for row in stream):
        assert len(set(row)) == 12
        assert max(row) == 39
    states = list(ours.walks[0].slots.tensors.states.values())
    assert len(states) == len(policy.statistics)
    for state in states:
        assert len(state.unique()) == state.numel() - len(state) + 1  # of the free slots alone it is the initial one
    assert (ours._tokens_read, ours.slots) == (read._tokens_read, read.slots)


class Graph:
    """Stands in for a CUDA graph: replays the step and nothing else that the host would do."""

    of_compiled_code: ClassVar[list[bool]] = []  # of every graph

    def __init__(self, step, tokens):
        self.step = step
        Graph.of_compiled_code.append(_COMPILED.get() is not None)

    def __call__(self, tokens):
        return self.step(tokens)


class OnCuda(CachedDecoder):
    """A decoder that captures its steps, as one on CUDA does, and counts the tokens that any of them reads."""

    read_tokens = 0

    def __init__(self, model, config, streams=1, method=EAGER, dtype=None):
        super().__init__(model, config, streams, method, dtype)
        self.graphs = CapturedSteps(Graph) if method.captured else None

    def __call__(self, tokens, valid=None, keep=None):
        OnCuda.read_tokens += tokens.numel()
        return super().__call__(tokens, valid, keep)


@pytest.fixture
def as_on_cuda(monkeypatch):
    """The check as it is on CUDA."""
    monkeypatch.setattr(trial, "TIMED_DEVICES", {DEVICE.type})
    for module in (fastcheck, trial):
        monkeypatch.setattr(module, "CachedDecoder", OnCuda)
    monkeypatch.setattr(OnCuda, "read_tokens", 0)
    monkeypatch.setattr(Graph, "of_compiled_code", [])
    monkeypatch.setattr(fused, "_BACKEND", "eager")


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on only where a test says what takes how long: a function makes a method cost seconds."""
    now = [0.0]
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def cost(kind: type, name: str, seconds: float) -> None:
        plain = getattr(kind, name)

        def slow(self, *args, **kwargs):
            now[0] += seconds
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, slow)

    return cost


def dies(*args, **kwargs):
    raise RuntimeError("out of resource: shared memory")


def kernels(config: CacheConfig):
    return CachedDecoder(model_of("llama"), config, method=FASTEST).walks[0]._kernels


@needs_compiler
@pytest.mark.parametrize("config", [CacheConfig(H2O(), 8), CacheConfig(SinkWindow(4), 8), CacheConfig(Dense())], ids=str)
def test_a_step_kernel_that_dies_leaves_blocks_fast(monkeypatch, config):
    model = model_of("llama")
    whole = fast_method(model, config)
    assert (whole.refused, whole.step) == ("", "compiled")
    monkeypatch.setattr(type(kernels(config).step), "__call__", dies)
    found = fast_method(model, config)
    assert (found.blocks, found.step) == (whole.blocks, "plain")
    assert found.method == replace(whole.method, step_kernel=False)
    assert found.refused == "step kernels: RuntimeError: out of resource: shared memory"


@needs_compiler
def test_a_closed_form_that_refuses_leaves_the_compiled_walk_and_steps(monkeypatch):
    """FlexAttention, for example, refuses heads with fewer than 16 dims."""
    config = CacheConfig(SinkWindow(4), 8)

    def refuses(*args):
        raise NotImplementedError("NYI: embedding dimension of the query, key, and value must be at least 16")

    monkeypatch.setattr(ClosedForm, "__call__", refuses)
    found = fast_method(model_of("llama"), config)
    assert (found.blocks, found.step, found.differs) == ("compiled walk", "compiled", torch.inf)
    assert found.refused.startswith("closed form: NotImplementedError: NYI: embedding dimension")


@needs_compiler
def test_methods_that_fail_only_together_are_not_used(monkeypatch):

    def differs(check, method, *given):
        differs.plain(check, method, *given)
        return "they differ" if method.walk_kernel and method.step_kernel else ""

    differs.plain = MethodCheck._differs
    monkeypatch.setattr(MethodCheck, "_differs", differs)
    found = fast_method(model_of("llama"), CacheConfig(H2O(), 8))
    assert (found.method, found.blocks, found.step, found.refused) == (PLAIN_WALK, "walk", "plain", "they differ")


@needs_compiler
@pytest.mark.parametrize(
    ("policy", "kind"), [(H2O(), CpuWalkKernel), (SinkWindow(4), ClosedForm)], ids=["compiled walk", "closed form"]
)
@pytest.mark.parametrize("seconds", [0.1, 100])
def test_a_block_method_is_used_only_where_it_measures_faster(clock, as_on_cuda, policy, kind, seconds):
    """Times are those of the fast method, and of the plain walk: 0.5 seconds a token and layer."""
    clock(kind, "__call__", seconds)
    clock(Rows, "release", 0.5)
    name = "compiled walk" if kind is CpuWalkKernel else "closed form"
    found = fast_method(model_of("llama"), CacheConfig(policy, 8))
    if seconds < 1:
        assert (found.blocks, found.refused) == (name, "")
    else:
        assert found.blocks == ("walk" if kind is CpuWalkKernel else "compiled walk")
        assert found.refused == "a block takes 2e+05 ms, and 6.4e+04 ms plainly"


@needs_compiler
@pytest.mark.parametrize("slow", [False, True])
def test_a_captured_step_is_used_only_where_it_measures_faster(clock, as_on_cuda, slow):
    """Here by its kernel, so that the captured plain step is used instead."""
    clock(CpuStepKernel, "__call__", 2.0 if slow else 0.1)
    clock(Walk, "_step", 0.5)
    found = fast_method(model_of("llama"), CacheConfig(H2O(), 8))
    assert (found.blocks, found.step) == ("compiled walk", "captured")
    assert found.method.step_kernel == (not slow)
    assert found.refused == ("a step takes 4e+03 ms, and 1e+03 ms plainly" if slow else "")


def test_the_cells_streams_are_read_where_they_fit(monkeypatch, clock, as_on_cuda):
    model, config = model_of("llama"), CacheConfig(H2O(), 8)
    plain, asked = MethodCheck._differs, []
    monkeypatch.setattr(MethodCheck, "_differs", lambda check, *given: asked.append(given[-1]) or plain(check, *given))
    fast_method(model, config, 5)
    of_stream = MethodCheck(model, config, 1)._bytes_of_stream()
    for fitting in (3, 0):
        monkeypatch.setattr(trial, "free_bytes", lambda device, fitting=fitting: fitting * of_stream)
        fast_method(model, config, 5)
    assert list(dict.fromkeys(asked)) == [5, 3, 1]


def in_bfloat16(layers: int, spread: float) -> Model:
    """A Llama whose weights have this standard deviation."""
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    hf = tiny_model("llama", vocab_size=96, num_hidden_layers=layers, initializer_range=spread, **sizes)
    return adopt(hf.to(DEVICE, torch.bfloat16))


@pytest.fixture(scope="module")
def deep() -> Model:
    """Its scores are large and its layers many, so that rounding grows."""
    return in_bfloat16(16, 0.2)


SINKS, ANY = CacheConfig(SinkWindow(4), 40), CacheConfig(Random(), 40)  # neither looks at attention
LOOKS = CacheConfig(H2O(), 40)


@needs_compiler
@pytest.mark.parametrize(("config", "blocks"), [(SINKS, "closed form"), (ANY, "compiled walk")], ids=str)
def test_rounding_that_grows_from_layer_to_layer_refuses_no_shortcut(deep, config, blocks):
    bench = MethodCheck(deep, config, 1)
    (apart,) = bench._differences([bench._decoder(PLAIN_WALK), bench._decoder(FASTEST)], [40, 32, 1])
    assert apart > 5
    found = fast_method(deep, config)
    assert (found.blocks, found.refused) == (blocks, "")
    assert 0 < found.differs < 1


@needs_compiler
@pytest.mark.parametrize(
    ("config", "spread", "share"),
    [(ANY, 0.2, 1.75), (LOOKS, 0.02, 0.9)],
)
def test_a_wrong_kernel_in_16_bits_is_refused(monkeypatch, config, spread, share):
    """Its output is this share of the right one; where scores are large, rounding leaves less to be seen."""
    model = in_bfloat16(2, spread)
    assert fast_method(model, config).blocks == "compiled walk"
    right = CpuWalkKernel.__call__
    monkeypatch.setattr(CpuWalkKernel, "__call__", lambda *given, **named: right(*given, **named) * share)
    found = fast_method(model, config)
    assert found.blocks == "walk"
    assert "compiled walk: its attention differs from the plain walk's" in found.refused


def wrong_head(out, keys):
    out[:, 1] = 0


def wrong_where_it_evicts(out, keys):
    if keys.shape[2] < 40:  # the first block fills the cache
        out.zero_()


def wrong_in_one_layer(out, keys, calls=[0]):  # noqa: B006
    calls[0] += 1
    if calls[0] % 2:
        out.zero_()


@needs_compiler
@pytest.mark.parametrize("fault", [wrong_head, wrong_where_it_evicts, wrong_in_one_layer])
def test_a_kernel_that_is_wrong_in_places_in_16_bits_is_refused(monkeypatch, fault):
    right = CpuWalkKernel.__call__

    def wrong(self, slots, rows, layer, query, keys, *rest, **named):
        out = right(self, slots, rows, layer, query, keys, *rest, **named)
        fault(out, keys)
        return out

    monkeypatch.setattr(CpuWalkKernel, "__call__", wrong)
    found = fast_method(in_bfloat16(2, 0.02), LOOKS)
    assert found.blocks == "walk"
    assert "compiled walk: its attention differs" in found.refused


@needs_compiler
def test_both_sides_are_timed_in_the_same_state(monkeypatch, deep, as_on_cuda):
    seen = []
    monkeypatch.setattr(MethodCheck, "_slower", lambda *given: seen.append(tuple(read._tokens_read for read in given[-2:])) or "")
    fast_method(deep, CacheConfig(Random(), 256))
    assert seen
    assert all(ours == theirs > 256 for ours, theirs in seen)


@pytest.mark.parametrize("policy", [Random(), SinkWindow(4)], ids=lambda p: type(p).__name__)
def test_runs_in_16_bits_are_compared_layer_by_layer(monkeypatch, deep, policy):
    config = CacheConfig(policy, 40, evict=16)
    assert MethodCheck(deep, config, 1).trial_of_runs() == ""
    right = RunReader._attend
    monkeypatch.setattr(RunReader, "_attend", lambda *given: (lambda out, seen: (out * 0.2, seen))(*right(*given)))
    assert MethodCheck(deep, config, 1).trial_of_runs() == "its attention differs from the plain walk's"


def test_a_wrong_graph_in_16_bits_is_refused(monkeypatch, clock, as_on_cuda):
    model = in_bfloat16(2, 0.2)
    assert fast_method(model, SINKS).step == "captured"
    monkeypatch.setattr(Graph, "__call__", lambda graph, tokens: graph.step(tokens) * 1.1)
    found = fast_method(model, SINKS)
    assert (found.step, found.method.captured) == ("plain", False)
    assert "captured steps: its logits differ from those of steps that are not captured" in found.refused


@needs_compiler
def test_a_kernel_that_evicts_others_in_16_bits_is_refused(monkeypatch):
    random, real = built_of(Random().bind(40), "walk.c", "walk"), cpu_walk.built_of
    monkeypatch.setattr(cpu_walk, "built_of", lambda *asked: random if asked[2] == "walk" else real(*asked))
    found = fast_method(in_bfloat16(2, 0.02), LOOKS)
    assert found.blocks == "walk"
    assert found.refused.startswith("compiled walk: ")
    assert found.refused.endswith("% of the tokens it evicts are others than the plain walk's")


@needs_compiler
def test_a_large_cache_is_filled_and_not_read(clock, as_on_cuda):
    found = fast_method(model_of("llama"), CacheConfig(H2O(), 2000))
    assert found.method == replace(FASTEST, closed_form=False, flex=False, walk_graphs=False, walk_steps=False)
    assert found.blocks == "compiled walk"
    assert 0 < OnCuda.read_tokens < 1500  # of two decoders, timed blocks and steps included


def test_cells_that_differ_in_seed_alone_share_a_check(monkeypatch):
    model, checked = adopt(tiny_model("llama").to(DEVICE)), []
    found = fastcheck.FastCheck(PLAIN_WALK, "walk", "plain", 0.0)
    monkeypatch.setattr(fastcheck, "fast_method", lambda _, config, *more: checked.append(config) or found)
    first = CacheConfig(H2O(), 8)
    changes = ({"capacity": 9}, {"positions": "stream"}, {"evict": 4}, {"policy": Random()})
    others = [replace(first, **change) for change in changes]
    for config in (first, replace(first, seed=3), *others):
        assert fastcheck.remembered_check(model, config) is found
    assert checked == [first, *others]
    fastcheck.remembered_check(adopt(tiny_model("llama").to(DEVICE)), first)
    assert checked[-1] == first


@pytest.mark.parametrize("config", [CacheConfig(H2O(), 20), CacheConfig(SinkWindow(4), 20), CacheConfig(Dense())], ids=str)
def test_fast_and_plain_agree_from_a_filled_cache(config):
    fast, plain = filled(config, 50, method=FASTEST), filled(config, 50, method=PLAIN_WALK)
    for block in tokens_of(26, 2).split([20, 1, 1, 1, 1, 1, 1], 1):
        torch.testing.assert_close(fast(block), plain(block), atol=1e-4, rtol=0)
    assert fast.kept() == plain.kept()
    other = filled(config, 50, method=PLAIN_WALK, seed=1)
    assert not torch.equal(other.walks[0].slots.tensors.keys.tensor, plain.walks[0].slots.tensors.keys.tensor)


@needs_compiler
def test_a_walk_kernel_that_dies_leaves_steps_fast(monkeypatch):
    config = CacheConfig(H2O(), 8)
    monkeypatch.setattr(type(kernels(config).walk), "__call__", dies)
    found = fast_method(model_of("llama"), config)
    assert (found.blocks, found.step) == ("walk", "compiled")
    assert (found.method.walk_kernel, found.method.step_kernel) == (False, True)
    assert found.refused == "compiled walk: RuntimeError: out of resource: shared memory"
    read = CachedDecoder(model_of("llama"), config, method=found.method)
    read(tokens_of(30))  # would die by the kernel
    assert read(tokens_of(1)).isfinite().all()
