"""Timing of cells side by side, interleaved round by round, until the step time of each has a stated precision."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import torch

from kvbench.harness.core.device import Reference, bandwidth, free_bytes, multiply_rate
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.recompute import RecomputeDecoder
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.tasks.latency import FIRST_POINT, PROMPTS, LatencyOptions
from kvbench.harness.tasks.latency.lane import Lane
from kvbench.harness.tasks.task import Job
from kvbench.policies.recompute_window import RecomputeWindow

_MAX_SHARE_OF_FREE_MEMORY = 0.7  # share for the caches of cells measured side by side


def measure(options: LatencyOptions, jobs: Sequence[Job]) -> Iterator[tuple[int, Metrics | Exception]]:
    """Measure all cells interleaved, in groups whose caches fit into memory.

    Yields:
        The index of a job, and its figures or its error: first the cells that don't fit, then each group when it is finished.
    """
    model = jobs[0].model
    rates = _rates(model)
    lanes = [Lane(options, job) for job in jobs]
    groups = _groups_that_fit(lanes)
    yield from [(number, lane.error) for number, lane in enumerate(lanes) if lane.error is not None]
    for number, group in enumerate(groups):
        together = f"{time.time_ns():x}-{number}"
        forward_ms = _measure(options, group)
        rates = {name: max(rate, rates[name]) for name, rate in _rates(model).items()}  # the device may have been busy in one
        for lane in group:
            lane.finish(rates, together, forward_ms)
        for lane in group:
            yield lanes.index(lane), lane.result if lane.error is None else lane.error


def _rates(model: Model) -> dict[str, float]:
    """Measure the device's current rates: bandwidth in bytes per second, multiply_rate in operations per second."""
    return {"bandwidth": bandwidth(model.device), "multiply_rate": multiply_rate(model.device, model.dtype)}


def _groups_that_fit(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Return the lanes to measure side by side: all, or groups that fit into memory, by capacity."""
    free = _MAX_SHARE_OF_FREE_MEMORY * free_bytes(lanes[0].job.model.device)
    groups: list[list[Lane]] = [[]]
    used = 0
    for lane in sorted(lanes, key=lambda x: x.job.config.capacity or 0):
        if lane.kv_bytes > free:
            lane.error = MemoryError(f"its K/V takes {lane.kv_bytes / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB are free")
            continue
        if used + lane.kv_bytes > free:
            groups.append([])
            used = 0
        groups[-1].append(lane)
        used += lane.kv_bytes
    return [group for group in groups if group]  # none if no lane fits


def _measure(options: LatencyOptions, lanes: Sequence[Lane]) -> list[float]:
    """Repeat sittings until all lanes are settled. Each sitting starts with empty caches; each round orders lanes randomly.

    Returns:
        Milliseconds of the model's own forward pass in each round at the end of the stream.
    """
    draw, forward = random.Random(0), _own_forward(lanes[0].job.model, options.batch)
    forward_ms: list[float] = []
    points = [p for p in (FIRST_POINT * 2**i for i in range(40)) if options.prompt <= p < options.tokens]
    for sitting in range(options.most_sittings):
        for _ in range(1 if sitting else PROMPTS):
            for lane in _running(lanes):
                with lane.guard():
                    lane.read_prompt()
        for point in [] if sitting else points:
            _time_rounds(options, lanes, forward, point, draw)
            for lane in _running(lanes):
                with lane.guard():
                    lane.add_point(point, [lane.round_ms])
        _time_rounds(options, lanes, forward, options.tokens, draw, stop_when_full=sitting > 0)
        forward_ms += forward.rounds
        for lane in lanes:
            lane.sitting_ms.append(lane.round_ms)
        unsettled = [lane for lane in _running(lanes) if not lane.settled]
        lanes[0].job.progress(options.tokens, f"{sitting + 1} sittings, {len(unsettled)} cells not settled")
        if sitting + 1 >= options.sittings and not unsettled:
            break
    for lane in _running(lanes):
        with lane.guard():
            lane.add_point(options.tokens, lane.sitting_ms)
    return forward_ms


def _own_forward(model: Model, streams: int) -> Reference:
    """Return the reference for dense: the model reads a token of each stream, without code of a cache or policy."""
    alone = CacheConfig(RecomputeWindow(), capacity=1)
    tokens = torch.zeros(streams, 1, dtype=torch.int64, device=model.device)
    return Reference(model.device, lambda: RecomputeDecoder(model, alone, streams)(tokens))


def _time_rounds(
    options: LatencyOptions,
    lanes: Sequence[Lane],
    forward: Reference,
    point: int,
    draw: random.Random,
    stop_when_full: bool = False,
) -> None:
    """Read up to a point of the stream, or only until caches are full, and time all rounds there."""
    forward.rounds = []
    for lane in _running(lanes):
        position = min(point, (lane.job.config.capacity or point) + 1) if stop_when_full else point
        with lane.guard():
            lane.advance(position)
    lanes[0].job.progress(point, f"at token {point:,}")
    order: list[Reference | Lane] = [forward, *lanes]
    for _ in range(options.rounds):
        draw.shuffle(order)
        for timed in order:
            if isinstance(timed, Reference):
                timed.time_round()
            elif timed.error is None:
                with timed.guard():
                    timed.time_round()


def _running(lanes: Sequence[Lane]) -> Iterator[Lane]:
    """Return the lanes without an error so far."""
    return (lane for lane in lanes if lane.error is None)
