"""RoPE left out where it does nothing: at position 0, where the decode loop runs the model.

Rotating by an angle of 0 returns the same numbers, but takes ten kernels in every layer. The functions that rotate are found by
their names in the model's files; the probe run at load decides whether they can be left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

_ROTARY = re.compile(r"_?apply_\w*rotary\w*")  # transformers' names: apply_rotary_pos_emb, apply_rotary_emb and so on


def unchanged(query: Tensor, keys: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Stands in for a function that rotates both."""
    return query, keys


def contiguous(query: Tensor, keys: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Stands in for a function that rotates both and returns them in a layout of its own, as partial RoPE does."""
    return query.contiguous(), keys.contiguous()


STAND_INS = (unchanged, contiguous)


@dataclass(frozen=True)
class RotaryFunctions:
    """The functions by which a model's layers rotate queries and keys.

    Attributes:
        places: the Python module, the name there, and the function.
        stand_in: takes their place while they are skipped.
    """

    places: tuple[tuple[ModuleType, str, Callable[..., Any]], ...] = ()
    stand_in: Callable[..., tuple[Tensor, Tensor]] = unchanged

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Leave them out. While this lasts, it holds for all models of the family and in all threads."""
        try:
            for module, name, _ in self.places:
                setattr(module, name, self.stand_in)
            yield
        finally:
            for module, name, function in self.places:
                setattr(module, name, function)


def rotary_functions(model: nn.Module) -> tuple[tuple[ModuleType, str, Callable[..., Any]], ...]:
    """All functions in the files of a model's layers that rotate, going by their names."""
    files = dict.fromkeys(sys.modules[type(layer).__module__] for layer in model.modules())
    named = ((file, name, value) for file in files for name, value in vars(file).items() if _ROTARY.fullmatch(name))
    return tuple((file, name, value) for file, name, value in named if callable(value))


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers (0 and -0 count as one) in the same layout."""
    layouts = [[step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1] for x in (a, b)]
    return a.dtype == b.dtype and bool(a.equal(b)) and layouts[0] == layouts[1]
