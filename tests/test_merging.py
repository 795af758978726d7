"""Merging: every rule against plain lists, and what every rule must leave as it is."""

import itertools
import math
import statistics
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from factories import CLOSE, MODES, chooser, needs_compiler, uniform_number
from helpers import H2O, CacheConfig, CachedDecoder, SinkWindow, SnapKV, adopt, in_blocks, model_of, tiny_model, tokens_of
from reference import Held, ListBackend, oldest
from test_traced_policies import check
from torch import Tensor

from kvbench.harness.engine.method import EAGER, FASTEST, RAN, TOKEN_BY_TOKEN
from kvbench.policies.adakv import AdaKV
from kvbench.policies.cake import Cake
from kvbench.policies.cam import CaM
from kvbench.policies.chunkkv import ChunkKV
from kvbench.policies.d2o import D2O
from kvbench.policies.merges import Evicted, Merged, Merging
from kvbench.policies.merging import ValueMerging
from kvbench.policies.statistics import RecentAttention
from kvbench.policies.view import CacheView

pytestmark = pytest.mark.fast

DOUBLE, CAPACITY, SEED = torch.float64, 12, 3
SINKS, HEAVY = SinkWindow(sinks=2), H2O(window=4)


@dataclass(frozen=True)
class Nothing(Merging):
    """Merge with weight 0."""

    def merge(self, view: CacheView, evicted: Evicted) -> Merged:
        return Merged(view.values + 0.0 * evicted.take(view.values).sum(2, keepdim=True), view.keys)


def read_by(policy, tokens: Tensor, size: int, mode: str = "stream", prompt: int = 0, evict=1, method=EAGER, dtype=DOUBLE):
    config = CacheConfig(policy, CAPACITY, positions=mode, seed=SEED, evict=evict, limit=64)
    read = CachedDecoder(model_of("llama", dtype), config, len(tokens), method)
    if not prompt:
        return in_blocks(read, tokens, size)
    first = read.read_prompt(tokens[:, :prompt], size, once=True)
    return torch.cat([first[:, None], in_blocks(read, tokens[:, prompt:], size)], 1)


def by_lists(policy, merge, tokens: Tensor, mode: str = "stream", prompt: int = 0, budgets=None, every: int = 1) -> Tensor:
    """Logits by plain lists, from the prompt's last token on. budgets: of layers, where they are not the capacity."""
    merge = deepcopy(merge)
    merge.lists = ListBackend(
        model_of("llama", DOUBLE),
        chooser(policy.score, CAPACITY, SEED),
        CAPACITY,
        mode,
        limit=64,
        first_eviction=max(0, prompt - 1),
        budgets=budgets,
        every=every,
        merge=merge,
    )
    return merge.lists.run(tokens)[:, max(0, prompt - 1) :]


def rotated(lists: ListBackend, token: Held) -> Tensor:
    return lists._rotated(token.key[None], torch.tensor([token.position]))[0]


def nearest(lists: ListBackend, token: Held, kept: list[Held]) -> tuple[float, Held]:
    cosine = [torch.cosine_similarity(rotated(lists, token), rotated(lists, other), 0).item() for other in kept]
    best = max(range(len(kept)), key=cosine.__getitem__)
    return cosine[best], kept[best]


class Spread:
    """CaM."""

    lists: ListBackend

    def __init__(self, spread: int, variant: str) -> None:
        self.spread, self.variant = spread, variant

    def __call__(self, heads: list[list[Held]], victims: list[list[Held]], layer: int) -> None:
        for head, kept in enumerate(heads):
            for token in victims[head]:
                after = [other for other in kept if other.position > token.position]
                if not after:
                    continue
                takes = after[: self.spread]
                if self.variant == "kvpress":
                    probability, parts = token.mass / (sum(x.mass for x in takes) / len(takes)), len(takes)
                else:
                    probability = token.newest_mass / (sum(x.newest_mass for x in after) / len(after))
                    parts = self.spread
                if uniform_number(layer, head, token.position, SEED) < probability:
                    for other in takes:
                        other.value = other.value + token.value / parts


class Averaged:
    """kvpress' MergingPress."""

    lists: ListBackend

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def __call__(self, heads: list[list[Held]], victims: list[list[Held]], layer: int) -> None:
        for head, kept in enumerate(heads):
            given: dict[int, list[tuple[float, Tensor]]] = {}
            for token in victims[head]:
                similarity, target = nearest(self.lists, token, kept)
                if similarity >= self.threshold and similarity > 0:
                    norms = token.value.norm().item(), target.value.norm().item()
                    given.setdefault(target.position, []).append((similarity * norms[0] / (sum(norms) + 1e-6), token.value))
            for target in kept:
                if parts := given.get(target.position):
                    total = target.value + sum(weight * value for weight, value in parts)
                    target.value = total / (1 + sum(weight for weight, _ in parts))


class Discriminated:
    """D2O."""

    lists: ListBackend

    def __init__(self, beta: float, variant: str) -> None:
        self.beta, self.variant, self.threshold = beta, variant, dict[int, float]()

    def __call__(self, heads: list[list[Held]], victims: list[list[Held]], layer: int) -> None:
        found = [[nearest(self.lists, token, kept) for token in gone] for kept, gone in zip(heads, victims, strict=True)]
        every = [similarity for of_head in found for similarity, _ in of_head]
        now = sum(every) / len(every)
        before = self.threshold.get(layer, now)
        self.threshold[layer] = (1 - self.beta) * before + self.beta * now
        for head, kept in enumerate(heads):
            given: dict[int, list[tuple[float, Held]]] = {}
            for i, token in enumerate(victims[head]):
                similarity, target = found[head][i]
                if sum(of_head[i][0] for of_head in found) / len(found) >= self.threshold[layer]:
                    given.setdefault(target.position, []).append((similarity, token))
            for target in kept:
                if parts := given.get(target.position):
                    self._mix(target, parts)

    def _mix(self, target: Held, parts: list[tuple[float, Held]]) -> None:
        if self.variant == "official":
            own, weights, total = 1.0, [x for x, _ in parts], 1.0 + len(parts)
        else:
            own, weights = math.e, [math.exp(x) for x, _ in parts]
            total = own + sum(weights)
        tokens = [token for _, token in parts]
        value = own * target.value + sum(w * token.value for w, token in zip(weights, tokens, strict=True))
        key = own * rotated(self.lists, target) + sum(w * rotated(self.lists, t) for w, t in zip(weights, tokens, strict=True))
        angles = target.position * self.lists.model.layers[0].rotation.frequencies
        rotation = self.lists.model.layers[0].rotation
        pairs = torch.view_as_complex((key / total)[rotation.order].unflatten(0, (-1, 2)).contiguous())
        back = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), -angles)).flatten()
        target.key, target.value = torch.empty_like(key).index_copy_(0, rotation.order, back), value / total


RULES = [
    (CaM(SINKS, 5), Spread(5, "kvpress")),
    (CaM(SINKS, 5, "official"), Spread(5, "official")),
    (CaM(HEAVY, 3), Spread(3, "kvpress")),
    (ValueMerging(HEAVY), Averaged(0.0)),
    (ValueMerging(SINKS, 0.6), Averaged(0.6)),
    (D2O(HEAVY, sinks=0), Discriminated(0.5, "official")),
    (D2O(HEAVY, sinks=0, beta=0.3, variant="paper"), Discriminated(0.3, "paper")),
]


@pytest.mark.parametrize(
    ("policy", "merge", "mode"),
    [*((policy, merge, "stream") for policy, merge in RULES), *((*rule, mode) for rule in RULES[:4] for mode in MODES[::2])],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)  # D2O merges keys, which have a position in the stream alone
@pytest.mark.parametrize(("size", "every"), [(1, 1), (40, 1), (10, 5)])
def test_a_rule_computes_what_plain_lists_compute(policy, merge, mode, size, every):
    """Also where several tokens go at once."""
    tokens = tokens_of(40)
    ours = read_by(policy, tokens, size, mode, evict=every)
    assert (ours - by_lists(policy, merge, tokens, mode, every=every)).abs().max() < CLOSE[DOUBLE]
    assert (ours - read_by(policy.score, tokens, size, mode, evict=every)).abs().max() > 1e-3, "nothing was merged"


@pytest.mark.parametrize(("policy", "merge"), RULES[3:5], ids=lambda x: type(x).__name__)
def test_a_prompt_is_merged_at_its_end(policy, merge):
    tokens = tokens_of(40)
    ours = read_by(policy, tokens, 30, prompt=30)
    assert (ours - by_lists(policy, merge, tokens, prompt=30)).abs().max() < CLOSE[DOUBLE]


@pytest.mark.parametrize("policy", [r[0] for r in RULES[:3]], ids=lambda x: x.variant)
def test_cam_drops_a_prompt_that_is_cut_once(policy):
    tokens = tokens_of(40)
    ours, dropped = (read_by(x, tokens, 10, prompt=30, evict="prompt") for x in (policy, policy.score))
    assert (ours - dropped).abs().max() < CLOSE[DOUBLE]
    assert (read_by(policy, tokens, 10, prompt=30) - read_by(policy.score, tokens, 10, prompt=30)).abs().max() > 1e-3


@dataclass(frozen=True)
class Noted(CaM):
    """Also note what the merge was given, and what it returned."""

    notes: ClassVar[list[tuple[Tensor, Tensor, Tensor]]] = []  # attention received, values, merged values

    def merge(self, view: CacheView, evicted: Evicted) -> Merged:
        received, values = view.state(RecentAttention(self.spread)).sum(-1), view.values.clone()
        merged = super().merge(view, evicted)
        if not values.is_meta:  # a trial of shapes
            self.notes.append((received, values, merged.values))
        return merged


@pytest.mark.parametrize("spread", [3, 8])
def test_cam_of_kvcache_factory_passes_the_values_of_a_prompt_on(spread):
    Noted.notes.clear()
    policy, tokens = Noted(SnapKV(window=3, kernel=1), spread, "kvcache_factory"), tokens_of(40)
    read_by(policy, tokens, 10, prompt=30, evict="prompt")
    assert len(Noted.notes) == 2, "once in each layer"
    for layer, (received, unmerged, merged) in enumerate(Noted.notes):
        given = 0
        for stream, head in itertools.product(range(len(tokens)), range(2)):
            mass, values = received[stream, head].tolist(), [*unmerged[stream, head]]
            for i in range(3, 30 - spread):  # the first tenth gives nothing
                probability = mass[i] / max(*mass[:3], *mass[i : i + spread])
                if uniform_number(layer, head, i, SEED) < probability:
                    values[i + 1 : i + 1 + spread] = [v + values[i] / spread for v in values[i + 1 : i + 1 + spread]]
                    given += 1
            assert (merged[stream, head, :30] - torch.stack(values)[:30]).abs().max() < CLOSE[DOUBLE]
        assert given, "nothing was merged"


@pytest.mark.parametrize(("policy", "merge"), RULES[-2:], ids=lambda x: x.variant)
def test_d2o_divides_a_prompt_between_layers_and_merges_it(policy, merge):
    tokens = tokens_of(40)
    read = CachedDecoder(model_of("llama", DOUBLE), CacheConfig(policy, CAPACITY, positions="stream", seed=SEED))
    read.read_prompt(tokens[:, :30], 30, once=True)
    budgets = {layer: len(heads[0][0]) for layer, heads in enumerate(read.kept())}
    assert sum(budgets.values()) == 2 * CAPACITY
    assert budgets == dict(enumerate(layer_budgets(tokens[:, :30])))
    ours = read_by(policy, tokens, 10, prompt=30)
    assert (ours - by_lists(policy, merge, tokens, prompt=30, budgets=budgets)).abs().max() < CLOSE[DOUBLE]


def layer_budgets(tokens: Tensor) -> list[int]:
    """Tokens of the two layers: shares of softmax(-variance), each variance scaled to [0, 1] over heads and averaged."""
    lists = ListBackend(model_of("llama", DOUBLE), oldest, 1000)
    lists.run(tokens)
    shares = []
    for layer in range(2):
        spread = [statistics.variance([t.mass for t in lists.held[layer, head]]) for head in range(2)]
        scaled = [(x - min(spread)) / (max(spread) - min(spread) + 1e-6) for x in spread]
        shares.append(math.exp(-sum(scaled) / 2))
    first = round(2 * CAPACITY * shares[0] / sum(shares))
    return [first, 2 * CAPACITY - first]


@pytest.mark.parametrize("evict", [1, 5, "prompt"])
def test_a_merge_of_weight_0_is_eviction(evict):
    tokens, prompt = tokens_of(48, 2), 30 if evict == "prompt" else 0
    for size in (1, 16):
        merged = read_by(Nothing(HEAVY), tokens, size, prompt=prompt, evict=evict)
        assert torch.equal(merged, read_by(HEAVY, tokens, size, prompt=prompt, evict=evict, method=TOKEN_BY_TOKEN))


@pytest.mark.parametrize("policy", [r[0] for r in RULES], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("evict", [1, 4])
def test_streams_and_blocks_change_nothing(policy, evict):
    tokens = tokens_of(44, 3)
    alone = torch.cat([read_by(policy, tokens[i : i + 1], 1, evict=evict) for i in range(3)])
    for method in (TOKEN_BY_TOKEN, FASTEST):
        assert (read_by(policy, tokens, 22, evict=evict, method=method) - alone).abs().max() < CLOSE[DOUBLE]


def test_heads_that_hold_different_numbers_merge_in_every_method():
    """A prompt gives each layer of each stream a number of its own, so that K and V are in pages, which tokens move between."""
    tokens = tokens_of(60, 4)
    policy = ValueMerging(Cake(window=4))
    losses = [read_by(policy, tokens, 1, prompt=30, method=method, dtype=torch.float32) for method in (TOKEN_BY_TOKEN, FASTEST)]
    assert (losses[0] - losses[1]).abs().max() < CLOSE[torch.float32]
    dropped = read_by(policy.score, tokens, 1, prompt=30, dtype=torch.float32)
    assert (losses[0] - dropped).abs().max() > 1e-3


class Branching(Nothing):
    def merge(self, view, evicted):
        return Merged(view.values if view.step.max() > 3 else 2 * view.values)


def test_blocks_of_a_merge_that_can_not_be_compiled_are_read_by_compiled_steps():
    read = CachedDecoder(model_of("llama"), CacheConfig(Branching(HEAVY), CAPACITY), method=FASTEST)
    assert read.walks[0].plain_because == "a branch that depends on a tensor can't be compiled"
    before = RAN["compiled steps"]
    in_blocks(read, tokens_of(40), 40)
    assert RAN["compiled steps"] > before


def test_every_layer_of_d2o_has_room_for_its_sinks_and_window(monkeypatch):
    """Of 64 tokens each, a layer whose attention is much less even than that of seven others would get 26."""
    evenness = iter([-1.0] + 7 * [0.0])
    monkeypatch.setattr("kvbench.policies.d2o._evenness", lambda view: torch.tensor([next(evenness)]))
    view = SimpleNamespace(step=torch.tensor([[[999]]]), rank=torch.zeros(1, 2, 1000))
    budgets = D2O().bind(64).prompt_budgets([view] * 8, 64)
    assert budgets[0, 0].tolist() == [4 + 32 + 1] * 2
    assert budgets.sum() == 8 * 2 * 64


@pytest.mark.parametrize(
    ("policy", "options", "reason"),
    [
        (D2O(), {"positions": "cache"}, "D2O merges keys, which belong to one position: positions must be stream"),
        (ChunkKV(CaM()), {}, "CaM merges evicted tokens, so no policy can be around it: it must be around ChunkKV"),
        (ChunkKV(AdaKV(CaM())), {}, "CaM merges evicted tokens, so no policy can be around it: it must be around ChunkKV"),
        (ValueMerging(AdaKV(HEAVY)), {}, "ValueMerging can't merge where heads compete for slots: it needs evict: prompt"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_can_not_be_merged_is_refused_in_one_line(policy, options, reason):
    with pytest.raises(ValueError, match="^" + reason.replace("(", r"\(") + "$"):
        CacheConfig(policy, 16, **options)


@dataclass(frozen=True)
class OneHead(Merging):
    """Return the values of the first head alone."""

    def merge(self, view: CacheView, evicted: Evicted) -> Merged:
        return Merged(view.values[:, :1])


def test_a_merge_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"^merge returned values of shape \[2, 1, 13, 16\], expected \[2, 2, 13, 16\]$"):
        read_by(OneHead(HEAVY), tokens_of(20), 1)


@needs_compiler
@pytest.mark.parametrize("window", [8, 16])
def test_what_a_sliding_window_hides_is_dropped_not_merged(window):
    """With 12 slots, a window of 8 hides every token that leaves; one of 16 hides some."""
    model, tokens = adopt(tiny_model("mistral", vocab_size=96, sliding_window=window)), tokens_of(40)
    check(ValueMerging(HEAVY), CAPACITY, [20, 9, 5, 1, 1, 6], 2, model=model, offers=["compiled walk"])
    outputs = [in_blocks(CachedDecoder(model, CacheConfig(p, CAPACITY)), tokens, 8) for p in (HEAVY, ValueMerging(HEAVY))]
    assert torch.equal(*outputs) == (window == 8)
