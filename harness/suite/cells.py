"""Loading of suites: check the YAML, report mistakes with their line, and expand its lists into cells.

A list of capacities, times of eviction, seeds, models or values of any policy parameter gives one cell per item.
"""

from __future__ import annotations

import itertools
import typing
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

from kvbench.harness.core import plugins
from kvbench.harness.core.codec import Codec
from kvbench.harness.core.errors import UserError, did_you_mean
from kvbench.harness.core.evict import Evict, at_once, evict_as_json, evict_words
from kvbench.harness.core.grouped import distinguishing_keys, grouped
from kvbench.harness.core.parameters import names_inside, parameters_of, policy_from
from kvbench.harness.core.resets import holds_kv
from kvbench.harness.core.workload import Workload
from kvbench.harness.models.shape import ModelShape
from kvbench.harness.records import digest
from kvbench.harness.records.cell import CellSpec, Options, flat
from kvbench.harness.suite.axes import evict_from, multiplied
from kvbench.harness.suite.entries import Entry, capacity_of, entries
from kvbench.harness.suite.file import ModelSpec, Resources, SuiteFile
from kvbench.harness.suite.overrides import override
from kvbench.harness.suite.text import Location, Source, items, spread, validated
from kvbench.policies import Policy, PositionMode

MAX_CELLS = 100_000
T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """Combination of model, policy, capacity, evict, task and seed: the unit of work, of resuming and of records."""

    suite: str
    suite_version: int
    model: ModelSpec
    task: Any  # the task's options
    name: str  # name of the policy in the suite
    policy: Policy
    capacity: int | None
    positions: PositionMode
    limit: int | None
    seed: int
    evict: Evict = 1
    kv: Codec | None = None  # codec of stored K and V; None: the model's dtype
    place: str = field(default="", compare=False)  # place of the policy in the suite's file, for messages
    resources: Resources = field(default=Resources(), compare=False)  # resources of a worker that measures the cell

    def as_json(self) -> dict[str, Any]:
        """Return the form that records keep. All defaults are filled in, except those of axes and parameters added later."""
        bound = self.policy if self.capacity is None else self.policy.bind(self.capacity)
        added: dict[str, Any] = {} if self.evict == 1 else {"evict": evict_as_json(self.evict)}
        added |= {} if self.kv is None else {"kv": self.kv.as_json()}
        return {
            "suite": self.suite,
            "suite_version": self.suite_version,
            "model": self.model.as_json(),
            "task": self.task.model_dump(exclude_none=True, exclude=set(self.task.not_recorded))
            | {"name": plugins.recorded_name(self.task.name)},
            "policy": plugins.recorded_name(self.name),
            "parameters": parameters_of(bound, recorded=True),
            "capacity": self.capacity,
            "positions": self.positions,
            "limit": self.limit,
            "seed": self.seed,
        } | added

    @property
    def id(self) -> str:
        """Hash of `as_json`."""
        return digest(self.as_json())

    @property
    def workload(self) -> Workload:
        """Sizes of the cell's work."""
        work: Workload = plugins.task_class(self.task.name).workload(self.task)
        return work

    @property
    def reference(self) -> Cell | None:
        """Cell whose record the task needs while this cell is measured; None without such a need, or for a reference itself."""
        name = self.workload.reference
        if name is None or (self.name == name and self.kv is None):
            return None
        policy = policy_from(name, {})
        if policy.evicts and self.capacity is None:  # this cell is unbounded, so no reference has its capacity
            return None
        capacity = self.capacity if policy.evicts else None
        return replace(
            self, name=name, policy=policy, capacity=capacity, positions="cache", limit=None, evict=1, kv=None, place=""
        )

    @property
    def label(self) -> str:
        """Short name for messages and progress."""
        parts = [self.name, *(str(c) for c in [self.capacity] if c is not None), *evict_words(self.evict)]
        parts += [self.positions] if self.positions != "cache" else []
        parts += [str(self.kv)] if self.kv else []
        return " ".join([*parts, *([f"seed {self.seed}"] if self.seed else [])])

    @property
    def most_kept(self) -> int | None:
        """Largest number of tokens that a KV head keeps between steps, on average; None if unbounded."""
        return None if self.capacity is None or self.evict == "prompt" else self.capacity + at_once(self.evict) - 1

    def kv_bytes(self, shape: ModelShape) -> int:
        """Return the largest number of bytes of K and V that the cell holds, over all streams that must be read at once."""
        if not holds_kv(self.policy):
            return 0
        work, itemsize = self.workload, getattr(torch, self.model.dtype).itemsize
        return shape.kv_bytes(self.most_kept or work.length, work.side_by_side, itemsize, self.kv)


def labels(cells: Sequence[Cell]) -> dict[str, str]:
    """Return short names by cell id, extended by the models, parameters and task options that tell the cells apart."""
    specs = [cell.as_json() for cell in cells]
    tasks = grouped(range(len(cells)), lambda place: cells[place].task.name)
    rivals = grouped(range(len(cells)), lambda place: (cells[place].name, cells[place].capacity))
    options = {name: distinguishing_keys([specs[place]["task"] for place in group]) for name, group in tasks.items()}
    shown = [flat(spec["parameters"]) for spec in specs]
    parameters = {key: distinguishing_keys([shown[place] for place in group]) for key, group in rivals.items()}
    several_models = len({cell.model.id for cell in cells}) > 1
    names = {}
    for cell, spec, values in zip(cells, specs, shown, strict=True):
        parts = [*([cell.model.id] if several_models else []), *([cell.task.name] if len(tasks) > 1 else []), cell.label]
        parts += [f"{n} {values[n]}" for n in parameters[cell.name, cell.capacity] if n in values]
        parts += [f"{n} {spec['task'][n]}" for n in options[cell.task.name] if n in spec["task"]]
        names[digest(spec)] = ", ".join(parts)
    return names


def find(name: str) -> Path:
    """Return the file of a suite, given its path or the name of a bundled suite.

    Raises:
        UserError: `name` is neither.
    """
    path = Path(name)
    if path.exists() and not path.is_dir():
        return path
    shipped = {p.stem: p for p in shipped_suites()}
    if name in shipped:
        return shipped[name]
    raise UserError(f"{name}: no such suite{did_you_mean(path.stem, shipped)}")


def shipped_suites() -> list[Path]:
    """Return the files of the suites that come with the project, in the checkout or the installed package."""
    folder = Path(__file__).resolve().parents[2] / "suites"  # beside `harness`, in the checkout as in the wheel
    return sorted(folder.glob("*.yaml"))


def load(
    path: Path, model: str | None = None, dtype: str | None = None, policies: Sequence[str] = (), settings: Sequence[str] = ()
) -> tuple[SuiteFile, list[Cell]]:
    """Read and check a suite, and expand its lists into cells. `model` to `settings` change the suite, see `override`.

    Raises:
        UserError: the suite has a mistake. The message names the first one with its line.
    """
    source = Source(path)
    override(source, model, dtype, policies, settings)
    suite = validated(SuiteFile, source.data, source, ())
    models = _bounded(
        (validated(ModelSpec, m, source, ("model", *i)) for i, given in items(suite.model) for m in spread(given)), path
    )
    tasks = _bounded((one for i, given in items(suite.task) for one in _tasks(given, source, ("task", *i))), path)
    chosen = _bounded((entry for i in range(len(suite.policies)) for entry in entries(suite, i, source)), path)
    idle = [task for task in tasks if task.is_idle(chosen)]
    if idle and (not policies or len(idle) == len(tasks)):
        raise _idle(idle[0], chosen, source)
    resources = validated(Resources, suite.resources or {}, source, ("resources",))
    cells = _bounded(
        (
            _cell(suite, spec, task, entry, source, resources)
            for spec, task, entry in itertools.product(models, tasks, chosen)
            if task.is_for(entry)
        ),
        path,
    )
    unique = _unique(cells)
    if not unique:
        raise UserError(f"{path}: 0 cells: one of its lists is empty")
    return suite, with_references(unique)


def _unique(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells without duplicates.

    Raises:
        UserError: two cells have the same id, but their policy, task or model is in different files. Ids leave out folders.
    """
    known: dict[str, Cell] = {}
    for cell in cells:
        other = known.setdefault(cell.id, cell)
        if other is cell:
            continue
        for (name, source), (other_name, other_source) in zip(_sources(cell), _sources(other), strict=True):
            if source != other_source:
                raise UserError(f"{other_name} and {name} would have the same records, which leave out folders: rename one")
    return list(known.values())


def _sources(cell: Cell) -> list[tuple[str, object]]:
    """Return the policy class, task class and model path that a cell's names refer to on this machine."""
    model = cell.model.id
    task = plugins.task_class(cell.task.name)
    return [(cell.name, type(cell.policy)), (cell.task.name, task), (model, Path(model).expanduser().resolve())]


def with_references(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells, each after its reference. Missing references are added."""
    given = {cell.id: cell for cell in cells}
    ordered: dict[str, Cell] = {}
    for cell in given.values():
        reference = cell.reference
        if reference is not None:
            ordered.setdefault(reference.id, given.get(reference.id, reference))
        ordered.setdefault(cell.id, cell)
    return list(ordered.values())


def _idle(task: _TaskEntry, entries: Sequence[Entry], source: Source) -> UserError:
    """Return the error of a task whose times of eviction no policy has. It would silently measure `dense` alone."""
    theirs, its = (", ".join(dict.fromkeys(str(evict_as_json(m)) for m in x)) for x in (_moments(entries), task.evicts or []))
    says = f"evict: {its}, but the suite's policies evict: {theirs}; add it to the suite's evict"
    return source.error((*task.location, "evict"), says)


def _moments(entries: Sequence[Entry]) -> list[Evict]:
    """Return the times of eviction of the entries to which they matter."""
    return [entry.evict for entry in entries if entry.has_moment]


def _bounded(values: Iterable[T], path: Path) -> list[T]:
    """Return the values as a list.

    Raises:
        UserError: more than `MAX_CELLS` values.
    """
    bounded = list(itertools.islice(values, MAX_CELLS + 1))
    if len(bounded) > MAX_CELLS:
        raise UserError(f"{path}: more than {MAX_CELLS:,} cells, because its lists multiply; make them shorter")
    return bounded


def cell_from_spec(recorded: CellSpec, model: str | None = None, trusted: Collection[str] = ()) -> Cell:
    """Return the cell of a record, to measure it again.

    Args:
        model: present path of a local model.
        trusted: policies of users' files, `FILE.py:NAME`, that may be imported. A record alone never makes its reader run a file.

    Raises:
        UserError: this version can't run the cell, or its policy is in a user's file that is not trusted, or its task in one.
    """
    for name in (recorded.policy, *names_inside(recorded.parameters)):
        if ":" in name and not name.startswith("hf:") and name not in trusted:
            raise UserError(f"the policy {name} is defined in a user's file: add --policy {name}")
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
            policy=policy_from(recorded.policy, recorded.parameters),
            capacity=recorded.capacity,
            positions=_position_mode(recorded.positions),
            limit=recorded.limit,
            seed=recorded.seed,
            evict=recorded.moment,
            kv=recorded.codec,
        )
        same = cell.as_json() | ({"model": spec["model"]} if model else {}) == spec
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"this version can't run the recorded cell: {str(error).splitlines()[0]}") from None
    if not same:
        raise UserError("the recorded cell means something else in this version: measure its suite instead")
    return cell


def _position_mode(name: str) -> PositionMode:
    if name not in typing.get_args(PositionMode):
        raise ValueError(f"positions {name}")
    return cast(PositionMode, name)


class _TaskEntry(NamedTuple):
    """A task, and the policies and times of eviction to measure it with."""

    task: type[Any]  # a `Task`
    options: Options
    policies: list[str] | None  # names of policies; None: all
    evicts: list[Evict] | None  # times of eviction; None: all
    location: Location  # location in the suite's file

    def is_for(self, entry: Entry) -> bool:
        """Whether an entry of the suite's policies is measured in this task."""
        return (self.policies is None or entry.name in self.policies) and (
            self.evicts is None or not entry.has_moment or entry.evict in self.evicts
        )

    def is_idle(self, entries: Sequence[Entry]) -> bool:
        """Whether no entry evicts at one of the task's times, although some evict."""
        moments = _moments(entries)
        return self.evicts is not None and bool(moments) and not set(self.evicts) & set(moments)


def _tasks(given: dict[str, Any], source: Source, location: Location) -> Iterator[_TaskEntry]:
    """Yield the tasks of an entry, with its lists expanded."""
    only = given.get("policies")
    if only is not None and not (isinstance(only, list) and all(isinstance(name, str) for name in only)):
        raise source.error((*location, "policies"), "a list of the names of policies")
    for name in only or []:
        try:
            plugins.policy_class(name)
        except UserError as error:
            raise source.error((*location, "policies"), str(error)) from None
    try:
        evicts = [evict_from(value) for value in multiplied(given["evict"])] if "evict" in given else None
    except ValueError as error:
        raise source.error((*location, "evict"), f"evict: {error}, not {repr(given['evict'])[:60]}") from None
    for one in spread({k: v for k, v in given.items() if k not in ("policies", "evict")}):
        yield _TaskEntry(*_task(one, source, location), only, evicts, location)


def _cell(suite: SuiteFile, model: ModelSpec, given: _TaskEntry, entry: Entry, source: Source, resources: Resources) -> Cell:
    return Cell(
        suite.suite,
        suite.version,
        model,
        given.options,
        entry.name,
        entry.policy,
        _capacity(model, given, entry, source),
        entry.positions,
        entry.limit,
        entry.seed,
        entry.evict,
        entry.kv,
        source.place(entry.location),
        resources,
    )


def _capacity(model: ModelSpec, given: _TaskEntry, entry: Entry, source: Source) -> int | None:
    """Return the capacity of a cell, in tokens; None if the entry has no budget.

    Raises:
        UserError: the capacity can't be computed, the policy can't serve it, or the task refuses this time of eviction.
    """
    work = given.task.workload(given.options)
    if entry.evict == "prompt" and (work.not_after_prompt or work.prompt == 0):
        refused = work.not_after_prompt or f"prompt waits for the end of a prompt, but task {given.options.name} has none"
        hint = ": give it prompt: TOKENS" if getattr(given.options, "prompt", 0) is None else ""
        raise source.error((*entry.location, "evict"), f"evict: {refused}{hint}")
    if entry.budget is None or isinstance(entry.budget, int):
        return entry.budget
    try:
        capacity = capacity_of(entry, entry.budget, model, work.prompt or None)
    except ValueError as error:
        raise source.error((*entry.location, "capacity"), f"capacity: {error}") from None
    entry.refuse_if_unfit(capacity, source)
    return capacity


def _task(value: dict[str, Any], source: Source, location: Location) -> tuple[type[Any], Options]:
    name = value.get("name")
    if not isinstance(name, str):
        raise source.error(location, "the task's 'name' is missing")
    try:
        task = plugins.task_class(name)
    except UserError as error:
        raise source.error((*location, "name"), str(error)) from None
    return task, validated(task.options, value, source, location)
