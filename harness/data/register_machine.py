"""A register machine whose program is the prompt and whose trace a model writes, and conversations about labelled values.

A program is n lines `LABEL rB M rC N rA O NEXT Z OTHER`: register A becomes (B + C) mod 10. Then the line NEXT runs, or OTHER
if A is now 0. One OTHER is `end`. For every step, the trace states both operands, the result, the branch taken and the next
label. It also restates the line's words before them (`full`) or not (`reads`). M, N, O and Z include the line's number, as its
label does. Each word of a full trace can therefore be looked up by the word before it, copied from a fixed distance, or computed
as a sum of two digits.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from kvbench.harness.data.lookups import Lookups

Restate = Literal["full", "reads"]
LABELS, LINES, REGISTERS, BASE = 64, 32, 8, 10  # lines at most
STEP_WORDS = {"full": 10, "reads": 8}  # words of a step, without the told register
LINE_WORDS = 10
LEFT, RIGHT, TARGET, JUMP, ZERO = 1, 3, 5, 7, 9  # index of the words in a line
TOLD = 2  # index of the told register's word in a prompt
WORDS = (
    "full",
    "reads",
    "tell",
    "run",
    "end",
    "set",
    "ask",
    *map(str, range(BASE)),
    *(f"{name}{n}" for name in "vr" for n in range(REGISTERS)),
    *(f"L{n}" for n in range(LABELS)),
    *(f"{name}{n}" for name in "MNOZJ" for n in range(LINES)),
)
_TRIES = 10_000  # programs drawn for one of a given length
_ADDS = 0.5  # share of lines that add to a register and so lose no information; without them, most programs soon repeat
_SKEW = 5.0  # range of log frequencies of names in far turns, in nats
_READS, _TELLS, _ENDS = 0.1, 0.3, 0.7  # in training: shares of programs that don't restate, that tell, and whose trace ends


@dataclass(frozen=True)
class Line:
    """Register `target` becomes the sum of registers `left` and `right`; then a line runs."""

    target: int
    left: int
    right: int
    jump: int  # label of the next line
    zero: int | None  # label of the next line if the sum is 0; None: the program ends

    def words(self, label: int) -> list[str]:
        """Return the words of the line in the prompt."""
        other = "end" if self.zero is None else f"J{self.zero}"
        return [
            f"L{label}",
            f"r{self.left}",
            f"M{label}",
            f"r{self.right}",
            f"N{label}",
            f"r{self.target}",
            f"O{label}",
            f"J{self.jump}",
            f"Z{label}",
            other,
        ]


@dataclass(frozen=True)
class TraceStep:
    """Step of a program's trace: the label of its line, its words, and the register values after it."""

    label: int
    worked: tuple[str, ...]  # operands, result, the register to tell if any, and the branch taken
    jump: str  # the next label, or `end`
    values: tuple[int, ...]  # values of all registers after the step

    @property
    def words(self) -> list[str]:
        """Words of the step, the jump included."""
        return [*self.worked, self.jump]


@dataclass(frozen=True)
class Program:
    """A program, the initial values of its registers, and the form of trace that the prompt requires."""

    lines: dict[int, Line]  # by label, in the order of the prompt
    start: int  # label of the first line
    values: tuple[int, ...]  # initial value of each register
    tell: int | None  # register whose value each step states after its result
    restate: Restate

    @classmethod
    def from_prompt(cls, words: Sequence[str]) -> Self:
        """Return the program that the words of a prompt describe."""
        has_tell = words[1] == "tell"
        position, lines = head_words(has_tell), dict[int, Line]()
        while words[position][0] == "L":
            label, left, _, right, _, target, _, jump = (int(word[1:]) for word in words[position : position + ZERO - 1])
            other = words[position + ZERO]
            lines[label] = Line(target, left, right, jump, None if other == "end" else int(other[1:]))
            position += LINE_WORDS
        values = tuple(int(value) for value in words[position + 1 : -2 : 2])
        restate: Restate = "full" if words[0] == "full" else "reads"
        return cls(lines, int(words[-1][1:]), values, int(words[TOLD][1:]) if has_tell else None, restate)

    def prompt(self) -> list[str]:
        """Return the words of the prompt, which the trace follows."""
        words = [self.restate, *([] if self.tell is None else ["tell", f"r{self.tell}"])]
        for label, line in self.lines.items():
            words += line.words(label)
        for register, value in enumerate(self.values):
            words += [f"v{register}", str(value)]
        return [*words, "run", f"L{self.start}"]

    def run(self) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
        """Yield (label, left operand, right operand, register values afterwards) per step; endless for a program that loops."""
        label, values = self.start, list(self.values)
        while True:
            line = self.lines[label]
            left, right = values[line.left], values[line.right]
            values[line.target] = (left + right) % BASE
            yield label, left, right, tuple(values)
            goes = line.jump if values[line.target] else line.zero
            if goes is None:
                return
            label = goes

    def steps(self) -> Iterator[TraceStep]:
        """Yield the steps of the trace, endlessly if the program loops."""
        for label, left, right, values in self.run():
            line, full = self.lines[label], self.restate == "full"
            result = values[line.target]
            words = [f"v{line.left}", f"{left}", *([f"M{label}"] if full else [])]
            words += [f"v{line.right}", f"{right}", *([f"N{label}"] if full else [])]
            words += [f"v{line.target}", f"{result}"]
            if self.tell is not None:
                words += [f"v{self.tell}", f"{values[self.tell]}"]
            goes = line.jump if result else line.zero
            words.append(f"O{label}" if result else f"Z{label}")
            yield TraceStep(label, tuple(words), "end" if goes is None else f"L{goes}", values)


def head_words(tell: bool) -> int:
    """Return the number of words of a prompt before its lines."""
    return 3 if tell else 1


def prompt_words(lines: int, registers: int, tell: bool) -> int:
    """Return the number of words of a prompt."""
    return head_words(tell) + LINE_WORDS * lines + 2 * registers + 2


def step_words(restate: Restate, tell: bool) -> int:
    """Return the number of words of one step."""
    return STEP_WORDS[restate] + (2 if tell else 0)


def program(
    draw: random.Random,
    lines: int,
    restate: Restate,
    tell: bool,
    steps: tuple[int, int],
    registers: int | None = None,
    far: bool = False,
) -> Program:
    """Draw a random program of `lines` lines whose trace ends after at least `steps[0]` and at most `steps[1]` steps.

    Args:
        registers: number of registers; None draws the number.
        far: whether the lines that repeat use only some of the registers.

    Raises:
        ValueError: no such program was drawn.
    """
    for _ in range(_TRIES):
        candidate = _any_program(draw, lines, restate, tell, registers, far)
        ends = [label for label, number in _first_zeros(candidate, steps[1]).items() if number >= steps[0]]
        if ends:
            end = draw.choice(ends)
            return replace(candidate, lines=candidate.lines | {end: replace(candidate.lines[end], zero=None)})
    raise ValueError(f"no program of {lines} lines ends after {steps[0]:,} to {steps[1]:,} steps")


def _first_zeros(candidate: Program, most: int) -> dict[int, int]:
    """Return the step at which a line's sum is first 0, by label, in the first `most` steps. Stops when the program loops."""
    firsts: dict[int, int] = {}
    visited: set[tuple[int, tuple[int, ...]]] = set()
    for number, (label, _, _, values) in enumerate(itertools.islice(candidate.run(), most), 1):
        if (label, values) in visited:
            break
        visited.add((label, values))
        if values[candidate.lines[label].target] == 0:
            firsts.setdefault(label, number)
    return firsts


def _any_program(draw: random.Random, lines: int, restate: Restate, tell: bool, registers: int | None, far: bool) -> Program:
    """Draw a random program that never ends."""
    count = draw.randint(3, REGISTERS) if registers is None else registers
    labels = draw.sample(range(LINES), lines)
    circle = draw.randint(max(2, lines // 2), lines)  # lines that repeat; the rest run only after a sum of 0
    often = everywhere = list(range(count))
    if far:
        circle, often = draw.randint(2, max(2, lines // 2)), draw.sample(everywhere, draw.randint(2, count))
    code = []
    for number, label in enumerate(labels):
        used = often if number < circle else everywhere
        left, right = draw.sample(used, 2)
        target = left if draw.random() < _ADDS else draw.choice(used)
        code.append((label, Line(target, left, right, labels[(number + 1) % circle], draw.choice(labels))))
    draw.shuffle(code)
    values = tuple(draw.randrange(BASE) for _ in range(count))
    register = draw.randrange(count) if tell else None
    return Program(dict(code), draw.choice(labels), values, register, restate)


def programs(draw: random.Random, words: int, far: bool = False) -> Lookups:
    """Draw a program and its trace, for training. Most traces end within `words` words, the rest later."""
    lines = draw.randint(2, max(3, min(LINES, words // 40)))
    restate: Restate = "reads" if draw.random() < _READS else "full"
    tell = draw.random() < _TELLS
    most = (words - prompt_words(lines, REGISTERS, tell)) // step_words(restate, tell)
    steps = (max(1, most // 2), max(2, most)) if draw.random() < _ENDS else (max(1, most), 2 * max(1, most))
    try:
        drawn = program(draw, lines, restate, tell, steps, far=far)
    except ValueError:  # few programs of two lines run for long
        return programs(draw, words, far)
    result = Lookups(" ".join(drawn.prompt()))
    for step in drawn.steps():
        for words_of_step, is_answer in ((step.worked, True), ((step.jump,), False)):
            result.count(" " + " ".join(words_of_step), is_answer)
    return result


def turns(draw: random.Random, words: int) -> Lookups:
    """Draw a conversation for training: labels get values, get new values, and are asked for. The latest value is right."""
    known: dict[int, int] = {}
    labels = draw.sample(range(LABELS), draw.randint(2, max(3, min(LABELS, words // 6))))
    result, written = Lookups(), 0
    while written < words:
        if known and draw.random() < 0.4:
            label = draw.choice(list(known))
            result.text += f" ask L{label}"
            result.count(f" {known[label]}", True)
        else:
            label = draw.choice(labels)
            known[label] = draw.randrange(BASE)
            result.text += f" set L{label} {known[label]}"
        written += 3
    return result


def far_programs(draw: random.Random, words: int) -> Lookups:
    """Draw a program with rarely used registers, so that a value is read long after it was stated."""
    return programs(draw, words, far=True)


def far_turns(draw: random.Random, words: int) -> Lookups:
    """Draw a conversation for training in which some labels or registers are used a hundred times as often as others."""
    named = [f"v{n}" for n in range(REGISTERS)] + [f"L{n}" for n in range(LABELS)] * (draw.random() < 0.5)
    names = draw.sample(named, draw.randint(2, len(named)))
    shares = [math.exp(draw.uniform(-_SKEW, 0)) for _ in names]
    known: dict[str, int] = {}
    result = Lookups()
    for name in draw.choices(names, shares, k=words // 3 + 1):
        if name in known and draw.random() < 0.5:
            result.text += f" ask {name}"
            result.count(f" {known[name]}", True)
        else:
            known[name] = draw.randrange(BASE)
            result.text += f" set {name} {known[name]}"
    return result
