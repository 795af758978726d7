"""Functions in C, built once a machine by its C compiler. Optional: without a compiler the plain code is used.

Built libraries lie in the user's cache folder. A name holds the hash of all that decides what is built, and the hash of the
file itself: a file that does not match its name, or that others could have written, is never loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.harness.core.files import new_partial, put_in_place
from kvbench.harness.core.user_cache import private_folder, why_unsafe
from kvbench.harness.engine.kernels.tracing import NotTraceableError, traced
from kvbench.policies import Policy

_HERE = Path(__file__).parent
_TIMEOUT_S = 120
_FLAGS = [  # infinities and NaN keep their meaning; sums may be reordered
    "-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-fno-signed-zeros", "-fassociative-math",
]  # fmt: skip


class Built(NamedTuple):
    """A function of ctypes, or why there is none."""

    function: Any = None
    why_not: str = ""


class BuildError(RuntimeError):
    """The compiler did not make a library; the message says why, in one line."""


def compiler() -> str | None:
    """The C compiler, if there is one."""
    return shutil.which(os.environ.get("CC", "cc"))


def built(template: str, name: str, replaced: tuple[tuple[str, str], ...]) -> Built:
    """A function of a C file beside this one.

    Args:
        template: name of the file.
        name: of the function.
        replaced: texts of the file, and what is put in their place.
    """
    source = (_HERE / template).read_text(encoding="utf-8")
    headers = [(f'#include "{path.name}"', path.read_text(encoding="utf-8")) for path in _HERE.glob("*.h")]
    for old, new in (*headers, *replaced):
        source = source.replace(old, new)
    command = compiler()
    if command is None:
        return Built(why_not=f"no C compiler ({os.environ.get('CC', 'cc')})")
    try:
        return _built(source, name, command, private_folder("kernels"))
    except OSError as error:
        return Built(why_not=f"no folder to build in ({error})")


def built_of(policy: Policy, template: str, name: str) -> Built:
    """A C function with a bound policy's expressions put in, as `built`.

    Raises:
        NotTraceableError: the policy has no such expressions.
    """
    importance, update = traced(policy)
    return built(template, name, (("(IMPORTANCE)", f"({importance})"), ("(UPDATE)", f"({update})")))


def why_untraced(policy: Policy) -> str:
    """What of a bound policy has no place in a compiled walk; empty if nothing."""
    try:
        traced(policy)
    except NotTraceableError as error:
        return f"{error} can't be compiled"
    return ""


def why_not(policy: Policy) -> str:
    """Why a bound policy has no compiled walk on this machine; empty if it has one."""
    return why_untraced(policy) or built_of(policy, "walk.c", "walk").why_not


@lru_cache
def _built(source: str, name: str, command: str, folder: Path) -> Built:
    """The function from a library that was built before; else, or if none of them can be loaded, built now."""
    key = "\0".join([source, *_FLAGS, command, _target(command), *platform.libc_ver()])
    stem = f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    for library in _whole(folder, stem):
        try:
            return Built(_loaded(library, name))
        except (OSError, AttributeError):  # built by a machine with other system libraries, say
            continue
    try:
        return Built(_loaded(_build(source, command, folder, stem), name))
    except (OSError, AttributeError, BuildError, subprocess.SubprocessError) as error:
        return Built(why_not=f"{name}.c can't be built: {' '.join(str(error).split())}"[:300])


@lru_cache
def _target(command: str) -> str:
    """What the compiler says of itself and of this CPU: its macros hold its version and every instruction set it would use."""
    asked = [command, "-march=native", "-dM", "-E", "-x", "c", os.devnull]
    try:
        return subprocess.run(asked, text=True, capture_output=True, timeout=_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError):  # then it can't build either, which says more
        return ""


def _whole(folder: Path, stem: str) -> Iterator[Path]:
    """Libraries of a stem that are what their names say, and nobody else's; those of ours that are not are removed."""
    for library in sorted(folder.glob(f"{stem}_*.so")):
        try:
            if why_unsafe(library):
                continue
            if library == _named(library, folder, stem):
                yield library
            else:
                library.unlink()
        except OSError:  # removed by another process that found the same
            continue


def _named(library: Path, folder: Path, stem: str) -> Path:
    """Where a library of this content belongs."""
    with library.open("rb") as file:
        return folder / f"{stem}_{hashlib.file_digest(file, 'sha256').hexdigest()[:32]}.so"


def _loaded(library: Path, name: str) -> Any:
    """A function of a library.

    Raises:
        OSError: it can't be loaded.
        AttributeError: it has no such function.
    """
    return getattr(ctypes.CDLL(str(library)), name)


def _build(source: str, command: str, folder: Path, stem: str) -> Path:
    """Compile a library; several processes may build the same one.

    Raises:
        BuildError: the compiler refuses.
        OSError: the folder can't be written to.
        SubprocessError: the compiler does not come to an end.
    """
    partial = new_partial(folder / stem)
    try:
        asked = [command, *_FLAGS, "-x", "c", "-", "-o", str(partial), "-lm"]
        done = subprocess.run(asked, input=source, text=True, capture_output=True, timeout=_TIMEOUT_S)
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if "error" in line), "")
            raise BuildError(f"{command} ended with exit code {done.returncode}{said and ': '}{said}")
        partial.chmod(0o700)  # the linker goes by the umask
        library = _named(partial, folder, stem)
        put_in_place(partial, library)
    finally:
        partial.unlink(missing_ok=True)
    return library
