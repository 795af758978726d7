"""Find, count and copy the tensors that an object holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

T = TypeVar("T")


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes allocated for tensors. Each storage counts once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def tensors_in(value: Any, leave_out: tuple[type[Any], ...]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an object holds, at any depth; a quantized tensor yields its parts.

    Args:
        leave_out: types whose tensors are skipped.
    """
    for tensor in _whole_tensors(value, leave_out, set()):
        yield from _parts(tensor)


def copied(value: T) -> T:
    """Return a deep copy, also of quantized tensors that don't support it themselves."""
    return deepcopy(value, {id(x): _clone(x) for x in _whole_tensors(value, (), set()) if is_traceable_wrapper_subclass(x)})


def _whole_tensors(value: Any, leave_out: tuple[type[Any], ...], visited: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an object holds, at any depth. visited: ids of objects visited before."""
    if id(value) in visited or isinstance(value, leave_out):
        return
    visited.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, dict):
        parts = [*value.values()]
    elif isinstance(value, (list, tuple, set)):
        parts = [*value]
    else:
        parts = [*vars(value).values()] if hasattr(value, "__dict__") and not isinstance(value, type) else []
    for part in parts:
        yield from _whole_tensors(part, leave_out, visited)


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a tensor consists of: only itself unless it is a wrapper."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))


def _clone(tensor: Any) -> Any:
    """Copy all tensors that a tensor consists of."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.clone()
    names, context = tensor.__tensor_flatten__()
    parts = {name: _clone(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
