"""Python interface to `bench run`: measure the same cells in the same way, and return their records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import writable
from kvbench.harness.core.parameters import parameters_of
from kvbench.harness.report.export import Records
from kvbench.harness.run.cache_arguments import whole_number
from kvbench.harness.run.request import KeepSteps, RunRequest
from kvbench.policies import Policy

if TYPE_CHECKING:
    import torch

PolicyEntry = str | type[Policy] | Policy | Mapping[str, Any]


def run(
    suite: str | Path,
    *,
    model: str | Path | None = None,
    data: str | Path | None = None,
    results: str | Path = "results",
    policies: PolicyEntry | Iterable[PolicyEntry] = (),
    tasks: str | Iterable[str] = (),
    device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = None,
    threads: int | None = None,
    block: int | None = None,
    walk: bool = False,
    fresh: bool = False,
    trace: str | None = None,
    progress: bool = True,
    ray: str | None = None,
    workers: int | None = None,
    **settings: Any,
) -> Records:
    """Measure the cells of a suite that have no record yet.

    Args:
        suite: a YAML file, or the name of a suite that comes with the project.
        model: a directory, a hub id, or `builtin:NAME`; the suite's model if not given.
        data: directory of the text, for suites that read files.
        results: folder of the records; cells that have a record there are not measured again.
        policies: measure only these: names, `file.py:Class`, classes, instances, or mappings like `{"name": "h2o", "window": 8}`.
        tasks: names of the suite's tasks to measure; all tasks if not given.
        device: auto, cpu, cuda, cuda:1, or a torch.device.
        dtype: dtype of the weights and the cache: float32, bfloat16 or float16, as a name or a torch.dtype.
        threads: CPU threads; torch's default if not given.
        block: tokens that pass a layer at once; chosen by method and free memory if not given.
        walk: always read token by token inside the layers.
        fresh: measure finished cells again.
        trace: `kept`, `kept=all` or `kept=128,256,end`: also record the positions kept at these steps.
        progress: show the progress on stderr: a line per finished cell, or a bar on a terminal.
        ray: measure with workers on Ray: `local`, or the address of a cluster.
        workers: number of workers on Ray; as many as there is room for if not given.
        **settings: changes to the suite, like `bench run --set`: `capacity=[64, 128]`, `tokens=4096`.

    Returns:
        One record per cell, in the order of the cells. Records of earlier runs are included.

    Raises:
        UserError: the suite or an argument has a mistake; the message is one line.
    """
    entries = policies if isinstance(policies, Iterable) and not isinstance(policies, (str, Mapping)) else [policies]
    threads, block, workers = (
        None if value is None else whole_number(name, value, 1, most)
        for name, value, most in (("threads", threads, 4096), ("block", block, 10**9), ("workers", workers, 4096))
    )
    request = RunRequest(
        str(suite), _text(model), _text(data), tuple(_yaml(entry) for entry in entries),
        tuple(f"{name}={_json(value)}" for name, value in settings.items()), str(device), _text(dtype), threads, ray, workers,
        (tasks,) if isinstance(tasks, str) else tuple(tasks), block, walk, fresh,
        None if trace is None else KeepSteps.from_option(str(trace)),
    )  # fmt: skip
    folder = writable(Path(results).expanduser())
    return Records(request.measure(folder, request.cells(folder), progress=progress))


def _text(value: str | Path | torch.dtype | None) -> str | None:
    """Return a value as a command line gives it."""
    return None if value is None else str(value).removeprefix("torch.")


def _yaml(entry: PolicyEntry) -> str:
    """Return a policy as an entry of a suite, in JSON, which is valid YAML."""
    if isinstance(entry, Policy):
        return _json({"name": plugins.name_of(type(entry)), **parameters_of(entry)})
    return _json(plugins.name_of(entry) if isinstance(entry, type) else entry)


def _json(value: Any) -> str:
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """Return a NumPy or PyTorch number as a Python number."""
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):
        raise UserError(f"{value!r}: expected a number, a text, a list or a mapping") from None
