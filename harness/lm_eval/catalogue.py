"""lm-eval's tasks, ours among them: found, loaded, and what to do where their data can't be reached."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import tqdm
from lm_eval.api.registry import model_registry
from lm_eval.tasks import TaskManager

from kvbench.harness.core.errors import UserError, did_you_mean
from kvbench.harness.models.hub import quiet as quiet_hub

GENERATED = Path(__file__).parent / "generated"  # tasks that need no download
_NAME = "kvbench"


def register() -> None:
    """Make the model `kvbench` known to lm-eval, which loads no plug-ins by itself."""
    import lm_eval.models  # noqa: F401  # fills the registry

    if _NAME not in model_registry:
        model_registry.register(_NAME, target="kvbench.harness.lm_eval.kvbench:KVBench")


@contextmanager
def quiet() -> Iterator[None]:
    """Without lm-eval's log and progress bars: what goes wrong is said once, by us."""
    log, begin = logging.getLogger("lm_eval"), tqdm.std.tqdm.__init__
    level = log.level
    log.setLevel(logging.ERROR)
    quiet_hub()
    tqdm.std.tqdm.__init__ = partialmethod(begin, disable=True)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        log.setLevel(level)
        tqdm.std.tqdm.__init__ = begin  # type: ignore[method-assign]


def task(name: str, fewshot: int | None, seed: int, include: Sequence[str], metadata: dict[str, Any]) -> dict[str, Any]:
    """One task as lm-eval's `evaluate` takes it, its data loaded.

    Args:
        name: of a task; not of a group.
        fewshot: examples before each question; what the task says when None.
        seed: of the examples drawn, and of whatever the task draws.
        include: folders of further tasks.
        metadata: for tasks that make their questions.

    Raises:
        UserError: there is no such task, it is a group, or its data can't be had.
    """
    random.seed(seed)
    np.random.seed(seed)
    everything = name not in _manager(tuple(include), (), False).task_index
    known = _manager(tuple(include), (), everything).task_index
    if name not in known:
        raise UserError(f"{name}: lm-eval has no such task{did_you_mean(name, known)}; 'bench lm-eval ls tasks' lists them")
    try:
        with quiet():
            loaded: dict[str, Any] = _manager(tuple(include), tuple(sorted(metadata.items())), everything).load([name])
    except Exception as error:
        raise unreachable(error) or UserError(f"{name}: lm-eval can't load it ({_first_line(error)})") from error
    if len(loaded["tasks"]) != 1 or loaded["groups"]:
        raise UserError(f"{name}: several tasks of lm-eval; list them: {', '.join(sorted(loaded['tasks']))}")
    (found,) = loaded["tasks"].values()
    if fewshot is not None or found.get_config("num_fewshot") is None:
        found.set_config(key="num_fewshot", value=fewshot or 0)
    return loaded


@cache
def _manager(include: tuple[str, ...], metadata: tuple[tuple[str, Any], ...], everything: bool) -> TaskManager:
    """Of all tasks, for which it reads thousands of files; or of ours and those included."""
    with quiet():
        return TaskManager(include_path=[GENERATED, *include], include_defaults=everything, metadata=dict(metadata))


def unreachable(error: BaseException) -> UserError | None:
    """What to download and where to put it, if that is what went wrong: a task's data, and no network."""
    asked = _asked(error)
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    names = {kind.__name__ for link in chain for kind in type(link).__mro__}
    if asked is None or not names & {
        "ConnectionError",
        "OfflineModeIsEnabled",
        "LocalEntryNotFoundError",
        "DatasetNotFoundError",
    }:
        return None
    path, subset = asked
    loading = f"datasets.load_dataset({path!r}{f', {subset!r}' if subset else ''})"
    return UserError(
        f"{path}{f' ({subset})' if subset else ''}: this task's data is not in the local cache and the hub is out of reach; "
        f"run {loading} where there is a network, and copy its ~/.cache/huggingface here, or set HF_HOME to it"
    )


def unknown(error: BaseException) -> UserError | None:
    """The names that lm-eval does not know, or that there are none, if that is what went wrong."""
    if str(error).startswith("No tasks specified"):
        return UserError("--tasks is missing; 'bench lm-eval ls tasks' lists them")
    found = re.fullmatch(r"Tasks not found: (.+)", str(error).strip())
    if found is None:
        return None
    name = found[1].split(",")[0].strip()
    return UserError(f"{found[1]}: lm-eval has no such task{did_you_mean(name, _manager((), (), True).task_index)}")


def _asked(error: BaseException) -> tuple[str, str | None] | None:
    """The dataset that a task was loading when it went wrong."""
    at, found = error.__traceback__, None
    while at is not None:
        own = at.tb_frame.f_locals.get("self")
        path = getattr(own, "DATASET_PATH", None)
        found = (str(path), getattr(own, "DATASET_NAME", None)) if path else found
        at = at.tb_next
    return found


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
