"""Decode steps as CUDA graphs: a whole step, evictions in every layer included, is replayed with no Python between tokens.

A graph is valid for one phase, which stands for all that the host decides about a step: how many slots are attended, whether
tokens are evicted. Phases come back where tokens are evicted several at once, so a decoder keeps the graphs of those it met
last, until its slots are replaced. Its first steps run eagerly, which compiles kernels. After those, the first step of a phase
is a dry run, which finds out whether the step waits for the device. If it doesn't, the phase's next step is captured, and from
then on its graph is replayed.
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

CAPTURE_AFTER = 16  # steps; a capture costs 50 to 100 ms, so a short answer does without
_MAX_GRAPHS = 32  # of a decoder; phases recur after `evict.every` steps, one for each 256 slots that the cache grows by
_WAIT_MESSAGE = "called a synchronizing CUDA operation"  # PyTorch's warning

Result = TypeVar("Result")
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


def recorded(work: Callable[[], Result], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture some work, which computes nothing yet. The current stream is the same afterwards, even if the capture fails.

    `torch.cuda.graph` is not used, because it leaves the capture's stream in place if the capture fails.
    """
    graph, pool = torch.cuda.CUDAGraph(), _pool(device)
    with torch.cuda.stream(_stream(device)):
        graph.capture_begin(pool=pool.handle)
        try:
            result = work()
        except BaseException:
            with suppress(RuntimeError):  # it says no more than that the work failed
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, result


def replayable(launches: Callable[[], None], device: torch.device) -> Callable[[], None] | None:
    """Kernel launches that allocate nothing and have been made before, as a CUDA graph; None if they can't be captured."""
    if PROCESS.failed:
        return None
    try:
        return recorded(launches, device)[0].replay
    except Exception as error:
        PROCESS.failed = _first_line(error)
        return None


class CudaGraph:
    """Captured decode step, which replays as a CUDA graph."""

    def __init__(self, step: Step, tokens: Tensor) -> None:
        """Capture a step.

        Args:
            tokens: [B, 1].
        """
        self._tokens = tokens.clone()
        torch.cuda.synchronize(tokens.device)
        torch.cuda.empty_cache()  # nothing can be given back during the capture
        self._graph, self._logits = recorded(lambda: step(self._tokens), tokens.device)

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


class CapturedSteps:
    """The captured steps of one decoder.

    Attributes:
        refused: why steps run eagerly after all, e.g. because a layer waits for the device; empty if they don't.
        replayed: number of steps replayed.
    """

    def __init__(self, capture: Callable[[Step, Tensor], Step] = CudaGraph, after: int = CAPTURE_AFTER) -> None:
        """Start without a graph.

        Args:
            capture: turns a step into one that can be replayed.
            after: steps that run before any is captured, at least 1.
        """
        self._capture, self._after = capture, after
        self._slots: Hashable = None
        self._steps = 0  # with these slots
        self._graphs: OrderedDict[Hashable, tuple[Step, Any] | None] = OrderedDict()  # by phase; None after its dry run
        self.refused, self.replayed = "", 0

    def fresh(self, after: int | None = None) -> CapturedSteps:
        """Return graphs for another decoder, none captured yet. after: as in `__init__`; unchanged when None."""
        return CapturedSteps(self._capture, self._after if after is None else after)

    def __call__(
        self, slots: Hashable, phase: Hashable, alive: Any, step: Step, tokens: Tensor, around: Around = nullcontext
    ) -> tuple[Tensor, bool]:
        """Run one step, replayed from its graph if there is one. Arguments and result: as of `kernel_interface.StepGraphs`."""
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
        """Logits of a phase's dry run, after which the phase may be captured."""
        self._graphs[phase] = None
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)
        if tokens.device.type != "cuda":
            return step(tokens)
        with around():
            logits, self.refused = dry_run(step, tokens)
        return logits

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
                self.refused = PROCESS.failed = _first_line(error)
                return None


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type's name."""
    return (str(error) or type(error).__name__).splitlines()[0]
