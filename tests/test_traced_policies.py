"""Policies of scope `slot`, whatever their statistics: the compiled walk and the step kernels give what the plain walk gives."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from conftest import DEVICE, model_of, nll
from factories import MODES, needs_compiler, needs_triton, slots_for
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from traced_policies import PLAIN, WRITTEN

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import KERNELS, TOKEN_BY_TOKEN
from kvbench.harness.engine.rotary import Rotation, rotate
from kvbench.harness.engine.slot_rows import Rows, Windows
from kvbench.harness.engine.slots import LayerShape, Slots
from kvbench.harness.kernels import cpu, cuda
from kvbench.harness.kernels.expressions import NotTraceableError
from kvbench.harness.kernels.tracing import traced
from kvbench.policies import Attention, AttentionSum, Policy, Statistic, Written
from kvbench.policies.h2o import H2O
from kvbench.policies.random import Random
from kvbench.policies.sink_window import SinkWindow

LIMIT = 9  # tokens; the largest distance of mode `clamped`


def check_decoders(
    policy: Policy, capacity: int, sizes: list[int], streams: int, mode: str, family: str = "llama", every: int = 1
) -> None:
    """Blocks and single tokens by kernels are those of the plain walk: the same tokens kept, the same NLL.

    No token comes twice in a stream: in the first layer, two beyond the limit of mode `clamped` would tie but for rounding.
    """
    generator = torch.Generator().manual_seed(1)
    model, tokens = model_of(family), torch.stack([torch.randperm(96, generator=generator) for _ in range(streams)])
    tokens = tokens[:, : sum(sizes)].to(DEVICE)
    config = CacheConfig(policy, capacity, mode, LIMIT, seed=2**40 + 5, evict=every)
    fast, plain = CachedDecoder(model, config, streams, KERNELS), CachedDecoder(model, config, streams, TOKEN_BY_TOKEN)
    assert all(w.is_compiled and w.steps_by_kernel for w in fast.walks)
    ours, theirs = (torch.cat([read(x) for x in tokens.split(sizes, 1)], 1) for read in (fast, plain))
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=1e-4, rtol=0)
    assert fast.kept() == plain.kept()


@pytest.mark.slow("many drawn cases")
@needs_compiler
@settings(max_examples=40)
@given(
    policy=st.sampled_from([*PLAIN, *WRITTEN, H2O(), Random()]),
    capacity=st.sampled_from([4, 7, 12, 20]),  # few, because a compiler builds a walk for each
    every=st.sampled_from([1, 1, 2, 5, 16]),
    sizes=st.lists(st.sampled_from([1, 2, 7, 15, 22]), min_size=1, max_size=4),
    streams=st.integers(1, 3),
    mode=st.sampled_from(MODES),
    family=st.sampled_from(["llama", "gpt_neox"]),
)
def test_several_statistics_are_compiled(policy, capacity, every, sizes, streams, mode, family):
    check_decoders(policy, capacity, [*sizes, 1], streams, mode, family, every)


class Layer(NamedTuple):
    """One layer of a model with two streams, and the tokens that it reads."""

    policy: Policy
    capacity: int
    every: int
    mode: str
    tokens: int
    heads: int = 2
    group: int = 2
    dim: int = 8
    seed: int = 0

    def rotation(self) -> Rotation:
        frequencies = 100.0 ** (-torch.arange(self.dim // 2, dtype=torch.float64) / (self.dim // 2))
        return Rotation(frequencies, torch.arange(self.dim, device=DEVICE), 0)

    def slots(self) -> Slots:
        """Empty slots, of the third layer of five. The policy sees heads 3 and 5, and prompts of 4 and 9 tokens."""
        shape = LayerShape(self.heads, self.group, self.dim, self.dim, self.rotation(), None)
        config = CacheConfig(self.policy, self.capacity, self.mode, seed=7, evict=self.every)
        slots = slots_for(shape, config, [2], 5, streams=2, heads=(3, 5)[: self.heads])
        slots.prompt = torch.tensor([4, 9], device=DEVICE)
        return slots

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries [B, H, G, T, D], keys and values [B, H, T, D], token ids [B, T]."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = [(2, self.heads, self.group), (2, self.heads), (2, self.heads)]
        qkv = [2 * torch.randn(*size, self.tokens, self.dim, generator=generator).to(DEVICE) for size in sizes]
        return *qkv, torch.randint(96, (2, self.tokens), generator=generator).to(DEVICE)

    def written(self, keys: Tensor, values: Tensor, ids: Tensor, first: int = 0) -> dict[Statistic, Tensor]:
        """First values of the statistics that compute them."""
        position = torch.arange(first, first + keys.shape[2], device=DEVICE)
        token = Written(keys, values, position, ids[:, None], lambda x, _: x)
        made = {s: s.written(token) for s in self.policy.statistics}
        return {s: x for s, x in made.items() if x is not None}

    def angle(self, rank: Tensor, position: Tensor, step: int) -> Tensor:
        """Where RoPE puts tokens."""
        if self.mode == "clamped":
            return LIMIT - (step - position).clamp(0, LIMIT)
        return rank if self.mode == "cache" else position

    def reference(self) -> tuple[Tensor, list[list[int]], dict[Statistic, Tensor]]:
        """Token by token over lists of held tokens, in plain PyTorch: outputs [B, H, G, T, D], what is kept, and the states."""
        query, keys, values, ids = self.inputs()
        written, rotation, policy = self.written(keys, values, ids), self.rotation(), self.policy.bind(self.capacity)
        slots = self.slots()
        view = Rows(slots, slots.num_slots).view
        position = torch.zeros(2, self.heads, 0, dtype=torch.int64, device=DEVICE)
        state = {s: torch.zeros(2, self.heads, 0, *s.shape(slots.shape.sizes), device=DEVICE) for s in policy.statistics}
        out = torch.zeros_like(query)
        for t in range(self.tokens):
            position = torch.cat([position, torch.full((2, self.heads, 1), t, device=DEVICE)], -1)
            for s, x in state.items():
                constant = torch.full((2, self.heads, 1, *x.shape[3:]), s.initial, device=DEVICE)
                state[s] = torch.cat([x, written[s][:, :, t : t + 1] if s in written else constant], 2)
            rank = torch.arange(position.shape[-1], device=DEVICE).expand_as(position)
            at = position[..., None]
            held, worth = keys.take_along_dim(at, 2), values.take_along_dim(at, 2)
            held = rotate(held, rotation.factors(self.angle(rank, position, t), torch.float32, 200))
            here = self.angle(rank[..., -1:], position[..., -1:], t)
            asks = rotate(query[..., t, :], rotation.factors(here, torch.float32, 200))
            weights = (asks @ held.mT * self.dim**-0.5).softmax(-1)
            out[..., t, :] = weights @ worth
            view.rank, view.position, view.step, view.states = rank, position, torch.full((2, 1, 1), t, device=DEVICE), state
            new = {s: s.update(x, Attention(weights=weights), view) if s.sees else x for s, x in state.items()}
            state.update(new)
            if rank.shape[-1] < self.capacity + self.every:
                continue
            kept = policy.importance(view).sort(dim=-1, stable=True).indices[..., self.every :].sort(-1).values
            position = position.take_along_dim(kept, -1)
            for s, x in state.items():
                state[s] = x.take_along_dim(kept.view(*kept.shape, *[1] * (x.dim() - 3)), 2)
        return out, position.flatten(0, 1).tolist(), state

    def walked(self, module, sizes: list[int]) -> tuple[Tensor, Slots]:
        """The same by a module's kernels, in blocks; a block of one token by those of a step."""
        slots, (query, keys, values, ids), seen, out = self.slots(), self.inputs(), 0, []
        step_kind, release_kind, walk_kind = module.KERNELS
        walk = walk_kind.from_slots(slots, self.mode, LIMIT, 200)
        step, release = step_kind.from_slots(slots, self.mode, LIMIT, 200), release_kind.from_slots(slots)
        ordered, windows = True, Windows(slots)
        for size in sizes:
            q, k, v, token_ids = (x[..., seen : seen + size, :] for x in (query, keys, values, ids[..., None]))
            written = self.written(k, v, token_ids[..., 0], seen)
            rows = windows(slots.num_slots, 2)
            if size > 1:
                given = q if walk.rotates else self.rotated(q, seen, slots)
                out.append(walk(slots, rows, 2, given, k, v, self.dim**-0.5, ordered, seen, written))
                ordered = walk.leaves_ordered
            else:
                out.append(self.stepped(step, release, slots, q, k, v, written, seen))
                ordered = False
            seen += size
        return torch.cat(out, -2), slots

    def rotated(self, query: Tensor, seen: int, slots: Slots) -> Tensor:
        """Queries as the CPU's walk takes them."""
        steps = torch.arange(seen, seen + query.shape[-2], device=DEVICE)
        ranks = torch.tensor([slots.cadence.held(int(t)) for t in steps], device=DEVICE)
        at = torch.full_like(steps, LIMIT) if self.mode == "clamped" else self.angle(ranks, steps, 0)
        return rotate(query, self.rotation().factors(at, torch.float32, 200)) * self.dim**-0.5

    def stepped(self, step, release, slots: Slots, q: Tensor, k: Tensor, v: Tensor, written, seen: int) -> Tensor:
        """One token by the kernels of a step. Its account is entered as `Rows.place` would."""
        rows, tensors = Rows(slots, slots.num_slots), slots.tensors
        held, size = slots.cadence.held(seen), len(rows.rank)
        rows.place(torch.full((size,), held, device=DEVICE), torch.full((size,), seen, device=DEVICE), rows.view.layer)
        for s, first in written.items():
            tensors.flat_states[s][tensors.free] = first.reshape(size, *first.shape[3:])
        sees = any(s.sees for s in tensors.states)
        mass = torch.zeros(size, self.group, slots.num_slots, device=DEVICE) if sees else None
        out = step(slots, rows, q.flatten(1, 2), k, v, self.dim**-0.5, mass)
        release(slots, rows, mass, torch.full((size,), seen, device=DEVICE), held + 1 == self.capacity + self.every)
        return out.unflatten(1, (self.heads, self.group))


def check_layer(layer: Layer, module, sizes: list[int]) -> None:
    """Outputs, positions kept and statistics are those of the plain reference."""
    layer = layer._replace(tokens=sum(sizes))
    expected, kept, state = layer.reference()
    out, slots = layer.walked(module, sizes)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)
    assert [positions for stream in slots.kept(2) for positions in stream] == kept
    order = slots.tensors.rank.argsort(-1)[:, : len(kept[0])]
    for s, x in state.items():
        ours = slots.tensors.states[s]
        ours = ours.take_along_dim(order.view(*order.shape, *[1] * (ours.dim() - 2)), 1)
        torch.testing.assert_close(ours, x.flatten(0, 1), atol=1e-4, rtol=1e-4)


POLICIES = [*PLAIN, *WRITTEN, H2O(), Random(), SinkWindow(1)]


@pytest.mark.slow("many drawn cases")
@needs_compiler
@settings(max_examples=60)
@given(
    policy=st.sampled_from(POLICIES),
    capacity=st.sampled_from([3, 4, 7, 14]),
    every=st.integers(1, 9),
    mode=st.sampled_from(MODES),
    sizes=st.lists(st.sampled_from([1, 1, 2, 5, 13]), min_size=1, max_size=8),
    heads=st.integers(1, 2),
    group=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_a_layer_in_c_is_the_plain_reference(policy, capacity, every, mode, sizes, heads, group, seed):
    """With statistics of any kind, first values, some of a layer's heads, a prompt, and evictions of several at once."""
    policy = H2O(1) if isinstance(policy, H2O) else SinkWindow(1, capacity - 1) if isinstance(policy, SinkWindow) else policy
    check_layer(Layer(policy, capacity, every, mode, 0, heads, group, seed=seed), cpu, [*sizes, 1])


@pytest.mark.slow("takes seconds")
@needs_triton
@pytest.mark.parametrize(("policy", "mode"), list(zip(POLICIES, MODES, strict=False)), ids=str)
def test_a_layer_in_triton_is_the_plain_reference(policy, mode):
    check_layer(Layer(policy, 5, 1, mode, 0), cuda, [3, 3, 1, 1])


@needs_compiler
@pytest.mark.parametrize("every", [1, 3])
def test_evicting_the_tokens_that_are_worth_infinitely_much_takes_the_oldest(every):
    class Everything(Policy):
        def importance(self, view):
            return torch.full_like(view.position.float(), torch.inf)

    check_layer(Layer(Everything(), 4, every, "cache", 0), cpu, [9, 1, 1, 1, 1, 1, 4])


def made(importance, *statistics: Statistic) -> Policy:
    """A policy of scope slot."""
    return type("Made", (Policy,), {"statistics": statistics, "importance": lambda self, view: importance(view)})()


class PerHead(Statistic):
    per = "head"


class Logits(Statistic):
    sees = ("logits",)


class ByQuery(Statistic):
    def shape(self, sizes):
        return (sizes.group,)


class Squared(Statistic):
    def update(self, state, attention, view):
        return state + attention.weights.square().sum(2)


class Many(Statistic):
    def shape(self, sizes):
        return (8,)


REFUSED = {
    "PerHead, a statistic per head,": made(lambda view: view.rank.float(), PerHead()),
    "Logits, which sees logits,": made(lambda view: view.rank.float(), Logits()),
    "ByQuery, whose shape is not a few numbers per slot,": made(lambda view: view.rank.float(), ByQuery()),
    "statistics of 9 numbers per slot, more than 8,": made(lambda view: view.rank.float(), AttentionSum(), Many()),
    "'square' of attention": made(lambda view: view.rank.float(), Squared()),
    "rotated keys": made(lambda view: view.rotated_keys.norm(dim=-1)),
    "which compares slots": made(lambda view: view.by_rank(view.age.float())),
    "an operation that compares slots, heads or streams": made(lambda view: view.rank.float() - view.rank.float().mean(-1)),
    "a branch that depends on a tensor": made(lambda view: view.age.float() if view.layer > 1 else -view.age.float()),
    "'seed' of a view": made(lambda view: view.rank * view.seed),
    "several numbers per slot where one is expected": made(lambda view: view.state(Many()), Many()),
    "tensors with and without a last axis in one operation": made(lambda view: view.state(Many()) * view.rank, Many()),
    "'(x + y)' of bool tensors": made(lambda view: ((view.rank > 1) + (view.age > 1)).float()),
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
        check_layer(Layer(policy, 5, 1, "stream", 0, heads=1, group=1), module, sizes)
