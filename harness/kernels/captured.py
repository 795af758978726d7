"""Decode steps as CUDA graphs: a whole step, evictions in every layer included, is replayed with no Python between tokens.

A graph is valid for one phase. The phase contains all decisions of the host about a step: the number of slots attended, and
whether tokens are evicted. Phases recur if several tokens are evicted at once, so a decoder keeps the graphs of the most recent
phases until its slots are replaced. The first steps of a decoder run eagerly, which compiles kernels. Afterwards, the first step
of a phase is a dry run, which detects whether the step waits for the device. If it does not, the phase's next step is captured,
and later steps replay the graph.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvbench.harness.engine.method import RAN

CAPTURE_AFTER = 16  # steps; a capture takes 50 to 100 ms, too long for a short answer
_MAX_GRAPHS = 32  # of a decoder; phases recur after `evict.every` steps, and change with each 256 slots of a growing cache
_WAIT_MESSAGE = "called a synchronizing CUDA operation"  # PyTorch's warning

Result = TypeVar("Result")
Step = Callable[[Tensor], Tensor]
Around = Callable[[], AbstractContextManager[None]]


@dataclass
class ProcessState:
    """State of captures in this process.

    A process can't capture after a failed capture. Before PyTorch 2.12, the allocator then behaves as if the capture were still
    running and never frees memory, so that later cells run out of memory. Later cells should run in a new process.

    Attributes:
        failed: message of the first capture that failed; empty if no capture failed.
    """

    failed: str = ""


PROCESS = ProcessState()


class _Pool(NamedTuple):
    """Memory pool of all graphs on a device. Graphs never replay at the same time, and logits are copied after each replay.

    Attributes:
        handle: handle of the pool.
        keeper: empty graph that keeps the pool alive. A pool can't be used again after its last graph is deleted.
    """

    handle: Any
    keeper: torch.cuda.CUDAGraph


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of captures on a device."""
    return torch.cuda.Stream(device)


@cache
def _pool(device: torch.device) -> _Pool:
    pool = _Pool(torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph())
    with warnings.catch_warnings(), torch.cuda.stream(_stream(device)):
        warnings.simplefilter("ignore")  # PyTorch warns that the graph is empty
        pool.keeper.capture_begin(pool=pool.handle)
        pool.keeper.capture_end()
    return pool


def recorded(work: Callable[[], Result], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture work in a CUDA graph, without computing it. The current stream is restored, even if the capture fails.

    `torch.cuda.graph` is not used, because it leaves the capture's stream in place if the capture fails.
    """
    graph, pool = torch.cuda.CUDAGraph(), _pool(device)
    with torch.cuda.stream(_stream(device)):
        graph.capture_begin(pool=pool.handle)
        try:
            result = work()
        except BaseException:
            with suppress(RuntimeError):  # this error only repeats that the work failed
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, result


def replayable(launches: Callable[[], None], device: torch.device) -> Callable[[], None] | None:
    """Capture kernel launches that allocate nothing and ran before. Return the replay; None if the capture fails."""
    if PROCESS.failed:
        return None
    try:
        return recorded(launches, device)[0].replay
    except Exception as error:
        PROCESS.failed = _first_line(error)
        return None


class CudaGraph:
    """Decode step that is replayed as a CUDA graph."""

    def __init__(self, step: Step, tokens: Tensor) -> None:
        """Capture a step.

        Args:
            tokens: [B, 1].
        """
        self._tokens = tokens.clone()
        torch.cuda.synchronize(tokens.device)
        torch.cuda.empty_cache()  # memory can't be freed during the capture
        self._graph, self._logits = recorded(lambda: step(self._tokens), tokens.device)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Replay the step. tokens: [B, 1] int64 -> logits [B, 1, V]."""
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._logits.clone()


def dry_run(step: Step, tokens: Tensor) -> tuple[Tensor, str]:
    """Run a step on the stream of captures, and detect whether it can be captured.

    The step changes the cache. Waits for the device therefore cause warnings, not errors: an error would end the step half-way,
    and a second run would count its attention twice.

    Args:
        tokens: [B, 1].

    Returns:
        Logits [B, 1, V], and the reason that the step can't be captured; empty if it can.
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


class CapturedSteps:
    """Captured steps of one decoder.

    Attributes:
        refused: reason that no more steps are captured, e.g. because a layer waits for the device; empty if there is none.
        replayed: number of steps replayed.
    """

    def __init__(self, capture: Callable[[Step, Tensor], Step] = CudaGraph, after: int = CAPTURE_AFTER) -> None:
        """Create an object without graphs.

        Args:
            capture: turns a step into a step that is replayed.
            after: number of steps that run before the first capture, at least 1.
        """
        self._capture, self._after = capture, after
        self._slots: Hashable = None
        self._steps = 0  # number of steps with these slots
        self._graphs: OrderedDict[Hashable, tuple[Step, Any] | None] = OrderedDict()  # by phase; None after its dry run
        self.refused, self.replayed = "", 0

    def fresh(self, after: int | None = None) -> CapturedSteps:
        """Return an object for another decoder, without graphs. after: as in `__init__`; unchanged when None."""
        return CapturedSteps(self._capture, self._after if after is None else after)

    def __call__(
        self, slots: Hashable, phase: Hashable, alive: Any, step: Step, tokens: Tensor, around: Around = nullcontext
    ) -> tuple[Tensor, bool]:
        """Run one step, by a replay if its phase has a graph. Arguments and result are those of `kernel_interface.StepGraphs`."""
        if slots != self._slots:
            self._slots, self._steps = slots, 0
            self._graphs.clear()
        self._steps += 1
        if phase in self._graphs:
            self._graphs.move_to_end(phase)
            graph = self._graphs[phase] = self._graphs[phase] or self._captured(alive, step, tokens, around)
            if graph is not None:
                self.replayed += 1
                RAN["captured step"] += 1
                return graph[0](tokens), True
        elif self._steps >= self._after and not self.refused:
            return self._tried(phase, step, tokens, around), False
        return step(tokens), False

    def _tried(self, phase: Hashable, step: Step, tokens: Tensor, around: Around) -> Tensor:
        """Return the logits of a phase's dry run, after which the phase may be captured."""
        self._graphs[phase] = None
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)
        if tokens.device.type != "cuda":
            return step(tokens)
        with around():
            logits, self.refused = dry_run(step, tokens)
        return logits

    def _captured(self, alive: Any, step: Step, tokens: Tensor, around: Around) -> tuple[Step, Any] | None:
        """Capture a step. Return the graph with the objects that it reads; None if the step can't be captured."""
        if PROCESS.failed and not self.refused:
            self.refused = f"an earlier capture failed: {PROCESS.failed}"
        if self.refused:
            return None
        with around():
            try:
                return self._capture(step, tokens), alive
            except Exception as error:  # the step waited for the device, ran out of memory, or a policy failed
                self.refused = PROCESS.failed = _first_line(error)
                return None


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type's name."""
    return (str(error) or type(error).__name__).splitlines()[0]
