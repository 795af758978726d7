"""Suites: YAML, checked, with the line of every mistake, and spread out into cells.

Lists multiply: a list of capacities, seeds, models, or of any policy parameter is one cell each.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from harness import registry
from harness.errors import UserError
from harness.records import digest
from policies import Policy, PositionMode

M = TypeVar("M", bound=BaseModel)
Location = tuple[str | int, ...]
_FIELDS_OF_ENTRIES = ("capacity", "positions", "limit")  # of a policy's entry, or of the suite for all its entries


class ModelSpec(BaseModel):
    """Which model, and how it is loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(description="a hub id, or a local directory")
    revision: str | None = Field(None, description="of a hub model: a commit")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    rope_length: int | None = Field(None, ge=1, description="longest position, for RoPE types that depend on it; tokens")
    pickle: bool = Field(False, description="accept weights that are not safetensors")

    def asked(self) -> dict[str, Any]:
        """For the cell: what was asked, without the place where a local directory lies."""
        local = Path(self.id).expanduser()
        name = local.resolve().name if local.is_dir() else self.id
        return {"id": name, "revision": self.revision, "dtype": self.dtype, "rope_length": self.rope_length}


class SuiteFile(BaseModel):
    """What a suite file may say."""

    model_config = ConfigDict(extra="forbid")

    suite: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="its name")
    version: int = Field(ge=1, description="raised when a change makes old records incomparable")
    description: str = ""
    model: dict[str, Any] | list[dict[str, Any]]
    task: dict[str, Any] | list[dict[str, Any]]
    capacity: int | list[int] | None = Field(None, description="tokens per KV head kept between steps, for every policy")
    positions: PositionMode | list[PositionMode] = Field("cache", description="where RoPE puts a cached token")
    limit: int | None = Field(None, ge=1, description="largest distance of positions 'clamped'; tokens")
    seed: int | list[int] = 0
    policies: list[str | dict[str, Any]] = Field(min_length=1)


@dataclass(frozen=True)
class Cell:
    """One (model, policy, capacity, task, seed): the unit of work, of resuming and of records."""

    suite: str
    suite_version: int
    model: ModelSpec
    task: Any  # the task's options
    name: str  # of the policy, as asked for
    policy: Policy
    capacity: int | None
    positions: PositionMode
    limit: int | None
    seed: int

    def asked(self) -> dict[str, Any]:
        """For the record: everything that was asked, resolved."""
        bound = self.policy if self.capacity is None else self.policy.bind(self.capacity)
        where, colon, attribute = self.name.rpartition(":")
        return {
            "suite": self.suite, "suite_version": self.suite_version, "model": self.model.asked(),
            "task": self.task.model_dump(), "policy": f"{Path(where).name}{colon}{attribute}",
            "parameters": dataclasses.asdict(bound), "capacity": self.capacity, "positions": self.positions,
            "limit": self.limit, "seed": self.seed,
        }  # fmt: skip

    @property
    def id(self) -> str:
        """Hash of what was asked."""
        return digest(self.asked())

    @property
    def label(self) -> str:
        """Short name for people."""
        parts = [self.name, *(str(c) for c in [self.capacity] if c is not None)]
        parts += [self.positions] if self.positions != "cache" else []
        return " ".join([*parts, *([f"seed {self.seed}"] if self.seed else [])])


@dataclass
class Overrides:
    """What the command line changes of a suite."""

    model: str | None = None
    dtype: str | None = None
    policies: Sequence[str] = ()
    settings: Sequence[str] = ()  # key=value


class _Source:
    """A suite's text as data that knows where everything stands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places: dict[Location, str] = {}
        try:
            text = path.read_text(encoding="utf-8")
            node = yaml.compose(text, yaml.SafeLoader)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: can't be read ({type(error).__name__})") from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark else ""
            raise UserError(f"{path}{line}: not YAML ({getattr(error, 'problem', None) or 'broken'})") from error
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{path}:1: not a suite: expected 'suite:', 'version:', 'model:', 'task:', 'policies:'")
        self._note(node, ())
        try:
            self.data: dict[str, Any] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{path}: not YAML ({str(error).splitlines()[0]})") from error

    def _note(self, node: yaml.Node, at: Location) -> None:
        """Remember the line of every key and item."""
        self.places[at] = f"{self.path}:{node.start_mark.line + 1}"
        if len(at) > 8:
            raise UserError(f"{self.places[at]}: nested too deeply")
        if isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                self._note(item, (*at, i))
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                place = f"{self.path}:{key.start_mark.line + 1}"
                if not isinstance(key, yaml.ScalarNode):
                    raise UserError(f"{place}: a key must be a word")
                if key.value in seen:
                    raise UserError(f"{place}: '{key.value}' is given twice")
                seen.add(key.value)
                self._note(value, (*at, key.value))
                self.places[(*at, key.value)] = place

    def error(self, at: Location, message: str) -> UserError:
        """An error about the innermost place that has a line."""
        while at not in self.places and at:
            at = at[:-1]
        return UserError(f"{self.places[at]}: {message}")

    def put(self, at: Location, value: Any, place: str) -> None:
        """Change the data from the command line, and remember who said so."""
        target: Any = self.data
        for step in at[:-1]:
            target = target[step]
        target[at[-1]] = value
        self.places = {k: v for k, v in self.places.items() if k[: len(at)] != at} | {at: place}


def find(name: str) -> Path:
    """The file of a suite: a path, or the name of one that comes with the project.

    Raises:
        UserError: neither.
    """
    path = Path(name)
    if path.exists() and not path.is_dir():
        return path
    shipped = {p.stem: p for p in shipped_suites()}
    if name in shipped:
        return shipped[name]
    raise UserError(f"{name}: no such suite{registry.did_you_mean(path.stem, shipped)}")


def shipped_suites() -> list[Path]:
    """The suites that come with the project: those of the checkout, or of the installed package."""
    here = Path(__file__).parent
    folder = here / "suites" if (here / "suites").is_dir() else here.parent / "suites"
    return sorted(folder.glob("*.yaml"))


def load(path: Path, overrides: Overrides | None = None) -> tuple[SuiteFile, list[Cell]]:
    """Read, check and spread out a suite.

    Raises:
        UserError: the first mistake, with its line.
    """
    source = _Source(path)
    _apply(source, overrides or Overrides())
    suite = _validated(SuiteFile, source.data, source, ())
    models = [_validated(ModelSpec, m, source, ("model", *i)) for i, m in _items(suite.model)]
    tasks = [_task(t, source, ("task", *i)) for i, t in _items(suite.task)]
    entries = [cell for i in range(len(suite.policies)) for cell in _entry(suite, i, source)]
    seeds = suite.seed if isinstance(suite.seed, list) else [suite.seed]
    cells = [
        Cell(suite.suite, suite.version, model, task, *entry, seed)
        for model, task, entry, seed in itertools.product(models, tasks, entries, seeds)
    ]
    unique = list({cell.id: cell for cell in cells}.values())
    if not unique:
        raise UserError(f"{path}: 0 cells: an empty list somewhere")
    return suite, unique


def _items(value: Any) -> Iterator[tuple[Location, Any]]:
    """One or several, with their place."""
    yield from (((i,), v) for i, v in enumerate(value)) if isinstance(value, list) else iter([((), value)])


def _validated(kind: type[M], value: Any, source: _Source, at: Location) -> M:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = tuple(
            x for x in first["loc"] if isinstance(x, int) or x in kind.model_fields or first["type"] == "extra_forbidden"
        )
        name = ".".join(str(x) for x in first["loc"][:1])
        if first["type"] == "extra_forbidden":
            raise source.error((*at, *place), f"unknown key '{name}'{registry.did_you_mean(name, kind.model_fields)}") from None
        if first["type"] == "missing":
            raise source.error(at, f"'{name}' is missing") from None
        got = repr(first["input"])
        raise source.error((*at, *place), f"{name}: {first['msg']}, not {got[:60]}") from None


def _task(value: dict[str, Any], source: _Source, at: Location) -> BaseModel:
    name = value.get("name")
    if not isinstance(name, str):
        raise source.error(at, "the task's 'name' is missing")
    try:
        options = registry.task_class(name).options
    except UserError as error:
        raise source.error((*at, "name"), str(error)) from None
    return _validated(options, value, source, at)


Entry = tuple[str, Policy, int | None, PositionMode, int | None]


def _entry(suite: SuiteFile, index: int, source: _Source) -> Iterator[Entry]:
    """The cells of one policy's entry, its lists multiplied: name, policy, capacity, positions, limit."""
    at: Location = ("policies", index)
    entry = suite.policies[index]
    given = {"name": entry} if isinstance(entry, str) else dict(entry)
    name = given.pop("name", None)
    if not isinstance(name, str):
        raise source.error(at, "the policy's 'name' is missing")
    try:
        policy = registry.policy_class(name)
    except UserError as error:
        raise source.error((*at, "name"), str(error)) from None
    schema = entry_schema(name, policy)
    defaults = {"capacity": suite.capacity, "positions": suite.positions, "limit": suite.limit}
    fixed = {k: v for k, v in defaults.items() if k in schema.model_fields and v is not None} | given
    choices: list[list[Any]] = [v if isinstance(v, list) else [v] for v in fixed.values()]
    for values in itertools.product(*choices):
        chosen = _validated(schema, dict(zip(fixed, values, strict=True)), source, at).model_dump()
        capacity, positions, limit = (chosen.pop(k, None) for k in _FIELDS_OF_ENTRIES)
        if policy.evicts and capacity is None:
            raise source.error(at, f"{name} needs a capacity")
        limit = limit if positions == "clamped" else None
        try:
            made = policy(**chosen)
            if capacity is not None:
                made.bind(capacity)
        except ValueError as error:
            place = (
                (*at, "capacity") if "capacity" in given else ("capacity",) if "capacity" not in given and suite.capacity else at
            )
            raise source.error(place, f"{name}: {error}") from None
        yield name, made, capacity, positions or "cache", limit


def entry_schema(name: str, policy: type[Policy]) -> type[BaseModel]:
    """What an entry of this policy may say: its parameters, and what applies to it of capacity and positions."""
    hints = typing.get_type_hints(policy)
    parameters: dict[str, Any] = {
        f.name: (hints[f.name], ... if f.default is dataclasses.MISSING else f.default) for f in dataclasses.fields(policy)
    }
    if policy.evicts:
        parameters["capacity"] = (int | None, Field(None, ge=1))
    if policy.caches:
        parameters["positions"] = (PositionMode, "cache")
        parameters["limit"] = (int | None, Field(None, ge=1))
    safe = "".join(c if c.isalnum() else "_" for c in name)
    return create_model(f"{safe}_entry", __config__=ConfigDict(extra="forbid", strict=True), **parameters)


def _apply(source: _Source, overrides: Overrides) -> None:
    """The command line's changes."""
    if overrides.model is not None:
        source.put(("model",), {"id": overrides.model}, "--model")
    if overrides.dtype is not None:
        for i, _ in _items(source.data.get("model")):
            source.put(("model", *i, "dtype"), overrides.dtype, "--dtype")
    if overrides.policies:
        source.put(("policies",), [_yaml_value(p, "--policy") for p in overrides.policies], "--policy")
    for setting in overrides.settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise UserError(f"--set {setting}: expected key=value")
        _set(source, key, _yaml_value(text, f"--set {setting}"), f"--set {setting}")


def _yaml_value(text: str, place: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{place}: '{text}' is not YAML") from error


def _set(source: _Source, key: str, value: Any, place: str) -> None:
    """Change whatever bears this name: a field of the suite, of its tasks, of its model, or of its policies."""
    data, found = source.data, False
    if key in SuiteFile.model_fields and key not in ("model", "task", "policies"):
        source.put((key,), value, place)
        found = True
    for group in ("task", "model"):
        for i, holder in _items(data.get(group)):
            name = key.removeprefix(f"{group}.")
            if isinstance(holder, dict) and name in _options(group, holder):
                source.put((group, *i, name), value, place)
                found = True
    for index, entry in enumerate(data.get("policies") or []):
        if (isinstance(entry, dict) and key in entry) or key in _parameters(entry):
            if isinstance(entry, str):
                data["policies"][index] = {"name": entry}
            if key in SuiteFile.model_fields:
                data["policies"][index].pop(key, None)  # what the suite says for all now holds
            else:
                source.put(("policies", index, key), value, place)
            found = True
    if not found:
        known = {"capacity", "positions", "limit", "seed", *ModelSpec.model_fields}
        for _, holder in _items(data.get("task")):
            known |= _options("task", holder) if isinstance(holder, dict) else set()
        for entry in data.get("policies") or []:
            known |= _parameters(entry)
        raise UserError(f"{place}: unknown key '{key}'{registry.did_you_mean(key, known)}")


def _options(group: str, holder: dict[str, Any]) -> set[str]:
    """Names that a task's or a model's mapping may hold."""
    if group == "model":
        return set(ModelSpec.model_fields)
    try:
        return set(registry.task_class(str(holder.get("name"))).options.model_fields) - {"name"}
    except UserError:
        return set()


def _parameters(entry: Any) -> set[str]:
    """Names of a policy's own parameters; none if it is unknown, which is reported later, with its line."""
    name = entry.get("name") if isinstance(entry, dict) else entry
    try:
        return {f.name for f in dataclasses.fields(registry.policy_class(str(name)))}
    except UserError:
        return set()


def schema() -> dict[str, Any]:
    """JSON schema of suite files, for editors: the policies and tasks that are there, with their options."""
    entries: list[dict[str, Any]] = []
    for name in registry.policy_names():
        fields = entry_schema(name, registry.policy_class(name)).model_json_schema()["properties"]
        listed = {k: {"anyOf": [v, {"type": "array", "items": v}]} for k, v in fields.items()}
        entries.append({
            "type": "object", "required": ["name"], "additionalProperties": False,
            "properties": {"name": {"const": name}} | listed,
        })  # fmt: skip
    tasks = [registry.task_class(name).options.model_json_schema() for name in registry.task_names()]
    result = SuiteFile.model_json_schema()
    own = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "pattern": ":"}}}
    names: dict[str, Any] = {"anyOf": [{"enum": registry.policy_names()}, {"type": "string", "pattern": ":"}]}
    result["properties"]["policies"]["items"] = {"anyOf": [names, *entries, own]}
    for key, options in (("task", tasks), ("model", [ModelSpec.model_json_schema()])):
        one = {"anyOf": options}
        result["properties"][key] = {"anyOf": [one, {"type": "array", "items": one}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "KV Bench suite"} | result
