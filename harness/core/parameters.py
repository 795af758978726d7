"""Conversion of a policy's parameters to JSON and back. A policy inside another policy is a mapping with its name."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from kvbench.harness.core import plugins
from kvbench.policies import Policy


def parameters_of(policy: Policy, recorded: bool = False) -> dict[str, Any]:
    """Return the parameters by name. Parameters marked `metadata={"added": True}` are left out at their default.

    Args:
        recorded: name the policies inside without the folders of their files, as in records.
    """
    fields = dataclasses.fields(policy)
    return {f.name: _as_json(getattr(policy, f.name), recorded) for f in fields if not _is_left_out(policy, f)}


def policy_from(name: str, parameters: Mapping[str, Any]) -> Policy:
    """Return the policy with this name and these parameters, in the form of `parameters_of`.

    Raises:
        UserError: no policy has this name, or the name of a policy inside.
        ValueError, TypeError: the policy has no such parameters, or refuses their values.
    """
    kind = plugins.policy_class(name)
    held, sequences = policy_fields(kind), tuple_fields(kind)

    def value(key: str, given: Any) -> Any:
        if key in sequences:
            return tuple(given)
        return _inside(given) if key in held and given is not None else given

    return kind(**{key: value(key, given) for key, given in parameters.items()})


def policy_fields(kind: type[Policy]) -> frozenset[str]:
    """Return the names of the parameters that are policies."""
    hints = typing.get_type_hints(kind)
    return frozenset(f.name for f in dataclasses.fields(kind) if _is_policy(hints[f.name]))


def tuple_fields(kind: type[Policy]) -> frozenset[str]:
    """Return the names of the parameters that are tuples, which a file has as lists."""
    hints = typing.get_type_hints(kind)
    return frozenset(f.name for f in dataclasses.fields(kind) if typing.get_origin(hints[f.name]) is tuple)


def policies_inside(policy: Policy) -> Iterator[Policy]:
    """Yield the policies among a policy's parameters."""
    for f in dataclasses.fields(policy):
        value = getattr(policy, f.name)
        yield from (x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, Policy))


def all_policies_inside(policy: Policy) -> Iterator[Policy]:
    """Yield the policies at any depth among a policy's parameters."""
    for inside in policies_inside(policy):
        yield inside
        yield from all_policies_inside(inside)


def names_inside(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the policies at any depth in parameters of the form of `parameters_of`."""
    for value in itertools.chain.from_iterable(x if isinstance(x, list) else [x] for x in parameters.values()):
        if isinstance(value, Mapping):
            if isinstance(value.get("name"), str):
                yield value["name"]
            yield from names_inside(value)


def _is_policy(hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_policy(part) for part in typing.get_args(hint))
    return inspect.isclass(hint) and issubclass(hint, Policy)


def _inside(value: Any) -> Policy:
    given = {"name": value} if isinstance(value, str) else value
    return policy_from(given["name"], {k: v for k, v in given.items() if k != "name"})


def _as_json(value: Any, recorded: bool) -> Any:
    if isinstance(value, Policy):
        name = plugins.name_of(type(value))
        return {"name": plugins.recorded_name(name) if recorded else name} | parameters_of(value, recorded)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [_as_json(item, recorded) for item in value] if isinstance(value, tuple) else copy.deepcopy(value)


def _is_left_out(policy: Policy, field: dataclasses.Field[Any]) -> bool:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return bool(field.metadata.get("added")) and getattr(policy, field.name) == default
