"""Cells measured side by side, interleaved round by round, until each is known to a stated precision."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvbench.harness.core.calibration import Calibration
from kvbench.harness.core.device import bandwidth, free_bytes, multiply_rate
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.tasks.latency.lane import Lane
from kvbench.harness.tasks.latency.schema import LatencyOptions
from kvbench.harness.tasks.task import Job

_FIRST_POINT = 256  # tokens into the stream; every further point is at the double
_PROMPTS = 7  # prompts read for the time to the first token; the first one warms up
_FILLS = 0.7  # of the free memory that caches measured side by side may take


def measure(options: LatencyOptions, jobs: Sequence[Job]) -> list[Metrics | Exception]:
    """Measure all cells interleaved, as many at once as their caches fit into memory."""
    model = jobs[0].model
    device = {"bandwidth": bandwidth(model.device), "multiply_rate": multiply_rate(model.device, model.dtype)}
    lanes = [Lane(options, job) for job in jobs]
    for number, side_by_side in enumerate(_that_fit(lanes)):
        together = f"{time.time_ns():x}-{number}"
        calibration_ms = _measure(options, side_by_side)
        for lane in side_by_side:
            lane.finish(device, together, calibration_ms)
    return [lane.result for lane in lanes]


def _that_fit(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Lanes to be measured side by side: all, or as many as fit into memory, those of one capacity together."""
    free = _FILLS * free_bytes(lanes[0].job.model.device)
    groups: list[list[Lane]] = [[]]
    taken = 0
    for lane in sorted(lanes, key=lambda x: x.job.config.capacity or 0):
        if lane.kv_bytes > free:
            lane.result = MemoryError(f"its K/V takes {lane.kv_bytes / 2**30:.1f} GiB, {free / 2**30:.1f} GiB can be had")
            continue
        if taken + lane.kv_bytes > free:
            groups.append([])
            taken = 0
        groups[-1].append(lane)
        taken += lane.kv_bytes
    return groups


def _measure(options: LatencyOptions, lanes: Sequence[Lane]) -> list[float]:
    """Sittings with fresh caches, lanes interleaved in an order drawn anew every round, until all lanes are settled.

    Returns:
        Milliseconds of the calibration step in every round at the end of the stream.
    """
    draw, calibration = random.Random(0), Calibration(lanes[0].job.model.device)
    at_the_end: list[float] = []
    points = [p for p in (_FIRST_POINT * 2**i for i in range(40)) if options.prompt <= p < options.tokens]
    for sitting in range(options.most_sittings):
        for _ in range(1 if sitting else _PROMPTS):
            for lane in lanes:
                lane.attempt(lane.prompt)
        for point in [] if sitting else points:
            _rounds(options, lanes, calibration, point, draw)
            for lane in lanes:
                lane.attempt(lambda lane=lane, point=point: lane.note(point, [lane.rounds]))  # type: ignore[misc]
        _rounds(options, lanes, calibration, options.tokens, draw, as_soon_as_full=sitting > 0)
        at_the_end += calibration.rounds
        for lane in lanes:
            lane.sittings.append(lane.rounds)
        unsettled = [x for x in lanes if x.alive and not x.settled]
        lanes[0].job.progress(options.tokens, f"{sitting + 1} sittings, {len(unsettled)} cells not settled")
        if sitting + 1 >= options.sittings and not unsettled:
            break
    for lane in lanes:
        lane.attempt(lambda lane=lane: lane.note(options.tokens, lane.sittings))  # type: ignore[misc]
    return at_the_end


def _rounds(
    options: LatencyOptions, lanes: Sequence[Lane], calibration: Calibration, point: int, draw: random.Random,
    as_soon_as_full: bool = False,
) -> None:  # fmt: skip
    """All lanes to one point of the stream, or to where their caches are full, and their turns and the calibration's there."""
    calibration.rounds = []
    for lane in lanes:
        full = min(point, (lane.job.config.capacity or point) + 1) if as_soon_as_full else point
        lane.attempt(lambda lane=lane, full=full: lane.advance(full))  # type: ignore[misc]
    lanes[0].job.progress(point, f"at token {point:,}")
    turns: list[Callable[[], None]] = [calibration.time_round, *(partial(lane.attempt, lane.turn) for lane in lanes)]
    for _ in range(options.rounds):
        draw.shuffle(turns)
        for turn in turns:
            turn()
