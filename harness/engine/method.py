"""Choice of the shortcuts that a decoder may take instead of the plain walk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

RAN: Counter[str] = Counter()  # runs of each shortcut in this process; the fast check accepts only shortcuts that ran
SHORTCUTS = {  # name of each shortcut, by the field of `Method` that allows it
    "closed_form": "closed form",
    "flex": "FlexAttention",
    "walk_kernel": "compiled walk",
    "walk_graphs": "walk in graphs",
    "walk_steps": "compiled steps",
    "step_kernel": "step kernel",
    "captured": "captured step",
}


class OwnLoop(NamedTuple):
    """Method of reading with somebody else's cache.

    Attributes:
        attention: name of transformers' attention implementation; the contestant's choice when empty.
        blocks: number of first tokens of a stream that may be read in blocks, because a check found that blocks agree with
            single tokens.
    """

    attention: str = ""
    blocks: int = 0


_UNCHECKED = OwnLoop()


@dataclass(frozen=True)
class Method:
    """Shortcuts that a decoder may take. They affect speed and rounding, never which tokens are kept.

    A shortcut is taken only if policy, layer, dtype and device support it. Otherwise the plain walk is used.

    Attributes:
        fill: attend to a whole block at once while nothing is evicted.
        closed_form: compute a block as banded attention if the kept tokens are known in advance.
        flex: compute banded attention by FlexAttention, and rotate by kernels, on CUDA.
        walk_kernel: walk a block by a compiled kernel.
        walk_graphs: replay the launches of the walk kernel as CUDA graphs of a few tokens.
        walk_steps: if no kernel walks a block, attend for each of its tokens by the step kernel, on CPUs.
        step_kernel: read a single token by compiled kernels.
        captured: replay single tokens as CUDA graphs.
        fused: capture steps of a model that is compiled as a whole, which takes about a minute for each number of streams.
        own_loop: method of reading with somebody else's cache, to which no other field applies.
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
        """Return the method without the shortcuts that never ran. ran: number of runs of each shortcut, as in `RAN`."""
        used: dict[str, Any] = {field: getattr(self, field) and ran.get(name, 0) > 0 for field, name in SHORTCUTS.items()}
        method = replace(self, **used)
        return replace(method, fused=method.fused and method.captured)


TOKEN_BY_TOKEN = Method(fill=False, closed_form=False)  # the definition, with no shortcut
PLAIN_WALK = Method(closed_form=False)
EAGER = Method()  # plain PyTorch: nothing compiled
KERNELS = Method(closed_form=False, walk_kernel=True, walk_graphs=True, walk_steps=True, step_kernel=True, captured=True)
FASTEST = Method(flex=True, walk_kernel=True, walk_graphs=True, walk_steps=True, step_kernel=True, captured=True)
