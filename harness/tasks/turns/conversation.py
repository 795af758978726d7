"""Options of the task `turns`, and generated conversations: a text of facts, then turns that tell, correct and ask.

The words are those that our small models learnt: `set L3 5` and `ask L3` (`machine`), or `#12 = 34` and a question (`lookups`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from kvbench.harness.data.lookups import key_answer, key_line, key_question
from kvbench.harness.data.machine import BASE, LABELS
from kvbench.harness.data.questions import Script
from kvbench.harness.data.scbench import PROMPTS
from kvbench.harness.records.cell import Options

_MAX_LINES = 10**6  # of all streams, generated in memory


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


class TurnsOptions(Options):
    """Options of the task `turns`; those from `system` to `data_seed` are of generated conversations."""

    name: Literal["turns"] = "turns"
    data: Literal["keys", "words", "scbench"] = Field(
        "keys", description="generated, for builtin:recall (keys) or a model of `bench pretrain machine` (words); or SCBench's"
    )
    mode: Literal["turns", "requests"] = Field(
        "turns",
        description="turns: one cache reads the text, every question and every answer; requests: each is asked on a copy of the "
        "text's cache",
    )
    subset: str = Field("scbench_kv", description="of SCBench")
    turns: int = Field(12, ge=1, description="turns of a conversation, with one question each")
    streams: int = Field(20, ge=1, description="independent conversations; each is read with a fresh cache")
    context: Literal["gold", "model"] = Field(
        "gold", description="what stays of an answer in mode turns: the right one (gold), or the model's (model)"
    )
    system: int = Field(4, ge=0, description="facts that stand first")
    facts: int = Field(32, ge=0, description="facts of the text after them")
    told: int = Field(1, ge=0, description="facts that a turn tells or corrects, before its question")
    corrections: float = Field(0.5, ge=0, le=1, description="share of these that correct an earlier fact")
    filler: int = Field(4, ge=0, description="facts that a turn tells after those, and nobody asks about")
    data_seed: int = Field(0, ge=0, description="seed of names, values and questions")

    @property
    def names(self) -> int:
        """Different names that a generated conversation may need for its facts, without filler."""
        return self.system + self.facts + self.turns * self.told

    @field_validator("subset")
    @classmethod
    def _is_right_or_wrong(cls, subset: str) -> str:
        if subset not in PROMPTS:
            raise ValueError(f"{subset[:40]}: only {' and '.join(PROMPTS)} are scored by whether the right string was said")
        return subset

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if self.data == "scbench":
            return self
        needed, names = self.names + (self.filler > 0), len(STYLES[self.data].names)
        if needed > names:
            raise ValueError(
                f"system + facts + turns x told, and one name for filler, are {needed:,} names, but {self.data} has {names}"
            )
        if not self.system + self.facts:
            raise ValueError("system and facts are 0, so the first turn has nothing to ask about")
        lines = self.streams * (self.system + self.facts + self.turns * (self.told + self.filler + 1))
        if lines > _MAX_LINES:
            raise ValueError(f"{self.streams:,} conversations have {lines:,} lines together, more than {_MAX_LINES:,}")
        return self


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
