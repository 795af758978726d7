"""The schedule of groups over workers, simulated without workers."""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict

from kvbench.harness.run.schedule import Schedule, Work

LOAD_S = 20.0  # that a worker takes to load another model


def simulated(works, real, machines, deaths=()):
    """Run a schedule with a clock of its own.

    Args:
        works: groups, with estimates.
        real: seconds that each takes.
        machines: of the workers.
        deaths: numbers of groups that kill the worker of their first try.

    Returns:
        The end, busy seconds by worker, the number of loads, and (start, end, worker, work) of every measurement.
    """
    schedule, place = Schedule(works), {f"w{i}": machine for i, machine in enumerate(machines)}
    for name, machine in place.items():
        schedule.add(name, machine)
    free, running, now, spans = list(place), [], 0.0, []
    loaded, loads, busy, killed = {}, 0, defaultdict(float), set()
    while schedule.left:
        for name in list(free):
            work = schedule.next(name)
            if work is None:
                continue
            free.remove(name)
            load = LOAD_S * (loaded.get(name) != work.model)
            loads, loaded[name] = loads + bool(load), work.model
            spans.append((now, now + load + real[work.number], name, work))
            busy[name] += load + real[work.number]
            heapq.heappush(running, (now + load + real[work.number], name, work))
        assert running, "groups are left, but nothing runs"
        now, name, work = heapq.heappop(running)
        if work.number in deaths and work.number not in killed:
            killed.add(work.number)
            assert schedule.lost(name) is None
            schedule.add(name, place[name])
            loaded.pop(name)
        else:
            schedule.done(name)
        free.append(name)
    return now, busy, loads, spans


def ten_thousand(seed=0):
    """Cells of six models whose lengths differ by a factor of a thousand, with estimates that are off by a factor of two."""
    draw = random.Random(seed)
    real = [draw.lognormvariate(3, 1.2) for _ in range(10_000)]
    works = [Work(i, f"model {draw.randrange(6)}", s * draw.uniform(0.5, 2)) for i, s in enumerate(real)]
    return works, real


def test_a_group_comes_after_those_whose_records_it_needs_and_those_come_early():
    works = [Work(0, "m", 1.0)] + [Work(i, "m", 5.0) for i in range(1, 20)]
    works += [Work(i, "m", 50.0, after=frozenset({0})) for i in range(20, 24)]
    _, _, _, spans = simulated(works, [w.seconds for w in works], ["a", "a"])
    start, end = {s[3].number: s[0] for s in spans}, {s[3].number: s[1] for s in spans}
    assert start[0] == 0
    assert all(start[i] >= end[0] for i in range(20, 24))
    assert len(spans) == 24


def test_a_worker_keeps_its_model_and_takes_the_longest_first():
    schedule = Schedule([Work(0, "a", 1), Work(1, "b", 2), Work(2, "a", 3), Work(3, "b", 9)])
    schedule.add("w", "here")
    order = []
    while schedule.left:
        order.append(schedule.next("w").number)
        schedule.done("w")
    assert order == [3, 1, 2, 0]


def test_a_group_whose_worker_died_is_tried_elsewhere_and_given_up_after_the_third_time():
    schedule = Schedule([Work(0, "a", 1.0), Work(1, "a", 0.5, after=frozenset({0}))])
    schedule.add("w0", "here")
    schedule.add("w1", "there")
    assert schedule.next("w0").number == 0
    assert schedule.next("w1") is None, "it waits for the other"
    assert schedule.lost("w0") is None
    schedule.add("w2", "here")
    assert schedule.next("w2") is None, "its worker died here, and there is another machine"
    assert schedule.next("w1").number == 0
    assert schedule.lost("w1") is None
    assert schedule.next("w2").number == 0, "it was tried on every machine"
    given_up, machines = schedule.lost("w2")
    assert (given_up.number, machines) == (0, ["here", "there", "here"])
    schedule.add("w3", "here")
    assert schedule.next("w3").number == 1, "its reference has failed, and it finds out itself"
    schedule.done("w3")
    assert schedule.left == 0


def test_every_group_is_measured_once_though_workers_die():
    works, real = ten_thousand(2)
    _, _, _, spans = simulated(works[:500], real, ["a", "a", "b"], deaths={3, 77, 400})
    tries = Counter(work.number for *_, work in spans)
    assert {n for n, times in tries.items() if times == 2} == {3, 77, 400}
    assert len(tries) == 500
