"""A user's Python files as modules. Other processes receive the content of the files, so they need no access to the files."""

from __future__ import annotations

import hashlib
import io
import linecache
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.abc import SourceLoader
from importlib.util import decode_source, module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

from kvbench.harness.core.errors import UserError

PREFIX = "bench_user_"  # prefix of the names of modules loaded from files


@dataclass(frozen=True)
class UserFile:
    """A file that a process has loaded.

    Attributes:
        name: name of the file as the user wrote it.
        module: name of the module, to which pickled classes refer.
        path: absolute path.
        content: bytes of the file when it was loaded.
    """

    name: str
    module: str
    path: str
    content: bytes


_loaded: dict[str, UserFile] = {}  # last loaded file of each name
_received: dict[str, UserFile] = {}  # files from the process that started the run, by name


def user_module(name: str) -> ModuleType:
    """Return the module of a file. The file is executed once, and again after `forget_changed`.

    Raises:
        UserError: the file does not exist.
    """
    if name in _received:
        return sys.modules[_received[name].module]
    path = Path(name).expanduser().resolve()
    module = f"{PREFIX}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module in sys.modules:
        loader = sys.modules[module].__loader__
        assert isinstance(loader, _Loader)
        _loaded[name] = UserFile(name, module, str(path), loader.content)
        return sys.modules[module]
    if not path.exists():
        raise UserError(f"{name}: no such file")
    file = UserFile(name, module, str(path), path.read_bytes())
    executed = _execute(file)
    _loaded[name] = file  # other processes get only files that could be executed
    return executed


def forget_changed() -> None:
    """Forget the files that were edited since they were loaded. Call it when a user's call begins, never during a run."""
    for name, file in list(_loaded.items()):
        path = Path(file.path)
        if path.exists() and path.read_bytes() != file.content:
            sys.modules.pop(file.module, None)
            del _loaded[name]


def loaded_files() -> list[UserFile]:
    """Return the files that this process has loaded, the last file of each name."""
    return list(_loaded.values())


def receive(files: Iterable[UserFile]) -> None:
    """Load the files of the process that started the run, under the same names."""
    for file in files:
        if file.module not in sys.modules:
            try:
                _execute(file)
            except Exception:  # a cell that needs this file executes it again and reports the error
                continue
        _received[file.name] = file


def _execute(file: UserFile) -> ModuleType:
    spec = spec_from_loader(file.module, _Loader(file.path, file.content))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[file.module] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[file.module]
        raise
    lines = io.StringIO(f"{decode_source(file.content).removesuffix(chr(10))}\n").readlines()
    linecache.cache[file.path] = len(file.content), None, lines, file.path  # the code that runs, even if the file changes later
    return module


class _Loader(SourceLoader):
    """Loader of a module from the content of its file. Tracebacks and `inspect.getsource` show the same content."""

    def __init__(self, path: str, content: bytes) -> None:
        self._path, self.content = path, content

    def get_filename(self, fullname: str) -> str:
        """Return the path of the file."""
        return self._path

    def get_data(self, path: str | bytes) -> bytes:
        """Return the content of the file."""
        return self.content
