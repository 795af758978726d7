"""Find races between the warps of a compiled Triton program, and loads that warps repeat, in its TTGIR.

Triton may give one element of a tensor to several threads. Each of them loads it, and one stores it: without a barrier between
the two, a late thread loads what is already updated. `races` asks for a barrier between every load and store of one array, in
program order and around loops, unless it can prove that each thread stays with places of its own.

Two stores to one place are not looked at: Triton lets one thread of those that hold an element store it. Nor is another program
of the grid, which no barrier holds back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_BARRIERS = ("gpu.barrier", "ttg.barrier all")  # as Triton up to 3.6 and later ones print `tl.debug_barrier`
_LOADS = {"tt.load", "ttg.async_copy_global_to_local"}
_FORWARDS = {
    "tt.addptr",
    "tt.splat",
    "tt.broadcast",
    "tt.expand_dims",
    "ttg.convert_layout",
    "tt.bitcast",
}  # a pointer to an array
_REGIONS = {"module", "tt.func", "scf.for", "scf.if", "tt.reduce"}
_OPERATION = re.compile(r"(?:(%[^=]+?) = )?\"?([a-z_]+(?:\.[a-z_.0-9]+)?)\"?(.*)")


@dataclass(frozen=True)
class Access:
    """A load or store of an array in global memory."""

    array: str  # the kernel's argument
    stores: bool
    text: str
    waits: bool  # is over at the next barrier: a copy to shared memory may not be
    repeated: bool  # an element belongs to several threads
    place: str = ""  # a vector of distinct places, one a thread, that a loop moves on by its own size; empty if that is not known
    layout: str = ""  # which thread has which element
    loops: tuple[tuple[int, str, int], ...] = ()  # the loops around it: (which, counter, iteration)

    def never_meets(self, other: Access) -> bool:
        """No place is touched by one thread here and by another one there."""
        if not self.place or self.place != other.place:
            return False
        if self.layout == other.layout:
            return True
        *outer, last = self.loops or ((0, "", 0),)
        *others, other_last = other.loops or ((0, "", 0),)
        moved = outer == others and last[:2] == other_last[:2] and last[2] != other_last[2]
        return moved and self.place.endswith(f" {last[1]}")


@dataclass(frozen=True)
class _Value:
    """Known properties of an SSA value."""

    key: str  # equal for equal values
    array: str = ""  # array of a pointer
    varies: bool = False  # whether the value varies between the iterations of a loop
    operation: str = ""
    operands: tuple[_Value, ...] = ()


@dataclass(frozen=True)
class _Line:
    results: str
    operation: str
    rest: str
    text: str
    body: tuple[tuple[_Line, ...], ...] = ()  # its regions


def races(ttgir: str, aliases: Mapping[str, str] | None = None) -> list[str]:
    """Loads and stores of one array with no barrier between them.

    Args:
        ttgir: a kernel.
        aliases: arguments that are views of other arguments.

    Raises:
        ValueError: There is an operation on pointers, or a region, that this reader doesn't know.
    """
    return _Reader(ttgir, aliases or {}).races()


def repeated(ttgir: str) -> list[str]:
    """Loads and stores of tensors of which several threads hold an element."""
    reader = _Reader(ttgir, {})
    reader.races()
    return list({x.text: None for x in reader.accesses if x.repeated})


def barriers(ttgir: str) -> int:
    """Return the number of barriers."""
    return sum(line.strip().startswith(_BARRIERS) for line in ttgir.splitlines())


class _Reader:
    """Walks through a kernel in program order."""

    def __init__(self, ttgir: str, aliases: Mapping[str, str]) -> None:
        lines = [re.sub(r"\s+loc\(.*\)$", "", x).strip() for x in ttgir.splitlines()]
        self._layouts = dict(re.findall(r"^(#\w+) = (.*)$", "\n".join(lines), re.MULTILINE))
        self._lines = _nested([x for x in lines if x and not x.startswith(("#", "^", "//"))])
        self._aliases = aliases
        self._values: dict[str, _Value] = {}
        self._found: dict[str, None] = {}
        self._names: dict[str, str] = {}  # short ones of expressions, which would double with each use
        self._loops: tuple[tuple[int, str, int], ...] = ()
        self.accesses: dict[Access, None] = {}

    def races(self) -> list[str]:
        """Return a line per race."""
        self._walk(self._lines, frozenset())
        return list(self._found)

    def _walk(self, lines: tuple[_Line, ...], pending: frozenset[Access]) -> frozenset[Access]:
        """Read some lines. pending: accesses with no barrier since. -> those at the end."""
        for line in lines:
            if line.text.startswith(_BARRIERS):
                pending = frozenset(x for x in pending if not x.waits)
            elif line.operation in _LOADS or line.operation == "tt.store":
                pending = self._touch(line, pending)
            elif line.operation == "scf.for":
                pending |= self._loop(line, pending)
            elif line.operation == "scf.if":
                after = [self._walk(body, pending) for body in line.body]
                pending = frozenset().union(*after, *([pending] if len(after) == 1 else []))
            elif line.operation in ("module", "tt.func"):
                for name in re.findall(r"(%[\w.]+): !tt\.ptr", line.rest):
                    self._values[name] = _Value(name, array=self._aliases.get(name[1:], name[1:]))
                pending = self._walk(line.body[0], pending)
            self._define(line)
        return pending

    def _loop(self, line: _Line, pending: frozenset[Access]) -> frozenset[Access]:
        """Read a loop's body twice, so that the end of an iteration meets the beginning of the next."""
        counter, low, step = re.match(r" (%\w+) = (%\w+) to %\w+ step (%\w+)", line.rest).groups()  # type: ignore[union-attr]
        low, step = self._value(low), self._value(step)
        for name, start in re.findall(r"(%\w+) = (%[\w#.]+)", line.rest.partition("iter_args")[2]):
            if self._value(start).array:
                raise ValueError(f"can't follow a pointer through a loop: {line.text}")
            self._values[name] = _Value(f"carried {name} {id(line)}", varies=True)
        key = f"counter({low.key},{step.key},{len(self._loops)})"
        self._values[counter] = _Value(key, varies=True, operation="for", operands=(low, step))
        outer = self._loops
        for iteration in range(2):
            self._loops = (*outer, (id(line), key, iteration))
            pending |= self._walk(line.body[0], pending)
        self._loops = outer
        return pending

    def _touch(self, line: _Line, pending: frozenset[Access]) -> frozenset[Access]:
        pointer = self._value(re.search(r"%[\w#.]+", line.rest)[0])  # type: ignore[index]
        if not pointer.array:
            raise ValueError(f"can't tell the array: {line.text}")
        kind = re.search(r"tensor<([\dx]+)x!tt\.ptr<\w+>, (#.+?)>(?:$| ->|,)", line.rest.rpartition(" : ")[2])
        repeated = bool(kind) and not self._one_thread_each(*kind.groups())  # type: ignore[union-attr]
        place, layout = (_vector(pointer, kind[1]), kind[2]) if kind and not repeated else ("", "")
        new = Access(
            pointer.array,
            line.operation == "tt.store",
            line.text,
            line.operation != "ttg.async_copy_global_to_local",
            repeated,
            place,
            layout,
            self._loops,
        )
        self.accesses[new] = None
        for old in pending:
            if old.array == new.array and old.stores != new.stores and not new.never_meets(old):
                self._found[f"no barrier between '{old.text}' and '{new.text}' ({new.array})"] = None
        return pending | {new}

    def _one_thread_each(self, size: str, layout: str) -> bool:
        """Every element of a tensor belongs to one thread. Only plain blocked layouts are understood."""
        sides = re.findall(r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = \[([\d, ]+)\]", self._layouts.get(layout, ""))
        if len(sides) != 3:
            return False
        per_thread, per_warp, warps = ([int(n) for n in x.split(",")] for x in sides)
        shape = [int(n) for n in size.split("x")]
        return all(a * b * c <= n for a, b, c, n in zip(per_thread, per_warp, warps, shape, strict=True))

    def _define(self, line: _Line) -> None:
        """Keep what is known of an operation's result."""
        of = tuple(self._value(x) for x in re.findall(r"%[\w#.]+", line.rest)) if not line.body else ()
        array = next((x.array for x in of if x.array), "")
        if array and line.operation not in _FORWARDS | _LOADS | {"tt.store"}:
            raise ValueError(f"an unknown operation on pointers: {line.text}")
        if line.body and line.operation not in _REGIONS:
            raise ValueError(f"an unknown region: {line.text}")
        if not line.results:
            return
        opaque = line.body or line.operation in _LOADS or not line.operation.startswith(("arith.", "tt.", "ttg.convert"))
        varies = any(x.varies for x in of) or bool(opaque and self._loops)
        plain = re.sub(r"%[\w#.]+", "", line.rest)
        for name in re.findall(r"%\w+", line.results):
            if opaque:
                self._values[name] = _Value(f"{name} {id(line)}", varies=varies)
            elif line.operation == "arith.constant":
                self._values[name] = _Value(f"constant{line.rest}")
            else:
                key = f"{line.operation}({','.join(x.key for x in of)}){plain}"
                short = self._names.setdefault(key, f"v{len(self._names)}")
                shifted = line.operation == "tt.make_range" and "start = 0 " not in line.rest
                self._values[name] = _Value(short, array, varies, "" if shifted else line.operation, of)

    def _value(self, name: str) -> _Value:
        """A value that an earlier line defines, or a number that is an argument."""
        whole = name.partition("#")[0]
        if name != whole:
            return _Value(f"{self._value(whole).key}{name}", varies=self._value(whole).varies)
        return self._values.get(name) or _Value(name)


def _vector(pointer: _Value, size: str) -> str:
    """Names the vector of places `base + start + s`: `s` is a range, and `start` a loop's counter of that step, or fixed.

    `start + s` may be multiplied by a constant.
    """
    if pointer.operation != "tt.addptr" or "x" in size:
        return ""
    base, index = pointer.operands
    factor = next((x for x in index.operands if x.key.startswith("constant ")), None)
    if index.operation == "arith.muli" and factor is not None:
        index = next(x for x in index.operands if x is not factor)
    if base.varies or base.operation != "tt.splat" or index.operation != "arith.addi":
        return ""
    if {x.operation for x in index.operands} != {"tt.splat", "tt.make_range"}:
        return ""
    start = next(x for x in index.operands if x.operation == "tt.splat").operands[0]
    if start.operation == "for":
        low, step = start.operands
        moves = not low.varies and step.key.startswith(f"constant {size} :")
        return f"{base.operands[0].key} {start.key}" if moves else ""
    return "" if start.varies else f"{base.operands[0].key} {start.key}"


def _nested(lines: list[str]) -> tuple[_Line, ...]:
    """Lines with the regions that they open."""
    whole: list[_Line] = []
    while lines:
        text = lines.pop(0)
        if text.startswith("}"):
            lines.insert(0, text)
            break
        results, operation, rest = _OPERATION.match(text).groups()  # type: ignore[union-attr]
        bodies = []
        while text.endswith("{"):
            bodies.append(_nested(lines))
            text = lines.pop(0)  # the line that closes the region, and perhaps opens another one
        shown = f"{results} = {operation}{rest}" if results else f"{operation}{rest}"
        whole.append(_Line(results or "", operation, rest, shown, tuple(bodies)))
    return tuple(whole)
