"""The feed: the policies at each budget and their losses, as a pure function of records (docs/records.md).

The page, the top of the Markdown page and `feed.json` all show the feed, so that they can't disagree.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from kvbench.harness.core.shown import visible
from kvbench.harness.records import Record
from kvbench.harness.report.chart import make_visible
from kvbench.harness.report.feed import equal_bytes, words
from kvbench.harness.report.feed.question import Question, questions, reference
from kvbench.harness.report.feed.row import cell_json, figure, provenance_json, row_json
from kvbench.harness.report.feed.words import finding, origin, size
from kvbench.harness.report.rows import Row
from kvbench.harness.report.sections import groups

VERSION = 3  # raised when a reader of the previous version would misread the feed
_LISTS = ("questions", "equal_bytes", "cells")
NAME = "kv-bench"  # first field of the feed, by which a file is recognised


def feed(records: Iterable[Record]) -> dict[str, Any]:
    """Return the feed of records of all suites and models: plain JSON, with the newest record of each cell."""
    records = list(records)
    open_questions, shown = questions(records), list(itertools.chain.from_iterable(groups(records)))
    answered = answers(open_questions)
    shapes = [question.first.facts.kv_shapes or () for question in open_questions]
    token_numbers = [sum(s.layers * s.heads * (s.key_dim + s.value_dim) for s in layers) for layers in shapes]
    cells = [cell_json(record) for record in shown]
    policies = sorted({row["policy"] for question in answered["questions"] for row in rows_of(question)})
    data: dict[str, Any] = {
        "feed": NAME,
        "version": VERSION,
        "measured": max((cell["measured"] for cell in cells), default=""),
        "default": default(answered["questions"], token_numbers),
        "papers": {name: {"paper": whose.paper, "arxiv": whose.arxiv} for name in policies if (whose := origin(name)).paper},
        **answered,
        "cells": cells,
        "provenance": {cell["provenance"]: provenance_json(record) for cell, record in zip(cells, shown, strict=True)},
    }
    visible_data: dict[str, Any] = make_visible(data)
    return visible_data


def answers(open_questions: Sequence[Question]) -> dict[str, Any]:
    """Return the part of a feed that answers questions: each question, and the questions at equal bytes."""
    entries = {"questions": [_question(q) for q in open_questions], "equal_bytes": list(equal_bytes.entries(open_questions))}
    answered: dict[str, Any] = make_visible(entries)
    return answered


def text(data: dict[str, Any]) -> str:
    """Return the content of `feed.json`: one line per question or cell, so that changes are readable."""
    head = {name: value for name, value in data.items() if name not in _LISTS}
    lists = [
        f'"{name}": [\n' + ",\n".join(json.dumps(x, ensure_ascii=False, allow_nan=False) for x in data[name]) + "\n]"
        for name in _LISTS
    ]
    body = json.dumps(head, ensure_ascii=False, allow_nan=False)[:-1]
    return f"{body}, {', '.join(lists)}}}\n"


def default(answered: Sequence[dict[str, Any]], sizes: Sequence[int]) -> str | None:
    """Return the id of the question to show first; None without questions.

    Questions about a text are preferred if they have rows with a loss to a reference and its interval; a random control is no
    reference here. The question of the largest model comes first, then the question with the most such rows, then the question
    with the most policies. sizes: number of elements in K and V of one token, for each question's model.
    """
    if not answered:
        return None

    def order(question: dict[str, Any], size: int) -> tuple[int, int, int, int]:
        rows = [row for budget in question["budgets"] for row in budget["rows"]]
        references = {row["id"] for row in question["references"]}
        losses = [lost for row in rows if (lost := row["loss"]) and lost["low"] is not None and lost["to"] in references]
        judged = len(losses) if question["measure"] == "perplexity" else 0
        return size if judged else 0, judged, len({row["policy"] for row in rows}), len(rows)

    orders = list(map(order, answered, sizes))
    best: str = answered[orders.index(max(orders))]["id"]
    return best


def rows_of(question: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all rows of a question of the feed, references first."""
    return [*question["references"], *(row for budget in question["budgets"] for row in budget["rows"])]


def _question(question: Question) -> dict[str, Any]:
    """Return the feed's entry of a question, with its budgets and references."""
    return {
        **words.identity(question),
        "machine": visible(question.machine),
        "about": words.about(question),
        "dense_bytes": question.dense_bytes,
        "dense_measured": question.dense is not None and bool(question.dense.kv_bytes),
        "references": [row_json(question, row, None, question.dense) for row in question.references],
        "budgets": [_budget(question, capacity) for capacity in question.capacities],
    }


def _budget(question: Question, capacity: int | None) -> dict[str, Any]:
    """Return the feed's entry of a capacity, with all policies ordered by rank, then by figure."""
    base, whole, ranks = reference(question, capacity), question.dense_bytes, question.ranks(capacity)

    def order(row: Row) -> tuple[float, float, float]:
        value, rank = question.figure(row), ranks.get(row.id)
        return (math.inf if value is None else 0, math.inf if rank is None else rank[0], value or 0.0)

    rows = sorted(question.at(capacity), key=order)
    most = max((row.kv_bytes for row in rows if row.kv_bytes), default=None)
    shown = [row_json(question, row, ranks.get(row.id), base) for row in rows]
    changes = [question.change(second, first) for first, second in itertools.combinations(rows, 2)]
    beaten = {row.id for row in rows[1:] if (lost := question.change(row, rows[0])) is not None and lost.sign > 0}
    sentence = finding(question, shown, beaten)
    return {
        "capacity": capacity,
        "kv_bytes": most,
        "kv_share": figure(most / whole) if most and whole else None,
        "references": {row.id: figure(question.perplexity(row, capacity)) for row in question.references},
        "reference": None if base is None else base.id,
        "rows": shown,
        "pairs": [x and [float(f"{end:.4g}") for end in (x.mean, x.low, x.high) if end is not None] for x in changes],
        "finding": sentence,
        "answer": f"At {size(capacity)}, {words.scope(question)}: {sentence}",
    }
