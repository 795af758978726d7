"""Build functions in C with the machine's C compiler, once per machine. Without a compiler, PyTorch code is used.

Built libraries are kept in the user's cache folder. The name of a library contains the hash of all build inputs and the hash of
the file itself. A file that does not match its name, or that other users could have written, is never loaded.
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
from kvbench.harness.kernels.policy_program import ARRAYS, Layout, Programs, programs
from kvbench.harness.kernels.tracing import NotTraceableError, traced
from kvbench.policies import HeadSizes, Policy

_HERE = Path(__file__).parent
_TIMEOUT_S = 120
_SLOTS = 512  # of an example
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

_NO_EXPRESSIONS = dict.fromkeys(("NUMBERS", "MOST_READ", "WIDTHS", "IMPORTANCE", "UPDATES"), "0")
_NO_PROGRAMS = dict.fromkeys((
    "PROGRAMS", "SUMS", "SCRATCH", "RANKS_READ", "LOGITS_READ", "MERGES", "MERGED_WIDTH", "FREQUENCIES", "KEYS_WIDTH",
    "ROTATED_WIDTH", "TERMS_WIDTH", "SUM_OF_TERM",
), "0") | {"TOGETHER": "1", "PROGRAM_TEXTS": ""}  # fmt: skip
_ARRAYS = "\n".join(f"void *const {name} = (void *)a.{name}; (void){name};" for name in ARRAYS)


class Built(NamedTuple):
    """A ctypes function, or the reason that it can't be built. Both are empty if it does not support the layers."""

    function: Any = None
    why_not: str = ""


class BuildError(RuntimeError):
    """The compiler failed; the message gives the reason in one line."""


def compiler() -> str | None:
    """Return the path of the C compiler; None if there is none."""
    return shutil.which(os.environ.get("CC", "cc"))


def built(template: str, name: str, replaced: tuple[tuple[str, str], ...]) -> Built:
    """Build a function from a C file in this folder.

    Args:
        template: name of the file.
        replaced: pairs of a text in the file and a replacement.
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
    """Build a function from a C file and the expressions of a bound policy.

    Raises:
        NotTraceableError: the policy can't be traced to expressions.
    """
    formulas = traced(policy)
    parts = _NO_PROGRAMS | {
        "NUMBERS": str(len(formulas.updates)),
        "MOST_READ": str(int("most" in formulas.reads)),
        "WIDTHS": ", ".join(map(str, formulas.widths)) or "0",
        "IMPORTANCE": formulas.importance,
        "UPDATES": ", ".join(formulas.updates) or "0",
    }
    return _built_of(template, name, parts)


def built_of_programs(found: Programs, template: str, name: str) -> Built:
    """Build a function from a C file and the programs of a policy."""
    functions = (("update", found.update), ("importance", found.importance), ("merge", found.merge))
    texts = (f"static void {name}_program(Arrays a, char *scratch) {{\n{_ARRAYS}\n{x.text}\n}}" for name, x in functions)
    parts = _NO_EXPRESSIONS | {
        "NUMBERS": str(found.numbers),
        "PROGRAMS": "1",
        "TOGETHER": str(found.heads),
        "SUMS": str(found.sums),
        "SCRATCH": str(max(x.scratch for _, x in functions)),
        "RANKS_READ": str(int("rank" in found.reads)),
        "LOGITS_READ": str(int("logits" in found.reads)),
        "MERGED_WIDTH": str(found.widths[0] * found.merges_keys),
        "FREQUENCIES": ", ".join(map(str, found.frequencies * found.merges_keys)) or "0",
        "MERGES": str(int(bool(found.merge.text))),
        "PROGRAM_TEXTS": "\n\n".join(["#include <tgmath.h>", *texts]),
        "SUM_OF_TERM": ", ".join(map(str, found.terms)) or "0",
    }
    widths = zip(("KEYS", "ROTATED", "TERMS"), found.widths, strict=True)
    return _built_of(template, name, parts | {f"{kind}_WIDTH": str(width) for kind, width in widths})


def built_without_policy(template: str, name: str) -> Built:
    """Build a function from a C file that receives a policy's importance, and uses no expressions of the policy."""
    return _built_of(template, name, _NO_EXPRESSIONS | _NO_PROGRAMS)


def _built_of(template: str, name: str, parts: dict[str, str]) -> Built:
    return built(template, name, tuple((f"{part}_OF_POLICY", text) for part, text in parts.items()))


def why_untraced(policy: Policy) -> str:
    """Return the reason that a bound policy can't be traced; empty if it can."""
    try:
        traced(policy)
    except NotTraceableError as error:
        return f"{error} can't be compiled"
    return ""


def why_not(policy: Policy) -> str:
    """Return the reason that a bound policy has no compiled walk on this machine; empty if it has one."""
    competes = policy.pool_floor(_SLOTS) is not None
    if not competes and not why_untraced(policy):
        return built_of(policy, "walk.c", "walk").why_not
    heads = 2 if competes or policy.scope == "layer" else 1
    because = why_no_programs(policy, Layout(heads, _SLOTS, HeadSizes(2, 4, 4), 2, 0, uneven=competes))
    return because or built_without_policy("walk.c", "walk").why_not


def why_no_programs(policy: Policy, layout: Layout) -> str:
    """Return the reason that a bound policy can't be translated to programs; empty if it can."""
    try:
        programs(policy, layout)
    except NotTraceableError as error:
        return f"{error} can't be compiled"
    return ""


@lru_cache
def _built(source: str, name: str, command: str, folder: Path) -> Built:
    """Load the function from an earlier build; build it if there is none that can be loaded."""
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
    """Return the compiler's predefined macros, which include its version and its instruction sets on this CPU."""
    arguments = [command, "-march=native", "-dM", "-E", "-x", "c", os.devnull]
    try:
        return subprocess.run(arguments, text=True, capture_output=True, timeout=_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError):  # building will fail, too, with a better message
        return ""


def _intact(folder: Path, stem: str) -> Iterator[Path]:
    """Yield the libraries whose content matches their name and that other users can't change. Remove damaged libraries."""
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
    """Return the path of a library, which contains the hash of its content."""
    with library.open("rb") as file:
        return folder / f"{stem}_{hashlib.file_digest(file, 'sha256').hexdigest()[:32]}.so"


def _loaded(library: Path, name: str) -> Any:
    """Load a function from a library.

    Raises:
        OSError: the library can't be loaded.
        AttributeError: the library has no such function.
    """
    return getattr(ctypes.CDLL(str(library)), name)


def _build(source: str, command: str, folder: Path, stem: str) -> Path:
    """Compile a library. Several processes may build the same library at once.

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
