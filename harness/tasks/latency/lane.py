"""Cell of the latency task: read the stream, time its steps, and compute the figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.harness.core.device import Marks
from kvbench.harness.core.resets import holds_kv
from kvbench.harness.engine.decoder import Decoder, read_blocks
from kvbench.harness.engine.loop import CachedDecoder, read_bytes
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.recompute import RecomputeDecoder
from kvbench.harness.engine.reset import ResetDecoder
from kvbench.harness.records.aggregates import largest, step_figures, timing
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.tasks.latency import BOOKKEEPING_STEPS, MAX_ROUND_MS, WARM_UP_STEPS, LatencyMetrics, LatencyOptions
from kvbench.harness.tasks.task import Job

_MOST_WARM_UP_STEPS = 48  # steps for capturing a cycle of evictions, unless three cycles have more


class Lane:
    """A cell that is measured interleaved with other cells."""

    def __init__(self, options: LatencyOptions, job: Job) -> None:
        self.options, self.job = options, job
        self.result = Metrics()  # figures of the cell; empty before `finish`
        self.error: Exception | None = None  # reason that the cell could not be measured; the other cells go on
        self.round_ms: list[list[float]] = []  # milliseconds of each step, by round since the last `advance`
        self.sitting_ms: list[list[list[float]]] = []  # `round_ms` at the end of the stream, by sitting
        self.position = 0  # tokens read
        self.read: Decoder | None = None
        self.tokens: Tensor | None = None  # input of the next step. [B, 1]
        self._generator = torch.Generator().manual_seed(0)
        self._curve: list[dict[str, Any]] = []
        self._first_token_ms: list[float] = []
        self._steps_per_round = 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cell's K and V, computed from the shapes of the model's layers."""
        config = self.job.config
        if not holds_kv(config.policy):
            return 0
        return self.job.model.kv_bytes(config.capacity or self.options.tokens, self.options.batch, config.kv)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Store an exception as the cell's error, and free the cell's cache."""
        try:
            yield
        except Exception as error:
            self.error, self.read = error, None

    def _new_decoder(self) -> Decoder:
        """Return a decoder with an empty cache that captures its second step, so that warming up includes the capture."""
        read = self.job.decoder(self.options.batch)
        if isinstance(read, CachedDecoder) and read.graphs is not None:
            read.graphs = read.graphs.fresh(after=1)
        return read

    def read_prompt(self) -> None:
        """Read a prompt with an empty cache, and time the first token of the answer."""
        self.read = self._new_decoder()
        tokens = self._random(self.options.prompt)
        marks = Marks(self.job.model.device)
        marks.mark()
        self._read_tokens(tokens)
        marks.mark()
        self._first_token_ms += marks.milliseconds()
        self.position = self.options.prompt

    def advance(self, position: int) -> None:
        """Advance to a position in the stream, and warm up there. Tokens before it are read or replaced by random K and V."""
        missing = position - self.position
        if missing > 0:
            if can_be_filled(self.read):
                self._fill(position)
            else:
                self._read_tokens(self._random(missing))
            self.position = position
        warm_up_ms = self._warm_up()
        if not self.sitting_ms:
            self._steps_per_round = max(1, min(self.options.steps, int(MAX_ROUND_MS / warm_up_ms)))
        if isinstance(self.read, ResetDecoder) and self.position > (self.job.config.capacity or 0):
            self._approach_reset(self.read)
        self.round_ms = []

    def _approach_reset(self, read: ResetDecoder) -> None:
        """Read tokens until the next reset falls into the middle of the timed steps, if it would come after them."""
        timed = self._steps_per_round * self.options.rounds
        if read.steps_to_reset >= timed:
            missing = read.steps_to_reset - timed // 2
            self._read_tokens(self._random(missing))
            self.position += missing

    def _fill(self, position: int) -> None:
        """Replace the cache by a cache of random K and V, as if the stream had been read up to a position."""
        self.read = None  # frees the old cache and its graphs first
        read = self._new_decoder()
        assert isinstance(read, CachedDecoder)
        read.fill_randomly(position)
        self.read, self.tokens = read, self._random(1)

    def _warm_up(self) -> float:
        """Decode a few steps, on a GPU until all are captured or capture fails. Return the milliseconds of the last step."""
        assert self.read
        graphs = self.read.graphs if isinstance(self.read, CachedDecoder) else None
        cycle = self.job.config.every  # steps after which evictions repeat
        most = WARM_UP_STEPS if graphs is None else max(_MOST_WARM_UP_STEPS, 3 * cycle)
        self.read.reserve(most + self.options.rounds * self.options.steps + BOOKKEEPING_STEPS)
        marks, in_a_row = Marks(self.job.model.device), 0  # consecutive replayed steps
        marks.mark()
        for step in range(most):
            replayed = graphs.replayed if graphs is not None else 0
            self.step()
            marks.mark()
            in_a_row = in_a_row + 1 if graphs is not None and graphs.replayed > replayed else 0
            if step + 1 >= WARM_UP_STEPS and (graphs is None or graphs.refused or in_a_row > cycle):
                break
        return marks.milliseconds()[-1]

    def time_round(self) -> None:
        """Time the steps of one round."""
        marks = Marks(self.job.model.device)
        marks.mark()
        for _ in range(self._steps_per_round):
            self.step()
            marks.mark()
        self.round_ms.append(marks.milliseconds())

    def step(self) -> None:
        """Decode one greedy token."""
        assert self.read
        assert self.tokens is not None
        self.tokens = self.read(self.tokens)[:, -1:].argmax(-1)
        self.position += 1

    @property
    def settled(self) -> bool:
        """Whether the error of the step time at the end of the stream is within `precision`."""
        return timing(self.sitting_ms)[1] <= self.options.precision

    def add_point(self, position: int, sitting_ms: list[list[list[float]]]) -> None:
        """Add a point of the stream to the curve."""
        assert self.read
        used, attended = self.read.slots
        median, error = timing(sitting_ms)
        self._curve.append(
            {
                "position": position,
                "step_ms": median,
                "error": error,
                "steps": sum(len(r) for s in sitting_ms for r in s),
                "used_slots": used,
                "attended_slots": attended,
            }
        )

    def finish(self, device: dict[str, float], together: str, forward_ms: list[float]) -> None:
        """Compute the figures, and write the time of each step to the trace."""
        if self.error is None:
            with self.guard():
                self._finish(device, together, forward_ms)
        self.read = self.tokens = None

    def _finish(self, device: dict[str, float], together: str, forward_ms: list[float]) -> None:
        assert self.read
        options, model = self.options, self.job.model
        steps = np.array([round_ms for rounds in self.sitting_ms for round_ms in rounds])
        median, error = timing(self.sitting_ms)
        bounds = roofline(model, self.read, options.batch, device)
        medians = np.median(steps, 1)
        first, first_error = timing([[[ms] for ms in self._first_token_ms[1:]]])
        flags = []
        if not self.settled:
            flags.append(f"unsettled: medians of {len(steps)} rounds lie between {medians.min():.3g} and {medians.max():.3g} ms")
        kv_bytes = self.read.kv_bytes
        if self.job.config.capacity is not None and kv_bytes != self.kv_bytes:
            flags.append(f"its K/V takes {kv_bytes:,} bytes, but by the model's shapes {self.kv_bytes:,}")
        figures = {
            "step_ms": median,
            "error": error,
            "settled": self.settled,
            "sittings": len(self.sitting_ms),
            **step_figures(steps, options.batch),
            "largest_ms": largest(self.sitting_ms),
            "first_token_ms": first,
            "first_token_error": first_error,
            "position": self._curve[-1]["position"],
            "curve": self._curve,
            "bookkeeping_share": self._bookkeeping(),
            "roofline": bounds,
            "over_roofline": median / bounds["ms"],
            "device": device,
            "together": together,
            "forward_ms": [round(x, 5) for x in forward_ms],
            "kv_bytes": kv_bytes,
            "kv_read_bytes": read_bytes(self.read),
            "state_bytes": self.read.state_bytes,
            "flags": flags,
        }
        self.result = LatencyMetrics.from_json(figures)
        with self.job.trace.open("wb") as file:
            np.save(file, steps.astype("<f4"))

    def _bookkeeping(self) -> float:
        """Return the share of a step spent on statistics, scoring and eviction, timed in separate eager steps."""
        if not isinstance(self.read, CachedDecoder):
            return 0.0
        self.read.graphs = None  # a captured step can't be timed in parts
        steps, bookkeeping = Marks(self.job.model.device), Marks(self.job.model.device)

        @contextmanager
        def timed() -> Iterator[None]:
            bookkeeping.mark()
            yield
            bookkeeping.mark()

        self.read.around_bookkeeping = timed
        steps.mark()
        for _ in range(BOOKKEEPING_STEPS):
            self.step()
        steps.mark()
        bookkeeping_ms = bookkeeping.milliseconds()[::2]  # every other interval is the rest of a step
        return sum(bookkeeping_ms) / sum(steps.milliseconds())

    def _random(self, count: int) -> Tensor:
        vocabulary = self.job.model.hf.config.get_text_config().vocab_size
        return torch.randint(vocabulary, (self.options.batch, count), generator=self._generator).to(self.job.model.device)

    def _read_tokens(self, tokens: Tensor) -> None:
        assert self.read
        self.tokens = read_blocks(self.read, tokens, self.job.block).argmax(-1, keepdim=True)


def can_be_filled(read: Decoder | None) -> bool:
    """Whether random K and V may replace tokens of the stream: on a GPU, where reading the tokens would take minutes."""
    return isinstance(read, CachedDecoder) and read.model.device.type == "cuda"


def roofline(model: Model, read: Decoder, batch: int, device: dict[str, float]) -> dict[str, float]:
    """Return the shortest possible time of a step: bytes to move over the bandwidth, or operations over the rate.

    A step reads the model's weights, the K/V in use and the state once. The input embedding counts only if it is also the output
    head. Recomputing a window multiplies once per token of the window, and by the output head's weights once per step.

    Args:
        device: rates of the device per second, `bandwidth` and `multiply_rate`.

    Returns:
        `bytes`, `operations` and `ms`.
    """
    hf = model.hf
    inputs: Any = hf.get_input_embeddings()
    head: Any = hf.get_output_embeddings()
    parameters = {p.data_ptr(): p for p in hf.parameters()}
    tied = head is not None and head.weight.data_ptr() == inputs.weight.data_ptr()
    weights = [p for p in parameters.values() if tied or p.data_ptr() != inputs.weight.data_ptr()]
    used, _ = read.slots
    cached = isinstance(read, ResetDecoder) or not isinstance(read, RecomputeDecoder)
    moved = sum(p.nbytes for p in weights)
    if isinstance(read, CachedDecoder):
        full, selected = model.kv_bytes(round(used) - 1, batch, read.config.kv), read_bytes(read)
        moved += full + round(read.state_bytes * full / max(read.kv_bytes, 1)) if selected is None else selected
    elif cached:
        moved += read.held_bytes
    last = 0 if head is None else head.weight.numel()  # only the last token's logits are computed
    multiplied = last + (sum(p.numel() for p in weights) - last) * (1 if cached else round(used))
    operations = 2 * multiplied * batch
    seconds = max(moved / device["bandwidth"], operations / device["multiply_rate"])
    return {"bytes": moved, "operations": operations, "ms": 1e3 * seconds}
