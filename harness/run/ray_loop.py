"""Hands the groups of a run to the workers on Ray, and their outcomes to the run's ledger."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.records.facts import Failure
from kvbench.harness.run.estimate import estimates
from kvbench.harness.run.executor import Group, Ledger, Outcome, needs_machine
from kvbench.harness.run.fleet import Fleet, FleetWorker
from kvbench.harness.run.messages import GroupAnswer
from kvbench.harness.run.schedule import Schedule, Work

LOST_S = 60.0  # how long to wait for a new worker if no other is left
SILENT_S = 10.0  # how long Ray's control service may not answer: after 60 s, Ray ends this process
TICK_S = 0.5


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], None]]:
    """Gives a check that raises what Ctrl-C should have raised: within a callback or a destructor, Python only prints it."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        came.append(number)
        if callable(before):
            before(number, frame)

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


class Loop:
    """Hands groups to workers until all are done."""

    def __init__(
        self, fleet: Fleet, works: Sequence[Work], groups: Sequence[Group], numbers: dict[str, int], ledger: Ledger
    ) -> None:
        """Plan the groups, without sending any.

        The workers of the fleet know the order of the run, in which the cells have `numbers`, by id.
        """
        self._fleet, self._groups, self._numbers, self._ledger = fleet, groups, numbers, ledger
        self._ray = fleet.ray
        self._schedule = Schedule(works)
        self._running: dict[Any, FleetWorker] = {}  # by the reference of the answer
        self._starting: dict[Any, FleetWorker] = {}
        self._lost_since: float | None = None
        self._answered = time.monotonic()  # when Ray's control service last did
        self._progress: Any = None  # reference of the board's answer
        self._looked = 0.0

    def run(self) -> None:
        """Measure everything.

        Raises:
            UserError: a worker finds a mistake, or no worker or no Ray is left.
        """
        with _interrupts() as refuse_interrupted:
            self._run(refuse_interrupted)

    def _run(self, refuse_interrupted: Callable[[], None]) -> None:
        for worker in self._fleet.workers.values():
            self._join(worker)
        while self._schedule.left:
            refuse_interrupted()
            self._assign()
            self._refuse_idleness()
            self._refuse_silence()
            for ref in self._ray.wait([*self._running, *self._starting], num_returns=1, timeout=TICK_S)[0]:
                if ref in self._starting:
                    self._begin(ref)
                else:
                    self._receive(ref)
            self._show()

    def _join(self, worker: FleetWorker) -> None:
        self._schedule.add(worker.name, worker.about["node"], worker.machine.device)

    def _assign(self) -> None:
        """Give every free worker a group."""
        busy = {worker.name for worker in (*self._running.values(), *self._starting.values())}
        for worker in list(self._fleet.workers.values()):
            if worker.name in busy:
                continue
            work = self._schedule.next(worker.name)
            if work is not None:
                self._send(worker, work)

    def _send(self, worker: FleetWorker, work: Work) -> None:
        group = self._groups[work.number]
        self._ledger.begin(group, worker.label)
        references = [None if record is None else record.as_json() for record in self._ledger.references(group)]
        ref = worker.actor.measure.remote([self._numbers[item.cell.id] for item in group], references)
        self._running[ref] = worker
        worker.work = work

    def _refuse_idleness(self) -> None:
        """Give up if nothing runs, and no new worker comes.

        Raises:
            UserError: no worker is left.
        """
        if self._running:
            self._lost_since = None
            return
        now = time.monotonic()
        self._lost_since = self._lost_since or now
        if not self._starting or now - self._lost_since > LOST_S:
            names = ", ".join(w.label for w in self._starting.values()) or "no worker"
            left = f"{self._schedule.left} groups of cells"
            raise UserError(f"{names}: no worker is left that could measure {left}; finished cells are kept")

    def _refuse_silence(self) -> None:
        """Give up if Ray's control service (GCS) has ended, before Ray ends this process with an exit code of its own.

        Raises:
            UserError: it has not answered for `SILENT_S`.
        """
        if self._fleet.answers():
            self._answered = time.monotonic()
        elif time.monotonic() - self._answered > SILENT_S:
            raise UserError(f"Ray's control service at {self._fleet.service} has ended; finished cells are kept")

    def _receive(self, ref: Any) -> None:
        """Write the records of a group, or note that its worker died."""
        worker = self._running.pop(ref)
        work = worker.work
        assert work is not None
        try:
            line = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError:
            raise  # a bug of ours
        except self._ray.exceptions.RayError:
            self._bury(worker)
            return
        answer = GroupAnswer.from_json(line, worker.label)
        later = not self._schedule.awaited(work.number)
        self._ledger.watcher.idle(worker.label)
        if later:  # the worker goes on while the records are written
            self._schedule.done(worker.name)
            self._assign()
        for label, text in answer.notes:
            self._ledger.watcher.note(label, text)
        for item in self._groups[work.number]:
            answer.cells[self._numbers[item.cell.id]].deliver(item, self._ledger.store, self._ledger.done)
        self._ledger.end(self._groups[work.number])
        if not later:
            self._schedule.done(worker.name)

    def _bury(self, worker: FleetWorker) -> None:
        """A worker has died: start another, and give up the group if that was its last try."""
        self._fleet.bury(worker)
        self._ledger.watcher.idle(worker.label)
        self._ledger.watcher.note(worker.label, "died; what it measured is measured again")
        given_up = self._schedule.lost(worker.name)
        if given_up is not None:
            work, machines = given_up
            hosts = {w.about["node"]: w.about["host"] for w in (*self._fleet.workers.values(), worker) if w.about}
            names = ", ".join(hosts.get(machine, machine) for machine in machines)
            failure = {"kind": "WorkerDied", "message": f"its worker died {len(machines)} times, on {names}"}
            for item in self._groups[work.number]:
                self._ledger.done(item, Outcome(dict(item.facts), None, Failure.from_json(failure), None, None))
            self._ledger.end(self._groups[work.number])
        fresh = self._fleet.start()
        self._starting[fresh.actor.about.remote()] = fresh

    def _begin(self, ref: Any) -> None:
        """A new worker has started, in place of one that died."""
        worker = self._starting.pop(ref)
        try:
            self._ray.get(ref)
        except self._ray.exceptions.RayError:
            self._fleet.bury(worker)
            return
        self._fleet.meet([worker])
        self._fleet.brief([worker])
        self._join(worker)

    def _show(self) -> None:
        """Show the progress that the board knows, without waiting for it."""
        if self._progress is None:
            if time.monotonic() - self._looked >= TICK_S:
                self._looked, self._progress = time.monotonic(), self._fleet.board.read.remote()
            return
        if not self._ray.wait([self._progress], timeout=0)[0]:
            return
        board, self._progress = self._progress, None
        busy = {worker.name: worker for worker in self._running.values()}
        with contextlib.suppress(self._ray.exceptions.RayError):
            for name, (tokens, text) in self._ray.get(board).items():
                if name in busy:
                    self._ledger.watcher.advance(tokens, text, busy[name].label)


def works(groups: Sequence[Group], device: str) -> list[Work]:
    """The groups for the schedule.

    `device` is that of the workers that measure times and memory.
    """
    number_of = {item.cell.id: number for number, group in enumerate(groups) for item in group}
    seconds = {e.cell.id: e.seconds or 1.0 for e in estimates([item.cell for group in groups for item in group], "cpu")}
    works = []
    for number, group in enumerate(groups):
        references = [item.cell.reference for item in group]
        after = {number_of[cell.id] for cell in references if cell is not None and cell.id in number_of} - {number}
        alone, total = needs_machine(group), sum(seconds[item.cell.id] for item in group)
        works.append(Work(number, group[0].cell.model, total, alone, frozenset(after), device if alone else None))
    return works
