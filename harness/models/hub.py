"""Where a model's files are: a local directory, or the hub's cache; and what weights they hold."""

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

RANDOM = "random:"  # opens the id of a model with random weights
BUILTIN = "builtin:"  # opens the id of a model that comes with the project
_SHAPES = Path(__file__).parent / "shapes"
_BUILTIN = Path(__file__).parent / "builtin"
_WANTED = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
_UNWANTED = ["onnx/*", "original/*", "*/consolidated*", "consolidated*"]


def is_random(model: str) -> bool:
    """Whether a model's weights are drawn here, for measurements that don't depend on them."""
    return model.startswith(RANDOM)


def is_local_name(model: str) -> bool:
    """Whether an id is what a record keeps of a local directory, its name alone, and no such directory is here."""
    return ":" not in model and "/" not in model and not Path(model).is_dir()


def shapes() -> list[str]:
    """The published shapes that a model of random weights can take."""
    return sorted(p.stem for p in _SHAPES.glob("*.json"))


def builtins() -> list[str]:
    """The reference models that come with the project."""
    return sorted(p.parent.name for p in _BUILTIN.glob("*/config.json"))


def _builtin(name: str) -> Path:
    """The directory of a reference model.

    Raises:
        UserError: there is no such one.
    """
    known = builtins()
    if name not in known:
        which = did_you_mean(name, known) if known else "; none is there yet"
        raise UserError(f"{BUILTIN}{name}: no such model comes with kv-bench{which}; 'bench pretrain' makes them")
    return _BUILTIN / name


def _shape(name: str) -> Path:
    """The config file of a shape: one of ours, or a directory's.

    Raises:
        UserError: neither.
    """
    file = _SHAPES / f"{name}.json" if name in shapes() else Path(name).expanduser() / "config.json"
    if not file.exists():
        raise UserError(f"{RANDOM}{name}: no such shape{did_you_mean(name, shapes())}; or a directory with a config.json")
    return file


def model_directory(model: str, revision: str | None, allow_pickle: bool) -> Path:
    """The directory of a model's files, downloaded if need be; the config file alone of a model with random weights.

    Args:
        model: a local directory, a hub id, "builtin:" and a name, or "random:" and a shape.
        revision: of a hub model: a commit, branch or tag.
        allow_pickle: accept weights that are not safetensors.

    Raises:
        UserError: no such model, no weights, or the hub is out of reach.
    """
    if is_random(model):
        return _shape(model.removeprefix(RANDOM))
    if model.startswith(BUILTIN):
        return _builtin(model.removeprefix(BUILTIN))
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").exists():
            raise UserError(f"{model}: a directory without config.json, not a model")
    elif model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(f"{model}: no such directory; a hub id names its owner too, as openai-community/gpt2 does")
    else:
        directory = _download(model, revision, allow_pickle)
    if not _weights(directory, allow_pickle):
        extra = (
            "" if allow_pickle or not _weights(directory, True) else " (pickled weights are read only with model.pickle: true)"
        )
        raise UserError(f"{model}: no safetensors weights{extra}")
    return directory


def _weights(directory: Path, allow_pickle: bool) -> list[Path]:
    patterns = ["*.safetensors", *(["pytorch_model*.bin"] if allow_pickle else [])]
    return sorted(f for pattern in patterns for f in directory.glob(pattern))


def quiet() -> None:
    """Keep the hub's libraries from telling of every retry: what goes wrong is said once, by us."""
    for name in ("huggingface_hub", "datasets", "transformers", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _download(model: str, revision: str | None, allow_pickle: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    quiet()
    wanted = [*_WANTED, *(["pytorch_model*.bin"] if allow_pickle else [])]
    patterns: dict[str, Any] = {"revision": revision, "allow_patterns": wanted, "ignore_patterns": _UNWANTED}
    if re.fullmatch("[0-9a-f]{40}", revision or ""):  # a commit never changes: what is there need not be asked for
        with contextlib.suppress(LocalEntryNotFoundError):
            directory = Path(snapshot_download(model, local_files_only=True, **patterns))
            if _weights(directory, allow_pickle):
                return directory
    try:
        return Path(snapshot_download(model, **patterns))
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"{model}: not in the local cache and the hub is out of reach; give --model DIR, or set HF_HOME to a cache "
            f"that has it"
        ) from error
    except Exception as error:
        raise UserError(f"{model}: can't be downloaded ({type(error).__name__}: {str(error).splitlines()[0]})") from error


def weights_digest(directory: Path) -> str:
    """sha256 over config and weights; remembered by path, size and time of change, since weights are large."""
    files = [directory] if directory.is_file() else [directory / "config.json", *_weights(directory, True)]
    seen = hashlib.sha256()
    folder = cache_folder()
    try:
        cache = {} if folder is None else json.loads((folder / "digests.json").read_text())
    except (OSError, ValueError):
        cache = {}
    cache = cache if isinstance(cache, dict) else {}  # damaged: whole JSON, but of something else
    known = dict(cache)
    for file in files:
        stat = file.stat()
        name = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        if name not in cache:
            with file.open("rb") as stream:
                cache[name] = hashlib.file_digest(stream, "sha256").hexdigest()
        seen.update(cache[name].encode())
    if folder is not None and cache != known:
        try:
            make_private(folder)
            with atomic_write(folder / "digests.json") as out:
                json.dump(cache, out)
        except OSError:  # it is only a cache
            pass
    return seen.hexdigest()
