"""Finds a model's files (built in, in a local directory, or on the hub) and the digest of their weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import UserError, did_you_mean
from kvbench.harness.core.files import atomic_write
from kvbench.harness.core.user_cache import cache_folder, make_private

RANDOM = "random:"  # prefix of the id of a model with random weights
BUILTIN = "builtin:"  # prefix of the id of a model that comes with the project
_SHAPES = Path(__file__).parent / "shapes"
_BUILTIN = Path(__file__).parent / "builtin"
_DOWNLOADED = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
_NOT_DOWNLOADED = ["onnx/*", "original/*", "*/consolidated*", "consolidated*"]


def is_random(model: str) -> bool:
    """Whether a model has random weights, for measurements that don't depend on weights."""
    return model.startswith(RANDOM)


def is_local_name(model: str) -> bool:
    """Whether an id is the bare name of a local directory, as records keep it, and no such directory is here."""
    return ":" not in model and "/" not in model and not Path(model).is_dir()


def shapes() -> list[str]:
    """The published model shapes that are available with random weights."""
    return sorted(p.stem for p in _SHAPES.glob("*.json"))


def builtins() -> list[str]:
    """The reference models that come with the project."""
    return sorted(p.parent.name for p in _BUILTIN.glob("*/config.json"))


def _builtin(name: str) -> Path:
    """The directory of a reference model.

    Raises:
        UserError: there is no model with this name.
    """
    known = builtins()
    if name not in known:
        hint = did_you_mean(name, known) if known else "; there are none yet"
        raise UserError(f"{BUILTIN}{name}: no such model comes with kv-bench{hint}; 'bench pretrain' makes them")
    return _BUILTIN / name


def _shape(name: str) -> Path:
    """The config file of a shape: one of ours, or that of a model directory.

    Raises:
        UserError: it is neither.
    """
    file = _SHAPES / f"{name}.json" if name in shapes() else Path(name).expanduser() / "config.json"
    if not file.exists():
        hint = did_you_mean(name, shapes())
        raise UserError(f"{RANDOM}{name}: no such shape{hint}; a directory with a config.json works, too")
    return file


def model_directory(model: str, revision: str | None, allow_pickle: bool) -> Path:
    """The directory of a model's files, downloaded if necessary. For random weights, only the config file.

    A model is a local directory, a hub id (with a commit, branch or tag), "builtin:" and a name, or "random:" and a shape.
    Weights that are not safetensors need `allow_pickle`.

    Raises:
        UserError: there is no such model, it has no weights, or the hub is out of reach.
    """
    if is_random(model):
        return _shape(model.removeprefix(RANDOM))
    if model.startswith(BUILTIN):
        return _builtin(model.removeprefix(BUILTIN))
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").exists():
            raise UserError(f"{model}: not a model: this directory has no config.json")
    elif model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(f"{model}: no such directory; a hub id includes its owner, e.g. openai-community/gpt2")
    else:
        directory = _download(model, revision, allow_pickle)
    if not _weights(directory, allow_pickle):
        only_pickle = not allow_pickle and _weights(directory, True)
        hint = " (pickled weights are read only with model.pickle: true)" if only_pickle else ""
        raise UserError(f"{model}: no safetensors weights{hint}")
    return directory


def _weights(directory: Path, allow_pickle: bool) -> list[Path]:
    patterns = ["*.safetensors", *(["pytorch_model*.bin"] if allow_pickle else [])]
    return sorted(f for pattern in patterns for f in directory.glob(pattern))


def quiet() -> None:
    """Silence the retry messages of the hub's libraries. We report an error once."""
    for name in ("huggingface_hub", "datasets", "transformers", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _download(model: str, revision: str | None, allow_pickle: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    quiet()
    wanted = [*_DOWNLOADED, *(["pytorch_model*.bin"] if allow_pickle else [])]
    patterns: dict[str, Any] = {"revision": revision, "allow_patterns": wanted, "ignore_patterns": _NOT_DOWNLOADED}
    if re.fullmatch("[0-9a-f]{40}", revision or ""):  # a commit never changes, so a local copy is up to date
        with contextlib.suppress(LocalEntryNotFoundError):
            directory = Path(snapshot_download(model, local_files_only=True, **patterns))
            if _weights(directory, allow_pickle):
                return directory
    try:
        return Path(snapshot_download(model, **patterns))
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"{model}: not in the local cache, and the hub is out of reach; give --model DIR, or set HF_HOME to a cache "
            f"that has it"
        ) from error
    except Exception as error:
        raise UserError(f"{model}: can't be downloaded ({type(error).__name__}: {str(error).splitlines()[0]})") from error


def weights_digest(directory: Path) -> str:
    """sha256 over config and weights. File digests are cached by path, size and modification time, since weights are large."""
    files = [directory] if directory.is_file() else [directory / "config.json", *_weights(directory, True)]
    digest = hashlib.sha256()
    folder = cache_folder()
    try:
        cache = {} if folder is None else json.loads((folder / "digests.json").read_text())
    except (OSError, ValueError):
        cache = {}
    cache = cache if isinstance(cache, dict) else {}  # the file is damaged
    before = dict(cache)
    for file in files:
        stat = file.stat()
        name = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        if name not in cache:
            with file.open("rb") as stream:
                cache[name] = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(cache[name].encode())
    if folder is not None and cache != before:
        try:
            make_private(folder)
            with atomic_write(folder / "digests.json") as out:
                json.dump(cache, out)
        except OSError:  # it is only a cache
            pass
    return digest.hexdigest()
