"""Finding policies and tasks by name: ours are the files of their folders, a user's are a path or an entry point."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from kvbench.harness.core.errors import UserError, described, did_you_mean

if TYPE_CHECKING:
    from kvbench.policies import Policy

T = TypeVar("T")
_PLUGINS = "bench.policies"  # the entry-point group
_POLICIES, _TASKS = "kvbench.policies", "kvbench.harness.tasks"
_NOT_POLICIES = {"policy", "statistics"}
_NOT_TASKS = {"task", "answering", "lane", "latency_options"}


def policy_names() -> list[str]:
    """Ours and those of installed plug-ins, which come through the entry-point group `bench.policies`."""
    return sorted({*_modules(_POLICIES, _NOT_POLICIES), *(e.name for e in entry_points(group=_PLUGINS))})


def working_policies() -> dict[str, type[Policy]]:
    """The policies by name, without plug-ins that can't be loaded."""
    found = {}
    for name in policy_names():
        with contextlib.suppress(UserError):
            found[name] = policy_class(name)
    return found


def ignored_plugins(name: str | None = None) -> dict[str, str]:
    """What each ignored entry point stands for ("package.module:Class"), and why it is ignored: its name is taken.

    Args:
        name: only those of this name.
    """
    ours, taken, ignored = _modules(_POLICIES, _NOT_POLICIES), set[str](), {}
    for entry in entry_points(group=_PLUGINS):
        if name not in (None, entry.name):
            continue
        if entry.name in ours:
            ignored[entry.value] = f"ignored: '{entry.name}' is a policy of ours; its package must name it otherwise"
        elif entry.name in taken:
            ignored[entry.value] = f"ignored: another package has a policy '{entry.name}', too"
        taken.add(entry.name)
    return ignored


def is_ours(policy: type[Policy]) -> bool:
    """Whether a policy comes with the project."""
    return policy.__module__.startswith(f"{_POLICIES}.")


def name_of(policy: type[Policy]) -> str:
    """The name by which `policy_class` finds a class again: ours by their names, others as `module:Class`.

    Raises:
        UserError: it was defined inside a function or a class.
    """
    if is_ours(policy):
        return policy.__module__.rpartition(".")[2]
    if "." in policy.__qualname__:
        raise UserError(f"{policy.__qualname__}: define the policy at the top of its file or notebook, so that it can be found")
    return f"{policy.__module__}:{policy.__name__}"


def task_names() -> list[str]:
    """The tasks there are."""
    return _modules(_TASKS, _NOT_TASKS)


def policy_class(name: str) -> type[Policy]:
    """The policy of a name, of `package.module:Class` or of `path/to/file.py:Class`.

    Raises:
        UserError: there is none, or it can't be imported.
    """
    from kvbench.policies import Policy

    if ":" in name:
        where, _, attribute = name.rpartition(":")
        module = _user_module(where)
        found = getattr(module, attribute, None)
        if found is None:
            raise UserError(f"{where} has no '{attribute}'; {_classes_in(module, where)}")
    elif name.endswith(".py"):
        raise UserError(f"{name}: {_classes_in(_user_module(name), name)}")
    elif name in _modules(_POLICIES, _NOT_POLICIES):
        found = _defined_in(importlib.import_module(f"{_POLICIES}.{name}"), Policy)
    else:
        entries = [e for e in entry_points(group=_PLUGINS) if e.name == name]
        if not entries:
            raise UserError(f"unknown policy '{name}'{did_you_mean(name, policy_names())}")
        found = _plugin(entries[0])
    if not (inspect.isclass(found) and issubclass(found, Policy)):
        raise UserError(f"{name} is not a kvbench.Policy")
    return found


def task_class(name: str) -> type[Any]:
    """The task of a name: a `Task` of `harness/tasks`, which is imported by name because tasks import this package.

    Raises:
        UserError: there is none.
    """
    if name not in task_names():
        raise UserError(f"unknown task '{name}'{did_you_mean(name, task_names())}")
    kind: type[Any] = importlib.import_module(f"{_TASKS}.task").Task
    return _defined_in(importlib.import_module(f"{_TASKS}.{name}"), kind)


def _modules(package: str, infrastructure: set[str]) -> list[str]:
    """A package's modules, found as files, so that adding one is all it takes."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return sorted(m.name for m in pkgutil.iter_modules(spec.submodule_search_locations) if m.name not in infrastructure)


def _defined_in(module: ModuleType, kind: type[T]) -> type[T]:
    """The one class of a kind that a module defines itself."""
    found = [x for x in vars(module).values() if inspect.isclass(x) and issubclass(x, kind) and x.__module__ == module.__name__]
    assert len(found) == 1, f"{module.__name__} must define one {kind.__name__}, not {len(found)}"
    return found[0]


def _classes_in(module: ModuleType, where: str) -> str:
    """The policies that a user's module defines, as they are named on the command line."""
    from kvbench.policies import Policy

    kinds = [x for x in vars(module).values() if inspect.isclass(x) and issubclass(x, Policy)]
    names = [f"{where}:{x.__name__}" for x in kinds if x.__module__ == module.__name__]
    return f"name the class, e.g. {', '.join(names)}" if names else "it defines no class that inherits from kvbench.Policy"


def _plugin(entry: EntryPoint) -> object:
    """What an entry point stands for.

    Raises:
        UserError: it can't be imported, or its module does not have it.
    """
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise UserError(f"the plug-in '{entry.name}' ({entry.value}) can't be loaded: {described(error)}") from error


def _user_module(where: str) -> ModuleType:
    """A user's module, by file or by dotted name.

    Raises:
        UserError: there is none, or it can't be imported.
    """
    try:
        if not where.endswith(".py"):
            if str(Path.cwd()) not in sys.path:  # as `python -m` would find it; the console script does not
                sys.path.append(str(Path.cwd()))
            return importlib.import_module(where)
        path = Path(where).expanduser().resolve()
        if not path.exists():
            raise UserError(f"{where}: no such file")
        name = f"bench_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{where}.".startswith(f"{error.name}."):
            raise UserError(f"{where}: no such module here or installed") from error
        raise UserError(f"{where}: can't be imported: {described(error)}") from error
