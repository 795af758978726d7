"""Every shortcut past the plain walk is broken in turn, and each time the fast check refuses it and nothing else.

Shortcuts of CUDA run here too: their device gates are opened for the device of the tests, FlexAttention is uncompiled, Triton's
kernels are interpreted, and stand-ins take the place of CUDA graphs.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from factories import needs_compiler, needs_triton
from helpers import DEVICE, H2O, CacheConfig, Random, SinkWindow, SnapKV, model_of, tiny_model
from test_fastcheck import Graph, OnCuda

from kvbench.harness.engine import closed_form, comparison, fastcheck, shortcuts, trial
from kvbench.harness.engine.fastcheck import FastCheck, fast_method
from kvbench.harness.engine.model import UnsupportedModelError, adopt
from kvbench.harness.engine.runs import RunReader
from kvbench.harness.kernels import choose, cpu, cpu_walk, cuda, flex, flex_blocks, rope
from kvbench.harness.kernels.compiler import built_of
from kvbench.harness.models.selfcheck import check
from kvbench.policies.adakv import AdaKV
from kvbench.policies.expected_attention import QueryMoments
from kvbench.policies.keydiff import KeyDiff
from kvbench.policies.leverage import Leverage
from kvbench.policies.tova import Tova

DIFFERS = "its attention differs from the plain walk's"
OTHERS = "% of the tokens it evicts are others than the plain walk's"
DIFFERS_CAPTURED = "its logits differ from those of steps that are not captured"
STREAMING = CacheConfig(SinkWindow(4), 150)
HEAVY = CacheConfig(H2O(), 20)


def wrapped(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, change: Callable) -> None:
    """Let `change` answer instead of a function; its first argument is the function."""
    plain = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **more: change(plain, *args, **more))


@pytest.fixture
def flexible(monkeypatch):
    """Blocks in closed form go through FlexAttention and the kernels around it, and are timed, as on CUDA."""
    monkeypatch.setattr(flex, "_DEVICES", {DEVICE.type})
    monkeypatch.setattr(rope, "_DEVICES", {DEVICE.type})
    monkeypatch.setattr(trial, "TIMED_DEVICES", {DEVICE.type})
    monkeypatch.setattr(trial.MethodCheck, "_slower", lambda *args: "")


@pytest.fixture
def captured(monkeypatch):
    """Decoders capture their steps, as on CUDA."""
    for module in (fastcheck, trial):
        monkeypatch.setattr(module, "CachedDecoder", OnCuda)


def is_refused(found: FastCheck, name: str, field: str, why: str = DIFFERS) -> bool:
    """Whether one shortcut is off for this reason; the check goes on to the next best."""
    reasons = found.refused.split("; ")
    return any(reason.startswith(f"{name}: ") and reason.endswith(why) for reason in reasons) and not getattr(found.method, field)


def narrower(plain, query, keys, values, padding, window, terms):
    return plain(query, keys, values, padding, window - 1, terms)


def one_too_far(plain, out, x, factors, halves=0):
    """A position too far, but only where tokens of the block are rotated, so that distances change."""
    turned = halves and factors is not None
    plain(out, x, factors.roll(1, 0) if turned else factors, halves)


def without_sinks(plain, near, *args):
    return near


FLEX_BREAKS = {
    "a window that is one short": (flex_blocks, "flex", narrower),
    "a rotation off by one": (rope, "rotate_into", one_too_far),
    "no sinks": (rope, "merge", without_sinks),
}


@pytest.mark.slow("takes seconds")
@needs_triton
@pytest.mark.parametrize("name", [None, *FLEX_BREAKS])
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention_and_the_kernels_around_it(monkeypatch, flexible, name):
    if name is not None:
        wrapped(monkeypatch, *FLEX_BREAKS[name])
    found = fast_method(model_of("llama"), STREAMING)
    assert found.blocks == "closed form"
    assert found.method.closed_form
    if name is None:
        assert found.method.flex
        assert found.refused == ""
    else:
        assert is_refused(found, "FlexAttention", "flex")


@pytest.mark.slow("takes seconds")
@needs_triton
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_blocks_that_flex_attention_leaves_to_plain_code(monkeypatch, flexible):
    """They are read in the check, too: FlexAttention is not used beside a closed form that is wrong."""
    wrapped(monkeypatch, closed_form, "banded", lambda banded, *args: 1.01 * banded(*args))
    found = fast_method(model_of("llama"), STREAMING)
    assert is_refused(found, "FlexAttention", "flex")
    assert is_refused(found, "closed form", "closed_form")


@needs_triton
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_what_did_not_answer_in_the_check_is_not_used(monkeypatch, flexible):
    """Blocks of 64 tokens, which FlexAttention does not take; and the compiled walk, where the closed form takes every block."""
    monkeypatch.setattr(trial, "TILE", 64)
    found = fast_method(model_of("llama"), STREAMING)
    assert is_refused(found, "FlexAttention", "flex", "it did not answer in the check")
    assert found.method.closed_form
    assert not found.method.walk_kernel


def test_the_closed_form_in_plain_pytorch(monkeypatch):
    wrapped(monkeypatch, closed_form, "banded", lambda plain, *args, **more: 1.01 * plain(*args, **more))
    assert is_refused(fast_method(model_of("llama"), STREAMING), "closed form", "closed_form")


def stale(launches, device):
    return lambda: None


@pytest.mark.slow("takes seconds")
@needs_triton
@pytest.mark.parametrize("replayable", [None, stale])
def test_chunks_of_a_walk_in_graphs(monkeypatch, replayable):
    """In chunks of four tokens; a chunk is launched once and then replayed."""
    monkeypatch.setitem(choose._MODULES, DEVICE.type, cuda)
    monkeypatch.setattr(cuda, "_GRAPH_DEVICES", {DEVICE.type})
    monkeypatch.setattr(cuda, "CHUNK_TOKENS", 4)
    monkeypatch.setattr(cuda, "replayable", replayable or (lambda launches, device: launches))
    monkeypatch.setattr(trial, "TIMED_DEVICES", {DEVICE.type})
    monkeypatch.setattr(trial.MethodCheck, "_slower", lambda *args: "")
    monkeypatch.setattr(trial, "_TIMED_BLOCK_TOKENS", 12)
    monkeypatch.setattr(trial, "_ROOM_TOKENS", 2)
    model = adopt(tiny_model("llama", num_hidden_layers=1))
    found = fast_method(model, CacheConfig(H2O(), 8))
    assert found.blocks == "compiled walk"
    assert found.method.walk_kernel
    if replayable is None:
        assert found.method.walk_graphs
        assert found.refused == ""
    else:
        assert is_refused(found, "walk in graphs", "walk_graphs", OTHERS)


@needs_compiler
def test_a_step_kernel_with_other_outputs(monkeypatch):
    wrapped(monkeypatch, cpu.CpuStepKernel, "__call__", lambda plain, *args: 1.01 * plain(*args))
    found = fast_method(model_of("llama"), HEAVY)
    assert is_refused(found, "step kernels", "step_kernel")
    assert found.method.walk_kernel


@needs_compiler
def test_a_compiled_walk_that_evicts_other_tokens(monkeypatch):
    random, real = built_of(Random().bind(20), "walk.c", "walk"), cpu_walk.built_of
    monkeypatch.setattr(cpu_walk, "built_of", lambda *asked: random if asked[2] == "walk" else real(*asked))
    assert is_refused(fast_method(model_of("llama"), HEAVY), "compiled walk", "walk_kernel", OTHERS)


@needs_compiler
def test_compiled_code_of_steps_that_evicts_other_tokens(monkeypatch):
    """Under flat attention, one of 1,000 tokens moves no logit beyond 16 bits: the tokens kept tell."""
    random, real = built_of(Random().bind(1000), "release.c", "release"), cpu.built_of
    monkeypatch.setattr(cpu, "built_of", lambda *asked: random if asked[2] == "release" else real(*asked))
    monkeypatch.setattr(comparison, "_ROUNDING", {torch.float32: comparison._ROUNDING_16_BITS})
    found = fast_method(adopt(tiny_model("llama", initializer_range=0.02)), CacheConfig(H2O(), 1000))
    assert is_refused(found, "step kernels", "step_kernel", OTHERS)


class OfQueries(Leverage):
    statistics = (QueryMoments(4),)


def worst_kept(plain, kernel, slots, rows, *rest):
    own = rows.importance
    rows.importance = lambda policy, full=False: -own(policy, full)
    try:
        plain(kernel, slots, rows, *rest)
    finally:
        del rows.importance


@needs_compiler
@pytest.mark.parametrize(
    ("policy", "kernel", "fault", "why"),
    [
        (Leverage(), cpu.CpuStepKernel, lambda plain, *args: 1.01 * plain(*args), DIFFERS),
        (OfQueries(), cpu.CpuStepKernel, lambda plain, *args: 1.01 * plain(*args), DIFFERS),
        (Leverage(), cpu.CpuReleaseKernel, worst_kept, OTHERS),
        (Leverage(), None, None, ""),
        (OfQueries(), None, None, ""),
    ],
    ids=["attention", "attention with queries", "evicted tokens", "no fault", "no fault with queries"],
)
def test_blocks_by_kernels_of_a_step(monkeypatch, policy, kernel, fault, why):
    """Uses policies whose importance PyTorch computes. Single tokens of one that sees queries are read plainly."""
    if kernel:
        wrapped(monkeypatch, kernel, "__call__", fault)
    found = fast_method(model_of("llama"), CacheConfig(policy, 20))
    assert found.blocks == ("walk" if kernel else "compiled steps")
    assert found.method.walk_steps == (kernel is None)
    assert found.method.step_kernel == (kernel is None and type(policy) is Leverage)
    assert ("compiled steps: " in found.refused) == bool(kernel)
    assert why in found.refused


@needs_compiler
@pytest.mark.parametrize(
    ("policy", "blocks", "because"),
    [
        (Tova(), "compiled walk", ""),
        (
            KeyDiff(),
            "walk",
            "a tensor of bfloat16 can't be compiled",
        ),
    ],
)
def test_programs_in_16_bits_compare_no_numbers_of_the_model(policy, blocks, because):
    """PyTorch computes with a model's numbers in the model's dtype, and with attention in float32."""
    found = fast_method(model_of("llama", torch.bfloat16), CacheConfig(policy, 20))
    assert (found.blocks, found.plain_because, found.refused) == (blocks, because, "")


@needs_compiler
def test_heads_that_compete_are_not_padded_beyond_a_limit(monkeypatch):
    """The kernel of a step reads their blocks then."""
    monkeypatch.setattr(cpu_walk, "_MAX_PADDED_BYTES", 0)
    found = fast_method(model_of("llama"), CacheConfig(AdaKV(), 20))
    assert found.blocks == "compiled steps"
    assert found.plain_because == "heads that compete would be padded to 0 MiB a layer"


class Stale(Graph):
    """Replays the logits of its first step."""

    def __call__(self, tokens):
        self.logits = getattr(self, "logits", None)
        if self.logits is None:
            self.logits = self.step(tokens)
        return self.logits


class Evicting(Graph):
    """Knows no steps but those of the phase that it was captured in first: with evictions or without."""

    first: Callable | None = None

    def __call__(self, tokens):
        Evicting.first = Evicting.first or self.step
        return super().__call__(tokens) if Evicting.first is self.step else self.step(tokens) * 1.1


class OfCompiledCode(Graph):
    """Is right only if its code is not compiled as a whole."""

    def __call__(self, tokens):
        self.share = getattr(self, "share", 1.1 if Graph.of_compiled_code[-1] else 1.0)
        return self.share * self.step(tokens)


@needs_compiler
@pytest.mark.parametrize(("graph", "every"), [(Graph, 1), (Stale, 1), (Graph, 24), (Evicting, 24)])
def test_captured_steps(monkeypatch, captured, graph, every):
    """With evictions far apart, steps that evict are replayed in the check as well as those that don't."""
    monkeypatch.setattr(Evicting, "first", None)
    monkeypatch.setattr("test_fastcheck.Graph", graph)
    found = fast_method(model_of("llama"), replace(HEAVY, evict=every))
    assert found.method.captured == (graph is Graph)
    if graph is Graph:
        assert (found.step, found.refused) == ("captured", "")
    else:
        assert f"captured kernels: {DIFFERS_CAPTURED}" in found.refused


@pytest.mark.slow("takes seconds")
@needs_compiler
def test_captured_steps_of_compiled_code(monkeypatch, captured):
    monkeypatch.setattr("kvbench.harness.kernels.fused._BACKEND", "eager")
    monkeypatch.setattr("test_fastcheck.Graph", OfCompiledCode)
    monkeypatch.setattr(Graph, "of_compiled_code", [])
    found = fast_method(model_of("llama"), HEAVY, fused=True)
    assert is_refused(found, "fused steps", "fused", DIFFERS_CAPTURED)
    assert found.step == "captured"


@pytest.mark.parametrize("policy", [SinkWindow(4), H2O()], ids=lambda p: type(p).__name__)
def test_runs_between_evictions(monkeypatch, policy):
    config = CacheConfig(policy, 20, evict=12)
    assert fast_method(model_of("llama"), config).method.fill
    wrapped(monkeypatch, RunReader, "__call__", lambda plain, self, *args: 1.01 * plain(self, *args))
    found = fast_method(model_of("llama"), config)
    assert is_refused(found, "runs", "fill")
    assert found.blocks == "walk"


@pytest.mark.parametrize(("policy", "broken"), [(SnapKV(window=8), "seen"), (H2O(), "seen"), (SinkWindow(4), "attention")])
def test_a_prompt_read_in_one_go(monkeypatch, policy, broken):
    """Breaks the attention that statistics get, which changes kept tokens, and the attention itself, which changes logits."""
    config = CacheConfig(policy, 64, evict="prompt")
    found = fast_method(model_of("llama"), config)
    assert found.method.fill
    assert (found.blocks, found.refused) == ("full attention", "")
    if broken == "seen":
        wrapped(monkeypatch, shortcuts.Shortcuts, "read_runs", blind)
    else:
        wrapped(monkeypatch, shortcuts.Shortcuts, "fill", lambda plain, *args: 1.01 * plain(*args))
    found = fast_method(model_of("llama"), config)
    assert not found.method.fill
    assert found.blocks == "walk"
    assert "full attention: " in found.refused


def blind(plain, self, plan, *args):
    """Statistics see no attention in runs."""
    return plain(self, replace(plan, updates=False), *args)


def test_attention_of_a_block_in_one_go(monkeypatch):
    """Without eviction, the self-check refuses the model when it is loaded."""
    check(model_of("llama"))

    def delayed(plain, query, keys, values, terms, *more):
        return plain(query, keys.roll(1, 2), values.roll(1, 2), terms, *more)

    wrapped(monkeypatch, shortcuts, "causal", delayed)
    with pytest.raises(UnsupportedModelError):
        check(model_of("llama"))
