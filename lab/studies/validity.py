"""Writes docs/validity.md: whether our small models rank policies as large ones do. `make validity`; CI writes it again.

A published table is compared with a task of the suites `zoo` and `recall` over the policies that both have
(`rank_agreement`). A published rule is ours only if every parameter is the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from kvbench.harness.core.parameters import parameters_of, policy_from
from kvbench.harness.records import Record, RecordStore
from kvbench.harness.records.metrics import NllMetrics, QuestionMetrics
from kvbench.harness.report.markdown import table
from kvbench.lab.studies import DOCS, RESULTS, model_sizes
from kvbench.lab.studies.controls import holm
from kvbench.lab.studies.rank_agreement import LEVEL, Agreement, Scores, Table, Values, agreement, chance, drawn

SUITES = ("zoo", "recall")
POSITIONS = ("stream", "cache")  # best first: published codes that cut a prompt leave its keys at their positions in the stream
FEWEST = 3  # policies in common
_QUESTIONS = ("unseen", "seen")  # by the policy, when the cache is cut
_TITLE = """# Does a small model rank policies as a large one does?
"""
_ABOUT = """
For each task, Kendall's tau compares the order of policies on our models of a million parameters with the order in
[published tables](https://github.com/kv-bench/kv-bench/blob/main/docs/data/published.yaml) of large models: 1 is the same order,
0 no agreement, -1 the reverse. *Not shown* does not mean *refuted*: few policies have been published with equal parameters.

A table counts for a task if both have three policies in common and our scores differ by more than the choice of questions
explains (Friedman's test, 5 %). Tau is the mean over papers, with 95 % bootstrap intervals; p is the chance that random scores
agree as much, corrected by [Holm's procedure](statistics.md#many-pairs).

"""
_MATCHING = "A record stands for a published rule only if every parameter is the same."
TableScores = dict[str, float]


@dataclass(frozen=True)
class Source:
    """Tables of one benchmark in one paper or leaderboard.

    Attributes:
        name: name of the tables.
        origin: paper or leaderboard.
        where: place in the origin.
        benchmark: benchmark that was scored.
        question: "seen" or "unseen" by the policy when it evicts.
        rules: our policy for each name in the tables, unless the names are equal.
        tables: score of each policy, for each model and budget; larger scores are better.
    """

    name: str
    origin: str
    where: str
    benchmark: str
    question: str
    rules: dict[str, Any]
    tables: list[TableScores]

    @property
    def policies(self) -> dict[str, Any]:
        """The rule of each name in the tables."""
        return {name: self.rules.get(name, name) for one in self.tables for name in one}


@dataclass(frozen=True)
class Ours:
    """A task of ours under one model.

    Attributes:
        model: name of the model.
        task: name of the task.
        question: "seen" or "unseen" when a policy evicts; "-" for tasks without questions.
        records: records of the policies.
        scores: scores of the records.
    """

    model: str
    task: str
    question: str
    records: list[Record]
    scores: Scores

    def index(self, rule: Any) -> int | None:
        """Return the index of the record of a policy that a suite would write like this; None if it was not measured."""
        return next((i for i, record in enumerate(self.records) if _is_of(record, rule)), None)


@dataclass(frozen=True)
class Comparison:
    """A task of ours against all tables with one kind of question.

    Attributes:
        ours: the task.
        tables: with `FEWEST` policies in common or more, whether they count or not.
        agreement: with those that count; None if none does.
        raw_p: chance that random scores agree as much.
        p: corrected for the number of comparisons on the page.
    """

    ours: Ours
    tables: list[Table]
    agreement: Agreement | None
    raw_p: float
    p: float = 1.0


def _is_of(record: Record, rule: Any) -> bool:
    """Whether a record's policy has every parameter of a rule, and the defaults at the record's capacity."""
    name, given = (rule, {}) if isinstance(rule, str) else (rule["name"], {k: v for k, v in rule.items() if k != "name"})
    if record.cell.policy != name or record.cell.capacity is None:
        return False
    return parameters_of(policy_from(name, given).bind(record.cell.capacity), recorded=True) == record.cell.parameters


def published(file: Path = DOCS / "data" / "published.yaml") -> list[Source]:
    """The published tables."""
    return [
        Source(
            name=x["source"],
            origin=x.get("origin", x["source"]),
            where=x["where"],
            benchmark=x["benchmark"],
            question=x["question"],
            rules=x.get("rules", {}),
            tables=[one["scores"] for one in x["tables"]],
        )
        for x in yaml.safe_load(file.read_text(encoding="utf-8"))
    ]


def measured(results: Path = RESULTS) -> list[Ours]:
    """Our tasks after a prompt, of the built-in models."""
    return tasks_of(r for suite in SUITES for r in RecordStore(results / f"{suite}.jsonl").read_all()[0])


def tasks_of(records: Iterable[Record]) -> list[Ours]:
    """The tasks after a prompt that records measure, of any models."""
    by_task: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record.status == "ok" and record.cell.capacity is not None and record.cell.evict == "prompt":
            by_task[_asked(record)].append(record)
    return [_task(key, like_published(records)) for key, records in sorted(by_task.items())]


def _asked(record: Record) -> tuple[str, str, str]:
    """Model, task, and whether the question was seen."""
    options = dict(record.cell.options)
    seen = str(options.get("question") or "seen") if "tasks" in options else "-"
    return record.cell.model.id.removeprefix("builtin:"), str(options.get("tasks", record.cell.task.name)), seen


def like_published(records: Sequence[Record]) -> list[Record]:
    """Return one record for each policy: with keys where published codes leave them, if it was measured so."""
    best: dict[str, Record] = {}
    known = [record for record in records if record.cell.positions in POSITIONS and record.cell.seed == 0]  # others: controls
    for record in sorted(known, key=lambda record: POSITIONS.index(record.cell.positions)):
        best.setdefault(repr((record.cell.policy, record.cell.parameters)), record)
    return list(best.values())


def _task(key: tuple[str, str, str], records: list[Record]) -> Ours:
    units = np.array([_units(record) for record in records])
    return Ours(*key, records, Scores(units, drawn(units, answers=records[0].measured(QuestionMetrics) is not None)))


def _units(record: Record) -> Values:
    """A score for each question or stream, more is better. [N]."""
    if (answers := record.measured(QuestionMetrics)) and answers.outcomes:
        return np.array([int(digit) for digit in answers.outcomes], float)
    nll = record.measured(NllMetrics)
    assert nll is not None, record.cell
    assert nll.stream_tokens is not None, record.cell
    first = np.arange(len(nll.blocks.tokens)) * nll.blocks.size - len(record.data.prefix or ())  # of each block, in the text
    stream = np.maximum(first, 0) // nll.stream_tokens
    nats, tokens = (np.bincount(stream, weights=sums) for sums in (nll.blocks.nll_sum, nll.blocks.tokens))
    return -nats / tokens


def in_common(sources: Sequence[Source], ours: Ours) -> list[Table]:
    """The tables, over the policies that both have; those with fewer than `FEWEST` are left out."""
    found = []
    for source in sources:
        places = {name: ours.index(rule) for name, rule in source.policies.items()}
        for one in source.tables:
            both = {place: score for name, score in one.items() if (place := places[name]) is not None}
            if len(both) >= FEWEST:
                found.append(Table(source.origin, tuple(both), tuple(both.values())))
    return found


def compared(sources: Sequence[Source], ours: Sequence[Ours]) -> dict[str, list[Comparison]]:
    """Every task with every table that asks like it, by question, most alike first."""
    found = {
        question: [_compared(sources, task, question) for task in ours if task.question in (question, "-")]
        for question in _QUESTIONS
    }
    counting = [one for of_question in found.values() for one in of_question if one.agreement]
    adjusted = dict(zip(map(id, counting), holm([one.raw_p for one in counting]), strict=True))
    return {
        question: sorted(
            (replace(one, p=adjusted.get(id(one), 1.0)) for one in of_question),
            key=lambda one: -one.agreement.tau if one.agreement else 2,
        )
        for question, of_question in found.items()
    }


def _compared(sources: Sequence[Source], task: Ours, question: str) -> Comparison:
    tables = in_common([source for source in sources if source.question == question], task)
    alike = agreement(task.scores, tables)
    return Comparison(task, tables, alike, chance(task.scores, tables, alike.tau) if alike else 1.0)


def page(sources: Sequence[Source], ours: Sequence[Ours]) -> str:
    """Return the page."""
    found = compared(sources, ours)
    lines = [_TITLE, _verdict(found), _ABOUT + _matched(sources, ours)]
    lines += ["", *_by_task(found)]
    if model_sizes.FILE.exists():
        lines += model_sizes.section(model_sizes.Answers())
    return "\n".join(lines) + "\n"


def _verdict(found: Mapping[str, Sequence[Comparison]]) -> str:
    """State the result in a sentence, and how much is behind it."""
    counting = [(question, one) for question, tasks in found.items() for one in tasks if one.agreement]
    sure = [f"{one.ours.model}'s `{one.ours.task}`, question {question}" for question, one in counting if one.p < LEVEL]
    told = "No task of ours is shown to rank" if not sure else f"Shown for {'; '.join(sure)}, and no other task: it ranks"
    result = f"**{told} policies more like published tables than random scores do.**"
    numbers = "; ".join(f"with the question {question}, {_numbers(tasks)}" for question, tasks in found.items())
    return f"{result}\n{len(counting)} comparisons: {numbers}."


def _numbers(tasks: Sequence[Comparison]) -> str:
    """Describe the number of tables with which tasks were compared."""
    most = max(tasks, key=lambda one: len(one.tables), default=None)
    counted = [one.agreement.tables for one in tasks if one.agreement]
    if most is None or not counted:
        return "none"
    tables = f"{len(most.tables)} tables of {len({one.origin for one in most.tables})} papers or leaderboards"
    return f"{tables}, {min(counted)} to {max(counted)} of which count for a task"


def _matched(sources: Sequence[Source], ours: Sequence[Ours]) -> str:
    """State which records stand for which rules."""
    rules = [rule for source in sources for rule in source.policies.values()]
    absent = {str(rule) for rule in rules if all(task.index(rule) is None for task in ours)}
    return f"{_MATCHING} {len(absent)} published rules have no record." if absent else _MATCHING


def _by_task(found: Mapping[str, Sequence[Comparison]]) -> list[str]:
    """Return a row for each task, most alike first, and for each question tau and corrected p; "-" where no table counts."""
    by_task = {question: {(c.ours.model, c.ours.task): c for c in tasks} for question, tasks in found.items()}
    rows = [
        [model, task, *(_words(by_task[question].get((model, task))) for question in found)]
        for model, task in dict.fromkeys(key for tasks in by_task.values() for key in tasks)
    ]
    return table(["model", "task", *(f"question {question}: tau; p" for question in found)], rows, "ll" + "r" * len(found))


def _words(one: Comparison | None) -> str:
    a = one.agreement if one else None
    return f"{_figure(a.tau, a.tau_interval)}; {one.p:.2f}" if one and a else "-"


def _figure(value: float, interval: tuple[float, float]) -> str:
    return f"{value:+.2f} [{interval[0]:+.2f}, {interval[1]:+.2f}]"


if __name__ == "__main__":
    (DOCS / "validity.md").write_text(page(published(), measured()), encoding="utf-8")
