"""Layers that read the K and V of another layer: the engine refuses them, and a plain decoder reads them, under any policy."""

import json
from dataclasses import dataclass, field
from functools import cache
from math import inf

import pytest
import torch
from factories import MODES, POLICIES, chooser
from helpers import H2O, CacheConfig, CachedDecoder, Dense, Window, bench_in, in_blocks, tiny_model, tokens_of
from reference import Chooser, Held
from torch import Tensor
from torch.nn.functional import silu
from transformers import PreTrainedModel

from kvbench.harness.core import plugins
from kvbench.harness.engine.model import UnsupportedModelError, adopt
from kvbench.harness.engine.own_attention import own_attention
from kvbench.lab.pretrain.config import PretrainConfig, load
from kvbench.lab.pretrain.train import pretrain
from kvbench.lab.shared_kv.decoder import PlainDecoder, Setting
from kvbench.lab.shared_kv.model import LCKVConfig, LCKVForCausalLM

FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL] * 3,
    "num_kv_shared_layers": 3,
    "sliding_window": 16,
    "head_dim": 16,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "vocab_size": 96,
}
GEMMAS = {
    "gemma3n": (
        "gemma3n_text",
        {**GEMMA, "intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.0] * 6, "laurel_rank": 4},
    ),
    "gemma4": ("gemma4_text", {**GEMMA, "global_head_dim": 32}),
}
EARLIER = {"cla": [0, 0, 2, 2], "yoco": [0, 1, 2, 2]}
LATER = {
    "plain": [3, 3, 3, 3],
    "ordinary below": [0, 3, 3, 3],
    "sandwich": [0, 2, 2, 3],
    "two caches": [1, 1, 3, 3],
    "one inside": [3, 1, 3, 3],
    "shared below": [0, 0, 3, 3],
}
LLAMAS = {**EARLIER, **LATER}
HIDDEN, HEADS, QUERIES, DIMS, VOCABULARY = 32, 2, 4, 8, 96
EXACT = 1e-5  # in float64, where no rounding can hide a mistake


def hf_model(kv_layers: list[int] | None, **settings) -> LCKVForCausalLM:
    """Random weights that make attention choose. Larger ones make so deep a recurrence chaotic, and rounding large."""
    torch.manual_seed(0)
    config = LCKVConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=QUERIES,
        num_key_value_heads=HEADS,
        max_position_embeddings=128,
        initializer_range=0.15,
        kv_layers=kv_layers,
        **settings,
    )
    return LCKVForCausalLM(config).eval()


@cache
def model_named(name: str, **changes) -> PreTrainedModel:
    if name in LLAMAS:
        return hf_model(LLAMAS[name]).double()
    family, settings = GEMMAS[name]
    return tiny_model(family, **{**settings, **changes}).double()


def own_logits(hf: PreTrainedModel, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """The model's own forward pass. mask: tokens that a query sees besides those out of its layer's sliding window, [T, T]."""
    window, masks = getattr(hf.config, "sliding_window", None), None
    if mask is not None:
        at = torch.arange(len(mask), device=mask.device)
        near = mask & (at[:, None] - at < (window or len(mask)))
        masks = {FULL: additive(mask), SLIDING: additive(near)}
    with torch.inference_mode(), own_attention(hf):
        return hf(input_ids=tokens, attention_mask=masks, use_cache=False).logits


def additive(mask: Tensor) -> Tensor:
    """A mask to add to scores. [..., T, T] -> at least [1, 1, T, T]."""
    added = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device).masked_fill(~mask, -torch.inf)
    return added.view(1, -1, *mask.shape[-2:])


@dataclass
class Naive:
    """Reference for one stream, computed from the weights token by token and layer by layer, without code of the engine.

    If a layer reads a cache before the cache is written, tokens are entered after the step, and no layer attends to its own
    token. Otherwise, tokens are entered by the layer that computes them.
    """

    hf: LCKVForCausalLM
    capacity: float = inf
    choose: Chooser | None = None
    mode: str = "stream"
    limit: int = 0
    held: dict[tuple[int, int], list[Held]] = field(default_factory=dict)  # by layer that writes, and head
    kept: list[list[list[list[int]]]] = field(default_factory=list)  # after each step, by cache and head

    def run(self, tokens: list[int]) -> Tensor:
        """Logits. [T, V]."""
        return torch.stack([self.step(at, token) for at, token in enumerate(tokens)])

    def step(self, at: int, token: int) -> Tensor:
        sources = self.hf.config.kv_layers
        owners, state, waiting = sorted(set(sources)), self.hf.state_dict(), []
        x = state["model.embed_tokens.weight"][token]
        for layer, source in enumerate(sources):
            weight = {k.split(".", 3)[3]: v for k, v in state.items() if k.startswith(f"model.layers.{layer}.")}
            y = self._normed(x, weight["input_layernorm.weight"])
            lags = sources.index(source) < source
            if layer == source:
                made = [(weight[f"self_attn.{name}_proj.weight"] @ y).view(HEADS, DIMS) for name in "kv"]
                news = [((source, head), Held(at, made[0][head], made[1][head])) for head in range(HEADS)]
                if lags:
                    waiting += news
                else:
                    for where, new in news:
                        self.held.setdefault(where, []).append(new)
            queries = (weight["self_attn.q_proj.weight"] @ y).view(QUERIES, DIMS)
            caches = [self.held.get((source, q * HEADS // QUERIES), []) for q in range(QUERIES)]
            out = [self._attended(query, held, at, lags) for query, held in zip(queries, caches, strict=True)]
            x = x + weight["self_attn.o_proj.weight"] @ torch.cat(out)
            y = self._normed(x, weight["post_attention_layernorm.weight"])
            gate, up = (weight[f"mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
            x = x + weight["mlp.down_proj.weight"] @ (silu(gate) * up)
        for where, new in waiting:
            self.held.setdefault(where, []).append(new)
        for (owner, head), held in self.held.items():
            while len(held) > self.capacity:
                del held[self.choose(held, at, owners.index(owner), head)]
        self.kept.append([[[x.position for x in self.held[owner, head]] for head in range(HEADS)] for owner in owners])
        return state["lm_head.weight"] @ self._normed(x, state["model.norm.weight"])

    def _attended(self, query: Tensor, held: list[Held], at: int, lags: bool) -> Tensor:
        if not held:
            return torch.zeros_like(query)
        if self.mode == "cache":
            own, places = len(held) - 1 + lags, list(range(len(held)))
        elif self.mode == "stream":
            own, places = at, [x.position for x in held]
        else:
            own, places = self.limit, [self.limit - min(at - x.position, self.limit) for x in held]
        turned = self._turned(query, own)
        scores = torch.stack([turned @ self._turned(x.key, place) for x, place in zip(held, places, strict=True)]) / DIMS**0.5
        weights = scores.exp() / scores.exp().sum()
        for x, weight in zip(held, weights.tolist(), strict=True):
            x.mass += weight
        return sum(weight * x.value for weight, x in zip(weights, held, strict=True))

    def _turned(self, x: Tensor, place: int) -> Tensor:
        """RoPE: dims i and i + D / 2 turned by the angle of pair i."""
        angle = place * self.hf.model.rotary_emb.inv_freq.double()
        a, b = x.chunk(2)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean() + self.hf.config.rms_norm_eps).sqrt() * weight


@pytest.mark.parametrize("name", [*GEMMAS, *LLAMAS])
def test_dense_reading_gives_the_models_own_forward_pass(name):
    """If layers read later layers, the forward pass repeats until nothing changes."""
    hf, tokens = model_named(name), tokens_of(30, 2)
    assert (PlainDecoder(hf, Setting(Dense()), 2)(tokens) - own_logits(hf, tokens)).abs().max() < EXACT


@pytest.mark.parametrize("name", LLAMAS)
def test_dense_reading_gives_the_naive_loop(name):
    tokens = tokens_of(30)
    with torch.inference_mode():
        theirs = Naive(model_named(name)).run(tokens[0].tolist())
    assert (PlainDecoder(model_named(name), Setting(Dense()))(tokens)[0] - theirs).abs().max() < EXACT


@pytest.mark.parametrize(
    ("name", "policy", "mode"),
    [(list(LLAMAS)[i + j - 2], policy, mode) for i, policy in enumerate(POLICIES) for j, mode in enumerate(MODES)],
    ids=str,
)
def test_under_a_policy_every_step_is_that_of_the_naive_loop(name, policy, mode):
    """The logits, and the tokens kept after every step."""
    tokens, capacity, limit = tokens_of(40), 9, 12
    naive = Naive(model_named(name), capacity, chooser(policy, capacity, 5), mode, limit)
    with torch.inference_mode():
        theirs = naive.run(tokens[0].tolist())
    read = PlainDecoder(model_named(name), Setting(policy, capacity, mode, limit, seed=5))
    for token, expected, kept in zip(tokens.split(1, 1), theirs, naive.kept, strict=True):
        assert (read(token)[0, 0] - expected).abs().max() < EXACT
        assert [of_cache[0] for of_cache in read.kept()] == kept


@pytest.mark.parametrize("name", GEMMAS)
def test_under_a_window_all_layers_that_share_see_the_tokens_that_are_kept(name):
    hf, tokens, capacity, at = model_named(name), tokens_of(40), 9, torch.arange(40)
    age = at[:, None] - at
    own = own_logits(hf, tokens, (age >= 0) & (age <= capacity))
    assert (PlainDecoder(hf, Setting(Window(), capacity))(tokens) - own).abs().max() < EXACT


@pytest.mark.parametrize(
    "name", ["dense", "window", "sink_window", "h2o", "random", "tova", "snapkv", "knorm", "adakv", "keydiff"]
)
def test_where_no_layer_shares_it_gives_what_the_engine_gives(name):
    """Logits, and the tokens that are kept; or it refuses the policy in one line."""
    model, tokens, policy = adopt(tiny_model("gemma2", vocab_size=96).double()), tokens_of(40, 2), plugins.policy_class(name)()
    capacity = 24 if policy.evicts and not policy.outcome else None
    try:
        read = PlainDecoder(model.hf, Setting(policy, capacity, "cache", seed=3), 2)
    except ValueError as error:
        assert str(error).startswith(f"{type(policy).__name__}: ")
        return
    engine = CachedDecoder(model, CacheConfig(policy, capacity, seed=3), 2)
    assert (read(tokens) - in_blocks(engine, tokens, 1)).abs().max() < EXACT
    assert read.kept() == engine.kept()


@pytest.mark.parametrize("name", [*GEMMAS, *LLAMAS])
def test_the_engine_refuses_layers_that_share(name):
    with pytest.raises(UnsupportedModelError, match="^its layers share K and V; `bench shared-kv` reads it"):
        adopt(model_named(name))


def test_k_and_v_are_held_once():
    read = PlainDecoder(model_named("cla"), Setting(H2O(), 9), 2)
    read(tokens_of(20, 2))
    assert read.kv_bytes == 2 * 2 * HEADS * 9 * 2 * DIMS * 8  # caches, streams, heads, tokens, K and V, dims, float64


def test_another_window_over_the_same_k_and_v_is_refused():
    family, settings = GEMMAS["gemma3n"]
    hf = tiny_model(family, **settings)
    hf.model.layers[3].self_attn.sliding_window = 8
    with pytest.raises(ValueError, match=r"^layers \[1, 3, 5\] share K and V, but differ in their heads, sliding"):
        PlainDecoder(hf, Setting(Dense()))


def test_orders_that_no_pass_can_serve_are_refused():
    for kv_layers, why in (
        ([0, 0], "names 2 layers, expected num_hidden_layers = 4"),
        ([0, 0, 1, 3], "which has no K and V of its own"),
        ([2, 1, 2, 2], "it must be their last reader"),
    ):
        with pytest.raises(ValueError, match=why):
            hf_model(kv_layers)


def recipe(steps: int = 12, **changes) -> PretrainConfig:
    """Its shipped recipe, smaller."""
    shipped = load("lckv").model_dump()
    training = shipped["training"] | {
        "tokens": 72 * 4 * steps,
        "sample": 72,
        "batch": 4,
        "short": [],
        "probe_every": 6,
        "checkpoint_every": 5,
    }
    shape = shipped["shape"] | {"hidden": 16, "intermediate": 32}
    return PretrainConfig(**shipped | {"name": "tiny", "training": training, "shape": shape} | changes)


@pytest.mark.filterwarnings("ignore")  # accelerate and the Trainer give warnings
@pytest.mark.slow("training")
def test_training_lowers_the_loss_and_stopped_and_resumed_it_is_the_same_to_the_last_digit(tmp_path):
    logs = []
    for folder, stops in (("whole", [None]), ("stopped", [7, None])):
        for stop in stops:
            model = pretrain(recipe(), tmp_path / folder, None, torch.device("cpu"), lambda line: None, stop)
        logs.append((tmp_path / folder / "log.jsonl").read_text())
    assert logs[0] == logs[1]
    losses = [json.loads(line)["loss"] for line in logs[0].splitlines()]
    assert sum(losses[-3:]) < sum(losses[:3])
    read = bench_in(
        "shared-kv", model, "--text", "backcopy", "--tokens", 80, "--streams", 2, "--capacity", 8, "--json", cwd=tmp_path
    )
    assert [(row["policy"], row["capacity"]) for row in json.loads(read.stdout)] == [("dense", None), ("h2o", 8)]
    assert "a later layer made of earlier tokens" in (model / "README.md").read_text()


def test_as_many_passes_as_tokens_in_training_are_the_exact_forward_pass():
    tokens = tokens_of(12).cpu()
    training, exact = (hf_model([0, 3, 3, 3], blind=10, graded=2).double() for _ in range(2))
    few = hf_model([0, 3, 3, 3], blind=0, graded=1).double()
    logits, expected, first = (model(input_ids=tokens).logits for model in (training.train(), exact.eval(), few.train()))
    assert (logits - expected).abs().max() < EXACT
    assert (first - expected).abs().max() > 1e-2
