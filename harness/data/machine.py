"""A register machine whose program is the prompt, and whose trace a model writes; and conversations about labelled values.

A program is n lines `line LABEL rA xB yC NEXT`: register A becomes (B + C) mod 10, then the line NEXT runs. Lines run round and
round until a register takes the value that the prompt names. Of every step the trace restates the line (`full`) or not
(`reads`), then says both operands, the result and the next label, so that each word is a look-up, a copy or a sum of two digits.
That it ends is a look-up, too: the register and its value stand before `end` in the prompt, as they will in the trace.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from kvbench.harness.data.lookups import Lookups

Restate = Literal["full", "reads"]
LABELS, REGISTERS, BASE = 64, 8, 10
STEP_WORDS = {"full": 11, "reads": 7}  # of a step, without what it tells
LINE_WORDS = 6
UNTIL_WORDS = 4  # `until`, a register, its value and `end`
WORDS = (
    "full", "reads", "tell", "until", "line", "run", "end", "set", "ask", *map(str, range(BASE)),
    *(f"{name}{n}" for name in "vrxy" for n in range(REGISTERS)), *(f"L{n}" for n in range(LABELS)),
)  # fmt: skip
_TRIES = 2000  # programs drawn for one of a given length
_READS, _TELLS, _ENDS = 0.1, 0.3, 0.7  # in training: shares of programs that don't restate, that tell, and whose trace ends


@dataclass(frozen=True)
class Line:
    """Register `target` becomes the sum of registers `left` and `right`; then the line `jump` runs."""

    target: int
    left: int
    right: int
    jump: int  # label

    def words(self) -> list[str]:
        """Its operands and its jump."""
        return [f"r{self.target}", f"x{self.left}", f"y{self.right}", f"L{self.jump}"]


@dataclass(frozen=True)
class Step:
    """One step of a trace: the label of its line, what it says, and the state that it leaves."""

    label: int
    restated: tuple[str, ...]  # words of the line; none if the trace only reads
    worked: tuple[str, ...]  # what the prompt asks to tell, operands and result, each a register and its value
    jump: str  # the next label, or `end`
    values: tuple[int, ...]  # of all registers, afterwards

    @property
    def words(self) -> list[str]:
        """All words of the step."""
        return [*self.restated, *self.worked, self.jump]


@dataclass(frozen=True)
class Program:
    """A program, the values that its registers begin with, and what the prompt asks for."""

    lines: dict[int, Line]  # by label, in the order of the prompt
    start: int  # label
    values: tuple[int, ...]  # of the registers; as many as there are
    until: tuple[int, int]  # register, value: ends once a step gives the register this value
    tell: int | None  # register whose value each step says before its own
    restate: Restate

    @classmethod
    def from_prompt(cls, words: Sequence[str]) -> Self:
        """The program that a prompt, all its words, describes."""
        told = words[1] == "tell"
        at, lines = head_words(told), dict[int, Line]()
        until = int(words[at - 3][1:]), int(words[at - 2])
        while words[at] == "line":
            label, *line = (int(word[1:]) for word in words[at + 1 : at + LINE_WORDS])
            lines[label], at = Line(*line), at + LINE_WORDS
        values = tuple(int(value) for value in words[at + 1 : -2 : 2])
        restate: Restate = "full" if words[0] == "full" else "reads"
        return cls(lines, int(words[-1][1:]), values, until, int(words[2][1:]) if told else None, restate)

    def prompt(self) -> list[str]:
        """The words of the prompt; the trace follows."""
        words = [self.restate, *([] if self.tell is None else ["tell", f"v{self.tell}"])]
        words += ["until", f"v{self.until[0]}", str(self.until[1]), "end"]
        for label, line in self.lines.items():
            words += ["line", f"L{label}", *line.words()]
        for register, value in enumerate(self.values):
            words += [f"v{register}", str(value)]
        return [*words, "run", f"L{self.start}"]

    def steps(self) -> Iterator[Step]:
        """The steps of the trace, endless if `until` is never reached."""
        label, values = self.start, list(self.values)
        while True:
            line = self.lines[label]
            left, right = values[line.left], values[line.right]
            said = [] if self.tell is None else [(self.tell, values[self.tell])]
            values[line.target] = (left + right) % BASE
            said += [(line.left, left), (line.right, right), (line.target, values[line.target])]
            worked = tuple(word for register, value in said for word in (f"v{register}", str(value)))
            ends = line.target == self.until[0] and values[line.target] == self.until[1]
            jump = "end" if ends else f"L{line.jump}"
            yield Step(label, tuple(line.words()) if self.restate == "full" else (), worked, jump, tuple(values))
            if ends:
                return
            label = line.jump


def head_words(tell: bool) -> int:
    """Words of a prompt before its lines."""
    return 1 + (2 if tell else 0) + UNTIL_WORDS


def prompt_words(lines: int, registers: int, tell: bool) -> int:
    """Words of a prompt."""
    return head_words(tell) + LINE_WORDS * lines + 2 * registers + 2


def step_words(restate: Restate, tell: bool) -> int:
    """Words of one step."""
    return STEP_WORDS[restate] + (2 if tell else 0)


def program(
    draw: random.Random, lines: int, restate: Restate, tell: bool, steps: tuple[int, int], registers: int | None = None
) -> Program:
    """A random program of `lines` lines whose trace ends after at least `steps[0]` and at most `steps[1]` steps.

    The number of its registers is drawn, too, unless it is given.

    Raises:
        ValueError: none was found.
    """
    for _ in range(_TRIES):
        made = _any_program(draw, lines, restate, tell, registers)
        seen: dict[tuple[int, int], int] = {}
        for number, (step, _) in enumerate(zip(made.steps(), range(steps[1]), strict=False), 1):
            register = made.lines[step.label].target
            seen.setdefault((register, step.values[register]), number)
        ends = [(at, value) for (at, value), number in seen.items() if number >= steps[0] and made.values[at] != value]
        if ends:
            return Program(made.lines, made.start, made.values, draw.choice(ends), made.tell, restate)
    raise ValueError(f"no program of {lines} lines ends after {steps[0]:,} to {steps[1]:,} steps")


def _any_program(draw: random.Random, lines: int, restate: Restate, tell: bool, registers: int | None) -> Program:
    """A random program; it never ends."""
    count = draw.randint(3, REGISTERS) if registers is None else registers
    labels = draw.sample(range(LABELS), lines)
    jumps = [*labels[1:], labels[0]]
    made = [
        (label, Line(draw.randrange(count), draw.randrange(count), draw.randrange(count), jump))
        for label, jump in zip(labels, jumps, strict=True)
    ]
    draw.shuffle(made)
    values = tuple(draw.randrange(BASE) for _ in range(count))
    told = draw.randrange(count) if tell else None
    return Program(dict(made), draw.choice(labels), values, (draw.randrange(count), BASE), told, restate)


def programs(draw: random.Random, words: int) -> Lookups:
    """A program and its trace, for training: most traces end within `words` words, the others later."""
    lines = draw.randint(2, max(3, min(LABELS, words // 40)))
    restate: Restate = "reads" if draw.random() < _READS else "full"
    tell = draw.random() < _TELLS
    most = (words - prompt_words(lines, REGISTERS, tell)) // step_words(restate, tell)
    steps = (max(1, most // 3), max(2, most)) if draw.random() < _ENDS else (max(1, most), 2 * max(1, most))
    try:
        made = program(draw, lines, restate, tell, steps)
    except ValueError:  # few programs of two lines run on for long
        return programs(draw, words)
    result = Lookups(" ".join(made.prompt()))
    for step in made.steps():
        for said, is_answer in ((step.restated, False), (step.worked, True), ((step.jump,), False)):
            result.count(" " + " ".join(said) if said else "", is_answer)
    return result


def turns(draw: random.Random, words: int) -> Lookups:
    """Labels are given values, given others, and asked for: the latest value is right. For training."""
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
