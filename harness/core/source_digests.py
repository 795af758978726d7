"""Digests of the source of policies and tasks. They are part of a record's key: a changed policy is measured again."""

from __future__ import annotations

import hashlib
import inspect
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.policies import Policy


def source_digest(policy: Policy) -> str:
    """sha256 of the source that decides what a policy keeps: its modules, its statistics, and the policies inside it.

    Of somebody else's cache: versions of packages, and the source of what is outside transformers.
    """
    from kvbench.harness.core.contestants import Contestant
    from kvbench.harness.core.parameters import policies_inside
    from kvbench.policies import Policy

    if isinstance(policy, Contestant):
        texts = [_source(sys.modules[name]) or _members(policy.named_class) for name in policy.modules]
        texts += [source_digest(inside) for inside in policies_inside(policy)]
        return hashlib.sha256("\0".join([policy.code, *texts]).encode()).hexdigest()
    kinds = [c for c in type(policy).__mro__ if issubclass(c, Policy) and c is not Policy]
    parts = []
    for module in dict.fromkeys(c.__module__ for c in kinds):
        text = _source(sys.modules[module])
        parts += [_members(c) for c in kinds if c.__module__ == module] if text is None else [text]
    parts += [_source(type(s)) or _members(type(s)) for s in policy.statistics]
    parts += [source_digest(inside) for inside in policies_inside(policy)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def task_digest(task: type[object]) -> str:
    """sha256 of the source of a user's task: the modules of its class and base classes, except ours."""
    modules = dict.fromkeys(c.__module__ for c in task.__mro__ if not c.__module__.startswith("kvbench.") and c is not object)
    return hashlib.sha256("\0".join(_source(sys.modules[m]) or repr(m) for m in modules).encode()).hexdigest()


def code_versions() -> dict[str, str]:
    """Return the digest of our code, and versions of packages that decide figures; "none" for one that is not installed."""
    digest = hashlib.sha256()
    for package in ("policies", "harness"):
        for file in sorted((Path(__file__).parents[2] / package).resolve().rglob("*.py"), key=str):
            digest.update(file.name.encode() + file.read_bytes())
    known = {"kv-bench's code": digest.hexdigest()[:12]}
    for package in ("torch", "transformers"):
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            known[package] = "none"
    return known


def _source(code: ModuleType | type) -> str | None:
    """The source text; None without a file, e.g. in a notebook.

    It says `policies` instead of `kvbench.policies`, the name of that package when older records were written.
    """
    try:
        return inspect.getsource(code).replace("kvbench.policies", "policies")
    except (OSError, TypeError):
        return None


def _members(kind: type) -> str:
    """A substitute for the source of a class without a file: its functions, as text or bytecode, and its plain values."""
    lines = []
    for name, value in sorted(vars(kind).items()):
        function = inspect.unwrap(getattr(value, "__func__", value))
        if inspect.isfunction(function) and not name.startswith("__"):
            lines.append(f"{name}: {_function(function)}")
        elif isinstance(value, (str, bool, int, float)) and not name.startswith("__"):
            lines.append(f"{name} = {value!r}")
    return "\n".join([kind.__name__, *lines])


def _function(function: FunctionType) -> str:
    try:
        return inspect.getsource(function)  # in a notebook, only functions have a source
    except (OSError, TypeError):
        return _bytecode(function.__code__)


def _bytecode(code: CodeType) -> str:
    constants = [_bytecode(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
