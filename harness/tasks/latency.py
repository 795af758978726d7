"""Latency of a decode step: the real loop, its cache full, and the curve over the stream while it fills.

Source: the figure of Xiao et al. 2023, arXiv:2309.17453, Figure 10 (per-token decoding latency by cache size).
Differs: cells are measured side by side, interleaved round by round, until each is known to a stated precision; what is
read is random and then the model's own greedy continuation, because latency does not depend on it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from harness.aggregates import of_steps
from harness.device import Marks, bandwidth, multiply_rate
from harness.engine.decoder import Decoder
from harness.engine.loop import CachedDecoder
from harness.engine.model import Model
from harness.engine.selfcheck import free_bytes
from harness.report.intervals import median_interval
from harness.tasks.task import Job, Options, RandomTokens, Task, Tokenizer

_WARM_UP = 3  # steps before each measurement
_FIRST_POINT = 256  # tokens into the stream; every further point is at the double
_PROMPTS = 7  # prompts read for the time to the first token; the first one warms up
_TURN_MS = 100.0  # a cell's turn is no longer than this, but at least one step
_BOOKKEEPING = 16  # steps that the share of bookkeeping is measured in
_FILLS = 0.7  # of the free memory that caches measured side by side may take


class LatencyOptions(Options):
    """Options of the latency task."""

    name: Literal["latency"] = "latency"
    tokens: int = Field(4096, ge=2, description="length of the stream; its end is where the steady state is measured")
    prompt: int = Field(256, ge=1, description="tokens of the prompt whose answer's first token is waited for")
    batch: int = Field(1, ge=1, description="streams side by side")
    steps: int = Field(16, ge=1, description="decode steps of a cell in a row, at most, before it is the next cell's turn")
    rounds: int = Field(8, ge=6, description="turns of every cell in a sitting")
    sittings: int = Field(3, ge=2, description="times that all is begun anew with fresh caches, at least")
    most_sittings: int = Field(8, ge=2, description="sittings after which a cell that does not settle is recorded as unsettled")
    precision: float = Field(0.02, gt=0, lt=1, description="relative error of the median step at which a cell is settled")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.prompt > self.tokens:
            raise ValueError(f"prompt {self.prompt} is longer than the stream of {self.tokens} tokens")
        if self.sittings > self.most_sittings:
            raise ValueError(f"sittings {self.sittings} are more than most_sittings {self.most_sittings}")
        return self


class Latency(Task):
    """Milliseconds of a decode step over a stream, and how far from what the memory allows."""

    options: ClassVar[type[Options]] = LatencyOptions
    trace: ClassVar[str] = ".steps.npy"
    of_device: ClassVar[bool] = True
    together: ClassVar[bool] = True

    @staticmethod
    def data(options: LatencyOptions, tokenizer: Tokenizer, directory: Path | None) -> RandomTokens:
        """Nothing is read but random tokens."""
        return RandomTokens(options.tokens)

    @staticmethod
    def total(options: LatencyOptions) -> int:
        """The stream."""
        return options.tokens * options.batch

    @classmethod
    def windows(cls, options: LatencyOptions) -> float:
        """One a step: of every sitting, and of about five points of the stream."""
        return options.batch * options.rounds * options.steps * (options.sittings + 5)

    @classmethod
    def run_together(cls, options: LatencyOptions, jobs: Sequence[Job]) -> list[dict[str, Any] | Exception]:
        """Measure all cells interleaved, as many at once as their caches fit into memory."""
        model = jobs[0].model
        device = {"bandwidth": bandwidth(model.device), "multiply_rate": multiply_rate(model.device, model.dtype)}
        lanes = [_Lane(options, job) for job in jobs]
        for number, side_by_side in enumerate(_that_fit(lanes)):
            together = f"{time.time_ns():x}-{number}"
            _measure(options, side_by_side)
            for lane in side_by_side:
                lane.finish(device, together)
        return [lane.result for lane in lanes]


class _Lane:
    """One cell on its way through the stream. What it dies of is kept, and the others go on."""

    def __init__(self, options: LatencyOptions, job: Job) -> None:
        self.options, self.job = options, job
        self.result: dict[str, Any] | Exception = {}
        self.rounds: list[list[float]] = []  # milliseconds of the steps of every turn since the last `advance`
        self.sittings: list[list[list[float]]] = []  # rounds at the end of the stream
        self.position = 0
        self.read: Decoder | None = None
        self.tokens: Tensor | None = None  # what the next step reads. [B, 1]
        self._drawn = torch.Generator().manual_seed(0)
        self._curve: list[dict[str, Any]] = []
        self._first: list[float] = []
        self._in_a_turn = 1  # steps

    @property
    def alive(self) -> bool:
        """Whether nothing went wrong yet."""
        return not isinstance(self.result, Exception)

    @property
    def kv_bytes(self) -> int:
        """What its cache will take, by the formula."""
        config = self.job.config
        kept = 0 if not config.policy.caches else config.capacity or self.options.tokens
        return self.job.model.kv_bytes(kept, self.options.batch) if config.policy.caches else 0

    def attempt(self, work: Callable[[], None]) -> None:
        """Do something that may fail."""
        if self.alive:
            try:
                work()
            except Exception as error:  # whatever a cell dies of, the others go on
                self.result, self.read = error, None

    def prompt(self) -> None:
        """Read a prompt with a fresh cache, and time it to the first token of the answer."""
        self.read = self.job.decoder(self.options.batch)
        tokens = self._random(self.options.prompt)
        marks = Marks(self.job.model.device)
        marks.mark()
        self._take_in(tokens)
        marks.mark()
        self._first += marks.milliseconds()
        self.position = self.options.prompt

    def advance(self, position: int) -> None:
        """Read on to a place in the stream, and warm up there."""
        missing = position - self.position
        if missing > 0:
            self._take_in(self._random(missing))
            self.position = position
        assert self.read
        self.read.reserve(_WARM_UP + self.options.rounds * self.options.steps + _BOOKKEEPING)
        marks = Marks(self.job.model.device)
        for _ in range(_WARM_UP):
            marks.mark()
            self.step()
        marks.mark()
        if not self.sittings:
            self._in_a_turn = max(1, min(self.options.steps, int(_TURN_MS / marks.milliseconds()[-1])))
        self.rounds = []

    def turn(self) -> None:
        """One round of timed steps."""
        marks = Marks(self.job.model.device)
        marks.mark()
        for _ in range(self._in_a_turn):
            self.step()
            marks.mark()
        self.rounds.append(marks.milliseconds())

    def step(self) -> None:
        """One decode step: the loop, and the greedy token."""
        assert self.read
        assert self.tokens is not None
        self.tokens = self.read(self.tokens)[:, -1:].argmax(-1)
        self.position += 1

    @property
    def settled(self) -> bool:
        """Whether the step at the end of the stream is known well enough."""
        return timing(self.sittings)[1] <= self.options.precision

    def note(self, at: int, sittings: list[list[list[float]]]) -> None:
        """What came out of the rounds at one point of the stream."""
        assert self.read
        used, attended = self.read.slots
        median, error = timing(sittings)
        self._curve.append({
            "position": at, "step_ms": median, "error": error, "steps": sum(len(r) for s in sittings for r in s),
            "used_slots": used, "attended_slots": attended,
        })  # fmt: skip

    def finish(self, device: dict[str, float], together: str) -> None:
        """Put the figures together, and write every timed step down."""
        self.attempt(lambda: self._finish(device, together))
        self.read = self.tokens = None

    def _finish(self, device: dict[str, float], together: str) -> None:
        assert self.read
        options, model = self.options, self.job.model
        rounds = [r for sitting in self.sittings for r in sitting]
        steps = np.array(rounds)
        median, error = timing(self.sittings)
        bounds = roofline(model, self.read, options.batch, device)
        medians = np.median(steps, 1)
        first, first_error = timing([[[x] for x in self._first[1:]]])
        flags = [] if self.settled else [
            f"unsettled: medians of {len(steps)} rounds lie between {medians.min():.3g} and {medians.max():.3g} ms"
        ]  # fmt: skip
        kv_bytes = self.read.kv_bytes
        if self.job.config.capacity is not None and kv_bytes != self.kv_bytes:
            flags.append(f"its K/V takes {kv_bytes} bytes and should take {self.kv_bytes}")
        self.result = {
            "step_ms": median, "error": error, "settled": self.settled, "sittings": len(self.sittings),
            **of_steps(steps, options.batch),
            "first_token_ms": first, "first_token_error": first_error, "position": self._curve[-1]["position"],
            "curve": self._curve, "bookkeeping_share": self._bookkeeping(),
            "roofline": bounds, "over_roofline": median / bounds["ms"], "device": device, "together": together,
            "kv_bytes": kv_bytes, "state_bytes": self.read.state_bytes, "flags": flags,
        }  # fmt: skip
        with self.job.trace.open("wb") as file:
            np.save(file, steps.astype("<f4"))

    def _bookkeeping(self) -> float:
        """Share of an eager step that updating statistics, scoring and evicting take, in steps of their own."""
        if not isinstance(self.read, CachedDecoder):
            return 0.0
        self.read.graphs = None  # a captured step can't be looked into
        device, steps = self.job.model.device, Marks(self.job.model.device)
        spent: list[Marks] = []
        for walk in self.read.walks:
            walk.end = _timed(walk.end, device, spent)  # type: ignore[method-assign]
        steps.mark()
        for _ in range(_BOOKKEEPING):
            self.step()
        steps.mark()
        for walk in self.read.walks:
            del walk.end
        return sum(sum(marks.milliseconds()) for marks in spent) / sum(steps.milliseconds())

    def _random(self, count: int) -> Tensor:
        vocabulary = self.job.model.hf.config.get_text_config().vocab_size
        return torch.randint(vocabulary, (self.options.batch, count), generator=self._drawn).to(self.job.model.device)

    def _take_in(self, tokens: Tensor) -> None:
        assert self.read
        for block in tokens.split(self.job.block, 1):
            logits = self.read(block, keep=torch.tensor([block.shape[1] - 1], device=block.device))
        self.tokens = logits[:, -1:].argmax(-1)


def _timed(work: Callable[..., None], device: torch.device, spent: list[Marks]) -> Callable[..., None]:
    """The same, its time noted."""

    def timed(*arguments: Any) -> None:
        marks = Marks(device)
        marks.mark()
        work(*arguments)
        marks.mark()
        spent.append(marks)

    return timed


def _that_fit(lanes: Sequence[_Lane]) -> list[list[_Lane]]:
    """Lanes to be measured side by side: all, or as many as fit into memory, those of one capacity together."""
    free = _FILLS * free_bytes(lanes[0].job.model.device)
    groups: list[list[_Lane]] = [[]]
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


def _measure(options: LatencyOptions, lanes: Sequence[_Lane]) -> None:
    """Sittings with fresh caches, lanes interleaved in an order drawn anew every round, until all lanes are settled."""
    draw = random.Random(0)
    points = [p for p in (_FIRST_POINT * 2**i for i in range(40)) if options.prompt <= p < options.tokens]
    for sitting in range(options.most_sittings):
        for _ in range(1 if sitting else _PROMPTS):
            for lane in lanes:
                lane.attempt(lane.prompt)
        for point in [] if sitting else points:
            _rounds(options, lanes, point, draw)
            for lane in lanes:
                lane.attempt(lambda lane=lane, point=point: lane.note(point, [lane.rounds]))  # type: ignore[misc]
        _rounds(options, lanes, options.tokens, draw, as_soon_as_full=sitting > 0)
        for lane in lanes:
            lane.sittings.append(lane.rounds)
        unsettled = [x for x in lanes if x.alive and not x.settled]
        lanes[0].job.progress(options.tokens, f"{sitting + 1} sittings, {len(unsettled)} cells not settled")
        if sitting + 1 >= options.sittings and not unsettled:
            break
    for lane in lanes:
        lane.attempt(lambda lane=lane: lane.note(options.tokens, lane.sittings))  # type: ignore[misc]


def _rounds(
    options: LatencyOptions, lanes: Sequence[_Lane], point: int, draw: random.Random, as_soon_as_full: bool = False
) -> None:
    """All lanes to one point of the stream, or to where their caches are full, and their turns there."""
    for lane in lanes:
        full = min(point, (lane.job.config.capacity or point) + 1) if as_soon_as_full else point
        lane.attempt(lambda lane=lane, full=full: lane.advance(full))  # type: ignore[misc]
    lanes[0].job.progress(point, f"at token {point:,}")
    order = list(lanes)
    for _ in range(options.rounds):
        draw.shuffle(order)
        for lane in order:
            lane.attempt(lane.turn)


def roofline(model: Model, read: Decoder, batch: int, device: dict[str, float]) -> dict[str, float]:
    """The shortest time a step can take: bytes that must move over the bandwidth, or operations over the rate.

    Args:
        model: its weights are read once a step, the input embedding only where it is the output head too.
        read: its K/V in use, and its state, are read once; a window run afresh multiplies once a token of it.
        batch: streams.
        device: bandwidth in bytes a second, multiply_rate in operations a second.

    Returns:
        bytes, operations, ms.
    """
    hf = model.hf
    inputs: Any = hf.get_input_embeddings()
    head: Any = hf.get_output_embeddings()
    once = {p.data_ptr(): p for p in hf.parameters()}
    tied = head is not None and head.weight.data_ptr() == inputs.weight.data_ptr()
    weights = [p for p in once.values() if tied or p.data_ptr() != inputs.weight.data_ptr()]
    used, _ = read.slots
    cached = isinstance(read, CachedDecoder)
    moved = sum(p.nbytes for p in weights)
    if cached:
        full = model.kv_bytes(round(used) - 1, batch)
        moved += full + round(read.state_bytes * full / max(read.kv_bytes, 1))
    operations = 2 * sum(p.numel() for p in weights) * batch * (1 if cached else round(used))
    seconds = max(moved / device["bandwidth"], operations / device["multiply_rate"])
    return {"bytes": moved, "operations": operations, "ms": 1e3 * seconds}


def timing(sittings: Sequence[Sequence[Sequence[float]]]) -> tuple[float, float]:
    """The median of the rounds' medians, and its relative error.

    Steps of a round share what the machine was doing, so rounds count and not steps. Sittings differ by more than rounds
    do: other memory, another minute. The error is half the 95 % interval of the median of rounds, or half that of
    sittings (half their range below 6), whichever is larger.

    Args:
        sittings: times of the steps of every round of every sitting.
    """
    medians = [[float(np.median(r)) for r in rounds] for rounds in sittings]
    pooled = [m for sitting in medians for m in sitting]
    low, high = median_interval(pooled)
    centres = [float(np.median(sitting)) for sitting in medians]
    least, most = median_interval(centres) if len(centres) >= 6 else (min(centres), max(centres))
    median = float(np.median(pooled))
    return median, max(high - low, most - least) / 2 / median
