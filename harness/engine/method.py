"""Which shortcuts past the plain walk a decoder may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """How a decoder may compute what its policy defines. It decides speed and rounding, never which tokens are kept.

    A shortcut is taken only where policy, layer, dtype and device have one; elsewhere tokens are walked plainly.

    Attributes:
        fill: attend to a block in one go while nothing can be evicted.
        closed_form: compute a block as banded attention where what is kept is known beforehand.
        walk_kernel: walk a block by a compiled kernel.
        step_kernel: take a single token in by compiled kernels.
        captured: replay single tokens as CUDA graphs.
        fused: capture them from code that is compiled as a whole, a minute's work for a model and number of streams.
    """

    fill: bool = True
    closed_form: bool = True
    walk_kernel: bool = False
    step_kernel: bool = False
    captured: bool = False
    fused: bool = False


TOKEN_BY_TOKEN = Method(fill=False, closed_form=False)  # the definition, with no shortcut
PLAIN_WALK = Method(closed_form=False)
EAGER = Method()  # plain PyTorch: nothing compiled
KERNELS = Method(closed_form=False, walk_kernel=True, step_kernel=True, captured=True)
FASTEST = Method(walk_kernel=True, step_kernel=True, captured=True)
