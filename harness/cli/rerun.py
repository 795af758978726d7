"""Conversion of a run's request to the form that a baseline keeps, without paths of this machine, and back."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.harness.core.errors import UserError
from kvbench.harness.run.request import RunRequest

if TYPE_CHECKING:
    from kvbench.harness.records import Record
    from kvbench.harness.report.baseline import Baseline, MeasuredWith
    from kvbench.harness.suite import Cell


def portable(request: RunRequest, folder: Path) -> tuple[str, MeasuredWith]:
    """Return the suite and the options of a baseline.

    Args:
        folder: resolved folder of the baseline, to which the path of the suite's file is relative.

    Raises:
        UserError: an option names an absolute path.
    """
    from kvbench.harness.report.baseline import MeasuredWith

    file = Path(request.suite)
    suite = Path(os.path.relpath(file.resolve(), folder)).as_posix() if file.is_file() else request.suite
    for option in (*request.policies, *request.settings):
        if re.search(r"(^|[\s:=\[{'\"])[/~]", option):
            raise UserError(f"{option}: a baseline must work on other machines: give a path relative to the current directory")
    path = None if request.model is None else Path(request.model).expanduser()
    local = path.resolve().name if path is not None and path.is_dir() else None
    options = MeasuredWith(
        model=None if local else request.model,
        local_model=local,
        policies=list(request.policies),
        settings=list(request.settings),
        **{name: getattr(request, name) for name in ("device", "dtype", "threads")},
    )
    return suite, options


def request_from_baseline(baseline: Baseline, folder: Path, model: str | None, data: str | None) -> RunRequest:
    """Return the request that measures a baseline's suite again.

    Args:
        model: path of the baseline's local model, or a mirror of its hub model; None: the baseline's own model.

    Raises:
        UserError: the baseline has a local model, and `model` is None.
    """
    options = baseline.options
    if options.local_model and model is None:
        raise UserError(f"{folder}: was measured with the local model '{options.local_model}': give its folder with --model")
    suite = baseline.suite
    if suite.endswith((".yaml", ".yml")):
        suite = os.path.relpath(folder.resolve() / suite)
    return RunRequest(suite, model or options.model, data, fresh=True, **options.model_dump(exclude={"model", "local_model"}))


def cells_of_baseline(request: RunRequest, records: Sequence[Record], folder: Path) -> list[Cell]:
    """Return the cells of the request.

    Raises:
        UserError: the baseline has no record of any of the cells, because the model differs or the suite has changed.
    """
    cells = request.cells()
    if not {c.id for c in cells} & {r.cell_id for r in records}:
        recorded, current = {r.cell.model.id for r in records}, {c.as_json()["model"]["id"] for c in cells}
        raise UserError(
            f"{folder}: has no record of any cell of its suite: it was measured with the model {', '.join(sorted(recorded))}; "
            f"this run uses {', '.join(sorted(current))}; if these agree, the suite has changed: update the baseline"
        )
    return cells


def with_groups(ids: Collection[str], cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with these ids, and the cells that are measured side by side with one of them."""
    from kvbench.harness.core import plugins

    groups = {(c.model, c.task, c.seed) for c in cells if c.id in ids and plugins.task_class(c.task.name).measures == "time"}
    return [c for c in cells if c.id in ids or (c.model, c.task, c.seed) in groups]
