"""The tensors that something holds, and their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes allocated for tensors. Each storage counts once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def tensors_in(value: Any, leave_out: tuple[type[Any], ...], visited: set[int] | None = None) -> Iterator[torch.Tensor]:
    """All tensors that an object holds, at any depth; of a quantized one, those that it consists of.

    Args:
        leave_out: types whose tensors don't count.
        visited: ids of what was seen before.
    """
    visited = set() if visited is None else visited
    if id(value) in visited or isinstance(value, leave_out):
        return
    visited.add(id(value))
    if isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value):
        yield value
        return
    if isinstance(value, torch.Tensor):
        wrapper: Any = value
        parts: list[Any] = [getattr(value, name) for name in wrapper.__tensor_flatten__()[0]]
    elif isinstance(value, dict):
        parts = [*value.values()]
    elif isinstance(value, (list, tuple, set)):
        parts = [*value]
    else:
        parts = [*vars(value).values()] if hasattr(value, "__dict__") and not isinstance(value, type) else []
    for part in parts:
        yield from tensors_in(part, leave_out, visited)
