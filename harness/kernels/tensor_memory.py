"""Where the results of a recorded program are: inlined in the operation that uses them, or at an offset of the scratch memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from kvbench.harness.kernels.tensor_forms import ELEMENTWISE, REDUCTIONS
from kvbench.harness.kernels.tensor_program import Operation, Recorder, address

ALIGNMENT = 64  # bytes


def aligned(size: int) -> int:
    """Round a number of bytes up."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def without_copies(operations: list[Operation]) -> list[Operation]:
    """Return equivalent operations that fill a tensor directly, instead of a clone that is later copied to the tensor.

    If the tensor is the cloned tensor, it is changed in place. The pass leaves a clone if the tensor is used between the two
    operations, or the clone after the copy.
    """
    for i, op in enumerate(operations):
        if op.name != "clone":
            continue
        clone, uses = op.outs[0], [k for k in range(i + 1, len(operations)) if _uses(operations[k], op.outs[0])]
        if not uses or (last := operations[uses[-1]]).name != "copy_" or clone.dtype != last.outs[0].dtype:
            continue
        source, target, copied = op.args[0], last.outs[0], last.args[1]
        whole = copied.numel() == clone.numel() and (copied.shape, copied.stride()) == (target.shape, target.stride())
        in_place = address(source) == address(target)
        if not whole or (in_place and (source.stride(), source.storage_offset()) != (clone.stride(), target.storage_offset())):
            continue
        if any(_uses(other, target) for other in operations[i + 1 : uses[-1]]):
            continue
        to_target = partial(_moved, clone, target, {})
        filled = to_target(clone)
        first = [] if in_place else [Operation("copy_", (filled, source), {}, (filled,))]
        between = [
            Operation(o.name, tuple(map(to_target, o.args)), o.kwargs, tuple(map(to_target, o.outs)))
            for o in operations[i + 1 : uses[-1]]
        ]
        return without_copies([*operations[:i], *first, *between, *operations[uses[-1] + 1 :]])
    return operations


def _moved(clone: Tensor, target: Tensor, views: dict[int, Tensor], x: Any) -> Any:
    """Return the view of `target` that corresponds to a view of `clone`; anything else as it is. views: of earlier calls."""
    if not isinstance(x, Tensor) or address(x) != address(clone):
        return x
    return views.setdefault(id(x), target.as_strided(x.shape, x.stride(), target.storage_offset() + x.storage_offset()))


def _uses(op: Operation, x: Tensor) -> bool:
    """Return whether an operation reads or changes the storage of a tensor."""
    return any(address(y) == address(x) for y in (*_operands(op), *op.outs))


def inlined(recorder: Recorder) -> dict[int, Operation]:
    """Return the operations that are computed where their result is used, by its address.

    They are elementwise, and the result is used once, as a whole, by an elementwise operation of its shape or by a reduction,
    before anything is changed in place. An operation in place reads every element just before it changes that element.
    """
    operations = recorder.operations
    result: dict[int, Operation] = {}
    reads: dict[int, list[Tensor]] = {}  # of an inlined operation, with those of what is inlined in it
    uses: dict[int, list[int]] = {}
    for i, op in enumerate(operations):
        for x in _operands(op):
            uses.setdefault(address(x), []).append(i)
    for i, op in enumerate(operations):
        out, users = op.outs[0], uses.get(address(op.outs[0]), [])
        if op.name not in ELEMENTWISE or address(out) in recorder.names or len(users) != 1:
            continue
        user = operations[users[0]]
        same_shape = user.name.removesuffix("_") in ELEMENTWISE and user.outs[0].shape == out.shape
        unchanged = not any(x.name.endswith("_") for x in operations[i : users[0]])
        read = [y for x in _operands(op) for y in reads.get(address(x), [x])]
        if user.name.endswith("_"):
            unchanged &= all(address(x) != address(user.outs[0]) or _alike(x, user.outs[0]) for x in read)
        if unchanged and (same_shape or user.name in REDUCTIONS) and any(x is out for x in _operands(user)):
            result[address(out)], reads[address(out)] = op, read
    return result


def placed(recorder: Recorder, within: Mapping[int, Operation]) -> tuple[dict[int, int], int]:
    """Return the offset of every result in the scratch memory, by its address, and the size of that memory in bytes.

    Memory is used again after the last use of what was in it. within: inlined operations, by address.
    """
    last: dict[int, int] = {}
    sizes: dict[int, int] = {}
    read_by: dict[int, list[Tensor]] = {}  # what an inlined operation reads is read by its user
    for i, op in enumerate(recorder.operations):
        read = [y for x in _operands(op) for y in read_by.get(address(x), [x]) if recorder.varies(y)]
        if address(op.outs[0]) in within:
            read_by[address(op.outs[0])] = read
            continue
        for x in (*op.outs, *read):
            if address(x) not in recorder.names:
                last[address(x)], sizes[address(x)] = i, aligned(x.untyped_storage().nbytes())
    offsets: dict[int, int] = {}
    free: list[tuple[int, int]] = []  # size and offset of memory that may be used again
    end = 0
    for i, op in enumerate(recorder.operations):
        for key in (address(x) for x in op.outs):
            if key in offsets or key not in sizes or key in within:
                continue
            fitting = min((part for part in free if part[0] >= sizes[key]), default=None)
            if fitting is None:
                offsets[key], end = end, end + sizes[key]
                continue
            free.remove(fitting)
            offsets[key] = fitting[1]
            if fitting[0] > sizes[key]:
                free.append((fitting[0] - sizes[key], fitting[1] + sizes[key]))
        free += [(sizes[key], offsets[key]) for key, use in last.items() if use == i and key in offsets]
    return offsets, end


def _alike(x: Tensor, y: Tensor) -> bool:
    """Return whether two views of one storage have every element at the same place."""
    return (x.shape, x.stride(), x.storage_offset()) == (y.shape, y.stride(), y.storage_offset())


def _operands(op: Operation) -> list[Tensor]:
    return [x for x in op.args if isinstance(x, Tensor)]
