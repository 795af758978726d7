"""What was asked of a suite, as a baseline keeps it: without a path of this machine, and back to what can be run."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.harness.core.errors import UserError
from kvbench.harness.run.asked import Asked

if TYPE_CHECKING:
    from kvbench.harness.records import Record
    from kvbench.harness.report.baseline_file import Baseline, MeasuredWith
    from kvbench.harness.suite import Cell


def kept(asked: Asked, folder: Path) -> tuple[str, MeasuredWith]:
    """The suite and the options of a baseline.

    Args:
        asked: on the command line.
        folder: of the baseline, resolved: the suite's file is named relative to it.

    Raises:
        UserError: an option names an absolute path.
    """
    from kvbench.harness.report.baseline_file import MeasuredWith

    file = Path(asked.suite)
    suite = Path(os.path.relpath(file.resolve(), folder)).as_posix() if file.is_file() else asked.suite
    for given in (*asked.policies, *asked.settings):
        if re.search(r"(^|[\s:=\[{'\"])[/~]", given):
            raise UserError(f"{given}: a baseline keeps no path of this machine: give a path relative to the current directory")
    path = None if asked.model is None else Path(asked.model).expanduser()
    local = path.resolve().name if path is not None and path.is_dir() else None
    options = MeasuredWith(
        model=None if local else asked.model, local_model=local, policies=list(asked.policies), settings=list(asked.settings),
        device=None if asked.device == "auto" else asked.device, dtype=asked.dtype, threads=asked.threads,
    )  # type: ignore[arg-type]  # click has checked the dtype  # fmt: skip
    return suite, options


def asked_again(about: Baseline, folder: Path, model: str | None, data: str | None) -> Asked:
    """What a baseline's suite is run with.

    Args:
        about: the baseline.
        folder: of it.
        model: where its local model is, or a hub model's mirror; None for the suite's own.
        data: directory of the text.

    Raises:
        UserError: its model was a local one, and `model` does not say where it is.
    """
    options = about.options
    if options.local_model and model is None:
        raise UserError(f"{folder}: measured with the local model '{options.local_model}': give its folder by --model")
    suite = about.suite
    if suite.endswith((".yaml", ".yml")):
        suite = os.path.relpath(folder.resolve() / suite)
    return Asked(
        suite, model or options.model, data, tuple(options.policies), tuple(options.settings), options.device or "auto",
        options.dtype, options.threads,
    )  # fmt: skip


def still_asked(asked: Asked, records: Sequence[Record], folder: Path) -> list[Cell]:
    """The cells of a baseline's suite, if any of the baseline's records is of one of them.

    Raises:
        UserError: none is: another model, or another suite of that name.
    """
    cells = asked.cells()
    if not {c.id for c in cells} & {r.cell_id for r in records}:
        then, now = {r.cell.model.id for r in records}, {c.asked()["model"]["id"] for c in cells}
        raise UserError(
            f"{folder}: the suite has none of its cells any more (its model is {', '.join(sorted(then))}; "
            f"asked for is {', '.join(sorted(now))})"
        )
    return cells


def with_those_beside(ids: Collection[str], cells: Sequence[Cell]) -> list[Cell]:
    """The cells of these ids, and those that are measured side by side with one of them."""
    from kvbench.harness.core import plugins

    together = {(c.model, c.task, c.seed) for c in cells if c.id in ids and plugins.task_class(c.task.name).together}
    return [c for c in cells if c.id in ids or (c.model, c.task, c.seed) in together]
