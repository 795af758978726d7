"""Loading of lm-eval's tasks and ours, with messages that explain how to get data that is out of reach."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import random
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache, partialmethod
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import tqdm
from lm_eval.api.registry import model_registry
from lm_eval.tasks import TaskManager
from pydantic import BaseModel, ConfigDict, Field

from kvbench.harness.core.errors import UserError, described, did_you_mean, first_line
from kvbench.harness.models.hub import quiet as quiet_hub
from kvbench.harness.suite import Settings, validated

GENERATED = Path(__file__).parent / "generated"  # tasks that need no download
_MODEL_NAME = "kvbench"
_QUIET = threading.RLock()  # held while output is silenced


class _Counts(BaseModel):
    """Numbers in a task's file."""

    model_config = ConfigDict(strict=True)

    num_fewshot: int = Field(0, ge=0)
    repeats: int = Field(1, ge=1)


def register() -> None:
    """Register the model `kvbench` with lm-eval, which has no plug-in mechanism."""
    import lm_eval.models  # noqa: F401  # fills the registry

    if _MODEL_NAME not in model_registry:
        model_registry.register(_MODEL_NAME, target="kvbench.harness.lm_eval.kvbench:KVBench")


def keep_requests_apart(options: Mapping[str, Any]) -> None:
    """Give the requests kept by `--cache_requests` a separate folder for each set of other options and files named there.

    lm-eval's file names of kept requests leave out generation settings, `--metadata` and the model.
    """
    from lm_eval.caching import cache

    parts = [f"{name}={value}" for name, value in sorted(options.items()) if name not in ("cache_requests", "func")]
    values = [value for option in options.values() for value in (option.values() if isinstance(option, dict) else [option])]
    files = [value for value in values if isinstance(value, str) and os.path.isfile(value)]
    parts += [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]
    cache.PATH = str(Path(cache.PATH) / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16])


def with_our_tasks(include: str | None, config: str | None) -> str | list[str]:
    """Return the folders of tasks besides lm-eval's own: ours, and the folder named by `--include_path` or in `--config`."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    given = include or (EvaluatorConfig.load_yaml_config(config).get("include_path") if config else None)
    return [str(GENERATED), given] if given else str(GENERATED)


def refuse_settings(options: Mapping[str, Any]) -> None:
    """Refuse invalid options of lm-eval's command and settings of its `--config` that lm-eval would silently accept.

    Raises:
        UserError: a count is negative, or results can't be written to `output_path`.
    """
    from lm_eval.config.evaluate_config import EvaluatorConfig

    config = options.get("config")
    settings = EvaluatorConfig.load_yaml_config(config) if config else {}
    settings |= {name: value for name, value in options.items() if value is not None}
    for name in ("num_fewshot", "limit"):
        value = settings.get(name)
        if isinstance(value, int | float) and value < 0:
            raise UserError(f"{name}: expected 0 or more, not {value:g}")
    if output := settings.get("output_path"):
        path = Path(output)
        folder = path.parent if path.suffix == ".json" else path
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"output_path: {folder} can't be made ({error.strerror})") from None
        if not os.access(folder, os.W_OK):
            raise UserError(f"output_path: {folder} can't be written to")


class _OtherThreads(io.TextIOBase):
    """Standard output that drops the output of the thread that created this object."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._silent = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Write text of another thread; drop text of the creating thread."""
        return len(text) if threading.get_ident() == self._silent else self._stream.write(text)

    def flush(self) -> None:
        """Flush the output of other threads."""
        self._stream.flush()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence lm-eval's log, its progress bars and the output of its tasks, because stdout is for results.

    A second thread waits until the first is done, because the changed state is global.
    """
    log = logging.getLogger("lm_eval")
    quiet_hub()
    with _QUIET, redirect_stdout(_OtherThreads(sys.stdout)):
        level, tqdm_init = log.level, tqdm.std.tqdm.__init__
        log.setLevel(logging.ERROR)
        tqdm.std.tqdm.__init__ = partialmethod(tqdm_init, disable=True)  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            log.setLevel(level)
            tqdm.std.tqdm.__init__ = tqdm_init  # type: ignore[method-assign]


def task(name: str, fewshot: int | None, seed: int, include: Sequence[str], metadata: dict[str, Any]) -> dict[str, Any]:
    """Load one task and its data, in the form that lm-eval's `evaluate` takes.

    Args:
        fewshot: number of examples before each question; None: the task's own number.
        seed: seed of all random numbers of the task.
        include: folders with more tasks.
        metadata: metadata for tasks that generate their questions.

    Raises:
        UserError: the task does not exist, is a group, or its data is not available.
    """
    for folder in include:
        if not Path(folder).is_dir():
            raise UserError(f"include: {folder}: no such folder")
    random.seed(seed)
    np.random.seed(seed)
    _restart_generators()
    defaults = name not in _manager(tuple(include), (), False).task_index
    known = _manager(tuple(include), (), defaults).task_index
    if name not in known:
        raise UserError(f"{name}: lm-eval has no such task{did_you_mean(name, known)}; 'bench lm-eval ls tasks' lists them")
    try:
        with quiet():
            loaded: dict[str, Any] = _manager(tuple(include), tuple(sorted(metadata.items())), defaults).load([name])
    except UserError:
        raise
    except Exception as error:
        raise unreachable(error) or UserError(f"{name}: lm-eval can't load it ({_reason(error)})") from error
    if len(loaded["tasks"]) != 1 or loaded["groups"]:
        raise UserError(f"{name}: a group of lm-eval tasks; list its tasks: {', '.join(sorted(loaded['tasks']))}")
    (loaded_task,) = loaded["tasks"].values()
    counts = {key: value for key in _Counts.model_fields if (value := loaded_task.get_config(key)) is not None}
    validated(_Counts, counts, Settings(name), ())
    if fewshot is not None or loaded_task.get_config("num_fewshot") is None:
        loaded_task.set_config(key="num_fewshot", value=fewshot or 0)
    return loaded


def _restart_generators() -> None:
    """Make lm-eval import files anew that keep a random generator (RULER's `ruler_cwe`), so that a task's draws repeat."""
    for name, module in list(sys.modules.items()):
        held = getattr(module, "__dict__", {})
        if "__mtime__" in held and any(isinstance(value, random.Random) for value in held.values()):  # lm-eval's own mark
            del sys.modules[name]


@cache
def _manager(include: tuple[str, ...], metadata: tuple[tuple[str, Any], ...], defaults: bool) -> TaskManager:
    """Return a manager of our tasks and the included tasks. `defaults` adds lm-eval's own, by reading thousands of files."""
    with quiet():
        return TaskManager(include_path=[GENERATED, *include], include_defaults=defaults, metadata=dict(metadata))


def unreachable(error: BaseException) -> UserError | None:
    """Translate a failed download into an error with the download command and the target folder; None for other errors."""
    dataset = _dataset_of(error)
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    names = {kind.__name__ for link in chain for kind in type(link).__mro__}
    if dataset is None or not names & {
        "ConnectionError",
        "OfflineModeIsEnabled",
        "LocalEntryNotFoundError",
        "DatasetNotFoundError",
    }:
        return None
    path, subset = dataset
    loading = f"datasets.load_dataset({path!r}{f', {subset!r}' if subset else ''})"
    return UserError(
        f"{path}{f' ({subset})' if subset else ''}: this task's data is not in the local cache and the hub is out of reach; "
        f"run {loading} where there is a network, and copy its ~/.cache/huggingface here, or set HF_HOME to it"
    )


def unknown(error: BaseException) -> UserError | None:
    """Translate lm-eval's complaint about missing or unknown task names into a user error; None for other errors."""
    if str(error).startswith("No tasks specified"):
        return UserError("--tasks is missing; 'bench lm-eval ls tasks' lists them")
    match = re.fullmatch(r"Tasks not found: (.+)", str(error).strip())
    if match is None:
        return None
    name = match[1].split(",")[0].strip()
    return UserError(f"{match[1]}: lm-eval has no such task{did_you_mean(name, _manager((), (), True).task_index)}")


def refused(error: BaseException, name: str) -> UserError | None:
    """Translate an error in lm-eval, or in code that it calls, into a user error; None for errors of our code and of the disk.

    lm-eval passes on every error of a task's data, templates, functions and options, and these are the user's. A ValueError or
    TemplateError that transformers raises when we call it is also a user error.
    """
    in_words = isinstance(error, ValueError) or "TemplateError" in {kind.__name__ for kind in type(error).__mro__}
    theirs = {"lm_eval", "transformers"} if in_words else {"lm_eval"}
    packages = [frame.f_globals.get("__name__", "").split(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = next((package for package in reversed(packages) if package in {"kvbench", *theirs}), "kvbench")
    ours = last == "kvbench" or isinstance(error, (UserError, OSError))
    return None if ours else UserError(f"{name}: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """Return the message of an error, with kind and place unless it is a ValueError, and the message of its first cause."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    message = (isinstance(error, ValueError) and first_line(error)) or described(error)
    return message if cause is error else f"{message}: {first_line(cause)}"


def _dataset_of(error: BaseException) -> tuple[str, str | None] | None:
    """Return the dataset that a task was loading when the error was raised."""
    entry, dataset = error.__traceback__, None
    while entry is not None:
        frame_self = entry.tb_frame.f_locals.get("self")
        path = getattr(frame_self, "DATASET_PATH", None)
        dataset = (str(path), getattr(frame_self, "DATASET_NAME", None)) if path else dataset
        entry = entry.tb_next
    return dataset
