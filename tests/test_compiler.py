"""A built library is loaded only if it is intact and ours. Otherwise it is rebuilt, or else the plain walk says why."""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import H2O, CacheConfig, CachedDecoder, Random, model_of

from kvbench.harness.core import user_cache
from kvbench.harness.engine import fastcheck
from kvbench.harness.engine.method import EAGER, FASTEST
from kvbench.harness.kernels import compiler

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
FOREIGN = "void release(void) {}"  # has the right name, but is not ours


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A new cache folder. Libraries of earlier tests are forgotten."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for remembered in (compiler._built, compiler._target, user_cache._temporary):
        remembered.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def opened(monkeypatch) -> list[Path]:
    """The paths of all libraries that are loaded."""
    seen, load = [], ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda path: seen.append(Path(path)) or load(path))
    return seen


def build() -> compiler.Built:
    """Build again, as another process would."""
    compiler._built.cache_clear()
    return compiler.built_of(Random().bind(20), "release.c", "release")


def libraries(folder: Path) -> list[Path]:
    return sorted((folder / "kv-bench/kernels").glob("*.so"))


def compiled_by_cc(source: str, to: Path) -> bytes:
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", to], input=source, text=True, check=True)
    return to.read_bytes()


def script(file: Path, text: str) -> str:
    """Install a script as the compiler."""
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def put(library: Path, content: bytes) -> None:
    """Replace a library by a new file, since the old one may still be loaded."""
    library.unlink()
    library.write_bytes(content)
    library.chmod(0o700)


@needs_compiler
def test_a_library_is_built_once(cache, opened):
    assert build().function is not None
    (library,) = libraries(cache)
    before = library.stat().st_mtime_ns
    assert build() is not None
    assert [p.stat().st_mtime_ns for p in libraries(cache)] == [before]
    assert opened == [library, library]


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "garbage", "foreign", "one bit"])
def test_a_damaged_library_is_never_opened_and_built_again(cache, tmp_path, opened, damage):
    build()
    (library,) = libraries(cache)
    whole = library.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    content = {
        "truncated": whole[: len(whole) // 2],
        "garbage": b"\x7fELF" + bytes(range(256)) * 40,
        "foreign": compiled_by_cc(FOREIGN, tmp_path / "foreign.so"),
        "one bit": bytes(flipped),
    }[damage]
    put(library, content)
    opened.clear()
    assert build().function is not None
    assert opened == libraries(cache)
    assert opened[0].read_bytes() == whole


@needs_compiler
@pytest.mark.parametrize("how", ["others may write to it", "another user's", "a symbolic link"])
def test_a_library_that_others_could_have_put_there_is_never_opened(cache, tmp_path, opened, monkeypatch, how):
    """Even with the right digest in its name."""
    build()
    (library,) = libraries(cache)
    stem = library.name.rsplit("_", 1)[0]
    content = compiled_by_cc(FOREIGN, tmp_path / "foreign.so")
    planted = library.with_name(f"{stem}_{hashlib.sha256(content).hexdigest()[:32]}.so")
    if how == "a symbolic link":
        planted.symlink_to(tmp_path / "foreign.so")
    else:
        planted.write_bytes(content)
        planted.chmod(0o777 if how == "others may write to it" else 0o700)
    if how == "another user's":
        real = Path.lstat
        owner = lambda path: os.stat_result((*real(path)[:4], 12345, *real(path)[5:]))  # noqa: E731
        monkeypatch.setattr(Path, "lstat", lambda path: owner(path) if path == planted else real(path))
    library.unlink()
    opened.clear()
    assert build().function is not None
    assert opened == [library]


@needs_compiler
def test_a_folder_that_others_may_write_to_is_not_used_and_that_is_said_once(cache, opened, caplog):
    build()
    folder = cache / "kv-bench"
    folder.chmod(0o777)
    opened.clear()
    with caplog.at_level(logging.WARNING, "kv-bench"):
        assert build().function is not None
        assert build().function is not None
    assert all(cache not in path.parents for path in opened)
    (said,) = caplog.messages
    assert f"others may write to {folder}; 'chmod go-w {folder}' fixes that" in said
    folder.chmod(0o700)
    assert build().function is not None
    assert opened[-1] == libraries(cache)[0]


@needs_compiler
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo 'x.c:1: error: no such thing' >&2; exit 1", "ended with exit code 1: x.c:1: error: no such thing"),
        ('while [ "$1" != -o ]; do shift; done; cat > /dev/null; cc -shared -x c /dev/null -o "$2"', "release"),
        ("exit 0", ""),
    ],
    ids=["fails", "makes another library", "makes nothing"],
)
def test_what_can_not_be_built_is_walked_plainly_and_says_why(cache, tmp_path, monkeypatch, text, reason):
    """After a silent fall-back, the benchmark would be slower and nobody would notice."""
    monkeypatch.setenv("CC", script(tmp_path / "mycc", f'case "$*" in *-dM*) exit 0;; esac; {text}'))
    assert reason in build().why_not
    assert not list((cache / "kv-bench/kernels").glob(".*"))
    model, tokens = model_of("llama"), torch.arange(60)[None]
    config = CacheConfig(H2O(), 20)
    found = fastcheck.fast_method(model, config)
    assert (found.blocks, found.step) == ("walk", "plain")
    assert "can't be built" in found.refused
    plain, fast = (CachedDecoder(model, config, method=method)(tokens) for method in (EAGER, FASTEST))
    assert torch.equal(plain, fast)


@needs_compiler
def test_another_cpu_and_another_compiler_have_libraries_of_their_own(cache, tmp_path, monkeypatch):
    """With a shared home, a library of one machine may have illegal instructions for another."""
    text = 'case "$*" in *-dM*) echo "#define __SSE2__ $CPU";; *) exec cc "$@";; esac'
    monkeypatch.setenv("CC", script(tmp_path / "mycc", text))
    for cpu, count in (("1", 1), ("2", 2), ("1", 2)):
        monkeypatch.setenv("CPU", cpu)
        compiler._target.cache_clear()
        assert build().function is not None
        assert len({p.name.rsplit("_", 1)[0] for p in libraries(cache)}) == count


@pytest.mark.slow("processes")
@needs_compiler
def test_processes_that_build_at_once_all_have_their_function(cache):
    code = (
        "from kvbench.harness.kernels.compiler import built_of\nfrom kvbench.policies.random import Random\n"
        "found = built_of(Random().bind(20), 'release.c', 'release')\nassert found.function, found.why_not"
    )
    children = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    assert build().function is not None
    assert not list((cache / "kv-bench/kernels").glob("*.partial"))
