"""Functions in C, built once a machine by its C compiler. Optional: without a compiler the plain code is used.

Built libraries lie in the user's cache folder under a hash of their source and of how they were built.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.engine.kernels.tracing import NotTraceableError, traced
from policies import Policy

_HERE = Path(__file__).parent
_FLAGS = [  # infinities and NaN keep their meaning; sums may be reordered
    "-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-fno-signed-zeros", "-fassociative-math",
]  # fmt: skip


def cache_folder() -> Path:
    """Where what is built is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kv-bench" / "kernels"


def compiler() -> str | None:
    """The C compiler, if there is one."""
    return shutil.which(os.environ.get("CC", "cc"))


@lru_cache
def function(template: str, name: str, replaced: tuple[tuple[str, str], ...]) -> Any:
    """A function of a C file beside this one, made a function of ctypes; None where it can't be built.

    Args:
        template: name of the file.
        name: of the function.
        replaced: texts of the file, and what is put in their place.
    """
    source = (_HERE / template).read_text(encoding="utf-8")
    headers = [(f'#include "{path.name}"', path.read_text(encoding="utf-8")) for path in _HERE.glob("*.h")]
    for old, new in (*headers, *replaced):
        source = source.replace(old, new)
    key = hashlib.sha256("\0".join([source, *_FLAGS, str(compiler()), platform.processor(), platform.node()]).encode())
    library = cache_folder() / f"{name}_{key.hexdigest()[:16]}.so"
    if not library.exists() and not _build(source, library):
        return None
    return getattr(ctypes.CDLL(str(library)), name)


def why_not(policy: Policy) -> str:
    """Why a bound policy has no compiled walk; empty if it has one, as far as can be told without building it."""
    try:
        traced(policy)
    except NotTraceableError as error:
        return f"{error} can't be compiled"
    return "" if compiler() else "no C compiler (cc)"


def function_of(policy: Policy, template: str, name: str) -> Any:
    """A C function with a bound policy's expressions put in, as `compiler.function`; None if there is none."""
    if why_not(policy):
        return None
    importance, update = traced(policy)
    return function(template, name, (("(IMPORTANCE)", f"({importance})"), ("(UPDATE)", f"({update})")))


def _build(source: str, library: Path) -> bool:
    """Compile; False where that does not work, for whatever reason: the plain walk is always there."""
    partial = library.with_suffix(f".{os.getpid()}.so")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        command = [str(compiler()), *_FLAGS, "-x", "c", "-", "-o", str(partial), "-lm"]
        if subprocess.run(command, input=source, text=True, capture_output=True, timeout=120).returncode:
            return False
        os.replace(partial, library)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return True
