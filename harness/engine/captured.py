"""Decode steps as CUDA graphs: a whole step, evictions in every layer included, is replayed with no Python between tokens.

A graph is valid for one key, which stands for all that the host decides about a step: where the slots are, how many are
attended, whether the cache is full. The first step with a key runs eagerly, which compiles kernels; the second is captured; from
then on the graph is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Step = Callable[[Tensor], Tensor]


class CudaGraph:
    """One step, captured."""

    def __init__(self, step: Step, tokens: Tensor) -> None:
        """Capture a step, which computes nothing yet. tokens: [B, 1]."""
        self._tokens, self._graph = tokens.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = step(self._tokens)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits of the next step. [B, 1] -> [B, 1, V]."""
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._logits.clone()


class StepGraphs:
    """The captured steps of one decoder.

    Attributes:
        refused: why steps run eagerly after all, e.g. because a layer waits for the device; empty if they don't.
        replayed: number of steps replayed.
    """

    def __init__(self, capture: Callable[[Step, Tensor], Step] = CudaGraph) -> None:
        """Start without graphs. capture: turns a step into one that can be replayed."""
        self._capture, self._graphs = capture, dict[Hashable, tuple[Step, Any]]()
        self._warm: set[Hashable] = set()
        self.refused, self.replayed = "", 0

    def __call__(self, key: Hashable, alive: Any, step: Step, tokens: Tensor) -> tuple[Tensor, bool]:
        """One step.

        Args:
            key: of the step.
            alive: objects that the graph reads from, kept alive with it.
            step: the eager step.
            tokens: [B, 1].

        Returns:
            Logits [B, 1, V], and whether they come from a replay: then `step` was not called.
        """
        if key not in self._warm or self.refused:
            self._warm.add(key)
            return step(tokens), False
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(step, tokens), alive
            except RuntimeError as error:  # the device was waited for, or memory asked of it
                self.refused = str(error).splitlines()[0]
                return step(tokens), False
        self.replayed += 1
        return self._graphs[key][0](tokens), True
