"""Policies of scope `slot`, whatever their statistics: the compiled walk and the step kernels give what the plain walk gives."""

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import pytest
import torch
from factories import MODES, needs_compiler, needs_triton, slots_for
from helpers import DEVICE, H2O, CacheConfig, CachedDecoder, Model, Random, SinkWindow, adopt, model_of, nll, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from traced_policies import PLAIN, WRITTEN

from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.method import KERNELS, TOKEN_BY_TOKEN
from kvbench.harness.engine.plan import Block
from kvbench.harness.engine.rotary import Rotation
from kvbench.harness.engine.slots import LayerShape, Slots
from kvbench.harness.engine.walk import Walk
from kvbench.harness.kernels import choose, cpu, cuda
from kvbench.harness.kernels.expressions import NotTraceableError
from kvbench.harness.kernels.tracing import traced
from kvbench.policies import AttentionSum, Policy, Statistic

LIMIT = 9  # tokens; the largest distance of mode `clamped`
POLICIES = [*PLAIN, *WRITTEN, H2O(), Random(), SinkWindow(1)]


@cache
def one_layer() -> Model:
    """Every layer takes Triton's interpreter seconds."""
    return adopt(tiny_model("llama", vocab_size=96, num_hidden_layers=1).to(DEVICE))


def by_rank(slots: Slots, state: Tensor) -> Tensor:
    """A statistic of the tokens held, row after row, the oldest first; one per head is as it is."""
    rank = slots.tensors.rank
    if state.shape[1] != rank.shape[1]:
        return state
    ordered, order = rank.sort(-1)
    return state.take_along_dim(order.view(*order.shape, *[1] * (state.dim() - 2)), 1)[ordered < slots.empty_rank]


def check(
    policy: Policy,
    capacity: int,
    sizes: list[int],
    streams: int = 1,
    mode: str = "cache",
    every: int = 1,
    prompt: int = 0,
    family: str = "llama",
    module: ModuleType = cpu,
    model: Model | None = None,
    offers: Sequence[str] = ("compiled walk", "step kernel"),
) -> None:
    """A prompt, blocks and single tokens by kernels are those of the plain walk: the tokens kept, NLL and statistics.

    No token comes twice in a stream: in the first layer, two beyond the limit of mode `clamped` would tie but for rounding.
    """
    generator = torch.Generator().manual_seed(1)
    model = model or (one_layer() if module is cuda else model_of(family))
    tokens = torch.stack([torch.randperm(96, generator=generator) for _ in range(streams)])[:, : prompt + sum(sizes)].to(DEVICE)
    config = CacheConfig(policy, capacity, mode, LIMIT, seed=2**40 + 5, evict=every)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(choose._MODULES, DEVICE.type, module)
        fast, plain = (CachedDecoder(model, config, streams, method) for method in (KERNELS, TOKEN_BY_TOKEN))
        assert all(set(offers) <= set(w.offers) for w in fast.walks), fast.walks[0].plain_because
        losses = []
        for read in (fast, plain):
            first = [read.read_prompt(tokens[:, :prompt], 7)[:, None]] if prompt else []
            logits = torch.cat([*first, *(read(x) for x in tokens[:, prompt:].split(sizes, 1))], 1)
            losses.append(nll(logits, tokens[:, max(0, prompt - 1) :]))
    torch.testing.assert_close(*losses, atol=1e-4, rtol=0)
    assert fast.kept() == plain.kept()
    for ours, theirs in zip(fast.walks, plain.walks, strict=True):
        for statistic, state in ours.slots.tensors.states.items():
            expected = by_rank(theirs.slots, theirs.slots.tensors.states[statistic])
            torch.testing.assert_close(by_rank(ours.slots, state), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow("many drawn cases")
@needs_compiler
@settings(max_examples=50)
@given(
    policy=st.sampled_from(POLICIES),
    capacity=st.sampled_from([4, 7, 12, 20]),  # few, because a compiler builds a walk for each
    every=st.sampled_from([1, 1, 2, 5, 16]),
    sizes=st.lists(st.sampled_from([1, 1, 2, 7, 15, 18]), min_size=1, max_size=4),
    streams=st.integers(1, 3),
    mode=st.sampled_from(MODES),
    prompt=st.sampled_from([0, 0, 5, 21]),
    family=st.sampled_from(["llama", "gpt_neox"]),
)
def test_walks_and_steps_in_c_are_the_plain_ones(policy, capacity, every, sizes, streams, mode, prompt, family):
    """With statistics of any kind, first values, a prompt, and evictions of several tokens at once."""
    policy = H2O(1) if isinstance(policy, H2O) else SinkWindow(1, capacity - 1) if isinstance(policy, SinkWindow) else policy
    check(policy, capacity, [*sizes, 1], streams, mode, every, prompt, family)


ROTATION = Rotation(100.0 ** (-torch.arange(4, dtype=torch.float64) / 4), torch.arange(8), 0)


@needs_compiler
@pytest.mark.parametrize("number", range(len(POLICIES)), ids=lambda n: type(POLICIES[n]).__name__)
def test_some_heads_of_a_layer_in_c_are_the_plain_ones(number):
    """The third layer of five, of which heads 3 and 5 live here, with two streams whose prompts have different lengths."""
    policy, mode, group, every = POLICIES[number], MODES[number % len(MODES)], 1 + number % 3, (1, 3)[number % 2]
    heads, capacity, sizes = (3, 5)[: 2 - number % 5 // 4], 7, [5, 13, 1, 1, 2, 9, 1]
    shape = LayerShape(len(heads), group, 8, 8, ROTATION, None)
    config, walks = CacheConfig(policy, capacity, mode, seed=7, evict=every), []
    for method in (KERNELS, TOKEN_BY_TOKEN):
        slots = slots_for(shape, config, [2], 5, streams=2, heads=heads)
        slots.prompt = torch.tensor([4, 9])
        walks.append(Walk(slots, mode, LIMIT, method))
    assert "compiled walk" in walks[0].offers
    assert "step kernel" in walks[0].offers
    generator, seen = torch.Generator().manual_seed(1), 0
    for size in sizes:
        steps = torch.arange(seen, seen + size).expand(2, -1)
        counts = (len(heads) * group, len(heads), len(heads))
        qkv = [2 * torch.randn(2, count, size, 8, generator=generator) for count in counts]
        block, found = Block(steps, None, seen, torch.randint(96, (2, size), generator=generator)), []
        for walk in walks:
            plan = walk.begin(block)
            found.append(walk.attend(plan, 2, *qkv, Terms(8**-0.5)))
            walk.end(plan, block)
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
        seen += size
    for state in ("position", *walks[0].slots.tensors.states):
        ours, theirs = (by_rank(w.slots, w.slots.tensors.states.get(state, w.slots.tensors.position)) for w in walks)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.slow("takes seconds")
@needs_triton
@pytest.mark.parametrize(("policy", "mode"), [(policy, MODES[i % 3]) for i, policy in enumerate(POLICIES)], ids=str)
def test_walks_and_steps_in_triton_are_the_plain_ones(policy, mode):
    check(policy, 5, [3, 3, 1, 1], mode=mode, module=cuda)


@pytest.mark.slow("takes seconds")
@needs_triton
@pytest.mark.parametrize("family", ["gpt_neox", "deepseek_v3", "smollm3", "mistral"])
def test_odd_layers_in_triton(family):
    """Covers partial RoPE, K and V of different dims, no RoPE, a sliding window, one query head per KV head."""
    window = {"sliding_window": 6} if family == "mistral" else {}
    check(H2O(), 7, [5, 4, 1, 1], model=adopt(tiny_model(family, vocab_size=96, **window).to(DEVICE)), module=cuda)


@needs_compiler
@pytest.mark.parametrize("every", [1, 3])
def test_evicting_the_tokens_that_are_worth_infinitely_much_takes_the_oldest(every):
    everything = made(lambda view: torch.full_like(view.position.float(), torch.inf))
    check(everything, 4, [9, 1, 1, 1, 1, 1, 4], every=every)


def made(importance, *statistics: Statistic) -> Policy:
    """A policy of scope slot."""
    return type("Made", (Policy,), {"statistics": statistics, "importance": lambda self, view: importance(view)})()


def statistic(name: str, **members) -> Statistic:
    return type(name, (Statistic,), members)()


MANY = statistic("Many", shape=lambda self, sizes: (8,))
SQUARED = statistic("Squared", update=lambda self, state, attention, view: state + attention.weights.square().sum(2))


REFUSED = {
    "PerHead, a statistic per head,": made(lambda view: view.rank.float(), statistic("PerHead", per="head")),
    "Logits, which sees logits,": made(lambda view: view.rank.float(), statistic("Logits", sees=("logits",))),
    "statistics of 9 numbers per slot, more than 8,": made(lambda view: view.rank.float(), AttentionSum(), MANY),
    "'square' of attention": made(lambda view: view.rank.float(), SQUARED),
    "rotated keys": made(lambda view: view.rotated_keys.norm(dim=-1)),
    "which compares slots": made(lambda view: view.by_rank(view.age.float())),
    "an operation that compares slots, heads or streams": made(lambda view: view.rank.float() - view.rank.float().mean(-1)),
    "a branch that depends on a tensor": made(lambda view: view.age.float() if view.layer > 1 else -view.age.float()),
    "'seed' of a view": made(lambda view: view.rank * view.seed),
    "several numbers per slot where one is expected": made(lambda view: view.state(MANY), MANY),
    "tensors with and without a last axis in one operation": made(lambda view: view.state(MANY) * view.rank, MANY),
    "a power of 3": made(lambda view: view.rank**3),
    "an expression of more than 1000 operations": made(lambda view: doubled(view.rank, 10)),
}


def doubled(x, times: int):
    return doubled(x + x, times - 1) if times else x


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_elementwise_rule_is_refused_and_says_why(why):
    with pytest.raises(NotTraceableError) as found:
        traced(REFUSED[why])
    assert why in str(found.value)


@pytest.mark.slow("takes seconds")
@needs_compiler
@needs_triton
@pytest.mark.parametrize(
    "rule",
    [
        lambda view: view.age // 3 * 10 + view.rank % 4 - (view.rank - 9) // 4 - (view.rank - 9) % 4,
        lambda view: view.rank.float() * (view.age > 3) + (view.age == 2).long() * (view.position != 7),
        lambda view: (1 - view.rank) * 0.5 + 7 / (view.age + 1) + 2**0.5 - (-view.rank).abs(),
        lambda view: view.position.clamp(min=0).pow(0.5) + torch.sqrt(view.age) - torch.exp(-view.age) * torch.log(view.rank + 2),
        lambda view: torch.where(view.rank > 2, torch.where(~(view.age < 2), 3, view.rank), 1.5),
        lambda view: (
            torch.full_like(view.rank, 3)
            + torch.zeros_like(view.age, dtype=torch.float32)
            - torch.ones_like(view.age) * view.rank
        ),
        lambda view: torch.minimum(view.rank, view.age * 0.7) + torch.maximum(view.rank, view.age).clamp(2, 6.5),
        lambda view: (torch.tensor([0.5, 2.0, -1.0]) * view.rank[..., None]).amax(-1) + (1 + view.age)[..., None].sum(-1),
        lambda view: (view.rank & 3) | (view.age ^ 1) + (view.valid & (view.rank > 3)).float().long(),
        lambda view: (torch.arange(4) == (view.step % 4)[..., None]).sum(-1) + view.rank / view.num_layers,
    ],
)
def test_dtypes_and_operators_mean_what_they_mean_in_pytorch(rule):
    """A statistic takes their values, in C and in Triton."""

    class Value(Statistic):
        def update(self, state, attention, view):
            return rule(view).float()

    policy = made(lambda view: view.state(policy.statistics[0]), Value())
    for module, sizes in ((cpu, [4, 9, 1, 1]), (cuda, [4, 4, 1])):
        check(policy, 5, sizes, module=module)
