"""Compares how two models rank policies, task by task: a section of docs/validity.md.

The ceiling is a model against itself on another text: no other model can be expected to agree more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvbench.harness.core.parameters import parameters_of, policy_from
from kvbench.harness.records import Record, RecordStore
from kvbench.harness.report.markdown import table
from kvbench.lab.studies import RESULTS
from kvbench.lab.studies.controls import holm
from kvbench.lab.studies.rank_agreement import permutation_test
from kvbench.lab.studies.validity import FEWEST, Ours, tasks_of


class Pair(NamedTuple):
    """Two tasks of one kind, under two models or under one model on two texts.

    Attributes:
        first: the task under one model.
        second: task of the same kind under the other model, or on the other text.
        policies: number of policies in both tasks.
        tau: Kendall's tau; nan if one task does not order the policies.
        p: probability that random scores agree as much, not corrected.
    """

    first: Ours
    second: Ours
    policies: int
    tau: float
    p: float


def rule(record: Record) -> str:
    """The policy with the parameters that are not its defaults, which is the same at every capacity."""
    cell = record.cell
    assert cell.capacity is not None
    needs_a_file = "file" in cell.parameters  # such a policy has no defaults
    defaults = {} if needs_a_file else parameters_of(policy_from(cell.policy, {}).bind(cell.capacity), recorded=True)
    return repr((cell.policy, {k: v for k, v in cell.parameters.items() if defaults.get(k) != v}))


def pairs(first: Sequence[Ours], second: Sequence[Ours]) -> list[Pair]:
    """Return every two tasks of one kind, over the policies that both have; pairs with fewer than `FEWEST` are left out."""
    result = []
    for one, other in ((a, b) for a in first for b in second if (a.task, a.question) == (b.task, b.question)):
        scores = [dict(zip(map(rule, task.records), task.scores.draws[:, 0], strict=True)) for task in (one, other)]
        common = sorted(scores[0].keys() & scores[1].keys())
        if len(common) >= FEWEST:
            result.append(
                Pair(one, other, len(common), *permutation_test(*(np.array([s[key] for key in common]) for s in scores)))
            )
    return result


def section(compared: Sequence[Pair], ceiling: Sequence[Pair]) -> list[str]:
    """A row for each task of two models, beside the second model's agreement with itself on another text."""
    itself = {(pair.first.model, pair.first.task, pair.first.question): f"{pair.tau:+.2f}" for pair in ceiling}
    rows = [
        [
            pair.first.model,
            pair.second.model,
            pair.first.task,
            pair.first.question,
            str(pair.policies),
            f"{pair.tau:+.2f}",
            itself.get((pair.second.model, pair.second.task, pair.second.question), "–"),
            f"{pair.p:.4f}",
            f"{corrected:.3f}",
        ]
        for pair, corrected in zip(compared, holm([pair.p for pair in compared]), strict=True)
    ]
    head = ["model", "other model", "task", "question", "policies", "Kendall's tau", "other with itself", "p", "p, corrected"]
    return table(head, rows, "llll" + "r" * 5)


def smollm2() -> str:
    """Compare the ranks of policies on the suite `zoo` with those on SmolLM2, and SmolLM2's on two books."""
    small, first_book, second_book = (
        _after_a_prompt(suite, capacity)
        for suite, capacity in (("zoo", 64), ("smollm2_prompt", 256), ("smollm2_second_book", 256))
    )
    return "\n".join(section(pairs(small, first_book), pairs(first_book, second_book)))


def _after_a_prompt(suite: str, capacity: int) -> list[Ours]:
    """Return the text of a suite after a prompt was cut to a capacity."""
    records = RecordStore(RESULTS / f"{suite}.jsonl").read_all()[0]
    tasks = tasks_of(record for record in records if record.cell.capacity == capacity and not record.cell.stored)
    return [task for task in tasks if task.task == "perplexity"]
