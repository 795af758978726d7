"""Conversations: one text, then several questions, with one cache that is carried from turn to turn or copied for each request.

Source: the two modes of SCBench, Li et al. 2024, arXiv:2412.10319.
Differs: generated conversations also state facts in turns, correct them, and ask for them later (docs/tasks/turns.md). They use
the words that our small models learnt: `set L3 5` and `ask L3` (`words`), or `#12 = 34` and a question (`keys`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from kvbench.harness.data import scbench
from kvbench.harness.data.lookups import key_answer, key_line, key_question, stated_value
from kvbench.harness.data.quiz import QuizData, Script, quiz_data
from kvbench.harness.data.register_machine import BASE, LABELS
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import AnswerMetrics
from kvbench.harness.report import chart
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.markdown import cache_bytes, on_device, percent, policy_table, row_label, task_line
from kvbench.harness.report.rows import short_titles, shown_kv_bytes, without_seeds
from kvbench.harness.report.shares import Answers
from kvbench.harness.report.task_charts import panels, policy_lines
from kvbench.harness.tasks.common.answers import AnsweringTask, QuizFacts, about_intervals, percent_or_status, summed
from kvbench.harness.tasks.task import Job, Options, Tokenizer, Workload

_KINDS = ("system", "text", "turn", "corrected")
_OLD = "old value said"  # heading of the percentage of answers with the value before the correction
_SCBENCH_TOKENS = 125_000  # approximate number of tokens of a context
_MAX_LINES = 10**6  # lines of all streams, which are generated in memory


class Style(NamedTuple):
    """Words of facts and questions."""

    names: range
    values: range
    fact: Callable[[int, int], str]
    question: Callable[[int], str]
    answer: Callable[[int], str]
    stop: str | None  # string that ends an answer
    most: int | None  # largest number of tokens of an answer
    fact_tokens: int  # approximate number of tokens of a fact
    asked_tokens: int  # approximate number of tokens of a question and its answer


STYLES: dict[str, Style] = {
    "words": Style(
        range(LABELS),
        range(BASE),
        lambda name, value: f" set L{name} {value}",
        lambda name: f" ask L{name}",
        lambda value: f" {value}",
        None,
        1,
        3,
        3,
    ),
    "keys": Style(
        range(1, 1000),
        range(1, 1000),
        lambda name, value: key_line(name, [value]),
        key_question,
        lambda value: key_answer([value]),
        "\n",
        None,
        5,
        6,
    ),
}


class TurnsOptions(Options):
    """Options of the task `turns`. The options from `system` to `data_seed` apply to generated conversations."""

    shown = ("data", "mode", "turns", "streams")
    never_pooled_over = ("mode",)

    name: Literal["turns"] = "turns"
    data: Literal["keys", "words", "scbench"] = Field(
        "keys",
        description="source: generated for builtin:recall (keys) or a model of `bench pretrain machine` (words), or SCBench",
    )
    mode: Literal["turns", "requests"] = Field(
        "turns",
        description="turns: one cache reads the text, every question and every answer; requests: each is asked on a copy of the "
        "text's cache",
    )
    subset: str = Field("scbench_kv", description="subset of SCBench")
    turns: int = Field(12, ge=1, description="turns of a conversation, with one question each")
    streams: int = Field(20, ge=1, description="independent conversations; each is read with a fresh cache")
    context: Literal["gold", "model"] = Field(
        "gold", description="answer that stays in the stream in mode turns: the right one (gold), or the model's (model)"
    )
    system: int = Field(4, ge=0, description="facts that stand first")
    facts: int = Field(32, ge=0, description="facts of the text after the first ones")
    told: int = Field(1, ge=0, description="facts that a turn tells or corrects, before its question")
    corrections: float = Field(0.5, ge=0, le=1, description="share of told facts that correct an earlier fact")
    filler: int = Field(4, ge=0, description="facts that a turn tells afterwards, and that no question is about")
    data_seed: int = Field(0, ge=0, description="seed of names, values and questions")

    @property
    def heading(self) -> str:
        """Heading with the mode, because right answers in turns and to requests never share a table."""
        return f"Conversations, asked in {self.mode}"

    @property
    def names(self) -> int:
        """Number of different names that a generated conversation may need for its facts, without filler."""
        return self.system + self.facts + self.turns * self.told

    @field_validator("subset")
    @classmethod
    def _is_right_or_wrong(cls, subset: str) -> str:
        if subset not in scbench.PROMPTS:
            raise ValueError(
                f"{subset[:40]}: only {' and '.join(scbench.PROMPTS)} are scored by whether the right string was said"
            )
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
    """Current value of a name."""

    kind: str  # system, text, turn or corrected
    value: int
    turn: int  # turn that stated the value; 0: the text
    line: int  # line of the script
    old: int | None  # value before the correction


def conversation(options: TurnsOptions, stream: int) -> Script:
    """Draw a conversation, which depends only on the options and its number.

    Every question is about a fact from the text or an earlier turn, so that filler separates the two. A fact is corrected at most
    once. In mode `requests`, each turn refers only to the text and to itself.
    """
    style, draw = STYLES[options.data], random.Random(f"{options.data_seed}/{stream}")
    names = draw.sample(style.names, len(style.names))
    unused, fillers = iter(names), names[options.names :]
    script, facts, questioned = Script(), dict[int, _Fact](), set[int]()

    def tell(name: int, kind: str, turn: int) -> None:
        old = facts[name].value if name in facts else None
        value = draw.choice([value for value in style.values if value != old])
        facts[name] = _Fact(kind, value, turn, len(script.lines), old)
        script.line(style.fact(name, value))
        questioned.discard(name)

    for kind, number in (("system", options.system), ("text", options.facts)):
        for _ in range(number):
            tell(next(unused), kind, 0)
    script.prompt, of_text = len(script.text), dict(facts)
    for turn in range(1, options.turns + 1):
        if options.mode == "requests":
            facts = dict(of_text)
        start, earlier = len(script.text), list(facts)
        for _ in range(options.told):
            uncorrected = [name for name in earlier if facts[name].old is None]
            if len(uncorrected) > 1 and draw.random() < options.corrections:  # keep one uncorrected
                tell(draw.choice(uncorrected), "corrected", turn)
            else:
                tell(next(unused), "turn", turn)
        for _ in range(options.filler):
            script.line(style.fact(draw.choice(fillers), draw.choice(style.values)))
        known = [name for name in earlier if facts[name].turn < turn]
        known = [name for name in known if name not in questioned] or known
        kind = draw.choice(sorted({facts[name].kind for name in known}))
        name = draw.choice([name for name in known if facts[name].kind == kind])
        questioned.add(name)
        fact = facts[name]
        about = {"turn": turn, "kind": kind} | ({"distance": turn - fact.turn} if fact.turn else {})
        about |= {} if fact.old is None else {"old": str(fact.old)}
        begins = start if options.mode == "requests" else None
        script.ask(style.question(name), str(fact.value), style.answer(fact.value), fact.line, begins, **about)
    return script


class Turns(AnsweringTask):
    """Right answers in conversations, by kind of question and by turn."""

    options = TurnsOptions

    @staticmethod
    def data(options: TurnsOptions, tokenizer: Tokenizer, directory: Path | None) -> QuizData:
        """Return the conversations, which are equal for every policy and machine."""
        if options.data == "scbench":
            source, scripts = scbench.conversations(options.subset, options.turns, options.streams, directory)
            reader = tokenizer()
            return quiz_data(scripts, source, reader, reader.eos_token, scbench.MOST_ANSWER_TOKENS)
        scripts, style = [conversation(options, stream) for stream in range(options.streams)], STYLES[options.data]
        return quiz_data(scripts, f"generated, data seed {options.data_seed}", tokenizer(), style.stop, style.most)

    @classmethod
    def workload(cls, options: TurnsOptions) -> Workload:
        """Estimate tokens from the words of facts and questions. The prompt is the text before the first turn."""
        style = STYLES[options.data] if options.data != "scbench" else None
        facts = options.system + options.facts + options.turns * (options.told + options.filler)
        length = style.fact_tokens * facts + style.asked_tokens * options.turns if style else _SCBENCH_TOKENS
        answer = (style.most or 6) if style else scbench.MOST_ANSWER_TOKENS
        return Workload(sequences=options.streams, length=length, steps=options.streams * options.turns * answer, prompt=None)

    @classmethod
    def is_right(cls, options: TurnsOptions, completion: str, gold: str) -> bool:
        """Whether the completion equals the right answer or, for SCBench, contains it."""
        return scbench.is_right(completion, gold) if options.data == "scbench" else completion == gold

    @classmethod
    def run(cls, options: TurnsOptions, job: Job) -> AnswerMetrics:
        """Hold the conversations, and write each answer to the trace."""
        from kvbench.harness.tasks.common.answering import answer_questions

        context = "none" if options.mode == "requests" else options.context
        parse = str if options.data == "scbench" else stated_value
        return answer_questions(job, context, parse, partial(cls.is_right, options))

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Return tables of right answers by kind and by turn. The seeds of a policy share a row."""
        groups = without_seeds(records)
        turns = sorted(summed(records, "turns"), key=int)
        data = records[0].data
        length = f"The text has {data.prompt_tokens:,.0f} tokens. " if isinstance(data, QuizFacts) and data.prompt_tokens else ""
        about = f"{task_line(records[0])}{length}Percent right with {about_intervals(records)}, by what is asked for:\n"
        names = [_name(group, records) for group in groups]
        by_kind = [(group[0], name | _by_kind(group)) for group, name in zip(groups, names, strict=True)]
        by_turn = [(group[0], name | _by_turn(group)) for group, name in zip(groups, names, strict=True)]
        return [
            about,
            *policy_table(by_kind, records, {head: head for head in ("K/V", "all", *_KINDS, _OLD)}),
            "Percent right by the turn:\n",
            *policy_table(by_turn, records, {head: head for head in ("K/V", *turns)}),
            *over_turns(records),
        ]


def _name(group: Sequence[Record], records: Sequence[Record]) -> dict[str, str]:
    """Return the first cells of a row."""
    seeds = f", {len(group)} seeds" if len(group) > 1 else ""
    return {"policy": row_label(group[0], records) + seeds, "K/V": cache_bytes(shown_kv_bytes(group[0]))}


def _by_kind(group: Sequence[Record]) -> dict[str, str]:
    """Return the percentage right of all questions and of each kind, and the percentage of old values of corrected facts."""
    counts = summed(group, "kinds")
    shown = {
        kind: f"{percent(right / total, _of_kind(group, kind).ends, '')} of {total:,}" for kind, (right, total) in counts.items()
    }
    stale = sum(metrics.stale or 0 for r in group if (metrics := r.measured(AnswerMetrics)))
    old = {_OLD: f"{100 * stale / counts['corrected'][1]:.1f}"} if "corrected" in counts else {}
    return {"all": percent_or_status(*group)} | shown | old


def _of_kind(group: Sequence[Record], kind: str) -> Answers:
    """Return the right answers to questions of a kind, by conversation. All seeds of a policy answer the same questions."""
    right, total = Counter[int](), Counter[int]()
    for record in group:
        metrics, options = record.measured(AnswerMetrics), record.cell.task_options(TurnsOptions)
        asks = [(stream, one) for stream in range(options.streams) for one in _kinds_asked(options, stream)]
        for (stream, one), digit in zip(asks, metrics.outcomes if metrics else "", strict=False):
            right[stream] += one == kind and digit == "1"
            total[stream] += one == kind
    streams = [(right[stream], questions) for stream, questions in total.items() if questions]
    return Answers(right.total(), total.total(), streams)


@lru_cache(maxsize=1024)
def _kinds_asked(options: TurnsOptions, stream: int) -> list[str]:
    """Return the kind of each question of a generated conversation."""
    return [about["kind"] for *_, about in conversation(options, stream).questions]


def _by_turn(group: Sequence[Record]) -> dict[str, str]:
    """Return the percentage right in each turn."""
    return {turn: f"{100 * right / total:.1f}" for turn, (right, total) in summed(group, "turns").items()}


def over_turns(records: Sequence[Record]) -> list[Chart]:
    """Return a panel per capacity with a line per policy; empty if all records have one turn."""
    measured = [r for r in records if (m := r.measured(AnswerMetrics)) and len(m.turns or {}) > 1]
    alt = "Share of right answers of {model} over the turns of a conversation, one line per policy"
    return panels(measured, alt, lambda part, _: _panel(part))


def _panel(records: Sequence[Record]) -> dict[str, Any]:
    groups = without_seeds(records)
    first = [group[0] for group in groups]
    names = [name + on_device(record, records) for name, record in zip(short_titles(first), first, strict=True)]
    values: list[dict[str, Any]] = [
        {"policy": name, "turn": int(turn), "right": round(100 * right / total, 2)}
        for name, group in zip(names, groups, strict=True)
        for turn, (right, total) in summed(group, "turns").items()
    ]
    scale = {"domain": [1, max(v["turn"] for v in values)], "nice": False, "padding": 8}
    turn = chart.channel("turn", "turn", axis={"format": "d", "tickMinStep": 1}, scale=scale)
    right = chart.channel("right", "percent right", scale={"domain": [0, 100]})
    pairs = [(name, record.cell.policy) for name, record in zip(names, first, strict=True)]
    return policy_lines(values, {"x": turn, "y": right}, pairs, point={"size": 50})
