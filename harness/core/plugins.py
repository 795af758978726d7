"""Finds policies and tasks by name: built-in modules, a user's files and modules, and entry points of installed plug-ins."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from kvbench.harness.core import user_files
from kvbench.harness.core.errors import UserError, described, did_you_mean

if TYPE_CHECKING:
    from kvbench.policies import Policy

T = TypeVar("T")


@dataclass(frozen=True)
class _Kind:
    """A kind of plug-in, policies or tasks: one class per module.

    Attributes:
        noun: "policy" or "task", for messages.
        package: package whose modules are the built-in plug-ins.
        helpers: modules of the package that are no plug-ins.
        group: group of entry points.
        base: base class of every plug-in, as "module:Class".
        base_name: name of the base class for messages.
    """

    noun: str
    package: str
    helpers: frozenset[str]
    group: str
    base: str
    base_name: str

    def base_class(self) -> type[Any]:
        """Return the base class, imported by name because tasks import this package."""
        module, _, name = self.base.partition(":")
        base: type[Any] = getattr(importlib.import_module(module), name)
        return base


_POLICY = _Kind(
    "policy",
    "kvbench.policies",
    frozenset({"merges", "policy", "selects", "shares", "statistic", "statistics", "tables", "view"}),
    "bench.policies",
    "kvbench.policies:Policy",
    "kvbench.Policy",
)
_TASK = _Kind(
    "task",
    "kvbench.harness.tasks",
    frozenset({"task", "common"}),
    "bench.tasks",
    "kvbench.harness.tasks:Task",
    "kvbench.harness.tasks.Task",
)
_CONTESTANTS = "kvbench.harness.core.contestants"
_tasks_of_files: dict[str, type[Any]] = {}  # tasks that this process has loaded from files, by their name in records


def policy_names() -> list[str]:
    """Return the names of the built-in policies and of the entry points in the group `bench.policies`."""
    return _names(_POLICY)


def task_names() -> list[str]:
    """Return the names of the built-in tasks and of the entry points in the group `bench.tasks`."""
    return _names(_TASK)


def working_policies() -> dict[str, type[Policy]]:
    """Return the policies by name, without plug-ins that can't be loaded."""
    return _working(_POLICY)


def working_tasks() -> dict[str, type[Any]]:
    """Return the tasks by name, without plug-ins that can't be loaded."""
    return _working(_TASK)


def ignored_plugins(name: str | None = None) -> dict[str, str]:
    """Return the entry points of policies that are ignored because their name is taken: "package.module:Class" to reason."""
    builtin, taken, ignored = _modules(_POLICY), set[str](), {}
    for entry in entry_points(group=_POLICY.group):
        if name not in (None, entry.name):
            continue
        if entry.name in builtin:
            ignored[entry.value] = f"ignored: '{entry.name}' is a built-in policy; its package must choose another name"
        elif entry.name in taken:
            ignored[entry.value] = f"ignored: another package has a policy '{entry.name}' too"
        taken.add(entry.name)
    return ignored


def is_ours(plugin: type[Any]) -> bool:
    """Whether a policy or a task comes with the project."""
    return plugin.__module__.startswith((f"{_POLICY.package}.", f"{_TASK.package}.", "kvbench.lab."))


def name_of(policy: type[Policy]) -> str:
    """Return the name by which `policy_class` finds a class.

    The name is a built-in policy's own, the name of a plug-in's entry point, `path/to/file.py:Class`, or `module:Class`. A
    contestant keeps the name by which it was looked up.

    Raises:
        UserError: the class was defined inside a function or a class.
    """
    if is_ours(policy):
        return policy.__module__.rpartition(".")[2]
    if policy.__module__ == _CONTESTANTS:
        return policy.__name__
    if "." in policy.__qualname__:
        raise UserError(f"{policy.__qualname__}: define the policy at the top of its file or notebook, so that it can be found")
    module = policy.__module__
    if module.startswith(user_files.PREFIX):
        return f"{sys.modules[module].__file__}:{policy.__name__}"
    full = f"{module}:{policy.__name__}"
    return next((e.name for e in entry_points(group=_POLICY.group) if e.value == full and e.name not in _modules(_POLICY)), full)


def policy_class(name: str) -> type[Policy]:
    """Return the policy class of a name, of `package.module:Class` or of `path/to/file.py:Class`.

    A class of a cache, or `hf:Class` of transformers, becomes a `Contestant`.

    Raises:
        UserError: no such policy exists, or it can't be imported.
    """
    return _find(_POLICY, name)


def task_class(name: str) -> type[Any]:
    """Return the task class (a `Task` of `harness/tasks`) of a name, of `package.module:Class` or of `path/to/file.py:Class`.

    Raises:
        UserError: no such task exists, or it can't be imported.
    """
    task = _find(_TASK, name)
    if ":" in name:
        _tasks_of_files[recorded_name(name)] = task
    return task


def named_object(name: str) -> object:
    """Return the object that `package.module:Name` or `path/to/file.py:Name` names; None if its module lacks it.

    Raises:
        UserError: the module can't be imported.
    """
    path, _, attribute = name.rpartition(":")
    return getattr(_user_module(path), attribute, None)


def known_task(name: str) -> type[Any] | None:
    """Return the task of a record: a built-in task, an installed plug-in, or a task from a file that the user had loaded.

    A file is never imported merely because a record names it.
    """
    return _tasks_of_files.get(name) if ":" in name else _installed_task(name, tuple(sys.path))


@lru_cache
def _installed_task(name: str, path: tuple[str, ...]) -> type[Any] | None:  # noqa: ARG001 - decides what is installed
    """Return a built-in or installed task; None if no task has the name.

    Args:
        path: `sys.path`, so that a change of it invalidates the cached result.
    """
    with contextlib.suppress(UserError):
        return _find(_TASK, name) if name in task_names() else None
    return None


def recorded_name(name: str) -> str:
    """Return the name of a policy or task in a record, without the folder of its file, which stays private."""
    module, colon, attribute = name.rpartition(":")
    return f"{Path(module).name}{colon}{attribute}"


def _names(kind: _Kind) -> list[str]:
    return sorted({*_modules(kind), *(e.name for e in entry_points(group=kind.group))})


def _working(kind: _Kind) -> dict[str, type[Any]]:
    classes = {}
    for name in _names(kind):
        with contextlib.suppress(UserError):
            classes[name] = _find(kind, name)
    return classes


def _find(kind: _Kind, name: str) -> type[Any]:
    """Return the class with this name.

    Raises:
        UserError: no such class exists, or it can't be imported.
    """
    base = kind.base_class()
    if ":" in name:
        path, _, attribute = name.rpartition(":")
        if kind is _POLICY and path == "hf":
            return _contestants().library_class(attribute)
        plugin: Any = named_object(name)
        if plugin is None:
            raise UserError(f"{path} has no '{attribute}'; {_classes_in(_user_module(path), path, kind)}")
    elif name.endswith(".py"):
        raise UserError(f"{name}: {_classes_in(_user_module(name), name, kind)}")
    elif name in _modules(kind):
        ours = [e for e in _lab_entries() if (e.group, e.name) == (kind.group, name)]
        plugin = load_entry_point(ours[0]) if ours else _defined_in(importlib.import_module(f"{kind.package}.{name}"), base)
    else:
        entries = [e for e in entry_points(group=kind.group) if e.name == name]
        if not entries:
            of_file = f" (a class in a file: FILE.py:{name})" if name[:1].isupper() else ""
            raise UserError(f"unknown {kind.noun} '{name}'{of_file}{did_you_mean(name, _names(kind))}")
        plugin = load_entry_point(entries[0])
    if not (inspect.isclass(plugin) and issubclass(plugin, base)):
        contestant = _contestants().contestant_class(name, plugin) if kind is _POLICY else None
        if contestant is not None:
            return contestant
        raise UserError(f"{name} is not a {kind.base_name}")
    return plugin


def _contestants() -> ModuleType:
    """Return the module of third-party caches, imported late because it imports this module."""
    return importlib.import_module(_CONTESTANTS)


def _modules(kind: _Kind) -> list[str]:
    """Return the names of the plug-in modules in the package. A new file adds a module."""
    spec = importlib.util.find_spec(kind.package)
    assert spec is not None
    assert spec.submodule_search_locations
    return sorted(m.name for m in pkgutil.iter_modules(spec.submodule_search_locations) if m.name not in kind.helpers)


def _defined_in(module: ModuleType, kind: type[T]) -> type[T]:
    """Return the only class of a kind that a module defines itself."""
    classes = [x for x in vars(module).values() if inspect.isclass(x) and issubclass(x, kind) and x.__module__ == module.__name__]
    assert len(classes) == 1, f"{module.__name__} must define one {kind.__name__}, not {len(classes)}"
    return classes[0]


def _classes_in(module: ModuleType, path: str, kind: _Kind) -> str:
    """Return the end of an error message: the policies or tasks that a user's module defines."""
    base = kind.base_class()
    classes = [x for x in vars(module).values() if inspect.isclass(x) and issubclass(x, base)]
    names = [f"{path}:{x.__name__}" for x in classes if x.__module__ == module.__name__]
    return f"name the class, e.g. {', '.join(names)}" if names else f"it defines no class that inherits from {kind.base_name}"


def load_model_type(name: str) -> None:
    """Import the entry point of the group `bench.models` with this name, which registers a model type with transformers.

    Raises:
        UserError: the entry point's module can't be imported or doesn't define the class.
    """
    for entry in entries("bench.models"):
        if entry.name == name:
            load_entry_point(entry)


def entries(group: str) -> list[EntryPoint]:
    """Return the entry points of a group, of `kvbench.lab` and of installed packages."""
    return [*(entry for entry in _lab_entries() if entry.group == group), *entry_points(group=group)]


@lru_cache
def _lab_entries() -> tuple[EntryPoint, ...]:
    """Return the entry points in `lab/entry_points.txt`, a file outside package metadata: a checkout needs no installation."""
    spec = importlib.util.find_spec("kvbench.lab")
    folders = None if spec is None else spec.submodule_search_locations
    return tuple(Distribution.at(folders[0]).entry_points) if folders else ()


def load_entry_point(entry: EntryPoint) -> object:
    """Return the object of an entry point.

    Raises:
        UserError: the entry point's module can't be imported or doesn't define the object.
    """
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise UserError(f"the plug-in '{entry.name}' ({entry.value}) can't be loaded: {described(error)}") from error


def _user_module(source: str) -> ModuleType:
    """Return a user's module, given its file or dotted name."""
    try:
        if not source.endswith(".py"):
            if str(Path.cwd()) not in sys.path:  # like `python -m`, unlike a console script
                sys.path.append(str(Path.cwd()))
            return importlib.import_module(source)
        return user_files.user_module(source)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{source}.".startswith(f"{error.name}."):
            raise UserError(f"{source}: no such module in the current directory or installed") from error
        raise UserError(f"{source}: can't be imported: {described(error)}") from error
