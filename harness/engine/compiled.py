"""Compiled walks: the C template of `walk_kernel.c` with a policy's own expressions, built once a machine by its C compiler.

Optional: without a compiler, or for a policy that does more than arithmetic on a slot's own numbers, the plain walk is used.
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

from harness.engine.tracing import NotTraceableError, traced
from policies import Policy

_TEMPLATE = Path(__file__).with_name("walk_kernel.c")
_FLAGS = [  # infinities and NaN keep their meaning; sums may be reordered
    "-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-fno-signed-zeros", "-fassociative-math",
]  # fmt: skip
_ARRAYS, _NUMBERS = 10, 10  # arguments of the kernel: arrays, and integers before `initial`


def why_not(policy: Policy) -> str:
    """Why a bound policy has no compiled walk; empty if it has one, as far as can be told without building it."""
    try:
        traced(policy)
    except NotTraceableError as error:
        return f"{error} can't be compiled"
    return "" if _compiler() else "no C compiler (cc)"


def compiled(policy: Policy) -> Any:
    """The compiled walk of a bound policy, a function of ctypes; None if there is none."""
    return None if why_not(policy) else _built(*traced(policy))


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc"))


@lru_cache
def _built(importance: str, update: str) -> Any:
    source = _TEMPLATE.read_text(encoding="utf-8").replace("(IMPORTANCE)", f"({importance})").replace("(UPDATE)", f"({update})")
    key = hashlib.sha256("\0".join([source, *_FLAGS, str(_compiler()), platform.processor(), platform.node()]).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kv-bench" / "kernels"
    library = folder / f"walk_{key.hexdigest()[:16]}.so"
    if not library.exists() and not _build(source, library):
        return None
    kernel = ctypes.CDLL(str(library)).walk
    kernel.restype = ctypes.c_int64
    kernel.argtypes = [
        *[ctypes.c_void_p] * _ARRAYS, *[ctypes.c_int64] * _NUMBERS, ctypes.c_float, *[ctypes.c_int64] * 4
    ]  # fmt: skip
    return kernel


def _build(source: str, library: Path) -> bool:
    """Compile; False where that does not work, for whatever reason: the plain walk is always there."""
    compiler = _compiler()
    assert compiler
    partial = library.with_suffix(f".{os.getpid()}.so")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        command = [compiler, *_FLAGS, "-x", "c", "-", "-o", str(partial), "-lm"]
        if subprocess.run(command, input=source, text=True, capture_output=True, timeout=120).returncode:
            return False
        os.replace(partial, library)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return True
