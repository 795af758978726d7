"""The feed: which policy, at which budget, and what it loses. A pure function of records (docs/records.md).

The page, the top of the Markdown page and `feed.json` all show this object, so that they can't disagree.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record
from kvbench.harness.report.chart import make_visible
from kvbench.harness.report.feed import equal_bytes, words
from kvbench.harness.report.feed.question import Question, loss, questions, reference
from kvbench.harness.report.feed.row import Placed, cell_json, dense_bytes, figure, perplexity, provenance_json, row_id, row_json
from kvbench.harness.report.feed.words import finding, origin, size
from kvbench.harness.report.markdown import model_name
from kvbench.harness.report.rows import Row, short_names
from kvbench.harness.report.sections import groups

VERSION = 3  # raised when a reader of the version before would misread the feed
_LISTS = ("questions", "equal_bytes", "cells")
NAME = "kv-bench"  # its first field, by which a file is recognised


def feed(records: Iterable[Record]) -> dict[str, Any]:
    """Return the feed of records of all suites and models: plain JSON, with the newest record of each cell."""
    records = list(records)
    asked_questions, shown = questions(records), list(itertools.chain.from_iterable(groups(records)))
    answered = answers(asked_questions)
    shapes = [question.first.facts.kv_shapes or () for question in asked_questions]
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


def answers(asked_questions: Sequence[Question]) -> dict[str, Any]:
    """Return the part of a feed that answers questions: each question, and the questions at equal bytes."""
    formats = [equal_bytes.as_json(together) for together in equal_bytes.together(asked_questions)]
    answered: dict[str, Any] = make_visible({"questions": [_question(q) for q in asked_questions], "equal_bytes": formats})
    return answered


def text(data: dict[str, Any]) -> str:
    """The content of `feed.json`: one line a question or cell, so that changes are readable."""
    head = {name: value for name, value in data.items() if name not in _LISTS}
    lists = [
        f'"{name}": [\n' + ",\n".join(json.dumps(x, ensure_ascii=False, allow_nan=False) for x in data[name]) + "\n]"
        for name in _LISTS
    ]
    body = json.dumps(head, ensure_ascii=False, allow_nan=False)[:-1]
    return f"{body}, {', '.join(lists)}}}\n"


def default(answered: Sequence[dict[str, Any]], sizes: Sequence[int]) -> str | None:
    """Return the id of the question to show first; None without questions.

    It is about a text and has rows with a loss to a reference and its interval; a random control is no reference here. The
    largest model comes first, then the question with the most such rows, then the one with the most policies.

    Args:
        answered: the questions.
        sizes: numbers in K and V of one token of each question's model.
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
    """A question with its budgets and references."""
    names = {row_id(row): name for row, name in zip(question.rows, short_names(question.rows), strict=True)}
    whole, measured = dense_bytes(question)
    references = [Placed(r, names[row_id(r)], None, loss(question, r, question.dense)) for r in question.references]
    heading = f"{model_name(question.first)}, {words.subject(question)}"
    return {
        **words.identity(question),
        "machine": visible(question.machine),
        "about": words.about(question),
        "dense_bytes": whole,
        "dense_measured": measured,
        "references": [row_json(question, placed, names) for placed in references],
        "budgets": [_budget(question, capacity, names, heading) for capacity in question.capacities],
    }


def _budget(question: Question, capacity: int | None, names: dict[str, str], heading: str) -> dict[str, Any]:
    """Return the feed's entry of a capacity, with all policies, the best first."""
    rows, base = question.at(capacity), reference(question, capacity)
    ranks = question.ranks(capacity)
    placed = [Placed(row, names[row_id(row)], ranks.get(question.numbers[id(row)]), loss(question, row, base)) for row in rows]
    placed.sort(key=lambda p: _order(question, p))
    whole, _ = dense_bytes(question)
    most = max((row.kv_bytes for row in rows if row.kv_bytes), default=None)
    shown = [row_json(question, p, names) for p in placed]
    sentence = finding(shown, question.measure)
    return {
        "capacity": capacity,
        "kv_bytes": most,
        "kv_share": figure(most / whole) if most and whole else None,
        "references": {row_id(row): figure(perplexity(question, row, capacity)) for row in question.references},
        "reference": None if base is None else row_id(base),
        "rows": shown,
        "pairs": [_pair(question, one.row, other.row) for one, other in itertools.combinations(placed, 2)],
        "finding": sentence,
        "answer": f"At {size(capacity)}, {heading}: {sentence}",
    }


def _pair(question: Question, one: Row, other: Row) -> list[float] | None:
    """Return [value, low, high] of the other's loss; only the value if there is no interval; None if the two can't be paired."""
    change = question.change(other, one)
    return None if change is None else [float(f"{x:.4g}") for x in (change.value, change.low, change.high) if x is not None]


def _order(question: Question, placed: Placed) -> tuple[float, float, float]:
    """Best rank first, then the better figure; what was not measured comes last."""
    value = question.figure(placed.row)
    return (math.inf if value is None else 0, math.inf if placed.rank is None else placed.rank[0], value or 0.0)
