"""Questions: one suite's model on one machine, with one text or task, one time of eviction and one mode of positions.

Rows of a question can be compared with each other. No question has two texts or two tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from kvbench.harness.core.grouped import grouped
from kvbench.harness.core.intervals import Interval
from kvbench.harness.core.perplexity import perplexity
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics, StepMetrics
from kvbench.harness.report.pairing import Common, common_tokens, mean_nll, paired, past_training
from kvbench.harness.report.ranks import Pair, Rank, answer_comparison, pair_changes, ranks
from kvbench.harness.report.rows import CONTROL, Row, rows, short_names
from kvbench.harness.report.sections import by_machine, groups, section_key, usual_positions
from kvbench.harness.report.shares import is_answered
from kvbench.harness.report.verify import CACHELESS, kv_bytes

Measure = Literal["perplexity", "answers"]


def reference(question: Question, capacity: int | None) -> Row | None:
    """Return the row with which the caches of a capacity are compared; None without a valid row.

    The reference is the best recomputed window of the capacity, if every capacity has a recomputed window. Otherwise, all
    capacities have the best recomputed window of the largest capacity with one. Without recomputed windows, the reference is
    dense, unless dense was read past the model's training length. The last choice is the best random control of the capacity.
    A recomputed window that scored only every `stride`-th token comes after dense, so that losses and ranks are over the same
    tokens wherever possible.
    """
    dense = None if question.dense is None or _has_trend(question, question.dense) else question.dense
    ours = [r for r in question.references if r.records[0].facts.code is None and question.figure(r) is not None]
    recomputed = [r for r in ours if r is not question.dense]
    if dense is not None:
        recomputed = [r for r in recomputed if r.stride == 1]
    rivals = recomputed
    if recomputed:
        sizes = {r.cell.capacity for r in recomputed}
        size = capacity if set(question.capacities) <= sizes else max(sizes, key=lambda size: size or 0)
        rivals = [r for r in recomputed if r.cell.capacity == size]
    elif dense is not None:
        return dense
    else:
        rivals = [r for r in question.at(capacity) if r.cell.policy == CONTROL and question.figure(r) is not None]
    return min(rivals, key=lambda r: question.figure(r) or 0.0, default=None)


def _has_trend(question: Question, dense: Row) -> bool:
    if question.measure == "answers":
        return dense.answers is None
    return dense.perplexity is None or dense.nll is None or past_training(dense.perplexity)


@dataclass(frozen=True)
class Question:
    """A question that a table of policies answers.

    Attributes:
        measure: quantity by which policies are judged.
        records: records that measure the quantity, references included.
        rows: rows of each policy and capacity, references included, with the answers and step times of the same suite.
        evicts: phrase that says when policies evict.
        positions: mode of positions, if each mode has a question or the mode is not `cache`; else empty.
        machine: device, with its set-up if several were timed.
        stored: label of the format of stored K and V; empty: the model's dtype.
        coded: references stored in another format, which are not in `rows`.
    """

    measure: Measure
    records: Sequence[Record]
    rows: Sequence[Row]
    evicts: str
    positions: str
    machine: str
    stored: str = ""
    coded: Sequence[Row] = ()

    @property
    def first(self) -> Record:
        """Record from which properties common to all records are read."""
        return next((r for r in self.records if r.status == "ok"), self.records[0])

    @cached_property
    def caches(self) -> list[Row]:
        """Rows of policies that keep a cache and evict from it."""
        return [row for row in self.rows if not is_reference(row.records[0])]

    @cached_property
    def references(self) -> list[Row]:
        """Rows without a capacity to compare at (`is_reference`): dense, recomputed windows and third-party caches."""
        return [row for row in self.rows if is_reference(row.records[0])]

    @cached_property
    def dense(self) -> Row | None:
        """Row of the cache that keeps everything; None without one."""
        return next((row for row in self.references if row.cell.is_dense), None)

    @property
    def capacities(self) -> list[int | None]:
        """Capacities of the caches, smallest first; None stands for no fixed capacity."""
        return sorted({row.cell.capacity for row in self.caches}, key=lambda c: (c is None, c or 0))

    def at(self, capacity: int | None) -> list[Row]:
        """Return the caches of a capacity."""
        return [row for row in self.caches if row.cell.capacity == capacity]

    def figure(self, row: Row, capacity: int | None = None) -> float | None:
        """Return the figure that ranks a row, less is better: nats per token, or the share of wrong answers.

        Nats are over the tokens after a cache of `capacity` has filled, by default of the row's own capacity. For dense, the
        default is the largest capacity.
        """
        if self.measure == "perplexity":
            largest = max((size or 0 for size in self.capacities), default=0) if row is self.dense else 0
            start = max(row.cell.capacity or 0, largest if capacity is None else capacity)
            return None if row.perplexity is None else mean_nll(row.perplexity, start, self.common.read)
        return None if row.answers is None else 1 - row.answers.share

    def perplexity(self, row: Row, capacity: int | None = None) -> float | None:
        """Return the perplexity over the tokens of a budget (`figure`); None for answers."""
        nll = self.figure(row, capacity) if self.measure == "perplexity" else None
        return None if nll is None else perplexity(nll)

    @cached_property
    def names(self) -> dict[str, str]:
        """Shortest name that distinguishes each row from the other rows of its capacity, by the row's id."""
        return {row.id: name for row, name in zip(self.rows, short_names(self.rows), strict=True)}

    @cached_property
    def dense_bytes(self) -> int | None:
        """Bytes of K and V that dense holds at the end of the text, measured or computed from the shapes of its layers."""
        if self.dense is not None and self.dense.kv_bytes:
            return self.dense.kv_bytes
        cell = self.first.cell.model_copy(update={"policy": "dense", "capacity": None, "evict": "step", "kv": None})
        facts = self.first.facts.model_copy(update={"method": None, "budgets": None})
        return kv_bytes(replace(self.first, cell=cell, facts=facts), held=True)

    @cached_property
    def changes(self) -> dict[Pair, Interval]:
        """Loss of the second of two caches of a capacity to the first, corrected for the number of pairs."""
        groups = [pair_changes(self.at(capacity), self.comparison) for capacity in self.capacities]
        return {pair: change for changes in groups for pair, change in changes.items()}

    @property
    def unranked(self) -> str:
        """Reason that caches without a rank have none."""
        if self.measure == "answers":
            return "there are too few streams"
        grown = any(row.perplexity is not None and past_training(row.perplexity) for row in self.caches)
        return "the text is too long for the model's training" if grown else "the text is too short"

    def ranks(self, capacity: int | None) -> dict[str, Rank | None]:
        """Return the ranks of the caches of a capacity that have a figure, by the rows' ids."""
        return ranks([row.id for row in self.at(capacity) if self.figure(row) is not None], self.changes)

    def comparison(self, a: Row, b: Row) -> Interval | None:
        """Return the loss of b to a; None if the two can't be paired."""
        if self.measure == "answers":
            return answer_comparison(a, b)
        return None if a.perplexity is None or b.perplexity is None else paired(b.perplexity, a.perplexity)

    def change(self, row: Row, base: Row) -> Interval | None:
        """Return the loss of a row to another; None if the two can't be paired.

        The interval of two caches of one capacity is corrected for the number of pairs. Any other interval is of one comparison.
        """
        same_capacity = row.cell.capacity == base.cell.capacity
        return (self.changes.get((base.id, row.id)) if same_capacity else None) or self.comparison(base, row)

    @cached_property
    def common(self) -> Common:
        """Tokens that all records scored, without regard to when caches fill."""
        return common_tokens(self.records)


def is_reference(record: Record) -> bool:
    """Return whether a record has no capacity to compare at: its policy never evicts, keeps no cache, or is third-party."""
    if record.facts.code is not None:
        return True
    return record.cell.policy == "dense" or record.cell.policy in CACHELESS or record.facts.method == "windows run afresh"


def questions(records: Iterable[Record]) -> list[Question]:
    """Return the questions that records answer, in the order of suites and models."""
    return [
        question
        for group in groups(records)
        for machine, part in by_machine(group)
        for question in [*_texts(part, machine), *_tasks(part, machine)]
    ]


def _texts(part: Sequence[Record], machine: str) -> Iterator[Question]:
    """Yield a question for each text and time of eviction.

    A failed record, whose text may be unknown, goes to the first text of the same task.
    """
    texts: dict[tuple[str, str], list[Record]] = {}
    for record in sorted((r for r in part if r.measures(NllMetrics)), key=lambda r: r.status != "ok"):
        options = repr(record.cell.options)
        known = next((key for key in texts if key[0] == options), None) if record.status != "ok" else None
        texts.setdefault(known or (options, record.data.ids_sha256), []).append(record)
    companions = [*poolable(list(filter(is_answered, part))), *(r for r in part if r.measures(StepMetrics))]
    for text in texts.values():
        yield from _by_eviction("perplexity", text, companions, machine)


def _tasks(part: Sequence[Record], machine: str) -> Iterator[Question]:
    """Yield a question for each task whose answers are right or wrong, and each time of eviction."""
    tasks = grouped(filter(is_answered, part), lambda r: (section_key(r), r.data.source))
    for task in tasks.values():
        yield from _by_eviction("answers", task, [r for r in part if r.measures(StepMetrics)], machine)


def _by_eviction(measure: Measure, subject: list[Record], companions: list[Record], machine: str) -> Iterator[Question]:
    """Yield a question for each time of eviction, mode of positions and codec with a measured cache.

    References have no capacity to compare at, so they are in all questions. A coded reference is only in questions with the same
    codec. The usual mode of positions for the time of eviction (`sections.usual_positions`) comes first.
    """
    caches = {(r.cell.evicts, r.cell.positions, r.cell.stored) for r in subject if not is_reference(r) and r.status == "ok"}
    names = {id(r) for r in subject}
    for evicts, positions, stored in sorted(caches, key=lambda x: (x[0], x[2], x[1] != usual_positions(x[0]), x[1])):
        several = len({mode for moment, mode, _ in caches if moment == evicts}) > 1
        alike = [
            r for r in [*subject, *companions] if is_reference(r) or (r.cell.evicts, r.cell.positions) == (evicts, positions)
        ]
        together = [r for r in alike if r.cell.stored == stored or (is_reference(r) and not r.cell.stored)]
        measured = [row for row in rows(together) if any(id(r) in names for r in row.records)]
        shown = [r for r in together if id(r) in names]
        devices = sorted({r.facts.device for r in shown} - {""})
        mode = positions if several or positions != "cache" else ""
        coded = rows([r for r in subject if is_reference(r) and r.cell.stored not in ("", stored)])
        yield Question(measure, shown, measured, evicts, mode, machine or " and ".join(devices), stored, coded)


def poolable(records: Sequence[Record]) -> list[Record]:
    """Leave out tasks whose right answers must not be added up, such as query-aware and query-blind answers."""
    distinct = {(r.cell.task.name, repr([r.cell.options.get(name) for name in r.cell.task.never_pooled_over])) for r in records}
    variants = Counter(name for name, _ in distinct)
    return [r for r in records if variants[r.cell.task.name] == 1]
