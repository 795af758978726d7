"""Source code in C of a recorded program: a loop for each operation, over buffers whose sizes and strides are constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.harness.kernels.expressions import NotTraceableError
from kvbench.harness.kernels.tensor_forms import (
    CHOICES,
    COMPARISONS,
    REDUCTIONS,
    form_of,
    is_supported,
    literal,
    reduction_of,
    type_of,
)
from kvbench.harness.kernels.tensor_memory import aligned, inlined, placed
from kvbench.harness.kernels.tensor_program import Operation, Recorder, address, reduced_axes

_MAX_CONSTANTS = 2**16  # numbers of one constant tensor
_LANES = 16  # of a reduction
_TILE_ROWS, _TILE = 4, 32  # as in program.h
_MAX_SCRATCH = 2**28  # bytes, for each thread


class Source(NamedTuple):
    """A program in C.

    Attributes:
        text: statements of a function with the variables `scratch` and those of the arrays.
        scratch: size of the scratch memory, in bytes.
        reads: names of the arrays that the program reads or changes.
    """

    text: str
    scratch: int
    reads: frozenset[str]


def source_of(recorder: Recorder) -> Source:
    """Return a recorded program in C.

    Raises:
        NotTraceableError: an operation can't be compiled.
    """
    for op in recorder.operations:
        if not is_supported(op.name):
            raise NotTraceableError(f"'{op.name}' of a tensor")
    return _Writer(recorder).source()


class _Writer:
    def __init__(self, recorder: Recorder) -> None:
        self._names, self._operations = recorder.names, recorder.operations
        self._inlined = inlined(recorder)
        self._offsets, self._scratch = placed(recorder, self._inlined)
        self._local = 0  # bytes that a single operation needs beyond the results
        self._lines: list[str] = []
        self._reads: set[str] = set()
        self._constants = 0
        self._varies = recorder.varies

    def source(self) -> Source:
        for operation in self._operations:
            if address(operation.outs[0]) not in self._inlined:
                self._write(operation)
        scratch = self._scratch + self._local
        if scratch > _MAX_SCRATCH:
            raise NotTraceableError(f"a policy that needs more than {_MAX_SCRATCH >> 20} MiB beside its statistics")
        return Source("\n".join(self._lines), scratch, frozenset(self._reads))

    def _write(self, op: Operation) -> None:
        self._lines.append("{")
        if op.name in REDUCTIONS:
            self._reduce(op)
        elif (special := _SPECIAL.get(op.name.removesuffix("_"))) is not None:
            special(self, op)
        else:
            self._each(op.outs[0], self._elementwise(op))
        self._lines.append("}")

    # Elements, and loops over them.

    def element(self, x: Any, index: Sequence[str], dtype: torch.dtype | None = None) -> str:
        """Return an element of a tensor that broadcasts to `index`, or a number, converted to a dtype."""
        if not isinstance(x, Tensor):
            return literal(x, dtype or torch.get_default_dtype())
        if (used := self._inlined.get(address(x))) is not None:
            text = self._elementwise(used)(index[len(index) - x.dim() :])
            return _converted(text if x.dtype == torch.bool else f"(({type_of(x.dtype)}){text})", x.dtype, dtype)
        if not self._varies(x) and x.numel() and bool((x == (first := x.flatten()[0])).all()):
            return literal(first.item(), dtype or x.dtype)
        own = index[len(index) - x.dim() :]
        terms = [f"{i} * {n}" for i, n, size in zip(own, x.stride(), x.shape, strict=True) if n and size > 1]
        return _converted(f"{self._pointer(x)}[{' + '.join([str(x.storage_offset()), *terms])}]", x.dtype, dtype)

    def _locals(self, **sizes: tuple[str, int]) -> str:
        """Declare local arrays in the scratch memory, by name. sizes: type and length of each."""
        text, first = "", 0
        for name, (kind, length) in sizes.items():
            text += f"{kind} *{name} = ({kind} *)(scratch + {self._scratch + first}); "
            first += aligned(8 * length)
        self._local = max(self._local, first)
        return text

    def _pointer(self, x: Tensor) -> str:
        key, kind = address(x), type_of(x.dtype)
        if not self._varies(x):
            return self._constant(x)
        if key in self._names:
            self._reads.add(self._names[key])
            return f"(({kind} *){self._names[key]})"
        return f"(({kind} *)(scratch + {self._offsets[key]}))"

    def _constant(self, x: Tensor) -> str:
        """Declare a constant array. Constants are contiguous copies."""
        span = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
        if span > _MAX_CONSTANTS:
            raise NotTraceableError(f"a constant of more than {_MAX_CONSTANTS} numbers")
        name = f"constant{self._constants}"
        self._constants += 1
        numbers = ", ".join(literal(v, x.dtype) for v in x.as_strided((span,), (1,), 0).tolist())
        self._lines.append(f"static const {type_of(x.dtype)} {name}[] = {{{numbers}}};")
        return name

    def loops(self, sizes: Sequence[tuple[str, int]], body: str, independent: bool = True) -> None:
        """Write nested loops. sizes: names and lengths of the indices, the innermost last."""
        loops = [f"for (int64_t {name} = 0; {name} < {size}; {name}++)" for name, size in sizes if size != 1]
        self._lines += [f"const int64_t {name} = 0; (void){name};" for name, size in sizes if size == 1]
        if loops and independent:
            loops.insert(len(loops) - 1, "#pragma GCC ivdep")
        self._lines += [*loops, f"{{ {body} }}"]

    def _each(self, out: Tensor, value: Callable[[Sequence[str]], str]) -> None:
        """Set every element of a tensor."""
        index = [f"i{d}" for d in range(out.dim())]
        text = f"{self.element(out, index)} = {value(index)};"
        self.loops(_by_stride(out, index), text)

    def _elementwise(self, op: Operation) -> Callable[[Sequence[str]], str]:
        """Return the expression of an elementwise operation at an index."""
        args, name, kind = op.args, op.name.removesuffix("_"), op.outs[0].dtype
        if name in COMPARISONS:
            common = torch.result_type(args[0], args[1])
            return lambda i: f"({self.element(args[0], i, common)} {COMPARISONS[name]} {self.element(args[1], i, common)})"
        if name in CHOICES:
            mask, x, other = args if name == "where" else (args[1], args[2], args[0])
            return lambda i: f"({self.element(mask, i)} ? {self.element(x, i, kind)} : {self.element(other, i, kind)})"
        form, operands = form_of(name, args, op.kwargs, kind), [x for x in args if isinstance(x, (Tensor, int, float))]
        return lambda i: form.format(*(self.element(x, i, kind) for x in operands))

    def _reduce(self, op: Operation) -> None:
        """Reduce a tensor over some of its axes, in the order in which it is stored."""
        x, out, kind = op.args[0], op.outs[0], op.outs[0].dtype
        dims = reduced_axes(op.args, op.kwargs)
        index = [f"i{d}" for d in range(x.dim())]
        kept = [i for d, i in enumerate(index) if d not in dims]
        if out.dim() == x.dim():
            kept = ["0" if d in dims else i for d, i in enumerate(index)]
        identity, form = reduction_of(op.name, kind)
        self._lines.append("{")
        self._each(out, lambda _: identity)
        self._lines.append("}")
        target, order = self.element(out, kept), _by_stride(x, index)
        inner = int(order[-1][0][1:]) if order else -1
        if inner not in dims:
            self.loops(order, f"{target} = {form.format(target, self.element(x, index, kind))};")
            return
        self.loops(order[:-1], self._total(x, index, order[-1], kind, (identity, form), target), independent=False)

    def _total(
        self, x: Tensor, index: Sequence[str], inner: tuple[str, int], kind: torch.dtype, rule: tuple[str, str], target: str
    ) -> str:
        """Return the reduction along the innermost axis, in lanes whose order does not depend on the place of the row.

        So rows that are equal give equal results, and the oldest of equal tokens is evicted.
        """
        (identity, form), (name, size), kind_name = rule, inner, type_of(kind)
        element = self.element(x, index, kind)
        in_lane = form.format("lane[j]", "y")
        whole = size - size % _LANES
        lines = [f"{kind_name} total = {identity};"]
        if whole:
            lines += [
                f"{kind_name} lane[{_LANES}]; for (int j = 0; j < {_LANES}; j++) lane[j] = {identity};",
                f"for (int64_t first = 0; first < {whole}; first += {_LANES})",
                "#pragma GCC unroll 1",  # GCC vectorises the loop, but not its unrolled body
                f"for (int j = 0; j < {_LANES}; j++)",
                f"{{ const int64_t {name} = first + j; const {kind_name} y = {element}; lane[j] = {in_lane}; }}",
                f"for (int j = 0; j < {_LANES}; j++) total = {form.format('total', 'lane[j]')};",
            ]
        lines.append(f"for (int64_t {name} = {whole}; {name} < {size}; {name}++) total = {form.format('total', element)};")
        return "\n".join([*lines, f"{target} = {form.format(target, 'total')};"])

    def sort(self, op: Operation) -> None:
        """Sort along one axis, stably."""
        x, (values, places) = op.args[0], op.outs
        dim = _axis_of(op)
        descending = op.kwargs.get("descending", next((a for a in reversed(op.args[1:]) if type(a) is bool), False))
        index, n = [f"i{d}" for d in range(x.dim())], x.shape[dim]
        moved = [*index[:dim], "order[j]", *index[dim + 1 :]]
        at_j = [*index[:dim], "j", *index[dim + 1 :]]
        body = self._locals(order=("int64_t", 2 * n), key=("double", n)) + f"for (int64_t j = 0; j < {n}; j++) "
        if not descending and self._is_order(x, dim):  # as in x.argsort().argsort()
            body += f"order[{self.element(x, at_j)}] = j; "
        else:
            body += f"key[j] = {'-' * descending}{self.element(x, at_j, torch.float64)}; sort_order(key, order, {n}); "
        body += f"for (int64_t j = 0; j < {n}; j++) {{ {self.element(values, at_j)} = {self.element(x, moved)}; "
        body += f"{self.element(places, at_j)} = order[j]; }}"
        self.loops([(i, size) for d, (i, size) in enumerate(zip(index, x.shape, strict=True)) if d != dim], body, False)

    def _is_order(self, x: Tensor, dim: int) -> bool:
        """Return whether a tensor is the places that another sort along the same axis gave."""
        return any(op.name == "sort" and x is op.outs[1] and _axis_of(op) == dim for op in self._operations)

    def gather(self, op: Operation) -> None:
        """Read elements, or whole slices, at indices along one axis."""
        x, dim, places = op.args[0], op.args[1] % op.args[0].dim(), op.args[2]

        def value(index: Sequence[str]) -> str:
            position = index if op.name == "gather" else [index[dim]]
            return self.element(x, [*index[:dim], f"within({self.element(places, position)}, {x.shape[dim]})", *index[dim + 1 :]])

        self._each(op.outs[0], value)

    def scatter(self, op: Operation) -> None:
        """Write elements to indices along one axis."""
        x, dim, places, source = op.args[0], op.args[1] % op.args[0].dim(), op.args[2], op.args[3]
        index, out = [f"i{d}" for d in range(places.dim())], op.outs[0]
        moved = [*index[:dim], f"within({self.element(places, index)}, {x.shape[dim]})", *index[dim + 1 :]]
        sign = "+=" if op.name.startswith("scatter_add") else "="
        text = f"{self.element(out, moved)} {sign} {self.element(source, index, out.dtype)};"
        self.loops(list(zip(index, places.shape, strict=True)), text, independent=False)

    def cumsum(self, op: Operation) -> None:
        """Sum up along one axis."""
        x, dim, out = op.args[0], op.args[1] % op.args[0].dim(), op.outs[0]
        index = [f"i{d}" for d in range(x.dim())]
        outer = [(i, n) for d, (i, n) in enumerate(zip(index, x.shape, strict=True)) if d != dim]
        body = f"{type_of(out.dtype)} total = 0; for (int64_t i{dim} = 0; i{dim} < {x.shape[dim]}; i{dim}++) "
        body += f"{{ total += {self.element(x, index, out.dtype)}; {self.element(out, index)} = total; }}"
        self.loops(outer, body, independent=False)

    def product(self, op: Operation) -> None:
        """Multiply matrices, by `multiply` or `dots` in program.h."""
        a, b, out = *op.args, op.outs[0]
        (size, rows, inner), columns, kind = a.shape, b.shape[2], type_of(out.dtype)
        if rows < _TILE_ROWS and b.stride(1) == 1 and self._varies(b):
            self._dots(a, b, out)
            return
        height, width = -(-rows // _TILE_ROWS) * _TILE_ROWS, -(-columns // _TILE) * _TILE
        body = self._locals(left=(kind, height * inner), right=(kind, inner * width))
        for name, x, (i, j), lengths in (("left", a, "ik", (height, inner)), ("right", b, "kj", (inner, width))):
            whole = f"{i} < {x.shape[1]} && {j} < {x.shape[2]}"
            nested = sorted(zip((i, j), lengths, x.stride()[1:], strict=True), key=lambda axis: -axis[2])
            body += " ".join(f"for (int64_t {k} = 0; {k} < {length}; {k}++)" for k, length, _ in nested)
            body += f" {name}[{i} * {lengths[1]} + {j}] = {whole} ? {self.element(x, ['n', i, j])} : 0;\n"
        target = self.element(out, ["n", "0", "0"])
        body += f"multiply_{kind}(left, right, &{target}, {rows}, {inner}, {columns}, {width}, "
        body += f"{out.stride(1)}, {out.stride(2)}, {int(_mirrored(a, b))});"
        self.loops([("n", size)], body, independent=False)

    def _dots(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Multiply a few rows with a matrix whose columns are contiguous."""
        (size, rows, inner), columns, kind = a.shape, b.shape[2], type_of(out.dtype)
        body = self._locals(left=(kind, rows * inner))
        body += f"for (int64_t i = 0; i < {rows}; i++) for (int64_t k = 0; k < {inner}; k++) "
        body += f"left[i * {inner} + k] = {self.element(a, ['n', 'i', 'k'])};\n"
        right, target = (self.element(x, ["n", "0", "0"]) for x in (b, out))
        body += f"dots_{kind}(left, &{right}, &{target}, {rows}, {inner}, {columns}, "
        body += f"{b.stride(2)}, {out.stride(1)}, {out.stride(2)});"
        self.loops([("n", size)], body, independent=False)


_SPECIAL: dict[str, Callable[[_Writer, Operation], None]] = {
    "bmm": _Writer.product,
    "cumsum": _Writer.cumsum,
    "gather": _Writer.gather,
    "index_select": _Writer.gather,
    "scatter": _Writer.scatter,
    "scatter_add": _Writer.scatter,
    "sort": _Writer.sort,
}


def _converted(text: str, dtype: torch.dtype, wanted: torch.dtype | None) -> str:
    """Convert an expression to another dtype, if one is wanted. Every number but 0 is true."""
    if wanted in (None, dtype):
        return text
    return f"({text} != 0)" if wanted == torch.bool else f"(({type_of(wanted)}){text})"


def _mirrored(a: Tensor, b: Tensor) -> bool:
    """Return whether batches of matrices are views of the same numbers, one of them transposed."""
    first, second = ((address(x), x.storage_offset(), x.shape, x[0].stride(), x.stride(0) * (len(x) > 1)) for x in (a, b.mT))
    return first == second


def _axis_of(op: Operation) -> int:
    """Return the axis of a sort."""
    dim: int = op.kwargs.get("dim", next((a for a in op.args[1:] if type(a) is int), -1))
    return dim % op.args[0].dim()


def _by_stride(x: Tensor, index: Sequence[str]) -> list[tuple[str, int]]:
    """Return names and lengths of a tensor's indices, in the order in which it is stored."""
    order = sorted(range(x.dim()), key=lambda d: (-x.stride()[d], d))
    return [(index[d], x.shape[d]) for d in order]
