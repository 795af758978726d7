"""What a policy of scope `slot` computes for one slot, as a C expression that a compiled walk can take in.

`importance` and the statistics' `update` are run once on stand-ins for tensors that write down what is done to them. What they
do must be elementwise and of a few kinds; anything else raises, and the policy is walked plainly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from policies import CacheView, Policy, Statistic


class NotTraceableError(TypeError):
    """A policy does something that has no place in the compiled walk."""


def _text(value: Any) -> str:
    """An operand as C."""
    if isinstance(value, Traced):
        return value.source
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int):
        return f"{value}LL"
    if isinstance(value, float):
        return {"inf": "INFINITY", "-inf": "(-INFINITY)", "nan": "NAN"}.get(repr(value), f"((float){value!r})")
    raise NotTraceableError(f"an operand of type {type(value).__name__}")


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "and_": "&", "or_": "|", "xor": "^",
}  # fmt: skip


class Traced:
    """Stands in for a tensor of one number a slot."""

    def __init__(self, source: str) -> None:
        """With the source of that number."""
        self.source = source

    def masked_fill(self, mask: Traced, value: Any) -> Traced:
        """As the tensor's."""
        return Traced(f"({_text(mask)} ? {_text(value)} : {self.source})")

    def float(self) -> Traced:
        """As the tensor's."""
        return Traced(f"((float){self.source})")

    def long(self) -> Traced:
        """As the tensor's."""
        return Traced(f"((int64_t){self.source})")

    def abs(self) -> Traced:
        """As the tensor's."""
        return Traced(f"({self.source} < 0 ? -{self.source} : {self.source})")

    def clamp(self, min: Any = None, max: Any = None) -> Traced:  # noqa: A002
        """As the tensor's."""
        low = self if min is None else Traced(f"({self.source} < {_text(min)} ? {_text(min)} : {self.source})")
        return low if max is None else Traced(f"({low.source} > {_text(max)} ? {_text(max)} : {low.source})")

    def __neg__(self) -> Traced:
        return Traced(f"(-{self.source})")

    def __invert__(self) -> Traced:
        return Traced(f"(!{self.source})")

    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError(f"'{name}' of a tensor")

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch.where and torch.full_like; nothing else."""
        if function is torch.where and len(args) == 3:
            return Traced(f"({_text(args[0])} ? {_text(args[1])} : {_text(args[2])})")
        if function is torch.full_like:
            return Traced(f"((float){_text(args[1])})")
        raise NotTraceableError(getattr(function, "__name__", str(function)))


def _infix(name: str) -> Callable[[Traced, Any], Traced]:
    return lambda self, other: Traced(f"({self.source} {_INFIX[name]} {_text(other)})")


def _reflected(name: str) -> Callable[[Traced, Any], Traced]:
    return lambda self, other: Traced(f"({_text(other)} {_INFIX[name]} {self.source})")


for _name in _INFIX:
    assert hasattr(operator, _name)
    _plain = _name.rstrip("_")
    setattr(Traced, f"__{_plain}__", _infix(_name))
    if _plain not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Traced, f"__r{_plain}__", _reflected(_name))


class _Attention:
    """Stands in for softmax weights [B, H, G, S]: the sum over the query heads is all that can be asked for."""

    def sum(self, dim: int) -> Traced:
        """Over the query heads of the KV head."""
        if dim not in (2, -2):
            raise NotTraceableError("a sum of attention over another axis than the query heads")
        return Traced("mass")

    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError(f"'{name}' of attention")


class _View(CacheView):
    """Stands in for the view of a cache."""

    def __init__(self, states: dict[type[Statistic], Any]) -> None:
        """With the states that the policy keeps."""
        given: Any = {name: Traced(name) for name in ("rank", "position", "step", "layer")}
        refused: Any = _Refused()
        super().__init__(given["rank"], given["position"], given["step"], refused, refused, states, given["layer"])

    @property
    def valid(self) -> Any:
        return Traced("1")

    def uniform(self) -> Any:
        return Traced("uniform(position, head, layer, seed)")


class _Refused:
    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError("keys or values")


def traced(policy: Policy) -> tuple[str, str]:
    """Source of a bound policy's importance, and of its statistic's new state ("state" if it has none), for one slot.

    Names in it: state, mass (attention received, summed over query heads), rank, position, step, layer, head, seed.

    Raises:
        NotTraceableError: and why.
    """
    if policy.scope != "slot":
        raise NotTraceableError(f"scope '{policy.scope}'")
    if len(policy.statistics) > 1 or any(s.shape for s in policy.statistics):
        raise NotTraceableError("more than one statistic, or one of several numbers a slot")
    states: dict[type[Statistic], Any] = {s: Traced("state") for s in policy.statistics}
    view, attention = _View(states), _Attention()
    try:
        worth = policy.importance(view)
        update = next((s.update(states[s], attention, view) for s in policy.statistics), Traced("state"))  # type: ignore[arg-type]
    except NotTraceableError:
        raise
    except Exception as error:  # a user's policy may do anything with what it is given
        raise NotTraceableError(f"{type(error).__name__}: {error}") from error
    if not isinstance(worth, Traced) or not isinstance(update, Traced):
        raise NotTraceableError("its importance is no number a slot")
    return worth.source, update.source
