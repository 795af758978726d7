"""Choose the group that a free worker measures next. Pure: no clock, no input, no output."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Group of cells in a schedule.

    Attributes:
        seconds: estimated seconds; only proportions matter.
        alone: no other worker may be busy at the same time.
        after: numbers of the groups whose records this group needs.
    """

    number: int
    model: Hashable
    seconds: float
    alone: bool = False
    after: frozenset[int] = frozenset()


class Schedule:
    """Order of a run's groups: first groups that other groups wait for, then the longest; groups that must be alone come last.

    Attributes:
        waiting: groups that are not assigned to a worker, in order, by number.
        left: numbers of the groups without records, groups in progress included.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        """Create a schedule in which all groups wait."""
        awaited = {number for work in works for number in work.after}
        ordered = sorted(works, key=lambda work: (work.alone, work.number not in awaited, -work.seconds))
        self.waiting = {work.number: work for work in ordered}
        self.left = set(self.waiting)
        self._busy: dict[str, Work] = {}
        self._models: dict[str, Hashable] = {}  # model that each worker has loaded

    def next(self, worker: str) -> Work | None:
        """Return the group that a free worker measures next, for its loaded model if possible; None if no group is ready."""
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
        """Note that a group has its records, for which other groups may wait."""
        self.left.remove(number)

    def free(self, worker: str, *, again: bool = False) -> None:
        """Note that a worker has ended its group. again: assign the group again, because it was not measured."""
        work = self._busy.pop(worker)
        if again:
            self.waiting = {work.number: work} | self.waiting
