"""Layers that read the K and V of another: driven exactly, counted once, evicted once, by what all of them attend to."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from conftest import DEVICE, in_blocks, nll, tokens_of
from reference import Held, lightest
from torch import Tensor

from kvbench.harness.engine import probes
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import BlockInLayers, CachedDecoder, decoder
from kvbench.harness.engine.method import EAGER, FASTEST, TOKEN_BY_TOKEN, Method
from kvbench.harness.engine.model import Model, UnsupportedModelError, adopt
from kvbench.harness.engine.own_attention import own_attention
from kvbench.harness.engine.walk import Walk
from kvbench.harness.models.families import tiny_model
from kvbench.harness.models.selfcheck import check
from kvbench.harness.models.shape import shape_of
from kvbench.policies import Policy
from kvbench.policies.adakv import AdaKV
from kvbench.policies.criticalkv import CriticalKV
from kvbench.policies.dense import Dense
from kvbench.policies.expected_attention import ExpectedAttention
from kvbench.policies.h2o import H2O
from kvbench.policies.keydiff import KeyDiff
from kvbench.policies.pyramidkv import PyramidKV
from kvbench.policies.recompute_window import RecomputeWindow
from kvbench.policies.snapkv import SnapKV
from kvbench.policies.tova import Tova
from kvbench.policies.window import Window

FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA = {
    "num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 3, "sliding_window": 16, "head_dim": 16,
    "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "vocab_size": 96,
}  # fmt: skip
SHARED = {"head_dim": 16, "vocab_size": 96}
MODELS = {
    "gemma3n": ("gemma3n_text", {**GEMMA, "intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.0] * 6,
                                 "laurel_rank": 4}),
    "gemma4": ("gemma4_text", {**GEMMA, "global_head_dim": 32}),
    "cla": ("qwen3_shared_kv", {**SHARED, "num_hidden_layers": 4, "kv_layers": [0, 0, 2, 2]}),
    "yoco": ("qwen3_shared_kv", {**SHARED, "num_hidden_layers": 6, "kv_layers": [0, 1, 2, 3, 3, 3], "sliding_window": 16,
                                 "use_sliding_window": True, "layer_types": [SLIDING] * 3 + [FULL] * 3}),
}  # fmt: skip
SOURCES = {
    "gemma3n": [0, 1, 2, 1, 2, 1], "gemma4": [0, 1, 2, 1, 2, 1], "cla": [0, 0, 2, 2], "yoco": [0, 1, 2, 3, 3, 3],
}  # fmt: skip
EVERY = pytest.mark.parametrize("name", MODELS)
EXACT = 1e-5  # in float64, where no rounding can hide a mistake


@cache
def model_named(name: str) -> Model:
    family, settings = MODELS[name]
    return adopt(tiny_model(family, **settings).to(DEVICE, torch.float64))


def own_logits(model: Model, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """The model's own forward pass. mask: tokens that a query sees besides those out of its layer's sliding window, [T, T]."""
    window, masks = model.hf.config.sliding_window, None
    if mask is not None:
        at = torch.arange(len(mask), device=mask.device)
        near = mask & (at[:, None] - at < (window or len(mask)))
        masks = {FULL: additive(mask), SLIDING: additive(near)}
    with torch.inference_mode(), own_attention(model.hf):
        return model.hf(input_ids=tokens, attention_mask=masks, use_cache=False).logits


def additive(mask: Tensor) -> Tensor:
    """A mask to add to scores. [..., T, T] -> at least [1, 1, T, T]."""
    added = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device).masked_fill(~mask, -torch.inf)
    return added.view(1, -1, *mask.shape[-2:])


@EVERY
@pytest.mark.parametrize(("method", "sizes"), [(EAGER, (1, 7, 60)), (TOKEN_BY_TOKEN, (7,))], ids=["eager", "token by token"])
def test_dense_reading_gives_the_nll_of_the_models_own_forward_pass(name, method, sizes):
    model, tokens = model_named(name), tokens_of(60)
    own = nll(own_logits(model, tokens), tokens)
    for size in sizes:
        ours = in_blocks(decoder(model, CacheConfig(Dense()), method=method), tokens, size)
        assert (nll(ours, tokens) - own).abs().max() < EXACT


@EVERY
@pytest.mark.parametrize(
    ("method", "sizes"),
    [(EAGER, (7, 60)), (TOKEN_BY_TOKEN, (7,)), (FASTEST, (1, 60))],
    ids=["eager", "token by token", "fastest"],
)
def test_under_a_window_all_layers_that_share_see_the_tokens_that_are_kept(name, method, sizes):
    model, tokens, capacity = model_named(name), tokens_of(60), 9
    at = torch.arange(60, device=DEVICE)
    age = at[:, None] - at
    own = own_logits(model, tokens, (age >= 0) & (age <= capacity))
    for size in sizes:
        read = decoder(model, CacheConfig(Window(), capacity, "stream"), method=method)
        assert (in_blocks(read, tokens, size) - own).abs().max() < EXACT


def h2o_by_eager_attention(
    model: Model, sources: list[int], tokens: Tensor, capacity: int
) -> tuple[Tensor, dict[int, list[list[int]]]]:
    """H2O over one stream, by nothing but the model's own forward passes: one a step, with what was evicted masked.

    Returns:
        Logits [1, T, V], and the positions kept, by layer that owns a cache and KV head.
    """
    heads, length, choose = model.layers[0].heads, tokens.shape[1], lightest(capacity // 2)
    queries = model.hf.config.num_attention_heads
    attention = [layer.self_attn for layer in model.hf.base_model.layers]
    sees = {o: torch.zeros(heads, length, length, dtype=torch.bool, device=DEVICE) for o in sorted(set(sources))}
    held: dict[int, list[list[Held]]] = {o: [[] for _ in range(heads)] for o in sees}
    seen: dict[int, Tensor] = {}

    def masked(module, args, kwargs):
        mask = sees[sources[module.layer_idx]].repeat_interleave(queries // heads, 0)
        end = kwargs["hidden_states"].shape[1] if "hidden_states" in kwargs else args[0].shape[1]
        return args, {**kwargs, "attention_mask": additive(mask[:, :end, :end])}

    hooks = [m.register_forward_pre_hook(masked, with_kwargs=True) for m in attention]
    hooks += [m.register_forward_hook(lambda m, _, out: seen.__setitem__(m.layer_idx, out[1])) for m in attention]
    logits = []
    for t in range(length):
        for owner, of_heads in held.items():
            for head, of_head in enumerate(of_heads):
                of_head.append(Held(t, tokens, tokens))
                sees[owner][head, t, [x.position for x in of_head]] = True
        with torch.inference_mode(), own_attention(model.hf):
            logits.append(model.hf(input_ids=tokens[:, : t + 1], use_cache=False).logits[:, -1:])
        for owner, of_heads in held.items():
            layers = [layer for layer, source in enumerate(sources) if source == owner]
            mass = sum(seen[layer][0, :, -1].unflatten(0, (heads, -1)).sum(1) for layer in layers)  # [H, t + 1]
            for head, of_head in enumerate(of_heads):
                for x in of_head:
                    x.mass += float(mass[head, x.position])
                if len(of_head) > capacity:
                    del of_head[choose(of_head, t, owner, head)]
    for hook in hooks:
        hook.remove()
    return torch.cat(logits, 1), {o: [[x.position for x in of_head] for of_head in held[o]] for o in held}


@cache
def h2o_reference(name: str) -> tuple[Model, Tensor, Tensor, list[list[list[int]]]]:
    family, settings = MODELS[name]
    wide = {**settings, "sliding_window": 64} if "sliding_window" in settings else settings  # no token leaves the window
    model, tokens = adopt(tiny_model(family, **wide).to(DEVICE, torch.float64)), tokens_of(40)
    logits, kept = h2o_by_eager_attention(model, SOURCES[name], tokens, 9)
    return model, tokens, logits, list(kept.values())


def h2o_agrees(name: str, sizes: tuple[int, ...] = (1, 10), method: Method = EAGER) -> bool:
    model, tokens, logits, kept = h2o_reference(name)
    for size in sizes:
        read = CachedDecoder(model, CacheConfig(H2O(), 9, "stream"), method=method)
        ours = in_blocks(read, tokens, size)
        if (ours - logits).abs().max() > EXACT or [of_layer[0] for of_layer in read.kept()] != kept:
            return False
    return True


@EVERY
def test_h2o_sums_the_attention_of_all_layers_that_read_a_cache(name):
    assert h2o_agrees(name)
    assert h2o_agrees(name, (40,), FASTEST)


def test_broken_statistics_of_the_first_layer_alone_are_noticed(monkeypatch: pytest.MonkeyPatch):
    plain = Walk._step

    def step(self, plan, layer, query, keys, values, terms, place):
        before = {name: x.clone() for name, x in plan.seen_of_layer[0].items()}
        out = plain(self, plan, layer, query, keys, values, terms, place)
        for name, x in plan.seen_of_layer[self.slots.layers.index(layer)].items():
            group = self.slots.shape.group_of_reader
            if place:
                x[:, place * group : (place + 1) * group] = 0 * before[name][:, :group]
        return out

    monkeypatch.setattr(Walk, "_step", step)
    assert not h2o_agrees("cla", (1,))


def test_broken_by_evicting_before_the_last_layer_has_read_is_noticed(monkeypatch: pytest.MonkeyPatch):
    plain, end = BlockInLayers.attend, BlockInLayers.end

    def attend(self, layer, *rest):
        if layer == 0:
            for x in self._plans[0].seen.values():
                x.zero_()
        out = plain(self, layer, *rest)
        if layer == 2:  # the first of the two that share
            end(self)
        return out

    monkeypatch.setattr(BlockInLayers, "attend", attend)
    monkeypatch.setattr(BlockInLayers, "end", lambda self: None)

    assert not h2o_agrees("cla", (1,))


@EVERY
def test_k_and_v_are_counted_once(name):
    """Measured, predicted by the model's shapes, in the record's facts, and by its config."""
    model, capacity = model_named(name), 9
    owners = sorted(set(SOURCES[name]))
    per_token = [s.kv_bytes(1, torch.float64) for s in model.layers]
    assert len(per_token) == len(owners)
    read = decoder(model, CacheConfig(H2O(), capacity))
    in_blocks(read, tokens_of(20), 5)
    assert read.kv_bytes == sum(per_token) * (capacity + 1) == model.kv_bytes(capacity)
    assert sum(kind["layers"] for kind in model.facts()["kv_shapes"]) == len(owners)
    if name != "gemma4":  # whose layers have heads of two sizes
        assert shape_of(model.hf.config).kv_bytes(capacity, 1, 8) == read.kv_bytes


@pytest.mark.parametrize(
    ("name", "evict", "policy"),
    [("gemma3n", 4, Window()), ("gemma3n", "prompt", SnapKV(window=4)), ("gemma3n", 1, KeyDiff()), ("yoco", "prompt", H2O()),
     ("yoco", 4, Tova()), ("cla", "prompt", ExpectedAttention()), ("cla", 1, CriticalKV(score=H2O())),
     ("cla", "prompt", PyramidKV(window=4))],
    ids=str,
)  # fmt: skip
def test_blocks_and_single_tokens_give_the_same(name, evict, policy: Policy):
    """Whatever a policy looks at, and whenever it evicts; bytes stay those of one cache."""
    model, tokens, capacity = model_named(name), tokens_of(36), 12
    results = []
    for size, method in ((1, TOKEN_BY_TOKEN), (11, EAGER), (30, FASTEST)):
        read = CachedDecoder(model, CacheConfig(policy, capacity, "stream", evict=evict), method=method)
        first = read.read_prompt(tokens[:, :30], size)
        rest = in_blocks(read, tokens[:, 30:], size)
        results.append((torch.cat([first[:, None], rest], 1), read.kept(), read.held_bytes))
    for logits, kept, held in results[1:]:
        assert (logits - results[0][0]).abs().max() < EXACT
        assert kept == results[0][1]
        assert held == results[0][2]


def test_heads_with_budgets_of_their_own_share_too():
    model, tokens = model_named("cla"), tokens_of(40)
    results = []
    for size in (1, 8):
        read = CachedDecoder(model, CacheConfig(AdaKV(score=SnapKV(window=4)), 12, "stream"))
        results.append((in_blocks(read, tokens, size), read.kept()))
    assert (results[0][0] - results[1][0]).abs().max() < EXACT
    assert results[0][1] == results[1][1]


def test_streams_of_different_lengths_are_read_as_if_alone():
    model, tokens = model_named("cla"), tokens_of(30, 2)
    valid = torch.ones(2, 30, dtype=torch.bool, device=DEVICE)
    valid[1, 20:] = False
    both = CachedDecoder(model, CacheConfig(H2O(), 9), 2)
    both(tokens, valid)
    last = both(tokens[:, :1])
    for stream, length in enumerate((30, 20)):
        alone = CachedDecoder(model, CacheConfig(H2O(), 9))
        in_blocks(alone, tokens[stream : stream + 1, :length], 6)
        assert (alone(tokens[stream : stream + 1, :1]) - last[stream]).abs().max() < EXACT
        assert [of_layer[0] for of_layer in alone.kept()] == [of_layer[stream] for of_layer in both.kept()]


@EVERY
def test_windows_that_are_recomputed_are_those_of_the_models_own_forward_pass(name):
    model, tokens = model_named(name), tokens_of(24)
    ours = in_blocks(decoder(model, CacheConfig(RecomputeWindow(), 9)), tokens, 6)
    for t in (3, 15, 23):
        own = own_logits(model, tokens[:, max(0, t - 9) : t + 1])[:, -1]
        assert (ours[:, t] - own).abs().max() < EXACT


def test_outputs_go_through_the_matrices_of_all_layers_that_read_a_cache():
    model = model_named("cla")
    shape = model.layers[1]
    ours = model.output_of(1)
    for place, layer in enumerate((2, 3)):
        weight = model.hf.base_model.layers[layer].self_attn.o_proj.weight
        for head in range(shape.heads):
            for g in range(shape.group_of_reader):
                at = (head * shape.group_of_reader + g) * shape.value_dim
                assert torch.equal(ours[head, place * shape.group_of_reader + g], weight[:, at : at + shape.value_dim])


def test_a_copy_of_k_and_v_is_shared_too():
    model = adopt(model_named("cla").hf)
    plain = probes._ProbeVectors.attend

    def attend(self, layer, query, keys, values, terms):
        return plain(self, layer, query, keys.clone(), values.clone(), terms)

    probes._ProbeVectors.attend = attend
    try:
        assert adopt(model.hf).readers == model.readers
    finally:
        probes._ProbeVectors.attend = plain


def test_another_window_over_the_same_k_and_v_is_refused():
    family, settings = MODELS["yoco"]
    hf = tiny_model(family, **{**settings, "kv_layers": [0, 1, 2, 3, 3, 2]})
    with pytest.raises(UnsupportedModelError, match="layer 5 reads the K and V of layer 2, but with another sliding window$"):
        adopt(hf)


def test_reuse_of_something_else_than_k_and_v_is_refused():
    """Such as a latent vector from which each layer makes keys of its own."""
    hf = tiny_model("llama")
    hf.model.layers[1].self_attn.is_kv_shared_layer = True
    with pytest.raises(UnsupportedModelError, match="layer 1 reuses what another layer cached, but its K and V are its own$"):
        adopt(hf)


@EVERY
def test_adopting_finds_which_layers_share_k_and_v(name):
    model, sources = model_named(name), SOURCES[name]
    owners = sorted(set(sources))
    assert [owners[r.cache] for r in model.readers] == sources
    assert [s.readers for s in model.layers] == [sources.count(owner) for owner in owners]
    assert check(model) <= 1


def test_broken_by_reading_blocks_layer_by_layer_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CachedDecoder, "_reads_at_once", lambda self, tokens, valid: True)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        assert h2o_agrees("cla", (10,))


def test_broken_by_a_cache_for_every_layer_is_noticed(monkeypatch: pytest.MonkeyPatch):
    right = model_named("cla")
    monkeypatch.setattr(probes, "sources", lambda hf: list(range(4)))
    model = adopt(right.hf)
    read = CachedDecoder(model, CacheConfig(H2O(), 9, "stream"))
    in_blocks(read, tokens_of(40), 10)
    kept = read.kept()
    assert kept[0] != kept[1]
    assert model.kv_bytes(9) == 2 * right.kv_bytes(9)


def test_layers_of_equal_weights_do_not_share():
    hf = tiny_model("llama").double()
    first, second = (layer.self_attn for layer in hf.model.layers)
    for name in ("k_proj", "v_proj"):
        getattr(second, name).weight = getattr(first, name).weight
    assert not adopt(hf).shares_caches
