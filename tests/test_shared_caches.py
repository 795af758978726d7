"""Layers that read the K and V of another: driven exactly, counted once, evicted once, by what all of them attend to."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import pytest
import torch
from conftest import DEVICE, in_blocks, nll, tokens_of
from reference import Held, lightest
from torch import Tensor

from kvbench.harness.core.errors import UserError
from kvbench.harness.engine import probes
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.fastcheck import fast_method
from kvbench.harness.engine.loop import BlockInLayers, CachedDecoder, decoder
from kvbench.harness.engine.method import EAGER, FASTEST, TOKEN_BY_TOKEN, Method
from kvbench.harness.engine.model import Model, UnsupportedModelError, adopt
from kvbench.harness.engine.own_attention import own_attention
from kvbench.harness.engine.walk import Walk
from kvbench.harness.engine.watch import watch
from kvbench.harness.kernels.fused import FusedStepError
from kvbench.harness.models.config import read_config
from kvbench.harness.models.families import tiny_model
from kvbench.harness.models.load import load_model
from kvbench.harness.models.selfcheck import check
from kvbench.harness.models.shape import readable_shape, shape_of
from kvbench.harness.run.head_table import retrieval_scores
from kvbench.harness.tasks.attention.measure import read_recorded
from kvbench.policies import Policy
from kvbench.policies.adakv import AdaKV
from kvbench.policies.criticalkv import CriticalKV
from kvbench.policies.dense import Dense
from kvbench.policies.expected_attention import ExpectedAttention
from kvbench.policies.h2o import H2O
from kvbench.policies.keydiff import KeyDiff
from kvbench.policies.pyramidkv import PyramidKV
from kvbench.policies.recompute_window import RecomputeWindow
from kvbench.policies.sink_window import SinkWindow
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
def test_adopting_finds_which_layers_share_k_and_v(name):
    model, sources = model_named(name), SOURCES[name]
    owners = sorted(set(sources))
    assert [owners[r.cache] for r in model.readers] == sources
    assert [s.readers for s in model.layers] == [sources.count(owner) for owner in owners]
    assert check(model) <= 1


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


def test_sinks_are_seen_by_all_layers_that_share_them():
    model, tokens, capacity, sinks = model_named("cla"), tokens_of(60), 9, 2
    at = torch.arange(60, device=DEVICE)
    age = at[:, None] - at
    own = own_logits(model, tokens, (age >= 0) & ((age <= capacity - sinks) | (at < sinks)))
    for size in (1, 7, 60):
        read = decoder(model, CacheConfig(SinkWindow(sinks), capacity, "stream"))
        assert (in_blocks(read, tokens, size) - own).abs().max() < EXACT


Mass = Callable[[float, Tensor], float]  # of a token: before the step, and its weights in the step, [readers * G]


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


def test_only_the_logits_asked_for_come_back():
    model, tokens = model_named("cla"), tokens_of(20)
    everything = CachedDecoder(model, CacheConfig(H2O(), 9))(tokens)
    for keep in ([19], [3, 7], []):
        some = CachedDecoder(model, CacheConfig(H2O(), 9))(tokens, keep=torch.tensor(keep, dtype=torch.int64, device=DEVICE))
        assert (some - everything[:, keep]).abs().max() < EXACT if keep else some.shape[1] == 0


def test_a_fork_goes_on_as_its_original_would():
    model, tokens = model_named("gemma3n"), tokens_of(40)
    read = CachedDecoder(model, CacheConfig(H2O(), 9))
    in_blocks(read, tokens[:, :25], 5)
    other = read.fork([0, 0])
    ours, theirs = (in_blocks(x, y, 5) for x, y in ((read, tokens[:, 25:]), (other, tokens[:, 25:].expand(2, -1))))
    assert (theirs - ours).abs().max() < EXACT


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


class Weights:
    """Keeps the attention that a watcher is shown, by layer."""

    def __init__(self) -> None:
        self.of_layer: dict[int, list[Tensor]] = {}

    def see_vectors(self, layer, keys, values):
        pass

    def see_chunk(self, chunk):
        length = chunk.weights.shape[-1]
        self.of_layer.setdefault(chunk.layer, []).append(torch.nn.functional.pad(chunk.weights, (0, 40 - length)))

    def see_hidden(self, layer, hidden):
        pass

    def rows(self, layer: int) -> Tensor:
        return torch.cat(self.of_layer[layer], 2)


def test_attention_under_a_policy_is_shown_layer_by_layer():
    model, tokens = model_named("cla"), tokens_of(40)
    under, full = Weights(), Weights()
    _, last_seen = read_recorded(model, CacheConfig(Window(), 39, "stream"), tokens, 0, under, ())
    watch(model.hf, full, input_ids=tokens)
    assert len(last_seen) == len(model.readers) == 4
    for layer in range(4):
        assert (under.rows(layer) - full.rows(layer)).abs().max() < EXACT


def test_a_head_table_has_a_row_for_every_cache():
    assert [len(row) for row in retrieval_scores(model_named("cla"), 8, 2)] == [2, 2]


def test_no_kernel_serves_layers_that_share_and_the_record_says_so():
    chosen = fast_method(model_named("cla"), CacheConfig(H2O(), 9))
    assert (chosen.blocks, chosen.step) == ("walk", "plain")
    assert "share K and V" in chosen.plain_because
    chosen = fast_method(model_named("cla"), CacheConfig(Window(), 9))
    assert chosen.blocks == "closed form"
    assert chosen.differs <= 1


def test_layers_of_equal_weights_do_not_share():
    hf = tiny_model("llama").double()
    first, second = (layer.self_attn for layer in hf.model.layers)
    for name in ("k_proj", "v_proj"):
        getattr(second, name).weight = getattr(first, name).weight
    assert not adopt(hf).shares_caches


def test_layers_whose_k_and_v_are_always_zero_do_not_share():
    hf = tiny_model("llama").double()
    for layer in hf.model.layers:
        layer.self_attn.k_proj.weight.data.zero_()
        layer.self_attn.v_proj.weight.data.zero_()
    assert not adopt(hf).shares_caches


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


def test_steps_of_layers_that_share_are_not_fused():
    model = model_named("cla")
    with pytest.raises(FusedStepError, match="share K and V"), model.fused_steps(1):
        pass


def config_folder(folder, **changes):
    """A folder with the config of a small model."""
    config = tiny_model("qwen3_shared_kv", **{**SHARED, "num_hidden_layers": 4, "kv_layers": [0, 0, 2, 2]}).config.to_dict()
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_random_weights_come_in_shapes_that_share(tmp_path):
    folder = config_folder(tmp_path)
    model = load_model(folder / "config.json", "float32", DEVICE, random=True)
    assert [r.cache for r in model.readers] == [0, 0, 1, 1]
    assert readable_shape(f"random:{folder}", None).kv_bytes(9, 1, 4) == model.kv_bytes(9)


@pytest.mark.parametrize(
    ("layers", "message"),
    [([0, 3, 3, 3], "layer 1 reads .* layer 3, which come after it .as in LCKV.: of model_type kv_bench_lckv they may$"),
     ([0, 0, 1, 1], "layer 2 reads layer 1, which has no K and V of its own$"),
     ([0, -1, 2, 3], "layer 1 reads layer -1, which has no K and V of its own$"),
     ([0, 0], "names 2 layers, expected num_hidden_layers = 4$")],
)  # fmt: skip
def test_sharing_that_one_pass_can_not_compute_is_refused_in_one_line(tmp_path, layers, message):
    with pytest.raises(UserError, match=message) as caught:
        read_config(config_folder(tmp_path, kv_layers=layers))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("shape", "layers"), [("smollm2-135m-cla", 15), ("smollm2-135m-yoco", 1)])
def test_shipped_shapes_share(shape, layers):
    """CLA halves the caches; YOCO has one, besides 15 sliding windows."""
    ours, plain = (readable_shape(f"random:{x}", None) for x in (shape, "smollm2-135m"))
    window = 1024 * 15 if layers == 1 else 0
    per_token = plain.kv_bytes(0, 1, 2) // 30
    assert ours.kv_bytes(4095, 1, 2) == per_token * (layers * 4096 + window)
