"""Record what a policy computes with tensors, as a list of operations on arrays of fixed shapes.

Policies that compare slots or heads can't be expressed for one slot alone (`tracing`). They run once on example arrays while
PyTorch's dispatcher reports every operation. Operations on values that no array enters are constants, computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kvbench.harness.kernels.expressions import NotTraceableError
from kvbench.harness.kernels.tensor_forms import REDUCTIONS, is_supported

_MAX_OPERATIONS = 1000
_LARGE = 2**15  # numbers of a constant


class Operation(NamedTuple):
    """One operation of a program.

    Attributes:
        name: of the operation in PyTorch's dispatcher, such as "add", without its overload.
        args: tensors and numbers; constant tensors are copies.
        kwargs: keyword arguments, likewise.
        outs: results; several for "sort".
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Tensor, ...]


class Recorder(TorchDispatchMode):
    """Context that records the operations on some arrays.

    Attributes:
        names: of the arrays, by their address; further addresses are those of results, and have no name.
        operations: in the order in which they ran.
    """

    def __init__(self, arrays: Mapping[str, Tensor]) -> None:
        """Record operations on these arrays and on what is computed from them. arrays: by name; contiguous."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {address(x): name for name, x in arrays.items()}
        self.operations: list[Operation] = []
        self._shared: set[int] = set()
        self._known, self._alive = set(self.names), list(arrays.values())

    def varies(self, x: Tensor) -> bool:
        """Return whether a tensor is an array or was computed from one."""
        return address(x) in self._known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it if its result varies."""
        given, name = kwargs or {}, _name(func)
        tensors = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor)]
        if not any(map(self.varies, tensors)):
            return self._of_constants(func, args, given)
        if name in _SIMPLER:
            with self:
                return _SIMPLER[name](*args, **given)
        if func in decomposition_table and not is_supported(name):
            with self:
                return decomposition_table[func](*args, **given)
        if func._can_decompose():
            with self:
                return func.decompose(*args, **given)
        if name in _CONSTANT:
            return func(*args, **given)
        if name == "bmm" and args[0].shape[2] == 1:  # slots are last in the arrays of values
            with self:
                return (args[1].mT * args[0].mT).mT
        if name == "gather" and self._is_identity(*args):
            self._shared.add(address(args[0]))
            return args[0]
        in_place = name.endswith("_")
        if in_place and address(args[0]) in self._shared:
            raise NotTraceableError("a change in place of a tensor that was put in order")
        if in_place and not self.varies(args[0]):  # a constant, or a part of one, becomes a variable
            size = args[0].untyped_storage().nbytes() // args[0].itemsize
            whole = args[0].as_strided((size,), (1,), 0)
            self._know(whole)
            self._record("copy_", (whole, whole.clone()), {}, (whole,))
        operands, options = tree_map_only(Tensor, lambda x: x if self.varies(x) else _copy(x), (args, given))
        out = func(*args, **given)
        if name in REDUCTIONS:
            out = _stored_like(args[0], out, reduced_axes(args, given))
        outs = tuple(x for x in tree_leaves(out) if isinstance(x, Tensor))
        if not outs:
            raise NotTraceableError("a branch that depends on a tensor")
        if in_place or not self.varies(outs[0]):  # not a view
            for x in outs:
                self._know(x)
            if name not in _EMPTY:
                self._record(name, operands, options, outs)
        return out

    def _of_constants(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute a constant. One that is much larger than its operands is recorded instead."""
        out = func(*args, **kwargs)
        large = isinstance(out, Tensor) and out.numel() > _LARGE and not func.is_view and not _name(func).endswith("_")
        if large and any(isinstance(x, Tensor) and 0 < x.untyped_storage().nbytes() < out.numel() for x in tree_leaves(args)):
            self._know(out)
            operands, options = tree_map_only(Tensor, _copy, (args, kwargs))
            self._record(_name(func), operands, options, (out,))
        return out

    def _is_identity(self, x: Tensor, dim: int, index: Tensor) -> bool:
        """Return whether a gather gives the tensor itself, as where ranks are the order of the slots."""
        if self.varies(index) or x.shape != index.shape:
            return False
        places = torch.arange(x.shape[dim]).view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
        return bool((index == places).all())

    def _know(self, x: Tensor) -> None:
        self._known.add(address(x))
        self._alive.append(x)

    def _record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[Tensor, ...]) -> None:
        self.operations.append(Operation(name, args, kwargs, outs))
        if len(self.operations) > _MAX_OPERATIONS:
            raise NotTraceableError(f"a policy of more than {_MAX_OPERATIONS} operations")


def _name(func: Any) -> str:
    """Return an operation's name without its overload; it ends with "_" if the operation changes its first operand."""
    name: str = func.overloadpacket.__name__
    return name.strip("_") if name.startswith("__") else name


def address(x: Tensor) -> int:
    """Return the address of a tensor's storage, which its views share."""
    return x.untyped_storage().data_ptr()


def reduced_axes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """Return the axes over which a reduction with these arguments goes."""
    x, given = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    return {d % max(1, x.dim()) for d in ([given] if isinstance(given, int) else given or range(x.dim()))}


def _stored_like(x: Tensor, out: Tensor, reduced: set[int]) -> Tensor:
    """Return the result of a reduction with its axes stored in the order of those of x, so that both are read in one pass."""
    kept = [d for d in range(x.dim()) if d not in reduced or out.dim() == x.dim()]
    strides = [x.stride(d) for d in kept]
    if 0 in strides:
        return out
    order = sorted(range(out.dim()), key=lambda i: -strides[i])
    return torch.empty_permuted(out.shape, order, dtype=out.dtype).copy_(out)


def _copy(x: Tensor) -> Tensor:
    """Copy a tensor, but not along axes on which it was expanded."""
    part = x[tuple(slice(0, 1) if n == 0 else slice(None) for n in x.stride())]
    return part.clone(memory_format=torch.contiguous_format).expand(x.shape)


_CONSTANT = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "scalar_tensor"}
_EMPTY = {"empty_like", "new_empty", "new_empty_strided"}


def _padded(x: Tensor, pad: list[int], value: float = 0) -> Tensor:
    """`torch.nn.functional.pad` with a constant."""
    pairs = [(0, 0)] * (x.dim() - len(pad) // 2) + list(zip(pad[-2::-2], pad[::-2], strict=True))
    out = torch.full([n + a + b for n, (a, b) in zip(x.shape, pairs, strict=True)], value, dtype=x.dtype)
    inner, part = out, x
    for d, (a, b) in enumerate(pairs):
        inner = inner.narrow(d, max(a, 0), inner.shape[d] - max(a, 0) - max(b, 0))
        part = part.narrow(d, max(-a, 0), part.shape[d] - max(-a, 0) - max(-b, 0))
    inner.copy_(part)
    return out


def _joined(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat`."""
    out = torch.zeros_like(tensors[0].narrow(dim, 0, 1)).repeat_interleave(sum(x.shape[dim] for x in tensors), dim)
    first = 0
    for x in tensors:
        out.narrow(dim, first, x.shape[dim]).copy_(x)
        first += x.shape[dim]
    return out


def _variance(x: Tensor, dim: Any = None, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """`torch.var`."""
    dims = list(range(x.dim())) if dim is None else dim
    mean = x.mean(dims, keepdim=True)
    degrees = x.numel() // mean.numel() - (1 if correction is None else correction)
    return (x - mean).square().sum(dims, keepdim=keepdim) / max(0, degrees)


def _pooled(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], value: float) -> Tensor:
    """Return the windows of a pooling along the last axis, as a further axis.

    Raises:
        NotTraceableError: it pools along another axis, or skips windows.
    """
    if kernel[0] != 1 or list(stride or kernel) != [1, 1] or padding[0]:
        raise NotTraceableError("pooling with a stride, or along two axes,")
    return torch.nn.functional.pad(x, (padding[1], padding[1]), value=value).unfold(-1, kernel[1], 1)


def _max_pooled(x: Tensor, kernel: Any, stride: Any = (), padding: Any = (0, 0), *_: Any) -> tuple[Tensor, Tensor]:
    """`max_pool2d_with_indices`; the indices are not computed."""
    out = _pooled(x, kernel, stride, padding, float("-inf")).amax(-1)
    return out, torch.zeros_like(out, dtype=torch.int64)


def _highest(x: Tensor, k: int, dim: int = -1, largest: bool = True, _sorted: bool = True) -> tuple[Tensor, Tensor]:
    """`torch.topk`."""
    values, index = x.sort(dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), index.narrow(dim, 0, k)


def _kth(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """`torch.kthvalue`."""
    found = [y.narrow(dim, k - 1, 1) for y in x.sort(dim=dim, stable=True)]
    values, index = found if keepdim else (y.squeeze(dim) for y in found)
    return values, index


def _median(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """`Tensor.median`: the lower one of two."""
    if dim is None:
        return _kth(x.flatten(), (x.numel() + 1) // 2)[0]
    return _kth(x, (x.shape[dim] + 1) // 2, dim, keepdim)


def _indexed(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Index one axis of a tensor by a tensor of places.

    Raises:
        NotTraceableError: several axes are indexed at once, or by a mask.
    """
    axes = [(d, index) for d, index in enumerate(indices) if index is not None]
    if len(axes) != 1 or axes[0][1].dtype != torch.int64 or not axes[0][1].dim():
        raise NotTraceableError("an index by a mask, or of several axes at once,")
    ((dim, index),) = axes
    return x.index_select(dim, (index % x.shape[dim]).flatten()).unflatten(dim, index.shape)


def _convolved(x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, *rest: Any) -> Tensor:
    """`torch.conv1d`. [N, C, L], [O, C, k] -> [N, O, L'].

    Raises:
        NotTraceableError: the convolution has two axes, groups, a stride or a dilation.
    """
    if (x.dim(), *stride, *dilation, rest[0], rest[2]) != (3, 1, 1, False, 1):
        raise NotTraceableError("a convolution of two axes, or with groups, a stride or a dilation,")
    windows = torch.nn.functional.pad(x, (padding[0], padding[0])).unfold(-1, weight.shape[-1], 1)  # [N, C, L', k]
    out = (windows[:, None] * weight[:, :, None]).sum((2, 4))
    return out if bias is None else out + bias[:, None]


def _bounded(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    """`Tensor.clamp`."""
    least = x if low is None else x.maximum(torch.as_tensor(low, dtype=x.dtype))
    return least if high is None else least.minimum(torch.as_tensor(high, dtype=x.dtype))


def _place_of(x: Tensor, extreme: Tensor, dim: int, keepdim: bool) -> Tensor:
    """Return the first place of an extreme along an axis. extreme: with the axis, of size 1."""
    places = torch.arange(x.shape[dim]).view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
    return torch.where(x == extreme, places, x.shape[dim]).amin(dim, keepdim=keepdim)


def _largest(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """`Tensor.max`."""
    if dim is None:
        return x.amax()
    return x.amax(dim, keepdim=keepdim), _place_of(x, x.amax(dim, keepdim=True), dim, keepdim)


def _smallest(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """`Tensor.min`."""
    if dim is None:
        return x.amin()
    return x.amin(dim, keepdim=keepdim), _place_of(x, x.amin(dim, keepdim=True), dim, keepdim)


_SIMPLER: dict[str, Callable[..., Any]] = {  # in terms of other operations, where PyTorch's decompositions are not
    "argmax": lambda x, dim, keepdim=False: _largest(x, dim, keepdim)[1],
    "argmin": lambda x, dim, keepdim=False: _smallest(x, dim, keepdim)[1],
    "avg_pool2d": lambda x, kernel, stride=(), padding=(0, 0), *_: _pooled(x, kernel, stride, padding, 0.0).mean(-1),
    "cat": _joined,
    "clamp": _bounded,
    "constant_pad_nd": _padded,
    "convolution": _convolved,
    "flip": lambda x, dims: reduce(lambda y, d: y.index_select(d, torch.arange(y.shape[d] - 1, -1, -1)), dims, x),
    "index": _indexed,
    "kthvalue": _kth,
    "max": _largest,
    "max_pool2d_with_indices": _max_pooled,
    "median": _median,
    "min": _smallest,
    "mm": lambda a, b: torch.bmm(a[None], b[None])[0],
    "scatter": lambda x, *args: x.clone().scatter_(*args),  # a clone is stored in the order of x
    "scatter_add": lambda x, *args: x.clone().scatter_add_(*args),
    "std": lambda *args, **kwargs: _variance(*args, **kwargs).sqrt(),
    "topk": _highest,
    "var": _variance,
}
