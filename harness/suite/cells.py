"""Loads suites: checks the YAML, reports mistakes with their line, and multiplies out its lists into cells.

A list of capacities, seeds, models or values of any policy parameter gives one cell per item.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError, described, did_you_mean
from kvbench.harness.records import digest
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.suite.file import ModelSpec, SuiteFile
from kvbench.harness.suite.overrides import Overrides, apply
from kvbench.harness.suite.text import Location, Source, items, spread, validated
from kvbench.policies import Policy, PositionMode

MAX_CELLS = 100_000
T = TypeVar("T")
_FIELDS_OF_ENTRIES = ("capacity", "positions", "limit")  # given in a policy's entry, or once for the whole suite


@dataclass(frozen=True)
class Cell:
    """One (model, policy, capacity, task, seed): the unit of work, of resuming and of records."""

    suite: str
    suite_version: int
    model: ModelSpec
    task: Any  # the task's options
    name: str  # of the policy, as the suite has it
    policy: Policy
    capacity: int | None
    positions: PositionMode
    limit: int | None
    seed: int

    def as_json(self) -> dict[str, Any]:
        """The cell as its record keeps it, with every default filled in."""
        bound = self.policy if self.capacity is None else self.policy.bind(self.capacity)
        return {
            "suite": self.suite, "suite_version": self.suite_version, "model": self.model.as_json(),
            "task": self.task.model_dump(exclude_none=True) | {"name": plugins.recorded_name(self.task.name)},
            "policy": plugins.recorded_name(self.name),
            "parameters": dataclasses.asdict(bound), "capacity": self.capacity, "positions": self.positions,
            "limit": self.limit, "seed": self.seed,
        }  # fmt: skip

    @property
    def id(self) -> str:
        """Hash of `as_json`."""
        return digest(self.as_json())

    @property
    def label(self) -> str:
        """A short name for people."""
        parts = [self.name, *(str(c) for c in [self.capacity] if c is not None)]
        parts += [self.positions] if self.positions != "cache" else []
        return " ".join([*parts, *([f"seed {self.seed}"] if self.seed else [])])


def labels(cells: Sequence[Cell]) -> dict[str, str]:
    """Short names by cell id, extended by the models, parameters and task options that differ between these cells."""
    specs = [cell.as_json() for cell in cells]
    tasks: dict[str, list[int]] = defaultdict(list)  # indices of the cells with each task
    rivals: dict[tuple[str, int | None], list[int]] = defaultdict(list)  # indices of the cells with each policy and capacity
    for place, cell in enumerate(cells):
        tasks[cell.task.name].append(place)
        rivals[cell.name, cell.capacity].append(place)
    options = {name: _varying(specs[place]["task"] for place in group) for name, group in tasks.items()}
    parameters = {key: _varying(specs[place]["parameters"] for place in group) for key, group in rivals.items()}
    several_models = len({cell.model.id for cell in cells}) > 1
    names = {}
    for cell, spec in zip(cells, specs, strict=True):
        parts = [*([cell.model.id] if several_models else []), *([cell.task.name] if len(tasks) > 1 else []), cell.label]
        parts += [f"{n} {spec['parameters'][n]}" for n in parameters[cell.name, cell.capacity]]
        parts += [f"{n} {spec['task'][n]}" for n in options[cell.task.name] if n in spec["task"]]
        names[digest(spec)] = ", ".join(parts)
    return names


def _varying(mappings: Iterable[dict[str, Any]]) -> list[str]:
    """The keys whose values differ between these mappings."""
    values_of: dict[str, set[str]] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            values_of.setdefault(name, set()).add(repr(value))
    return [name for name, values in values_of.items() if len(values) > 1]


def find(name: str) -> Path:
    """The file of a suite, given its path or the name of a bundled one.

    Raises:
        UserError: it is neither.
    """
    path = Path(name)
    if path.exists() and not path.is_dir():
        return path
    shipped = {p.stem: p for p in shipped_suites()}
    if name in shipped:
        return shipped[name]
    raise UserError(f"{name}: no such suite{did_you_mean(path.stem, shipped)}")


def shipped_suites(kind: str = "") -> list[Path]:
    """The suites that come with the project, in the checkout or the installed package. kind: a subfolder."""
    folder = Path(__file__).resolve().parents[2] / "suites"  # beside `harness`, in the checkout as in the wheel
    return sorted((folder / kind).glob("*.yaml"))


def load(path: Path, overrides: Overrides | None = None) -> tuple[SuiteFile, list[Cell]]:
    """Read and check a suite, and multiply out its lists into cells.

    Raises:
        UserError: describes the first mistake, with its line.
    """
    source = Source(path)
    apply(source, overrides or Overrides())
    suite = validated(SuiteFile, source.data, source, ())
    models = _bounded(
        (validated(ModelSpec, m, source, ("model", *i)) for i, given in items(suite.model) for m in spread(given)), path
    )
    tasks = _bounded((pair for i, given in items(suite.task) for pair in _tasks(given, source, ("task", *i))), path)
    entries = _bounded((cell for i in range(len(suite.policies)) for cell in _entry(suite, i, source)), path)
    seeds = suite.seed if isinstance(suite.seed, list) else [suite.seed]
    cells = _bounded(
        (
            Cell(suite.suite, suite.version, model, task, *entry, seed)
            for model, (task, only), entry, seed in itertools.product(models, tasks, entries, seeds)
            if only is None or entry[0] in only
        ),
        path,
    )
    unique = list({cell.id: cell for cell in cells}.values())
    if not unique:
        raise UserError(f"{path}: 0 cells: one of its lists is empty")
    return suite, unique


def _bounded(values: Iterable[T], path: Path) -> list[T]:
    """The values as a list, unless there are too many."""
    bounded = list(itertools.islice(values, MAX_CELLS + 1))
    if len(bounded) > MAX_CELLS:
        raise UserError(f"{path}: more than {MAX_CELLS:,} cells, because its lists multiply; make them shorter")
    return bounded


def cell_from_spec(recorded: CellSpec, model: str | None = None) -> Cell:
    """The cell of a record, to measure it again.

    Args:
        recorded: the record's cell.
        model: where a local model is now; the recorded model when None.

    Raises:
        UserError: this version can't run the cell, or its policy or task is in a user's file, which records don't keep.
    """
    if ":" in recorded.policy:
        raise UserError(f"the policy {recorded.policy} is defined in a user's file: run its suite with --policy instead")
    if ":" in recorded.task.name:
        raise UserError(f"the task {recorded.task.name} is defined in a user's file: run its suite instead")
    spec = recorded.as_json()
    model_spec = spec["model"] | ({"id": model} if model else {})
    try:
        cell = Cell(
            suite=recorded.suite,
            suite_version=recorded.suite_version,
            model=ModelSpec.model_validate({k: v for k, v in model_spec.items() if v is not None}),
            task=plugins.task_class(recorded.task.name).options.model_validate(recorded.options),
            name=recorded.policy,
            policy=plugins.policy_class(recorded.policy)(**recorded.parameters),
            capacity=recorded.capacity,
            positions=_position_mode(recorded.positions),
            limit=recorded.limit,
            seed=recorded.seed,
        )
        same = cell.as_json() | ({"model": spec["model"]} if model else {}) == spec
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"this version can't run the recorded cell: {str(error).splitlines()[0]}") from None
    if not same:
        raise UserError("the recorded cell means something else in this version: measure its suite instead")
    return cell


def _position_mode(name: str) -> PositionMode:
    """The mode of that name.

    Raises:
        ValueError: there is none.
    """
    for mode in typing.get_args(PositionMode):
        if mode == name:
            known: PositionMode = mode
            return known
    raise ValueError(f"positions {name}")


def _tasks(given: dict[str, Any], source: Source, at: Location) -> Iterator[tuple[BaseModel, list[str] | None]]:
    """The tasks of an entry, its lists multiplied out, each with the names of its policies (None: all)."""
    only = given.get("policies")
    if only is not None and not (isinstance(only, list) and all(isinstance(name, str) for name in only)):
        raise source.error((*at, "policies"), "a list of the names of policies")
    for name in only or []:
        try:
            plugins.policy_class(name)
        except UserError as error:
            raise source.error((*at, "policies"), str(error)) from None
    for one in spread({k: v for k, v in given.items() if k != "policies"}):
        yield _task(one, source, at), only


def _task(value: dict[str, Any], source: Source, at: Location) -> BaseModel:
    name = value.get("name")
    if not isinstance(name, str):
        raise source.error(at, "the task's 'name' is missing")
    try:
        options = plugins.task_class(name).options
    except UserError as error:
        raise source.error((*at, "name"), str(error)) from None
    return validated(options, value, source, at)


Entry = tuple[str, Policy, int | None, PositionMode, int | None]


def _entry(suite: SuiteFile, index: int, source: Source) -> Iterator[Entry]:
    """The cells of one policy's entry, its lists multiplied out: name, policy, capacity, positions, limit."""
    at: Location = ("policies", index)
    entry = suite.policies[index]
    given = {"name": entry} if isinstance(entry, str) else dict(entry)
    name = given.pop("name", None)
    if not isinstance(name, str):
        raise source.error(at, "the policy's 'name' is missing")
    try:
        policy = plugins.policy_class(name)
    except UserError as error:
        raise source.error((*at, "name"), str(error)) from None
    schema = entry_schema(name, policy)
    defaults = {"capacity": suite.capacity, "positions": suite.positions, "limit": suite.limit}
    fixed = {k: v for k, v in defaults.items() if k in schema.model_fields and v is not None} | given
    for key in fixed.keys() - given.keys():
        source.inherit((*at, key), (key,))
    for one in spread(fixed):
        chosen = validated(schema, one, source, at).model_dump()
        capacity, positions, limit = (chosen.pop(k, None) for k in _FIELDS_OF_ENTRIES)
        if policy.evicts and capacity is None:
            raise source.error(at, f"{name} needs a capacity")
        limit = limit if positions == "clamped" else None
        try:
            instance = policy(**chosen)
            if capacity is not None:
                instance.bind(capacity)
        except ValueError as error:
            overridden = [key for key in one if source.is_overridden((*at, key))]
            place = at if overridden or "capacity" in given or suite.capacity is None else ()
            raise source.error((*place, *(overridden or ["capacity"])[:1]), f"{name}: {error}") from None
        except Exception as error:  # a user's policy may raise anything
            raise source.error(at, f"{name}: {described(error)}") from error
        yield name, instance, capacity, positions or "cache", limit


def entry_schema(name: str, policy: type[Policy]) -> type[BaseModel]:
    """The fields of this policy's entry in a suite: its parameters and, if they apply to it, capacity and positions."""
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


def schema() -> dict[str, Any]:
    """JSON schema of suite files for editors, with the available policies and tasks and their options."""
    entries: list[dict[str, Any]] = []
    policies = plugins.working_policies()
    for name, kind in policies.items():
        fields = entry_schema(name, kind).model_json_schema()["properties"]
        listed = {k: _or_list(v) for k, v in fields.items()}
        entries.append({
            "type": "object", "required": ["name"], "additionalProperties": False,
            "properties": {"name": {"const": name}} | listed,
        })  # fmt: skip
    tasks = [task.options.model_json_schema() for task in plugins.working_tasks().values()]
    models = [ModelSpec.model_json_schema()]
    for options in (*tasks, *models):
        options["properties"] = {k: _or_list(v) for k, v in options["properties"].items()}
    for options in tasks:
        about = "policies to run the task with; all of the suite's if not given"
        options["properties"]["policies"] = {"type": "array", "items": {"type": "string"}, "description": about}
    result = SuiteFile.model_json_schema()
    own = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "pattern": ":"}}}
    names: dict[str, Any] = {"anyOf": [{"enum": list(policies)}, {"type": "string", "pattern": ":"}]}
    result["properties"]["policies"]["items"] = {"anyOf": [names, *entries, own]}
    for key, kinds in (("task", tasks), ("model", models)):
        one = {"anyOf": [*kinds, own] if key == "task" else kinds}
        result["properties"][key] = {"anyOf": [one, {"type": "array", "items": one}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "KV Bench suite"} | result


def _or_list(one: dict[str, Any]) -> dict[str, Any]:
    """A schema that accepts a value or a list of them."""
    return {"anyOf": [one, {"type": "array", "items": one}]}
