"""Entries of a suite's policies: parameters, policies inside, axes, and budgets converted to tokens."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, create_model
from pydantic_core import PydanticCustomError

from kvbench.harness.core import plugins
from kvbench.harness.core.codec import Codec
from kvbench.harness.core.contestants import AXES, Contestant
from kvbench.harness.core.errors import UserError, described
from kvbench.harness.core.evict import Evict, at_once, pages_of
from kvbench.harness.core.parameters import policy_fields, tuple_fields
from kvbench.harness.models.shape import ModelShape, readable_shape
from kvbench.harness.suite.axes import Budget, OneCapacity, OneEvict, OneKV, multiplied
from kvbench.harness.suite.file import ModelSpec, SuiteFile
from kvbench.harness.suite.text import Location, Settings, Source, spread, validated
from kvbench.policies import Policy, PositionMode, Selecting


@dataclass(frozen=True)
class Entry:
    """A policy with its axes, before it is combined with a model and a task.

    Attributes:
        name: name of the policy in the suite.
        policy: policy that is not yet bound to a capacity.
        budget: capacity in the suite's notation; None if the policy takes none.
        blamed: location that a message names if the policy can't serve the capacity.
    """

    name: str
    policy: Policy
    budget: Budget | None
    evict: Evict
    kv: Codec | None
    positions: PositionMode
    limit: int | None
    seed: int
    location: Location
    blamed: Location

    @property
    def has_moment(self) -> bool:
        """Whether it matters when tokens are evicted, or whether a prompt is read in full."""
        return isinstance(self.policy, Selecting) or (self.policy.evicts and self.policy.caches)

    def refuse_if_unfit(self, capacity: int | None, source: Source) -> None:
        """Check that the policy can serve a capacity.

        Raises:
            UserError: the policy can't serve the capacity, or a user's policy raises an error.
        """
        pages = pages_of(self.evict)
        try:
            if capacity is not None:
                self.policy.bind(capacity)
                if pages is not None and capacity % pages.size:
                    raise ValueError(f"capacity {capacity} doesn't make up whole pages of {pages.size}")
        except ValueError as error:
            raise source.error(self.blamed, f"{self.name}: {error}") from None
        except Exception as error:  # a user's policy may raise anything
            raise source.error(self.location, f"{self.name}: {described(error)}") from error


def entries(suite: SuiteFile, index: int, source: Source) -> Iterator[Entry]:
    """Yield the entries of one of the suite's policies, with its lists expanded.

    Raises:
        UserError: the entry has a mistake. The message names the first one with its line.
    """
    location: Location = ("policies", index)
    name, kind, given = _named(suite.policies[index], source, location)
    is_contestant = issubclass(kind, Contestant)
    for key in AXES if is_contestant else ():
        if key in given:
            raise source.error((*location, key), f"{name} decides {key} itself: leave it out")
    schema = entry_schema(name, kind)
    defaults = {"capacity": suite.capacity, "evict": suite.evict, "positions": suite.positions, "limit": suite.limit}
    defaults |= {"seed": suite.seed, "kv": suite.kv}
    if kind.outcome:
        defaults["evict"] = "prompt"
    fixed = {k: v for k, v in defaults.items() if k in schema.model_fields and v is not None} | given
    for key in fixed.keys() - given.keys():
        source.inherit((*location, key), (key,))
    modes = fixed.get("positions")
    if not kind.evicts and isinstance(modes, list) and "stream" in modes:  # then ranks are positions, and two modes are one
        fixed["positions"] = ["cache", *(mode for mode in modes if mode not in ("stream", "cache"))]
    if issubclass(kind, Selecting) and "evict" in fixed and "evict" not in given:  # evicts nothing, so all bursts are one moment
        moments = fixed["evict"] if isinstance(fixed["evict"], list) else [fixed["evict"]]
        fixed["evict"] = list(dict.fromkeys("step" if isinstance(moment, dict) else moment for moment in moments))
    for one in _spread(kind, fixed, source, location):
        chosen = _values(validated(schema, one, source, location))
        budget, evict, positions, limit, seed, kv = (chosen.pop(k, None) for k in AXES)
        if "capacity" in schema.model_fields and budget is None:
            form = f"{{name: {name}, capacity: 256}}, or --set capacity=256 for all"
            raise source.error(location, f"{name} needs a capacity: {form}")
        overridden = [key for key in one if key != "seed" and source.is_overridden((*location, key))]
        place = location if overridden or "capacity" in given or suite.capacity is None else ()
        blamed = (*place, *(overridden or ["capacity"])[:1])
        policy = _built(name, kind, chosen, source, location, blamed)
        limit = limit if positions == "clamped" else None
        usual: PositionMode = "stream" if is_contestant else "cache"  # a model rotates keys before it caches them
        refused = "" if kv is None else kv.why_not(positions or usual, kind.evicts and (evict or 1) != "prompt")
        if refused:
            raise source.error((*location, "kv"), refused)
        entry = Entry(name, policy, budget, evict or 1, kv, positions or usual, limit, seed or 0, location, blamed)
        entry.refuse_if_unfit(budget if isinstance(budget, int) else None, source)
        yield entry


def capacity_of(entry: Entry, budget: dict[str, Any], model: ModelSpec, prompt: int | None) -> int:
    """Convert a budget to a capacity, in tokens per KV head kept between steps.

    A budget is a share of the bytes of the prompt's K and V in the model's dtype, or the bytes of the slots of one stream. A
    cache that evicts `b` tokens at once needs `capacity + b` slots. The bytes of a codec include codes, scales and exempt tokens.
    With `count: all`, the bytes of ranks, positions and statistics count, too.

    Args:
        prompt: common length of the task's prompts in tokens; None if there is none.

    Raises:
        ValueError: the capacity can't be computed, or is less than one token.
    """
    by_tokens = "share" in budget and entry.kv is None and budget["count"] == "kv"
    tokens = _of_prompt(budget["share"], prompt) if by_tokens else _of_bytes(entry, budget, model, prompt)
    pages = pages_of(entry.evict)
    return tokens if pages is None else max(1, tokens // pages.size) * pages.size


def _of_prompt(share: float, prompt: int | None) -> int:
    tokens = int(Fraction(str(share)) * _known(prompt))
    if tokens < 1:
        raise ValueError(f"{share} of a prompt of {prompt:,} tokens is less than one token")
    return tokens


def _known(prompt: int | None) -> int:
    if prompt is None:
        raise ValueError("a share of the prompt, but this task has no prompts of one known length; give tokens")
    return prompt


def _of_bytes(entry: Entry, budget: dict[str, Any], model: ModelSpec, prompt: int | None) -> int:
    shape, codec = _shape(model.id, model.revision, model.gguf_file), entry.kv
    if shape is None:
        raise ValueError(f"the config of {model.id} can't be read, so the bytes of a token are unknown; give tokens")
    itemsize, spare = getattr(torch, model.dtype).itemsize, at_once(entry.evict)
    if "share" in budget:
        size, spare = int(Fraction(str(budget["share"])) * shape.kv_bytes(_known(prompt) - 1, 1, itemsize)), 0
    else:
        size = budget["bytes"]

    def state(capacity: int) -> int:
        try:
            return shape.state_bytes(entry.policy, capacity + spare, capacity, max(4, itemsize), entry.evict == "prompt")
        except ValueError:  # the policy needs more
            return 0

    tokens = shape.capacity_within(size, itemsize, spare, codec, state if budget["count"] == "all" else None)
    if tokens < 1:
        least = shape.kv_bytes(spare, 1, itemsize, codec)
        raise ValueError(f"{size:,} bytes, but the smallest cache of {model.id} takes {least:,}")
    return tokens


@cache
def _shape(model: str, revision: str | None, gguf_file: str | None) -> ModelShape | None:
    return readable_shape(model, revision, gguf_file)


def entry_schema(name: str, policy: type[Policy]) -> type[BaseModel]:
    """Return the fields of a policy's entry in a suite: its parameters and the axes that apply to it."""
    if issubclass(policy, Contestant):
        return parameter_schema(name, policy)
    axes: dict[str, Any] = {"seed": (int, 0)}
    if policy.evicts and not policy.outcome:
        axes["capacity"] = (OneCapacity, None)
    if issubclass(policy, Selecting):
        axes |= {"evict": (_StepOrPrompt, 1), "positions": (Literal["cache", "stream"], "cache")}
        return _model(f"{name}_entry", _parameter_fields(policy) | axes)
    if policy.evicts and policy.caches:
        axes["evict"] = (_OnlyPrompt if policy.outcome else OneEvict, 1)
    if policy.caches:
        axes["kv"] = (OneKV, None)
        axes["positions"] = (PositionMode, "cache")
        axes["limit"] = (int | None, Field(None, ge=1))
    return _model(f"{name}_entry", _parameter_fields(policy) | axes)


def parameter_schema(name: str, policy: type[Policy]) -> type[BaseModel]:
    """Return the fields of a policy inside another policy: its parameters."""
    return _model(f"{name}_inside", _parameter_fields(policy))


def policy_with(name: str, kind: type[Policy], parameters: Mapping[str, Any], option: str) -> Policy:
    """Return the policy with these parameters, which are validated like an entry of a suite.

    Args:
        parameters: parameters by name. A policy inside is an instance, a name, or a mapping with a name.
        option: option of the command line that gave the parameters, for messages.

    Raises:
        UserError: a parameter is invalid. The message names the first mistake.
    """
    source, given = Settings(option), dict(parameters)
    try:
        schema, held, sequences = parameter_schema(name, kind), policy_fields(kind), tuple_fields(kind)
    except Exception as error:  # e.g. an annotation that can't be evaluated
        raise UserError(f"{name}: its parameters can't be read: {described(error)}") from error
    for key in held & given.keys():
        inside = [given[key]] if isinstance(given[key], Policy | None) else list(policies_from(kind, given[key], source, (key,)))
        if len(inside) != 1:
            raise source.error((key,), f"{key}: {len(inside)} policies; give one")
        (given[key],) = inside
    given |= {key: tuple(given[key]) for key in sequences & given.keys() if isinstance(given[key], list)}
    return _built(name, kind, _values(validated(schema, given, source, ())), source, (), ())


def policies_from(holder: type[Policy], value: Any, source: Source, location: Location) -> Iterator[Policy]:
    """Yield the policies that a parameter describes by a name, or by a mapping with a name and parameters, lists expanded.

    Raises:
        UserError: the parameter has a mistake. The message names the first one with its line.
    """
    listed = isinstance(value, list)
    for place, item in [((*location, i), v) for i, v in enumerate(value)] if listed else [(location, value)]:
        name, kind, given = _named(item, source, place)
        if issubclass(holder, Contestant) != issubclass(kind, Contestant):
            raise source.error(place, f"{name} and what holds it run in different loops")
        if not issubclass(kind, Contestant) and (not kind.evicts or not kind.caches or kind.outcome):
            why = "keeps no cache" if not kind.caches else "never evicts" if not kind.evicts else "takes no capacity"
            raise source.error(place, f"{name} {why}, so no policy can hold it")
        schema = parameter_schema(name, kind)
        for one in _spread(kind, given, source, place):
            yield _built(name, kind, _values(validated(schema, one, source, place)), source, place, place)


def _named(entry: Any, source: Source, location: Location) -> tuple[str, type[Policy], dict[str, Any]]:
    """Return name and class of an entry's policy, and the entry's other keys.

    Raises:
        UserError: the entry has no name, or no policy has that name.
    """
    if not isinstance(entry, (str, dict)):
        raise source.error(location, f"expected a policy's name or a mapping with its name, not {repr(entry)[:60]}")
    given = {"name": entry} if isinstance(entry, str) else dict(entry)
    name = given.pop("name", None)
    if not isinstance(name, str):
        raise source.error(location, "the policy's 'name' is missing")
    try:
        return name, plugins.policy_class(name), given
    except UserError as error:
        raise source.error((*location, "name"), str(error)) from None


def _spread(kind: type[Policy], given: dict[str, Any], source: Source, location: Location) -> Iterator[dict[str, Any]]:
    """Expand the lists of an entry, including lists inside its axes and inside the policies it holds."""
    held = policy_fields(kind)
    policies = {k: list(policies_from(kind, v, source, (*location, k))) for k, v in given.items() if k in held and v is not None}
    axes = {k: multiplied(v) for k, v in given.items() if k in ("capacity", "evict", "kv")}
    sequences = {k: _tuples(v) for k, v in given.items() if k in tuple_fields(kind) and isinstance(v, list)}
    yield from spread(given | axes | policies | sequences)


def _tuples(value: list[Any]) -> list[tuple[Any, ...]]:
    """Return the values of a parameter that is a sequence. A list is one value, a list of lists several."""
    several = bool(value) and all(isinstance(item, list) for item in value)
    return [tuple(item) for item in value] if several else [tuple(value)]


def _built(
    name: str, kind: type[Policy], parameters: dict[str, Any], source: Source, location: Location, blamed: Location
) -> Policy:
    try:
        return kind(**parameters)
    except ValueError as error:
        raise source.error(blamed, f"{name}: {error}") from None
    except Exception as error:  # a user's policy may raise anything
        raise source.error(location, f"{name}: {described(error)}") from error


def _values(fields: BaseModel) -> dict[str, Any]:
    """Return the fields by name. `dict(fields)` would call a parameter that is named `keys`."""
    return {name: getattr(fields, name) for name in type(fields).model_fields}


def _only_prompt(value: Any) -> Evict:
    if value != "prompt":
        raise PydanticCustomError("evict", "its budgets follow from the prompt, so expected prompt")
    return "prompt"


def _step_or_prompt(value: Any) -> Evict:
    if value not in (1, "step", "prompt"):
        raise PydanticCustomError("evict", "it evicts nothing, so expected step or prompt (a prompt under full attention)")
    return "prompt" if value == "prompt" else 1


def _policy(value: Any) -> Any:
    if not isinstance(value, Policy):
        raise PydanticCustomError("policy", "expected a policy's name or a mapping with its name")
    return value


_OnlyPrompt = Annotated[Any, PlainValidator(_only_prompt), WithJsonSchema({"const": "prompt"})]
_StepOrPrompt = Annotated[Any, PlainValidator(_step_or_prompt), WithJsonSchema({"enum": ["step", "prompt"]})]
_Held = Annotated[Any, PlainValidator(_policy), WithJsonSchema({"type": ["string", "object"]})]


def _parameter_fields(policy: type[Policy]) -> dict[str, Any]:
    """Return the parameters as fields of a pydantic model."""
    hints = typing.get_type_hints(policy)
    for name in policy_fields(policy):
        hints[name] = _Held | None if type(None) in typing.get_args(hints[name]) else _Held
    return {f.name: (hints[f.name], _default(f)) for f in dataclasses.fields(policy)}


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return a parameter's default. A default that is a policy is created on demand, because it has no JSON."""
    if field.default_factory is not dataclasses.MISSING:
        return Field(default_factory=field.default_factory)
    if isinstance(field.default, Policy):
        return Field(default_factory=lambda: field.default)
    return ... if field.default is dataclasses.MISSING else field.default


def _model(name: str, fields: dict[str, Any]) -> type[BaseModel]:
    safe = "".join(c if c.isalnum() else "_" for c in name)
    return create_model(safe, __config__=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False), **fields)
