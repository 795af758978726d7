"""Chooses the group that a free worker measures next. Pure: no clock, no input, no output."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """A group of cells, as the schedule sees it.

    Attributes:
        seconds: estimated; only proportions matter.
        alone: no other worker may be busy meanwhile.
        after: numbers of the groups whose records it needs.
    """

    number: int
    model: Hashable
    seconds: float
    alone: bool = False
    after: frozenset[int] = frozenset()


class Schedule:
    """The groups of a run. Those that others wait for come first, then the longest; those that must be alone come last.

    Attributes:
        waiting: groups that no worker has got, in order, by number.
        left: numbers of the groups without records, those being measured included.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        """Begin with all groups waiting."""
        awaited = {number for work in works for number in work.after}
        ordered = sorted(works, key=lambda work: (work.alone, work.number not in awaited, -work.seconds))
        self.waiting = {work.number: work for work in ordered}
        self.left = set(self.waiting)
        self._busy: dict[str, Work] = {}
        self._models: dict[str, Hashable] = {}  # that each worker has loaded

    def next(self, worker: str) -> Work | None:
        """Return the group that a free worker measures now, of its loaded model if there is one; None if no group is ready."""
        if any(work.alone for work in self._busy.values()):
            return None
        ready = [work for work in self.waiting.values() if not work.after & self.left and not (work.alone and self._busy)]
        if not ready or (ready[0].alone and any(not work.alone for work in self.waiting.values())):
            return None
        same = (work for work in ready if work.alone == ready[0].alone and work.model == self._models.get(worker))
        work = next(same, ready[0])
        self._models[worker], self._busy[worker] = work.model, work
        return self.waiting.pop(work.number)

    def recorded(self, number: int) -> None:
        """Note that a group has its records, which others may wait for."""
        self.left.remove(number)

    def free(self, worker: str, *, again: bool = False) -> None:
        """Note that a worker has ended its group, which is given out `again` if it was not measured."""
        work = self._busy.pop(worker)
        if again:
            self.waiting = {work.number: work} | self.waiting
