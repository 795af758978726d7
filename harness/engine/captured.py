"""Decode steps as CUDA graphs: the whole step, every layer and its eviction included, replayed with no Python between tokens.

A graph holds for one state of the host: which slots are looked at, whether caches are full, where they lie. The first step in a
state runs eagerly, which compiles what is compiled; the second is captured; from then on it is replayed.
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
        """Capture it; nothing is computed yet. tokens: [B, 1]."""
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
        refused: why steps run eagerly after all; empty if they don't. A model whose layers wait for the device can't be captured.
        replayed: steps that were.
    """

    def __init__(self, capture: Callable[[Step, Tensor], Step] = CudaGraph) -> None:
        """Empty. capture: makes a step that can be replayed."""
        self._capture, self._graphs = capture, dict[Hashable, tuple[Step, Any]]()
        self._once: set[Hashable] = set()
        self.refused, self.replayed = "", 0

    def __call__(self, state: Hashable, alive: Any, step: Step, tokens: Tensor) -> tuple[Tensor, bool]:
        """One step.

        Args:
            state: of the host.
            alive: what a graph reads from that would otherwise be given up.
            step: the eager step.
            tokens: [B, 1].

        Returns:
            Logits [B, 1, V], and whether they come from a replay: then `step` was not called.
        """
        if state not in self._once or self.refused:
            self._once.add(state)
            return step(tokens), False
        if state not in self._graphs:
            try:
                self._graphs[state] = self._capture(step, tokens), alive
            except RuntimeError as error:  # the device was waited for, or memory asked of it
                self.refused = str(error).splitlines()[0]
                return step(tokens), False
        self.replayed += 1
        return self._graphs[state][0](tokens), True
