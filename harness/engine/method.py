"""Choice of the shortcuts past the plain walk that a decoder may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

RAN: Counter[str] = Counter()  # how often each shortcut has answered in this process: the fast check accepts none that did not
SHORTCUTS = {  # by the field of `Method` that allows it
    "closed_form": "closed form",
    "flex": "FlexAttention",
    "walk_kernel": "compiled walk",
    "walk_graphs": "walk in graphs",
    "walk_steps": "compiled steps",
    "step_kernel": "step kernel",
    "captured": "captured step",
}


class OwnLoop(NamedTuple):
    """How a model reads with somebody else's cache.

    Attributes:
        attention: of transformers that computes it; as the contestant says when empty.
        blocks: first tokens of a stream that may be read in blocks, because a check found that single tokens give the same.
    """

    attention: str = ""
    blocks: int = 0


_UNCHECKED = OwnLoop()


@dataclass(frozen=True)
class Method:
    """How a decoder may compute what its policy defines. It decides speed and rounding, never which tokens are kept.

    A shortcut is taken only where policy, layer, dtype and device have one; elsewhere tokens are walked plainly.

    Attributes:
        fill: attend to a block in one go while nothing can be evicted.
        closed_form: compute a block as banded attention where what is kept is known beforehand.
        flex: compute it by FlexAttention, and rotate by kernels, on CUDA.
        walk_kernel: walk a block by a compiled kernel.
        walk_graphs: replay the launches of such a walk as CUDA graphs of a few tokens.
        walk_steps: where no kernel walks a block, let the kernel of a step attend for each of its tokens, on CPUs.
        step_kernel: take a single token in by compiled kernels.
        captured: replay single tokens as CUDA graphs.
        fused: capture them from code that is compiled as a whole, a minute's work for a model and number of streams.
        own_loop: how a model reads with somebody else's cache, to which none of the others apply.
    """

    fill: bool = True
    closed_form: bool = True
    flex: bool = False
    walk_kernel: bool = False
    walk_graphs: bool = False
    walk_steps: bool = False
    step_kernel: bool = False
    captured: bool = False
    fused: bool = False
    own_loop: OwnLoop = _UNCHECKED

    def without_unsupported_by_codec(self) -> Method:
        """Return the method with only the shortcuts that can read a coded cache: runs, and the step kernel."""
        return replace(PLAIN_WALK if self.fill else TOKEN_BY_TOKEN, step_kernel=self.step_kernel)

    def limited_to(self, ran: Mapping[str, int]) -> Method:
        """Return the method without the shortcuts that never ran. ran: number of runs of each, as in `RAN`."""
        used: dict[str, Any] = {field: getattr(self, field) and ran.get(name, 0) > 0 for field, name in SHORTCUTS.items()}
        method = replace(self, **used)
        return replace(method, fused=method.fused and method.captured)


TOKEN_BY_TOKEN = Method(fill=False, closed_form=False)  # the definition, with no shortcut
PLAIN_WALK = Method(closed_form=False)
EAGER = Method()  # plain PyTorch: nothing compiled
KERNELS = Method(closed_form=False, walk_kernel=True, walk_graphs=True, walk_steps=True, step_kernel=True, captured=True)
FASTEST = Method(flex=True, walk_kernel=True, walk_graphs=True, walk_steps=True, step_kernel=True, captured=True)
