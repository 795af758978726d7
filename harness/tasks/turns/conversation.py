"""Generated conversations: a text of facts, then turns that tell facts, correct earlier ones and ask for one.

The words are those that our small models learnt: `set L3 5` and `ask L3` (`machine`), or `#12 = 34` and a question (`lookups`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvbench.harness.data.lookups import key_answer, key_line, key_question
from kvbench.harness.data.machine import BASE, LABELS
from kvbench.harness.data.questions import Script

if TYPE_CHECKING:
    from kvbench.harness.tasks.turns.schema import TurnsOptions


class Style(NamedTuple):
    """The words of facts and questions."""

    names: range
    values: range
    fact: Callable[[int, int], str]
    question: Callable[[int], str]
    answer: Callable[[int], str]
    stop: str | None  # ends an answer
    most: int | None  # tokens of an answer
    fact_tokens: int  # about
    asked_tokens: int  # of a question and its answer, about


STYLES: dict[str, Style] = {
    "words": Style(
        range(LABELS), range(BASE), lambda name, value: f" set L{name} {value}", lambda name: f" ask L{name}",
        lambda value: f" {value}", None, 1, 3, 3,
    ),
    "keys": Style(
        range(1, 1000), range(1, 1000), lambda name, value: key_line(name, [value]), key_question,
        lambda value: key_answer([value]), "\n", None, 5, 6,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class _Fact:
    """What a name stands for now."""

    kind: str  # system, text, turn or corrected
    value: int
    turn: int  # that told its value; 0: the text
    line: int  # of the script
    old: int | None  # value before it was corrected


def conversation(options: TurnsOptions, stream: int) -> Script:
    """One conversation; it depends only on the options and its number.

    Whatever is asked for was told in the text or in an earlier turn, so that filler lies in between. A fact is corrected once at
    most. In mode `requests`, each turn knows the text alone.
    """
    style, draw = STYLES[options.data], random.Random(f"{options.data_seed}/{stream}")
    names = draw.sample(style.names, len(style.names))
    unused, fillers = iter(names), names[options.names :]
    script, facts, asked = Script(), dict[int, _Fact](), set[int]()

    def tell(name: int, kind: str, turn: int) -> None:
        old = facts[name].value if name in facts else None
        value = draw.choice([value for value in style.values if value != old])
        facts[name] = _Fact(kind, value, turn, len(script.lines), old)
        script.line(style.fact(name, value))
        asked.discard(name)

    for kind, count in (("system", options.system), ("text", options.facts)):
        for _ in range(count):
            tell(next(unused), kind, 0)
    script.prompt, of_text = len(script.text), dict(facts)
    for turn in range(1, options.turns + 1):
        if options.mode == "requests":
            facts = dict(of_text)
        start, earlier = len(script.text), list(facts)
        for _ in range(options.told):
            uncorrected = [name for name in earlier if facts[name].old is None]
            if len(uncorrected) > 1 and draw.random() < options.corrections:  # one is left to ask for
                tell(draw.choice(uncorrected), "corrected", turn)
            else:
                tell(next(unused), "turn", turn)
        for _ in range(options.filler):
            script.line(style.fact(draw.choice(fillers), draw.choice(style.values)))
        known = [name for name in earlier if facts[name].turn < turn]
        known = [name for name in known if name not in asked] or known
        kind = draw.choice(sorted({facts[name].kind for name in known}))
        name = draw.choice([name for name in known if facts[name].kind == kind])
        asked.add(name)
        fact = facts[name]
        about = {"turn": turn, "kind": kind} | ({"distance": turn - fact.turn} if fact.turn else {})
        about |= {} if fact.old is None else {"old": str(fact.old)}
        begins = start if options.mode == "requests" else None
        script.ask(style.question(name), str(fact.value), style.answer(fact.value), fact.line, begins, **about)
    return script
