"""One cell of the latency task on its way through the stream, and what its timed steps come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.harness.core.device import Marks
from kvbench.harness.engine.decoder import Decoder
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.model import Model
from kvbench.harness.records.aggregates import step_figures, timing
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.tasks.latency.schema import LatencyMetrics, LatencyOptions
from kvbench.harness.tasks.task import Job

_WARM_UP = 3  # steps before each measurement
_TURN_MS = 100.0  # a cell's turn is no longer than this, but at least one step
_BOOKKEEPING = 16  # steps that the share of bookkeeping is measured in


class Lane:
    """One cell on its way through the stream. What it dies of is kept, and the others go on."""

    def __init__(self, options: LatencyOptions, job: Job) -> None:
        self.options, self.job = options, job
        self.result: Metrics | Exception = Metrics()
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

    def finish(self, device: dict[str, float], together: str, calibration_ms: list[float]) -> None:
        """Put the figures together, and write every timed step down."""
        self.attempt(lambda: self._finish(device, together, calibration_ms))
        self.read = self.tokens = None

    def _finish(self, device: dict[str, float], together: str, calibration_ms: list[float]) -> None:
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
        figures = {
            "step_ms": median, "error": error, "settled": self.settled, "sittings": len(self.sittings),
            **step_figures(steps, options.batch),
            "first_token_ms": first, "first_token_error": first_error, "position": self._curve[-1]["position"],
            "curve": self._curve, "bookkeeping_share": self._bookkeeping(),
            "roofline": bounds, "over_roofline": median / bounds["ms"], "device": device, "together": together,
            "calibration_ms": [round(x, 5) for x in calibration_ms],
            "kv_bytes": kv_bytes, "state_bytes": self.read.state_bytes, "flags": flags,
        }  # fmt: skip
        self.result = LatencyMetrics.from_json(figures)
        with self.job.trace.open("wb") as file:
            np.save(file, steps.astype("<f4"))

    def _bookkeeping(self) -> float:
        """Share of an eager step that updating statistics, scoring and evicting take, in steps of their own."""
        if not isinstance(self.read, CachedDecoder):
            return 0.0
        self.read.graphs = None  # a captured step can't be timed in parts
        whole, parts = Marks(self.job.model.device), Marks(self.job.model.device)

        @contextmanager
        def marked() -> Iterator[None]:
            parts.mark()
            yield
            parts.mark()

        self.read.around_bookkeeping = marked
        whole.mark()
        for _ in range(_BOOKKEEPING):
            self.step()
        whole.mark()
        return sum(parts.milliseconds()[::2]) / sum(whole.milliseconds())  # between two of them lies the rest of a step

    def _random(self, count: int) -> Tensor:
        vocabulary = self.job.model.hf.config.get_text_config().vocab_size
        return torch.randint(vocabulary, (self.options.batch, count), generator=self._drawn).to(self.job.model.device)

    def _take_in(self, tokens: Tensor) -> None:
        assert self.read
        for block in tokens.split(self.job.block, 1):
            logits = self.read(block, keep=torch.tensor([block.shape[1] - 1], device=block.device))
        self.tokens = logits[:, -1:].argmax(-1)


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
