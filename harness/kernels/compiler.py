"""Builds functions in C with the machine's C compiler, once per machine. Without a compiler the plain code is used.

Built libraries are kept in the user's cache folder. A library's name contains the hash of everything it was built from and the
hash of the file itself. A file that does not match its name, or that others could have written, is never loaded.
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
from kvbench.harness.kernels.tracing import NotTraceableError, traced
from kvbench.policies import Policy

_HERE = Path(__file__).parent
_TIMEOUT_S = 120
_FLAGS = [  # sums may be reordered, but infinities and NaN keep their meaning
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
]


class Built(NamedTuple):
    """A ctypes function, or why there is none."""

    function: Any = None
    why_not: str = ""


class BuildError(RuntimeError):
    """The compiler failed; the message says why, in one line."""


def compiler() -> str | None:
    """The path of the C compiler; None if there is none."""
    return shutil.which(os.environ.get("CC", "cc"))


def built(template: str, name: str, replaced: tuple[tuple[str, str], ...]) -> Built:
    """Build a function from a C file in this folder.

    Args:
        template: name of the file.
        replaced: pairs of a text in the file and its replacement.
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
    """Build a function from a C file, with a bound policy's expressions put in.

    Raises:
        NotTraceableError: the policy has no such expressions.
    """
    formulas = traced(policy)
    parts = {
        "NUMBERS": str(len(formulas.updates)),
        "MOST_READ": str(int("most" in formulas.reads)),
        "WIDTHS": ", ".join(map(str, formulas.widths)) or "0",
        "IMPORTANCE": formulas.importance,
        "UPDATES": ", ".join(formulas.updates) or "0",
    }
    return built(template, name, tuple((f"{part}_OF_POLICY", text) for part, text in parts.items()))


def built_without_policy(template: str, name: str) -> Built:
    """Build a function from a C file that takes a policy's importance and never calls its expressions."""
    nothing = dict.fromkeys(("NUMBERS", "MOST_READ", "WIDTHS", "IMPORTANCE", "UPDATES"), "0")
    return built(template, name, tuple((f"{part}_OF_POLICY", text) for part, text in nothing.items()))


def why_untraced(policy: Policy) -> str:
    """Why a bound policy can't be put into a compiled walk; empty if it can."""
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
    """The function from an earlier build; if there is none or it can't be loaded, from a new build."""
    key = "\0".join([source, *_FLAGS, command, _target(command), *platform.libc_ver()])
    stem = f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    for library in _intact(folder, stem):
        try:
            return Built(_loaded(library, name))
        except (OSError, AttributeError):  # e.g. built on a machine with other system libraries
            continue
    try:
        return Built(_loaded(_build(source, command, folder, stem), name))
    except (OSError, AttributeError, BuildError, subprocess.SubprocessError) as error:
        return Built(why_not=f"{name}.c can't be built: {' '.join(str(error).split())}"[:300])


@lru_cache
def _target(command: str) -> str:
    """The compiler's predefined macros, which include its version and the instruction sets that it uses on this CPU."""
    arguments = [command, "-march=native", "-dM", "-E", "-x", "c", os.devnull]
    try:
        return subprocess.run(arguments, text=True, capture_output=True, timeout=_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError):  # building will fail, too, with a better message
        return ""


def _intact(folder: Path, stem: str) -> Iterator[Path]:
    """Libraries whose content matches their name and that others can't change. Damaged ones are removed."""
    for library in sorted(folder.glob(f"{stem}_*.so")):
        try:
            if why_unsafe(library):
                continue
            if library == _named(library, folder, stem):
                yield library
            else:
                library.unlink()
        except OSError:  # another process removed it
            continue


def _named(library: Path, folder: Path, stem: str) -> Path:
    """The path where a library with this content belongs."""
    with library.open("rb") as file:
        return folder / f"{stem}_{hashlib.file_digest(file, 'sha256').hexdigest()[:32]}.so"


def _loaded(library: Path, name: str) -> Any:
    """Load a function from a library.

    Raises:
        OSError: the library can't be loaded.
        AttributeError: it has no such function.
    """
    return getattr(ctypes.CDLL(str(library)), name)


def _build(source: str, command: str, folder: Path, stem: str) -> Path:
    """Compile a library. Several processes may build the same one at once.

    Raises:
        BuildError: the compiler reports an error.
        OSError: the folder is not writable.
        SubprocessError: the compiler takes too long.
    """
    partial = new_partial(folder / stem)
    try:
        arguments = [command, *_FLAGS, "-x", "c", "-", "-o", str(partial), "-lm"]
        done = subprocess.run(arguments, input=source, text=True, capture_output=True, timeout=_TIMEOUT_S)
        if done.returncode:
            first_error = next((line for line in done.stderr.splitlines() if "error" in line), "")
            raise BuildError(f"{command} ended with exit code {done.returncode}{first_error and ': '}{first_error}")
        partial.chmod(0o700)  # the linker follows the umask
        library = _named(partial, folder, stem)
        put_in_place(partial, library)
    finally:
        partial.unlink(missing_ok=True)
    return library
