"""Choose the group that a free worker measures next. Pure: no clock, no input, no output.

A worker goes on with the model that it has loaded, longest group first. Without such a group it takes the model that has most
left to do for each worker that holds it. Groups that need their machine to themselves come last: by then the other workers of
the machine find nothing else to do.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Work:
    """A group of cells, as the schedule sees it.

    Attributes:
        number: of the group.
        model: that must be loaded.
        seconds: estimated; only proportions matter.
        alone: no other worker of the machine may be busy meanwhile.
        after: numbers of the groups whose records it needs.
        device: only workers with this device may measure it; any may when None.
    """

    number: int
    model: Hashable
    seconds: float
    alone: bool = False
    after: frozenset[int] = frozenset()
    device: str | None = None


@dataclass
class _WorkerState:
    """A worker.

    Attributes:
        machine: that it runs on.
        device: that it measures on.
        model: that it has loaded; None if none.
        work: that it measures now; None if it is free.
    """

    machine: str
    device: str
    model: Hashable = None
    work: Work | None = None


class Schedule:
    """The groups that are left, and the workers."""

    def __init__(self, works: Sequence[Work], tries: int = 3) -> None:
        """Begin with all groups waiting and no worker.

        A group is given up after `tries` workers died with it.
        """
        self._tries = tries
        self._workers: dict[str, _WorkerState] = {}
        self._machines: dict[str, set[str]] = defaultdict(set)  # names of the busy workers
        self._waiting = {w.number: set(w.after) for w in works if w.after}
        self._followers: dict[int, list[Work]] = defaultdict(list)  # groups that wait for this one
        self._ready: dict[tuple[bool, Hashable], list[tuple[float, int, Work]]] = defaultdict(list)  # heaps
        self._seconds: dict[tuple[bool, Hashable], float] = defaultdict(float)  # of the groups in these heaps
        self._again: list[tuple[Work, frozenset[str]]] = []  # whose worker died, and the machines where that was
        self._deaths: dict[int, list[str]] = defaultdict(list)  # machines where a worker died with this group
        self._left = {w.number for w in works}
        for work in works:
            for before in work.after:
                self._followers[before].append(work)
        for work in _with_followers(works):
            if not work.after:
                self._push(work)

    @property
    def left(self) -> int:
        """Number of groups that are not finished, those being measured included."""
        return len(self._left)

    def awaited(self, number: int) -> bool:
        """Whether a group that is not finished needs the records of this one."""
        return any(w.number in self._waiting for w in self._followers.get(number, ()))

    def add(self, worker: str, machine: str, device: str = "") -> None:
        """A worker has come."""
        self._workers[worker] = _WorkerState(machine, device)

    def next(self, worker: str) -> Work | None:
        """The group that a free worker measures now; None if there is none for it at the moment."""
        me = self._workers[worker]
        busy = self._machines[me.machine]
        if me.work is not None or any((w := self._workers[name].work) is not None and w.alone for name in busy):
            return None
        work = self._take_again(me, not busy) or self._take(me, False) or (None if busy else self._take(me, True))
        if work is not None:
            me.work, me.model = work, work.model
            busy.add(worker)
        return work

    def done(self, worker: str) -> None:
        """A worker has finished its group."""
        me = self._workers[worker]
        assert me.work is not None
        self._machines[me.machine].discard(worker)
        self._finish(me.work)
        me.work = None

    def lost(self, worker: str) -> tuple[Work, list[str]] | None:
        """A worker has died. Its group is measured again, unless that was its last try.

        Returns:
            The group that is given up, and the machines where its workers died; None if there is none.
        """
        me = self._workers.pop(worker)
        self._machines[me.machine].discard(worker)
        if me.work is None:
            return None
        deaths = self._deaths[me.work.number]
        deaths.append(me.machine)
        if len(deaths) < self._tries:
            self._again.append((me.work, frozenset(deaths)))
            return None
        self._finish(me.work)
        return me.work, deaths

    def _finish(self, work: Work) -> None:
        self._left.remove(work.number)
        for follower in self._followers.pop(work.number, ()):
            missing = self._waiting[follower.number]
            missing.discard(work.number)
            if not missing:
                del self._waiting[follower.number]
                self._push(follower)

    def _push(self, work: Work) -> None:
        key = (work.alone, work.model)
        heapq.heappush(self._ready[key], (-work.seconds, work.number, work))
        self._seconds[key] += work.seconds

    def _take_again(self, me: _WorkerState, idle: bool) -> Work | None:
        """A group whose worker died: on another machine if there is one."""
        machines = {worker.machine for worker in self._workers.values()}
        for place, (work, tried) in enumerate(self._again):
            elsewhere = me.machine not in tried or machines <= tried
            if elsewhere and (idle or not work.alone) and work.device in (None, me.device):
                del self._again[place]
                return work
        return None

    def _take(self, me: _WorkerState, alone: bool) -> Work | None:
        keys = [key for key, heap in self._ready.items() if heap and key[0] == alone and heap[0][2].device in (None, me.device)]
        if not keys:
            return None
        key = (alone, me.model)
        if key not in keys:
            holders = defaultdict[Hashable, int](int)
            for worker in self._workers.values():
                holders[worker.model] += worker is not me
            key = max(keys, key=lambda k: self._seconds[k] / (1 + holders[k[1]]))
        work = heapq.heappop(self._ready[key])[2]
        self._seconds[key] -= work.seconds
        return work


def _with_followers(works: Sequence[Work]) -> list[Work]:
    """The groups; one that others wait for counts as long as itself and the longest of them, so that it comes early."""
    longest: dict[int, float] = defaultdict(float)
    for work in works:
        for before in work.after:
            longest[before] = max(longest[before], work.seconds)
    return [replace(work, seconds=work.seconds + longest[work.number]) for work in works]
