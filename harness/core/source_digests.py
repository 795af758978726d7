"""Digests of the source of policies and tasks. The digests are part of a record's key, so a changed policy is measured again.

Docstrings, comments and blank lines don't count.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import sys
import textwrap
import tokenize
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.policies import Policy

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_QUOTES = ('"', "'", 'r"', "r'")


def source_digest(policy: Policy) -> str:
    """Return the sha256 of the source that decides which tokens a policy keeps: modules, statistics, and policies inside.

    For a contestant, the digest covers package versions and the source of its classes outside transformers.
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
    """Return the sha256 of the source of a user's task: the modules of its class and base classes, except our modules."""
    modules = dict.fromkeys(c.__module__ for c in task.__mro__ if not c.__module__.startswith("kvbench.") and c is not object)
    return hashlib.sha256("\0".join(_source(sys.modules[m]) or repr(m) for m in modules).encode()).hexdigest()


def code_versions() -> dict[str, str]:
    """Return the digest of our code, and the versions of packages that decide figures, "none" if a package is not installed."""
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
    """Return the statements of the source; None without a file, e.g. in a notebook."""
    try:
        return _statements(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError):
        return None


def _statements(source: str) -> str:
    """Remove docstrings, comments and blank lines. Only text is cut out, so the result is the same in every version of Python."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
            if lines[first - 1].lstrip().startswith(_QUOTES):  # not on the line of the `def` or `class`
                lines[first - 1 : last] = [""] * (last + 1 - first)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _members(kind: type) -> str:
    """Return a substitute for the source of a class without a file: its functions, as text or bytecode, and plain values."""
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
