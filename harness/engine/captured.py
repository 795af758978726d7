"""Decode steps as CUDA graphs: a whole step, evictions in every layer included, is replayed with no Python between tokens.

A graph is valid for one key, which stands for all that the host decides about a step: where the slots are, how many are
attended, whether the cache is full. A key never comes back once another has taken its place, so a decoder holds one graph. The
first steps with a key run eagerly, which compiles kernels. The last of them is a dry run, which finds out whether the step waits
for the device. If it doesn't, the next step is captured, and from then on the graph is replayed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

CAPTURE_AFTER = 16  # steps with one key; a capture costs 50 to 100 ms, so a short answer does without
_WAIT_MESSAGE = "called a synchronizing CUDA operation"  # PyTorch's warning

Step = Callable[[Tensor], Tensor]
Around = Callable[[], AbstractContextManager[None]]


@dataclass
class ProcessState:
    """Whether this process can still capture.

    After a failed capture it can't be trusted to: before PyTorch 2.12 the allocator goes on as if the capture were under way and
    never gives memory back, so that later cells run out of it. They belong in a new process.

    Attributes:
        failed: message of the first capture that failed; empty if none did.
    """

    failed: str = ""


PROCESS = ProcessState()


class _Pool(NamedTuple):
    """The memory of all graphs on a device. They are never replayed at once, and their logits are copied after each replay.

    Attributes:
        handle: of the memory.
        keeper: an empty graph. A pool can't be used again once the last of its graphs is gone.
    """

    handle: Any
    keeper: torch.cuda.CUDAGraph


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that captures are made on."""
    return torch.cuda.Stream(device)


@cache
def _pool(device: torch.device) -> _Pool:
    pool = _Pool(torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph())
    with warnings.catch_warnings(), torch.cuda.stream(_stream(device)):
        warnings.simplefilter("ignore")  # that the graph is empty
        pool.keeper.capture_begin(pool=pool.handle)
        pool.keeper.capture_end()
    return pool


class CudaGraph:
    """One step, captured."""

    def __init__(self, step: Step, tokens: Tensor) -> None:
        """Capture a step, which computes nothing yet. The current stream is the same afterwards, even if the capture fails.

        `torch.cuda.graph` is not used, because it leaves the capture's stream in place if the capture fails.

        Args:
            step: to capture.
            tokens: [B, 1].
        """
        self._tokens, self._graph = tokens.clone(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(tokens.device)
        torch.cuda.empty_cache()  # nothing can be given back during the capture
        pool = _pool(tokens.device)
        with torch.cuda.stream(_stream(tokens.device)):
            self._graph.capture_begin(pool=pool.handle)
            try:
                self._logits = step(self._tokens)
            except BaseException:
                with suppress(RuntimeError):  # it says no more than that the step failed
                    self._graph.capture_end()
                raise
            self._graph.capture_end()

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits of the next step. [B, 1] -> [B, 1, V]."""
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._logits.clone()


def dry_run(step: Step, tokens: Tensor) -> tuple[Tensor, str]:
    """Run a step on the stream of captures, and find out whether it could be captured.

    The step counts: it changes the cache. That is why waits for the device only warn; as errors they would end the step half-way,
    and run again it would count its attention twice.

    Args:
        step: to run.
        tokens: [B, 1].

    Returns:
        Logits [B, 1, V], and why the step can't be captured; empty if it can.
    """
    side, current = _stream(tokens.device), torch.cuda.current_stream(tokens.device)
    mode = torch.cuda.get_sync_debug_mode()
    side.wait_stream(current)
    try:
        with warnings.catch_warnings(record=True) as caught, torch.cuda.stream(side):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                logits = step(tokens)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
    finally:
        current.wait_stream(side)
    waits = any(_WAIT_MESSAGE in str(warning.message) for warning in caught)
    return logits.clone(), f"a step {_WAIT_MESSAGE}" if waits else ""


class StepGraphs:
    """The captured step of one decoder.

    Attributes:
        refused: why steps run eagerly after all, e.g. because a layer waits for the device; empty if they don't.
        replayed: number of steps replayed.
    """

    def __init__(self, capture: Callable[[Step, Tensor], Step] = CudaGraph, after: int = CAPTURE_AFTER) -> None:
        """Start without a graph.

        Args:
            capture: turns a step into one that can be replayed.
            after: steps with one key that run before it is captured, at least 1.
        """
        self._capture, self._after = capture, after
        self._key: Hashable = None
        self._steps = 0  # with this key
        self._graph: tuple[Step, Any] | None = None
        self.refused, self.replayed = "", 0

    def fresh(self, after: int | None = None) -> StepGraphs:
        """Graphs for another decoder, none captured yet. after: as in `__init__`; the same as here when None."""
        return StepGraphs(self._capture, self._after if after is None else after)

    def __call__(
        self,
        key: Hashable,
        alive: Any,
        step: Step,
        tokens: Tensor,
        around: Around = nullcontext,
    ) -> tuple[Tensor, bool]:
        """One step.

        Args:
            key: of the step. The graph of another key is dropped, with all that it kept alive.
            alive: objects that the graph reads from, kept alive with it.
            step: the eager step.
            tokens: [B, 1].
            around: entered around the dry run and the capture, so that the captured step may be other code than the eager one.

        Returns:
            Logits [B, 1, V], and whether they come from a replay: then `step` was not called.
        """
        if key != self._key:
            self._key, self._steps, self._graph = key, 0, None
        self._steps += 1
        if self._graph is None and self._steps > self._after:
            self._graph = self._captured(alive, step, tokens, around)
        if self._graph is not None:
            self.replayed += 1
            return self._graph[0](tokens), True
        if self._steps == self._after and not self.refused and tokens.device.type == "cuda":
            with around():
                logits, self.refused = dry_run(step, tokens)
            return logits, False
        return step(tokens), False

    def _captured(self, alive: Any, step: Step, tokens: Tensor, around: Around) -> tuple[Step, Any] | None:
        """The step's graph and what it reads from; None if it can't be captured."""
        if PROCESS.failed and not self.refused:
            self.refused = f"an earlier capture failed: {PROCESS.failed}"
        if self.refused:
            return None
        with around():
            try:
                return self._capture(step, tokens), alive
            except Exception as error:  # the device was waited for, memory asked of it, or whatever a policy does
                self.refused = PROCESS.failed = (str(error) or type(error).__name__).splitlines()[0]
                return None
