"""Layers that read what a later layer writes: driven exactly, token by token, under any policy; trained in several passes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from math import inf

import pytest
import torch
from conftest import DEVICE, in_blocks, tokens_of
from factories import MODES, POLICIES, chooser, default_policies
from reference import Chooser, Held
from torch import Tensor
from torch.nn.functional import silu

from kvbench.harness.core import plugins
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder, decoder
from kvbench.harness.engine.method import EAGER, FASTEST, TOKEN_BY_TOKEN
from kvbench.harness.engine.model import Model, UnsupportedModelError, adopt
from kvbench.harness.engine.own_attention import own_attention
from kvbench.harness.engine.rows import Rows
from kvbench.harness.engine.variants.lckv import LCKVConfig, LCKVForCausalLM
from kvbench.harness.engine.walk import Walk
from kvbench.harness.models.load import load_model
from kvbench.harness.models.selfcheck import check
from kvbench.lab.pretrain.config import PretrainConfig, find, load
from kvbench.lab.pretrain.train import pretrain
from kvbench.policies import Policy
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O
from kvbench.policies.sink_window import SinkWindow

LAYERS = {"plain": [3, 3, 3, 3], "ordinary below": [0, 3, 3, 3], "sandwich": [0, 2, 2, 3], "two caches": [1, 1, 3, 3],
          "one inside": [3, 1, 3, 3], "shared below": [0, 0, 3, 3]}  # fmt: skip
EVERY = pytest.mark.parametrize("name", LAYERS)
HIDDEN, HEADS, QUERIES, DIMS, VOCABULARY = 32, 2, 4, 8, 96
EXACT = 1e-5  # in float64, where no rounding can hide a mistake


def hf_model(kv_layers: list[int] | None, **settings) -> LCKVForCausalLM:
    """Random weights that make attention choose. Larger ones make so deep a recurrence chaotic, and rounding large."""
    torch.manual_seed(0)
    config = LCKVConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=4, num_attention_heads=QUERIES,
        num_key_value_heads=HEADS, max_position_embeddings=128, initializer_range=0.15, kv_layers=kv_layers, **settings,
    )  # fmt: skip
    return LCKVForCausalLM(config).eval()


@cache
def model_named(name: str) -> Model:
    return adopt(hf_model(LAYERS[name]).to(DEVICE, torch.float64))


def own_logits(model: Model, tokens: Tensor) -> Tensor:
    with torch.inference_mode(), own_attention(model.hf):
        return model.hf(input_ids=tokens, use_cache=False).logits


@cache
def dense_logits(name: str) -> Tensor:
    """The naive loop's, over 30 tokens, with nothing evicted. [T, V]."""
    with torch.inference_mode():
        return Naive(model_named(name).hf).run(tokens_of(30)[0].tolist())


@dataclass
class Naive:
    """One stream, written out from the weights: token by token, layer by layer, over plain lists. No code of the engine.

    Where a layer reads a cache before it is written, tokens are entered after the step, and no layer sees its own. Elsewhere they
    are entered where they are made.
    """

    hf: LCKVForCausalLM
    capacity: float = inf
    choose: Chooser | None = None
    mode: str = "stream"
    limit: int = 0
    every: int = 1
    held: dict[tuple[int, int], list[Held]] = field(default_factory=dict)  # by layer that writes, and head
    kept: list[list[list[list[int]]]] = field(default_factory=list)  # after each step, by cache and head
    prompt: int = 0  # tokens, if evicted once after them

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
            due = at + 1 == self.prompt if self.prompt else len(held) >= self.capacity + self.every
            while due and len(held) > self.capacity:
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


def agrees(name: str, policy: Policy, mode: str = "cache", size: int = 1, method=EAGER, length: int = 40) -> bool:
    """Whether the decode loop's logits are the naive loop's, and the tokens kept after every step (or block)."""
    model, tokens, capacity, limit = model_named(name), tokens_of(length), 9, 12
    naive = Naive(model.hf, capacity, chooser(policy, capacity, 5), mode, limit)
    with torch.inference_mode():
        theirs = naive.run(tokens[0].tolist())
    read = CachedDecoder(model, CacheConfig(policy, capacity, mode, limit, seed=5), method=method)
    for block, expected, end in zip(tokens.split(size, 1), theirs.split(size), range(size, length + size, size), strict=True):
        if not (read(block)[0] - expected).abs().max() < EXACT:
            return False
        if [of_layer[0] for of_layer in read.kept()] != naive.kept[min(end, length) - 1]:
            return False
    return True


@EVERY
def test_a_whole_text_gives_what_the_naive_loop_gives(name):
    """The model's own forward pass repeats its passes until nothing changes; token by token is the definition."""
    assert (own_logits(model_named(name), tokens_of(30))[0] - dense_logits(name)).abs().max() < EXACT


@EVERY
@pytest.mark.parametrize(
    ("method", "size"), [(EAGER, 1), (EAGER, 7), (TOKEN_BY_TOKEN, 30), (FASTEST, 30)], ids=["1", "7", "walk", "fastest"]
)
def test_dense_reading_gives_what_the_naive_loop_gives(name, method, size):
    read = decoder(model_named(name), CacheConfig(Dense()), method=method)
    assert (in_blocks(read, tokens_of(30), size)[0] - dense_logits(name)).abs().max() < EXACT


@pytest.mark.parametrize(
    ("name", "policy", "mode"),
    [(list(LAYERS)[(i + j) % 6], policy, mode) for i, policy in enumerate(POLICIES) for j, mode in enumerate(MODES)],
    ids=str,
)
def test_under_a_policy_every_step_is_that_of_the_naive_loop(name, policy, mode):
    assert agrees(name, policy, mode)


@pytest.mark.parametrize("name", ["plain", "sandwich"])
def test_several_tokens_that_go_at_once_are_those_of_the_naive_loop(name):
    model, tokens, policy = model_named(name), tokens_of(40), H2O()
    naive = Naive(model.hf, 9, chooser(policy, 9, 0), every=4)
    with torch.inference_mode():
        theirs = naive.run(tokens[0].tolist())
    read = CachedDecoder(model, CacheConfig(policy, 9, "stream", evict=4))
    assert (in_blocks(read, tokens, 1)[0] - theirs).abs().max() < EXACT
    assert [of_layer[0] for of_layer in read.kept()] == naive.kept[-1]


@pytest.mark.parametrize("name", ["plain", "sandwich"])
def test_a_prompt_that_is_cut_is_that_of_the_naive_loop(name):
    model, tokens, policy, prompt = model_named(name), tokens_of(40), H2O(), 30
    naive = Naive(model.hf, 9, chooser(policy, 9, 0), prompt=prompt)
    with torch.inference_mode():
        theirs = naive.run(tokens[0].tolist())
    read = CachedDecoder(model, CacheConfig(policy, 9, "stream", evict="prompt"))
    first = read.read_prompt(tokens[:, :prompt], 16)
    assert (first[0] - theirs[prompt - 1]).abs().max() < EXACT
    assert [of_layer[0] for of_layer in read.kept()] == naive.kept[prompt - 1]
    assert (in_blocks(read, tokens[:, prompt:], 3)[0] - theirs[prompt:]).abs().max() < EXACT


def test_broken_by_writing_what_the_first_reader_has_is_noticed(monkeypatch: pytest.MonkeyPatch):
    made = Walk.__init__

    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self._writer = 0

    monkeypatch.setattr(Walk, "__init__", init)
    assert not agrees("ordinary below", SinkWindow(2))


def test_broken_by_another_source_is_refused_by_the_self_check():
    hf = hf_model([0, 3, 3, 3])
    hf.model.layers[1].self_attn.later_source = 0
    with pytest.raises(UnsupportedModelError):
        check(adopt(hf))


def test_streams_of_different_lengths_are_read_as_if_alone():
    model, tokens = model_named("ordinary below"), tokens_of(30, 2)
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


def recipe(steps: int = 12, **changes) -> PretrainConfig:
    """Its shipped recipe, smaller."""
    shipped = load(find("lckv")).model_dump()
    training = shipped["training"] | {
        "tokens": 72 * 4 * steps, "sample": 72, "batch": 4, "short": [], "probe_every": 6, "checkpoint_every": 5,
    }  # fmt: skip
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
    loaded = load_model(model, "float32", torch.device("cpu"))
    assert loaded.check <= 1
    assert loaded.hf.config.kv_layers == list(recipe().lckv.kv_layers)
    assert "a later layer made of earlier tokens" in (model / "README.md").read_text()


def test_as_many_passes_as_tokens_in_training_are_the_exact_forward_pass():
    tokens = tokens_of(12).cpu()
    training, exact = (hf_model([0, 3, 3, 3], blind=10, graded=2).double() for _ in range(2))
    few = hf_model([0, 3, 3, 3], blind=0, graded=1).double()
    logits, expected, first = (model(input_ids=tokens).logits for model in (training.train(), exact.eval(), few.train()))
    assert (logits - expected).abs().max() < EXACT
    assert (first - expected).abs().max() > 1e-2


def test_broken_by_seeing_the_newest_token_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Rows, "used", lambda self: (self.rank < self._slots.empty_rank)[:, None])
    assert not agrees("ordinary below", H2O())


@pytest.mark.parametrize("name", [x for x in default_policies() if plugins.policy_class(x).caches])
def test_every_policy_keeps_the_same_in_blocks_as_token_by_token(name):
    model, tokens, policy = model_named("ordinary below"), tokens_of(45), plugins.policy_class(name)()
    evict = "prompt" if policy.outcome else 1
    results = []
    for size in (1, 8):
        read = CachedDecoder(model, CacheConfig(policy, 24 if policy.evicts and not policy.outcome else None, evict=evict))
        first = read.read_prompt(tokens[:, :30], size)
        results.append((torch.cat([first[:, None], in_blocks(read, tokens[:, 30:], size)], 1), read.kept()))
    assert (results[0][0] - results[1][0]).abs().max() < EXACT
    assert results[0][1] == results[1][1]
