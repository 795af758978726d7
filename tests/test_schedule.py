"""The schedule of groups over workers, simulated without workers."""

from __future__ import annotations

import heapq
import itertools
import random

from kvbench.harness.run.schedule import Schedule, Work

LOAD_S = 20.0  # that a worker takes to load another model


def simulated(works, real, workers):
    """Run a schedule with a clock of its own; `real` are the seconds of the groups.

    Returns:
        The end, the number of loads, and (start, end, worker, work) of every measurement.
    """
    schedule, free, now, loads = Schedule(works), [f"w{i}" for i in range(workers)], 0.0, 0
    loaded, running, spans = {}, [], []
    while schedule.left:
        for name in sorted(free):
            work = schedule.next(name)
            if work is None:
                continue
            free.remove(name)
            load = LOAD_S * (loaded.get(name) != work.model)
            loads, loaded[name] = loads + bool(load), work.model
            spans.append((now, now + load + real[work.number], name, work))
            heapq.heappush(running, (now + load + real[work.number], name, work))
        assert running, "groups are left, but nothing runs"
        now, name, work = heapq.heappop(running)
        schedule.free(name)
        schedule.recorded(work.number)
        free.append(name)
    return now, loads, spans


def test_no_worker_is_idle_for_long_and_few_models_are_loaded():
    """Six models, groups whose lengths differ by a factor of a thousand, and estimates that are off by a factor of two."""
    draw = random.Random(0)
    real = [draw.lognormvariate(3, 1.2) for _ in range(1000)]
    works = [Work(i, f"model {draw.randrange(6)}", s * draw.uniform(0.5, 2)) for i, s in enumerate(real)]
    end, loads, spans = simulated(works, real, 16)
    assert len({work.number for *_, work in spans}) == len(spans) == 1000
    assert end < 1.1 * (sum(real) + loads * LOAD_S) / 16
    assert loads <= 3 * 16


def test_a_group_comes_after_those_whose_records_it_needs_and_those_come_early():
    works = [Work(0, "m", 1.0)] + [Work(i, "m", 5.0) for i in range(1, 20)]
    works += [Work(i, "m", 50.0, after=frozenset({0})) for i in range(20, 24)]
    _, _, spans = simulated(works, [w.seconds for w in works], 2)
    start, end = {s[3].number: s[0] for s in spans}, {s[3].number: s[1] for s in spans}
    assert start[0] == 0
    assert all(start[i] >= end[0] for i in range(20, 24))
    assert len(spans) == 24


def test_a_worker_keeps_its_model_and_takes_the_longest_first():
    schedule = Schedule([Work(0, "a", 1), Work(1, "b", 2), Work(2, "a", 3), Work(3, "b", 9)])
    order = []
    while schedule.left:
        order.append(schedule.next("w").number)
        schedule.free("w")
        schedule.recorded(order[-1])
    assert order == [3, 1, 2, 0]


def test_groups_that_must_be_alone_come_last_one_after_the_other():
    works = [Work(i, "m", 1.0 + i, alone=i % 2 == 0, after=frozenset({9} if i == 4 else ())) for i in range(10)]
    _, _, spans = simulated(works, [w.seconds for w in works], 3)
    shared, alone = ([s for s in spans if s[3].alone == kind] for kind in (False, True))
    assert max(end for _, end, *_ in shared) <= min(start for start, *_ in alone)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(alone))
    assert len(spans) == 10


def test_a_group_that_was_not_measured_is_given_out_again():
    schedule = Schedule([Work(0, "a", 2.0), Work(1, "b", 1.0)])
    assert schedule.next("w").number == 0
    schedule.free("w", again=True)
    assert schedule.next("other").number == 0
