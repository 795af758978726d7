"""A model's files (built in, in a local directory, or on the hub) and the digest of its weights."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import UserError, did_you_mean
from kvbench.harness.core.packaged import PACKAGED, packaged_path
from kvbench.harness.core.user_cache import file_digest
from kvbench.harness.models.gguf_header import gguf_origin

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
    """Whether an id is the bare name of a local directory, as in records, and the directory does not exist here."""
    return ":" not in model and "/" not in model and model not in PACKAGED and not Path(model).exists()


def is_here(model: str) -> bool:
    """Whether a model needs no download."""
    return is_random(model) or model.startswith(BUILTIN) or model in PACKAGED or Path(model).expanduser().exists()


def shapes() -> list[str]:
    """Return the names of the published model shapes that are available with random weights."""
    return sorted(p.stem for p in _SHAPES.glob("*.json"))


def builtins() -> list[str]:
    """Return the names of the reference models that come with the project."""
    return sorted(p.parent.name for p in _BUILTIN.glob("*/config.json"))


def _builtin(name: str) -> Path:
    """Return the directory of a reference model."""
    known = builtins()
    if name not in known:
        hint = did_you_mean(name, known) if known else "; there are none yet"
        raise UserError(f"{BUILTIN}{name}: no such model comes with kv-bench{hint}; 'bench pretrain' makes them")
    return _BUILTIN / name


def _shape(name: str) -> Path:
    """Return the config file of a shape, either one of ours or the config of a model directory."""
    file = _SHAPES / f"{name}.json" if name in shapes() else Path(name).expanduser() / "config.json"
    if not file.exists():
        hint = did_you_mean(name, shapes())
        raise UserError(f"{RANDOM}{name}: no such shape{hint}; a directory with a config.json works, too")
    return file


def model_directory(model: str, revision: str | None, allow_pickle: bool, gguf_file: str | None = None) -> Path:
    """Return the directory of a model's files, downloaded or converted if necessary. For random weights, return the config file.

    A model is a local directory, a GGUF file, a hub id (with a commit, branch or tag), "builtin:" and a name, "random:" and a
    shape, or the name of a packaged model. Weights that are not safetensors need `allow_pickle`.

    Args:
        gguf_file: name of the GGUF file to read from a directory or hub repository.

    Raises:
        UserError: the model does not exist or has no weights, or the hub is out of reach.
    """
    if gguf_file is None and is_random(model):
        return _shape(model.removeprefix(RANDOM))
    if gguf_file is None and model.startswith(BUILTIN):
        return _builtin(model.removeprefix(BUILTIN))
    if (file := _gguf(model, revision, gguf_file)) is not None:
        from kvbench.harness.models.gguf_folder import gguf_folder

        return gguf_folder(file)
    directory = Path(model).expanduser()
    if not directory.exists() and model in PACKAGED:
        directory = packaged_path(model)
    if directory.is_dir():
        if not (directory / "config.json").exists():
            raise UserError(f"{model}: not a model: this directory has no config.json")
    else:
        directory = _download(_hub_id(model), revision, allow_pickle)
    if (directory / "adapter_config.json").exists():
        raise UserError(
            f"{model}: has an adapter (adapter_config.json), which is applied only where peft is installed: merge it into the "
            "weights (peft's merge_and_unload, then save_pretrained), or remove adapter_config.json to leave it out"
        )
    if not _weights(directory, allow_pickle):
        only_pickle = not allow_pickle and _weights(directory, True)
        hint = " (pickled weights are read only with model.pickle: true)" if only_pickle else ""
        raise UserError(f"{model}: no safetensors weights{hint}")
    return directory


def _hub_id(model: str) -> str:
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(f"{model}: no such directory or file; a hub id includes its owner, e.g. openai-community/gpt2")
    return model


def _gguf(model: str, revision: str | None, name: str | None) -> Path | None:
    """Return the GGUF file from which a model is read; None if the model is read from other files.

    Raises:
        UserError: the file does not exist, or a directory has several GGUF files.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _gguf_inside(path, name)
    if name is not None and (path.exists() or ":" in model or model in PACKAGED):
        raise UserError(f"{model}: gguf_file: {name} names a file of a directory or hub repository, and this is neither")
    if path.exists():
        return path
    if model in PACKAGED:
        return packaged if (packaged := packaged_path(model)).is_file() else None
    return None if name is None else _from_hub(_hub_id(model), lambda hub: hub.hf_hub_download(model, name, revision=revision))


def _gguf_inside(directory: Path, name: str | None) -> Path | None:
    """Return the GGUF file of a directory: the named file, or the only file if the directory has no other weights."""
    files = sorted(file.name for file in directory.glob("*.gguf"))
    if name is None and (not files or _weights(directory, True)):
        return None
    if name is None and len(files) > 1:
        raise UserError(f"{directory}: has {len(files)} GGUF files ({', '.join(files)}): name one, as in {directory / files[0]}")
    file = directory / (name or files[0])
    if not file.is_file():
        raise UserError(f"{file}: no such file; the directory has {', '.join(files) or 'no GGUF files'}")
    return file


def _weights(directory: Path, allow_pickle: bool) -> list[Path]:
    patterns = ["*.safetensors", *(["pytorch_model*.bin"] if allow_pickle else [])]
    return sorted(f for pattern in patterns for f in directory.glob(pattern))


def quiet() -> None:
    """Silence the retry messages of the hub's libraries, because our own message reports the error once."""
    for name in ("huggingface_hub", "datasets", "transformers", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _download(model: str, revision: str | None, allow_pickle: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = [*_DOWNLOADED, *(["pytorch_model*.bin"] if allow_pickle else [])]
    patterns: dict[str, Any] = {"revision": revision, "allow_patterns": wanted, "ignore_patterns": _NOT_DOWNLOADED}
    if re.fullmatch("[0-9a-f]{40}", revision or ""):  # a commit never changes, so a local copy is up to date
        with contextlib.suppress(LocalEntryNotFoundError):
            directory = Path(snapshot_download(model, local_files_only=True, **patterns))
            if _weights(directory, allow_pickle):
                return directory
    return _from_hub(model, lambda hub: hub.snapshot_download(model, **patterns))


def _from_hub(model: str, download: Callable[[Any], str]) -> Path:
    """Call a function of the package huggingface_hub, and return the path that it downloads.

    Raises:
        UserError: the hub is out of reach, or has no such model.
    """
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    quiet()
    try:
        return Path(download(huggingface_hub))
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"{model}: not in the local cache, and the hub is out of reach; give --model DIR, or set HF_HOME to a cache "
            f"that has it; `--model smollm2` needs only a package index"
        ) from error
    except Exception as error:
        raise UserError(f"{model}: can't be downloaded ({type(error).__name__}: {str(error).splitlines()[0]})") from error


def weights_digest(directory: Path) -> str:
    """Return the sha256 over configs and weights; for a converted GGUF file, the sha256 of the file.

    The generation config is included, because it names tokens that end an answer.
    """
    if origin := gguf_origin(directory):
        return str(origin["sha256"])
    if directory.is_file():
        files = [directory]
    else:
        generation = directory / "generation_config.json"
        files = [directory / "config.json", *([generation] if generation.exists() else []), *_weights(directory, True)]
    return hashlib.sha256("".join(map(file_digest, files)).encode()).hexdigest()
