"""`bench policy check`: the interface's rules, each tried on a policy, and what is wrong in words."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import Tensor

from harness import registry
from harness.engine.decoder import CacheConfig
from harness.engine.families import tiny_model
from harness.engine.loop import CachedDecoder, decoder
from harness.engine.model import Model, adopt
from harness.engine.recompute import RecomputeDecoder
from harness.errors import UserError
from harness.suite import entry_schema
from policies import CacheView, Policy, Statistic
from policies.dense import Dense

_CAPACITY, _STREAMS, _HEADS, _GROUP, _DIM = 16, 2, 3, 2, 8


@dataclass(frozen=True)
class Finding:
    """One rule, and what is wrong with the policy by it; empty if nothing."""

    rule: str
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether the policy keeps the rule."""
        return not self.problem


def run_checks(name: str, settings: Sequence[str] = ()) -> list[Finding]:
    """Every rule tried on the policy of a name.

    Raises:
        UserError: no such policy, or parameters that it does not have.
    """
    kind = registry.policy_class(name)
    policy = _made(name, kind, settings)
    rules: list[tuple[str, Callable[[Policy], str]]] = [
        ("importance is [B, H, S] float32, one number a slot", _shape),
        ("importance is never NaN, nor +inf for all of a full cache", _finite),
        ("the same view gives the same importance", _deterministic),
        ("views, states and attention are not changed", _pure),
        ("the declared scope holds", _scope),
        ("no more than `capacity` tokens are kept", _capacity),
        ("nothing evicted: equal to dense", _equal_to_dense),
        ("the band it names, if any, is what it keeps", _band),
    ]
    findings = []
    for rule, test in rules:
        try:
            findings.append(Finding(rule, test(policy)))
        except Exception as error:  # a policy of the user's may do anything
            findings.append(Finding(rule, f"it raised {type(error).__name__}: {error}"))
    return findings


def _made(name: str, kind: type[Policy], settings: Sequence[str]) -> Policy:
    """The policy with its parameters."""
    given = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        given[key] = yaml.safe_load(text)
    unknown = set(given) - set(entry_schema(name, kind).model_fields)
    if unknown:
        key = sorted(unknown)[0]
        raise UserError(f"{name} has no parameter '{key}'{registry.did_you_mean(key, entry_schema(name, kind).model_fields)}")
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: {error}") from error


def _bound(policy: Policy) -> Policy:
    return policy.bind(_CAPACITY) if policy.evicts else policy


def _view(policy: Policy, steps: int = 40, seed: int = 0) -> CacheView:
    """A full cache as the engine shows it: a random set of kept tokens in random slots, states grown step by step."""
    draw = torch.Generator().manual_seed(seed)
    slots = _CAPACITY + 1
    shape = (_STREAMS, _HEADS, slots)
    position = torch.stack([torch.randperm(steps, generator=draw)[:slots] for _ in range(_STREAMS * _HEADS)]).view(shape)
    newest = position.amax(-1, keepdim=True)
    position = position.masked_fill(position == newest, steps)  # the newest token is the one in hand
    rank = position.argsort(-1).argsort(-1)
    states: dict[type[Statistic], Tensor] = {s: torch.full((*shape, *s.shape), s.initial) for s in policy.statistics}
    view = CacheView(
        rank, position, torch.full((_STREAMS, 1, 1), steps), torch.randn(*shape, _DIM, generator=draw),
        torch.randn(*shape, _DIM, generator=draw), states, torch.tensor([[[1]], [[3]]]), 4, 7,
    )  # fmt: skip
    for _ in range(3):
        attention = torch.rand(_STREAMS, _HEADS, _GROUP, slots, generator=draw).softmax(-1)
        view.states = {s: s.update(x, attention, view) for s, x in view.states.items()}
    return view


def _shape(policy: Policy) -> str:
    view = _view(policy)
    out = _bound(policy).importance(view)
    if not isinstance(out, Tensor) or out.shape != view.rank.shape or out.dtype != torch.float32:
        got = f"{list(out.shape)} {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        return f"it returned {got}, expected {list(view.rank.shape)} torch.float32"
    for statistic, state in view.states.items():
        if state.shape[:3] != view.rank.shape or state.shape[3:] != statistic.shape:
            return f"the state of {statistic.__name__} became {list(state.shape)}"
    return ""


def _finite(policy: Policy) -> str:
    for seed in range(5):
        out = _bound(policy).importance(_view(policy, seed=seed))
        if out.isnan().any():
            return "there is a NaN"
        if policy.evicts and (out == torch.inf).all(-1).any():
            return "every slot of a full cache is +inf, so nothing may be evicted; protect fewer tokens than capacity + 1"
    return ""


def _deterministic(policy: Policy) -> str:
    view = _view(policy)
    first, second = _bound(policy).importance(view), _bound(policy).importance(view)
    return "" if torch.equal(first, second) else "two calls differ; use view.uniform() for randomness"


def _pure(policy: Policy) -> str:
    view = _view(policy)
    before = copy.deepcopy(view)
    attention = torch.rand(_STREAMS, _HEADS, _GROUP, _CAPACITY + 1).softmax(-1)
    attention_before = attention.clone()
    _bound(policy).importance(view)
    for statistic, state in view.states.items():
        statistic.update(state, attention, view)
    for name in ("rank", "position", "step", "keys", "values", "layer"):
        if not torch.equal(getattr(view, name), getattr(before, name)):
            return f"view.{name} was changed in place"
    if any(not torch.equal(x, before.states[s]) for s, x in view.states.items()):
        return "a state was changed in place"
    return "" if torch.equal(attention, attention_before) else "attention was changed in place"


def _scope(policy: Policy) -> str:
    """Slots permuted, and what lies outside the scope changed."""
    view, bound = _view(policy), _bound(policy)
    plain = bound.importance(view)
    order = torch.randperm(_CAPACITY + 1, generator=torch.Generator().manual_seed(1))
    if not _alike(bound.importance(_mapped(view, lambda x: x[:, :, order])), plain[:, :, order]):
        return "it depends on the order of slots, which means nothing"
    other = _view(policy, seed=1)
    if not _alike(bound.importance(_mixed(view, other, (slice(0, 1),)))[0], plain[0]):
        return "one stream's importance depends on another stream"
    if policy.scope != "layer":
        mixed = _mixed(view, other, (slice(None), slice(0, 1)))
        if not _alike(bound.importance(mixed)[:, 0], plain[:, 0]):
            return f"scope is '{policy.scope}', but a head's importance depends on other heads; declare scope 'layer'"
    if policy.scope == "slot":
        mixed = _mixed(view, other, (slice(None), slice(None), slice(0, 1)))
        if not _alike(bound.importance(mixed)[:, :, 0], plain[:, :, 0]):
            return "scope is 'slot', but a slot's importance depends on other slots; declare scope 'head'"
    return ""


def _alike(a: Tensor, b: Tensor) -> bool:
    """Equal but for the rounding of sums in another order."""
    return torch.allclose(a, b, atol=1e-5, equal_nan=True)


def _mapped(view: CacheView, change: Callable[[Tensor], Tensor]) -> CacheView:
    """The view with every tensor of slots changed."""
    new = copy.copy(view)
    for name in ("rank", "position", "keys", "values"):
        setattr(new, name, change(getattr(view, name)))
    new.states = {s: change(x) for s, x in view.states.items()}
    return new


def _mixed(view: CacheView, other: CacheView, keep: tuple[slice, ...]) -> CacheView:
    """`other`, with the part `keep` of every tensor taken from `view`."""
    sources: Iterator[Tensor] = iter([view.rank, view.position, view.keys, view.values, *view.states.values()])

    def change(x: Tensor) -> Tensor:
        out, source = x.clone(), next(sources)
        out[keep] = source[keep]
        return out

    return _mapped(other, change)


def _tiny() -> Model:
    return adopt(tiny_model("llama", vocab_size=64))


def _tokens(length: int) -> Tensor:
    return torch.randint(64, (2, length), generator=torch.Generator().manual_seed(0))


def _capacity(policy: Policy) -> str:
    if not policy.evicts:
        return ""
    read: Any = decoder(_tiny(), CacheConfig(policy, _CAPACITY), 2)
    for block in _tokens(3 * _CAPACITY).split(5, 1):
        read(block)
        if isinstance(read, RecomputeDecoder):
            counts = [len(text) for text in read._history]
        else:
            assert isinstance(read, CachedDecoder)
            counts = [len(p) for layer in read.kept() for stream in layer for p in stream]
        if max(counts) > _CAPACITY:
            return f"{max(counts)} tokens are held at capacity {_CAPACITY}"
    return "" if min(counts) == _CAPACITY else f"only {min(counts)} tokens are held at capacity {_CAPACITY}"


def _equal_to_dense(policy: Policy) -> str:
    model, tokens = _tiny(), _tokens(_CAPACITY)
    capacity = _CAPACITY if policy.evicts else None
    ours = decoder(model, CacheConfig(policy, capacity), 2)(tokens)
    difference = (ours - decoder(model, CacheConfig(Dense()), 2)(tokens)).abs().amax().item()
    return "" if difference <= 1e-4 else f"logits differ from dense by {difference:.1g} before anything is evicted"


def _band(policy: Policy) -> str:
    """What the policy says it keeps, against what its importance makes of a stream."""
    if not policy.evicts or not policy.caches:
        return ""
    band = policy.bind(_CAPACITY).band(_CAPACITY)
    if band is None:
        return ""
    sinks, window = band
    if sinks < 0 or window < 1 or sinks + window != _CAPACITY:
        return f"sinks {sinks} + window {window} are not the capacity {_CAPACITY}"
    read = CachedDecoder(_tiny(), CacheConfig(policy, _CAPACITY))
    for step in range(3 * _CAPACITY):
        read(torch.tensor([[step % 7]]))
        expected = [p for p in range(step + 1) if p < sinks or p > step - window]
        kept = read.kept()[0][0][0]
        if kept != expected:
            return f"after step {step} it keeps {kept}, and its band says {expected}"
    return ""
