"""Request for a run, from the command line or Python: a suite and changes to it, and the options of its measurement.

This module does not import torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.harness.core import user_files
from kvbench.harness.core.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import torch

    from kvbench.harness.records import Record
    from kvbench.harness.run.ledger import RunWatcher, Wanted
    from kvbench.harness.suite import Cell

PUBLISHED = Path("leaderboard/records")  # in a checkout: any cell of the published page can be measured again
_DEFAULT_STEPS = 16  # number of steps, spread evenly over the stream; the last step of the stream is added
_EXPECTED = "expected kept, kept=all, or kept=STEPS such as kept=128,256,end"


@dataclass(frozen=True)
class KeepSteps:
    """Steps after which kept positions are recorded.

    Attributes:
        text: the user's request: empty (the default steps), "all", or a list such as "128,256,end".
    """

    text: str = ""

    @classmethod
    def from_option(cls, trace: str) -> KeepSteps:
        """Parse the value of `--trace`.

        Raises:
            UserError: the value has another form.
        """
        name, equals, text = trace.partition("=")
        words = text.split(",")
        if name.strip() != "kept" or (equals and not all(_is_step(w) for w in words) and text.strip() != "all"):
            raise UserError(f"--trace {trace}: {_EXPECTED}")
        return cls(",".join(w.strip() for w in words))

    def of(self, tokens: int) -> list[int]:
        """Return the steps of a stream, in order. A step is the index of the token that was processed last.

        Raises:
            UserError: the stream has no such step.
        """
        if self.text == "all":
            return list(range(tokens))
        if not self.text:
            parts = _DEFAULT_STEPS + 1
            return sorted({-(-tokens * part // parts) - 1 for part in range(1, parts + 1)})
        steps = sorted({tokens - 1 if word == "end" else int(word) for word in self.text.split(",")})
        if steps[-1] >= tokens:
            raise UserError(
                f"--trace kept={self.text}: the last step of a stream is {tokens - 1:,}, so there is no {steps[-1]:,}"
            )
        return steps


@dataclass(frozen=True)
class RunOptions:
    """Options of a run. They change numbers by rounding only.

    Attributes:
        data: directory of the text; the task's own source when None.
        block: T, tokens that pass a layer at once; chosen by method and free memory when None.
        walk: always read token by token inside the layers.
        fresh: measure finished cells again.
        keep: write keep maps of these steps, and measure finished cells without a keep map again; None writes no maps.
    """

    device: torch.device
    data: Path | None = None
    block: int | None = None
    walk: bool = False
    fresh: bool = False
    keep: KeepSteps | None = None


def _is_step(word: str) -> bool:
    return word.strip() == "end" or (word.strip().isascii() and word.strip().isdigit())


@dataclass(frozen=True)
class RunRequest:
    """A suite, and the options that change it or its measurement. `block` to `keep` are those of `RunOptions`."""

    suite: str
    model: str | None = None
    data: str | None = None
    policies: Sequence[str] = ()
    settings: Sequence[str] = ()
    device: str = "auto"
    dtype: str | None = None
    threads: int | None = None
    ray: str | None = None  # address of a cluster, or "local"; None: this process measures
    workers: int | None = None  # on Ray
    tasks: Sequence[str] = ()  # only these of the suite, by name; all if empty
    block: int | None = None
    walk: bool = False
    fresh: bool = False
    keep: KeepSteps | None = None

    def cells(self, results: Path | None = None) -> list[Cell]:
        """Return the cells of the suite.

        If `suite` is the beginning of a cell id, return the recorded cell with this id, after its reference. The record is
        read from the folder `results`, or from the published records.

        Raises:
            UserError: there is no such suite, task or record, or the suite has a mistake.
        """
        from kvbench.harness import suite as suites

        user_files.forget_changed()
        if results is not None and re.fullmatch("[0-9a-f]{8,64}", self.suite) and not Path(self.suite).exists():
            return self._of_tasks(suites.with_references([self._recorded_cell(results)]))
        _, cells = suites.load(suites.find(self.suite), self.model, self.dtype, self.policies, self.settings)
        return self._of_tasks(cells)

    def _of_tasks(self, cells: list[Cell]) -> list[Cell]:
        """Return the cells of the chosen tasks."""
        known = {cell.task.name for cell in cells}
        for name in sorted(set(self.tasks) - known):
            raise UserError(f"the suite has no task '{name}'{did_you_mean(name, known)}")
        return [cell for cell in cells if not self.tasks or cell.task.name in self.tasks]

    def _recorded_cell(self, results: Path) -> Cell:
        from kvbench.harness import suite as suites
        from kvbench.harness.core.parameters import names_inside
        from kvbench.harness.models.hub import is_local_name
        from kvbench.harness.records import RecordStore

        for folder in (results, PUBLISHED):
            matches = {r.cell_id: r for r in RecordStore(folder).read_all()[0] if r.cell_id.startswith(self.suite)}
            if matches:
                break
        else:
            where = f"no record in {results} has a cell id that begins like this; --results names another folder"
            raise UserError(f"{self.suite}: {where}")
        if len(matches) > 1:
            raise UserError(f"{self.suite}: {len(matches)} cell ids in {folder} begin like this: give more characters")
        recorded = next(iter(matches.values())).cell
        if {*self.policies} - {recorded.policy, *names_inside(recorded.parameters)} or self.settings or self.dtype:
            raise UserError(f"{self.suite}: a recorded cell is measured unchanged: leave out --policy, --set and --dtype")
        cell = suites.cell_from_spec(recorded, self.model, self.policies)
        if self.model is None and is_local_name(cell.model.id):
            raise UserError(
                f"{self.suite}: its model {cell.model.id} was a local directory: say where it is now with --model DIR"
            )
        return cell

    def measure(
        self,
        results: Path,
        cells: Sequence[Cell],
        *,
        progress: bool = True,
        tracebacks: bool = False,
        wanted: Wanted | None = None,
        until: float = math.inf,
    ) -> list[Record]:
        """Measure the cells that have no record yet, or all if `fresh`.

        Args:
            results: folder of the records.
            progress: show the progress on stderr.
            tracebacks: also show the tracebacks of failed cells; no effect without `progress`.
            wanted: decides which groups are measured; ignored with workers on Ray, which measure all groups.
            until: moment of `time.monotonic` after which `wanted` accepts no more groups. Only the progress display uses it.

        Returns:
            Records in the order of the cells, without groups that `wanted` rejects and policies whose package is missing.

        Raises:
            UserError: a device, model, package or data are not available, or an option has a mistake.
        """
        from kvbench.harness.records import RecordStore
        from kvbench.harness.run.ledger import RunWatcher
        from kvbench.harness.run.progress import ProgressView, StderrConsole
        from kvbench.harness.run.runner import run

        store, options = RecordStore(results), self._options()
        with ExitStack() as stack:
            watcher = stack.enter_context(ProgressView(StderrConsole(), tracebacks, until)) if progress else RunWatcher()
            watcher.note("this machine", "" if self.ray else _crowded(options.device.type))
            installed = self._installed(cells, watcher)
            if self.ray is None:
                return run(installed, store, options, watcher, wanted=wanted)
            from kvbench.harness.run.on_ray import ray_executor

            workers = ray_executor(self.ray, self.workers, self.threads or 1, self.device, options, installed)
            executor = stack.enter_context(workers)
            return run(installed, store, options, watcher, executor.measure, executor.machine)

    def _installed(self, cells: Sequence[Cell], watcher: RunWatcher) -> list[Cell]:
        """Return the cells whose packages are installed. Each policy that is left out is noted.

        Raises:
            UserError: a policy that was requested by name lacks a package, or no cell is left.
        """
        from kvbench.harness.core.contestants import Contestant

        missing = {cell.id: cell.policy.missing for cell in cells if isinstance(cell.policy, Contestant)}
        absent, installed = [cell for cell in cells if missing.get(cell.id)], [cell for cell in cells if not missing.get(cell.id)]
        for cell in absent:
            if self.policies or not installed:
                raise UserError(f"{cell.place or self.suite}: {cell.name}: {missing[cell.id]}")
            watcher.note(f"{cell.name} is left out", missing[cell.id])
        return installed

    def _options(self) -> RunOptions:
        """Return the options of the run.

        Raises:
            UserError: there is no such device, or --workers is given without --ray.
        """
        from kvbench.harness.models.load import device_of

        if self.workers is not None and self.ray is None:
            raise UserError("--workers: give --ray, too")
        self.use_threads()
        directory = Path(self.data).expanduser() if self.data else None
        device = device_of(self.device if self.ray is None else "cpu")  # workers choose their own
        return RunOptions(device, directory, self.block, self.walk, self.fresh, self.keep)

    def use_threads(self) -> None:
        """Set the number of threads of this process to the requested number, if there is one."""
        import torch

        if self.threads:
            torch.set_num_threads(self.threads)


def _crowded(device: str) -> str:
    """Return a warning if threads outnumber the cores that other work leaves free; otherwise empty.

    Such threads spin while they wait for the slowest thread.
    """
    import torch

    from kvbench.harness.core.device import cores

    threads, free = torch.get_num_threads(), cores()
    load = os.getloadavg()[0]
    if device != "cpu" or threads == 1 or threads + load < free + 1:
        return ""
    return f"{threads} threads on {free} cores beside a load of {load:.1f}: steps may take many times as long; give --threads 1"
