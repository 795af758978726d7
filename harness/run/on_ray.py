"""Measure the groups of a run with workers on Ray: on this machine, or on a cluster.

The process that started the run assigns groups to workers, writes all records, and shows progress. Ray starts the workers, sends
their inputs, restarts workers that die, and repeats their calls.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.source_digests import code_versions
from kvbench.harness.core.user_files import loaded_files
from kvbench.harness.records.run_facts import Failure
from kvbench.harness.run.estimate import estimates
from kvbench.harness.run.ledger import Group, Ledger, Outcome, needs_machine
from kvbench.harness.run.order import GroupOutcomes, Order
from kvbench.harness.run.prepare import MachineFacts
from kvbench.harness.run.ray_cluster import Cluster, connected, needs
from kvbench.harness.run.ray_worker import Board, Place, RayWorker, Shared
from kvbench.harness.run.request import RunOptions
from kvbench.harness.run.schedule import Schedule, Work
from kvbench.harness.suite import Cell
from kvbench.harness.tasks.task import MeasurementError

TRIES = 3  # attempts to measure a group whose worker dies
START_S = 120.0
TICK_S = 0.5


@contextlib.contextmanager
def ray_executor(
    address: str, workers: int | None, threads: int, device: str, options: RunOptions, cells: Sequence[Cell]
) -> Iterator[RayExecutor]:
    """Start workers, which end with the context. If this function starts Ray, Ray ends with the context, too.

    Args:
        address: HOST:PORT or auto for a cluster, or "local".
        workers: number of workers; None starts as many as there is room for.

    Raises:
        UserError: Ray is not installed, there is no such cluster or no room in it, or a worker's code differs.
    """
    with connected(address) as cluster:
        need = needs(cells[0].resources, device, threads, cluster.gpus)
        executor = RayExecutor(cluster, options, "cuda" if "GPU" in need else "cpu", threads)
        try:
            executor.start(cluster.number_of_workers(workers, need, len(cells)), need)
            yield executor
        finally:
            executor.stop()


class RayExecutor:
    """Measures groups with workers that are Ray actors."""

    def __init__(self, cluster: Cluster, options: RunOptions, device: str, threads: int) -> None:
        """Start the board on which workers show their progress. `start` starts the workers."""
        self._cluster, self._ray, self._device, self._threads = cluster, cluster.ray, device, threads
        self._options = replace(options, device=torch.device(device))
        self._workers: list[_Worker] = []
        self._board = self._ray.remote(num_cpus=0)(Board).remote()

    @property
    def machine(self) -> MachineFacts:
        """Device and threads of the first worker, and the smallest free memory of all workers."""
        machines = [worker.machine for worker in self._workers]
        return replace(machines[0], free_bytes=min(machine.free_bytes for machine in machines))

    def start(self, count: int, need: Mapping[str, float]) -> None:
        """Start `count` workers that reserve `need` each, and compare their code with the code of this process.

        Raises:
            UserError: a worker does not start, its code differs, or it lacks the device. The message names the first such worker.
        """
        resources = {"num_cpus": need.get("CPU", 0), "num_gpus": need.get("GPU", 0), "memory": need.get("memory")}
        kind = self._ray.remote(max_restarts=-1, max_task_retries=TRIES - 1, scheduling_strategy="SPREAD", **resources)(RayWorker)
        self._workers += [_Worker(name, kind.remote(name)) for name in (f"worker-{i + 1}" for i in range(count))]
        calls = [worker.actor.about.remote(self._device, self._threads) for worker in self._workers]
        if late := self._ray.wait(calls, num_returns=count, timeout=START_S)[1]:
            name = self._workers[calls.index(late[0])].name
            raise UserError(f"{name}: not started after {START_S:.0f} s: is the cluster busy with other work?")
        ours = code_versions()
        for worker, call in zip(self._workers, calls, strict=True):
            worker.place, theirs, worker.machine = _result(self._ray, worker, call)
            for name, other in ((name, theirs.get(name, "none")) for name in ours):
                if other != ours[name]:
                    raise UserError(f"{worker.label}: {name} is {other}, here it is {ours[name]}: install the same on both")

    def stop(self) -> None:
        """End all workers, if Ray still answers."""
        if self._cluster.answers():
            for actor in (*(worker.actor for worker in self._workers), self._board):
                self._ray.kill(actor)

    def measure(self, groups: Sequence[Group], cells: Sequence[Cell], ledger: Ledger) -> None:
        """Measure all groups. cells: all cells of the run, finished cells included.

        Raises:
            UserError: a worker lacks a model or data, or finds a mistake, or no worker is left. The message names the worker.
        """
        try:
            order = Order.from_groups(groups, cells, self._options, self._threads)
        except MeasurementError as error:
            raise UserError(str(error)) from None
        shared = Shared(self._ray.put(loaded_files()), self._ray.put(order), self._board)
        of_node = {worker.place.node: worker for worker in self._workers}  # the workers of a node share its disk
        for worker, call in [(worker, worker.actor.check.remote(shared)) for worker in of_node.values()]:
            _result(self._ray, worker, call)
        with _interrupts() as interrupts:
            _Loop(self._cluster, self._workers, groups, shared, ledger).run(interrupts)


class _Worker:
    """State of a worker: its actor, the actor's process, facts about its machine, and the number of its group."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor, self.number = name, actor, -1
        self.place, self.machine = Place("", "", 0), MachineFacts("", 0, 0)

    @property
    def label(self) -> str:
        return f"{self.name} on {self.place.host}" if self.place.host else self.name


class _Loop:
    """Assigns groups to workers until all groups have records. Workers without further groups are ended."""

    def __init__(self, cluster: Cluster, workers: list[_Worker], groups: Sequence[Group], shared: Shared, ledger: Ledger) -> None:
        self._cluster, self._ray, self._workers = cluster, cluster.ray, workers
        self._groups, self._shared, self._ledger = groups, shared, ledger
        self._schedule = Schedule(works(groups))
        self._running: dict[Any, _Worker] = {}  # by the reference of the answer
        self._progress: Any = shared.board.read.remote()

    def run(self, interrupts: list[int]) -> None:
        while self._schedule.left:
            if interrupts:
                raise KeyboardInterrupt
            self._assign()
            self._cluster.refuse_silence()
            if not self._running:
                raise UserError(f"no worker is left for {len(self._schedule.left)} groups of cells; finished cells are kept")
            for ref in self._ray.wait(list(self._running), timeout=TICK_S)[0]:
                self._receive(self._running.pop(ref), ref)
            self._show()

    def _assign(self) -> None:
        for worker in [worker for worker in self._workers if worker not in self._running.values()]:
            work = self._schedule.next(worker.name)
            if work is not None:
                worker.number = work.number
                group = self._ledger.begin(self._groups[work.number], worker.label)
                call = worker.actor.measure.remote(self._shared, work.number, [item.reference for item in group])
                self._running[call] = worker
            elif not self._schedule.waiting:  # make room, perhaps for a worker that Ray starts again
                self._workers.remove(worker)
                self._ray.kill(worker.actor)

    def _receive(self, worker: _Worker, ref: Any) -> None:
        """Write the records of a group, while its worker measures the next group."""
        group, number, errors = self._groups[worker.number], worker.number, self._ray.exceptions
        watcher = self._ledger.watcher
        watcher.idle(worker.label)
        try:
            place, answer = _result(self._ray, worker, ref)
        except errors.ActorDiedError as error:  # for good: Ray can't start it again
            watcher.note(worker.label, f"can't be started again ({_last_line(error)})")
            self._schedule.free(worker.name, again=True)
            self._workers.remove(worker)
            return
        except errors.ActorUnavailableError:
            died = Failure(kind="WorkerDied", message=f"its worker died {TRIES} times")
            place, answer = worker.place, GroupOutcomes([Outcome(dict(item.facts), failure=died) for item in group], [])
        if place != worker.place:
            watcher.note(worker.label, "died; what it measured was measured again")
            worker.place = place
        self._schedule.free(worker.name)
        self._assign()
        for label, text in answer.notes:
            watcher.note(label, text)
        for item, outcome in zip(group, answer.outcomes, strict=True):
            self._ledger.done(item, outcome)
        self._ledger.end(group)
        self._schedule.recorded(number)

    def _show(self) -> None:
        """Show the progress on the board, without waiting for the board."""
        if not self._ray.wait([self._progress], timeout=0)[0]:
            return
        board, self._progress = self._progress, self._shared.board.read.remote()
        busy = {worker.name: worker for worker in self._running.values()}
        with contextlib.suppress(self._ray.exceptions.RayError):
            for name, (tokens, text) in self._ray.get(board).items():
                if name in busy:
                    self._ledger.watcher.advance(tokens, text, busy[name].label)


def works(groups: Sequence[Group]) -> list[Work]:
    """Return the groups as work of the schedule."""
    number_of = {item.cell.id: number for number, group in enumerate(groups) for item in group}
    seconds = {e.cell.id: e.seconds or 1.0 for e in estimates([item.cell for group in groups for item in group], "cpu")}
    works = []
    for number, group in enumerate(groups):
        references = [item.cell.reference for item in group]
        after = {number_of[cell.id] for cell in references if cell is not None and cell.id in number_of} - {number}
        total = sum(seconds[item.cell.id] for item in group)
        works.append(Work(number, group[0].cell.model, total, needs_machine(group), frozenset(after)))
    return works


def _result(ray: Any, worker: _Worker, ref: Any) -> Any:
    """Return the result of a worker's call.

    Raises:
        UserError: the worker raised a `UserError`, or never started.
        RayError: the worker died.
    """
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise type(error.cause)(f"{worker.label}: {error.cause}") from None
        raise
    except ray.exceptions.RayActorError as error:
        if worker.place.host:
            raise
        raise UserError(f"{worker.name}: died before anything was measured ({_last_line(error)})") from error


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1].strip()  # Ray's errors end with what happened in the worker


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yield a list that gets an entry at Ctrl-C. Python would ignore a `KeyboardInterrupt` in a callback or destructor."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    with contextlib.suppress(ValueError):  # only the main thread gets signals
        signal.signal(signal.SIGINT, lambda *received: came.append(received[0]))
    try:
        yield came
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, before)
