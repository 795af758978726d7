"""Search for the best policy for a model at a budget, over all questions, from the feed alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.harness.core.shown import visible
from kvbench.harness.records import Record
from kvbench.harness.report.feed import answers
from kvbench.harness.report.feed.question import questions
from kvbench.harness.report.feed.words import enumerated
from kvbench.harness.report.rows import CONTROL

_MAX_NAMES = 3  # names in a sentence


def best_policy(records: Sequence[Record], model: str, budget: int) -> tuple[str, list[str]]:
    """Find the best policy for a model at a budget in tokens.

    Returns:
        A sentence that names the policy, or the best policy for each question; and the feed's sentence on each question.
    """
    measured, findings, opened = {}, [], questions(records)
    for of_records, question in zip(opened, answers(opened)["questions"], strict=True):
        head = _head(question, of_records.first)
        for sized in (sized for sized in question["budgets"] if sized["capacity"] == budget):
            measured[head] = sized["rows"]
            findings.append(f"{head}: {sized['finding']}")
    leaders = {head: [row["name"] for row in rows if row["rank"] and row["rank"][0] == 1] for head, rows in measured.items()}
    judged = {head: names for head, names in leaders.items() if names}
    without = "no policy is known to lead." if measured else "no policy was measured in this time."
    most = max(map(len, measured.values()), default=0)
    fewer = {head: len(rows) for head, rows in measured.items() if len(rows) < most}
    sentence = f"{visible(model)}, {budget:,} tokens: {_sentence(judged, fewer) if judged else without}"
    if fewer:
        tried = enumerated([f"{count} on '{head}'" for head, count in fewer.items()])
        sentence += f" Of {most} policies, the time sufficed for {tried}."
    if measured and not any(question.measure == "answers" for question in opened):
        sentence += " No questions were measured, so the answer is about perplexity only."
    return sentence, findings


def _head(question: dict[str, Any], record: Record) -> str:
    """Return a short name of the text or task of a question of the feed, in the words of the heading of its table."""
    if question["measure"] == "perplexity":
        prompt = record.cell.options.get("prompt")
        return f"prompts of {prompt:,} tokens" if prompt else "text"
    name, *how = question["subject"].split(", ")
    return ", ".join([name, *(part for part in how if part.startswith("question "))])


def _sentence(leaders: dict[str, list[str]], fewer: dict[str, int]) -> str:
    """Name the policies that lead in all questions, or each question's leaders, which no policy beats at 95 % confidence.

    fewer: number of policies measured, of the questions for which not all were.
    """
    better = "no policy has better quality" if not fewer else "none of the policies measured has better quality"
    everywhere = [name for name in next(iter(leaders.values())) if all(name in names for names in leaders.values())]
    chosen = next((name for name in everywhere if not name.startswith(CONTROL)), "")
    if everywhere and not chosen:
        return "no policy is shown to beat a random choice (95 % confidence)."
    if len(everywhere) == 1:
        return f"choose {chosen}: {better} (95 % confidence)."
    if everywhere:
        control = ", nor from a random choice" if any(name.startswith(CONTROL) for name in everywhere) else ""
        tied = _names([name for name in everywhere if not name.startswith(CONTROL)], "and")
        tie = f"{tied} can't be told apart{control}" if tied != chosen else f"It can't be told{control.removeprefix(', nor')}"
        return f"choose {chosen}. {tie}, and {better} (95 % confidence)."
    parts = [f"{head}: {_names(names, 'or')}" for head, names in leaders.items()]
    measured = " among the policies measured" if any(head in fewer for head in leaders) else ""
    return f"no policy leads everywhere. Leaders{measured} (95 % confidence): {'; '.join(parts)}."


def _names(names: Sequence[str], conjunction: str) -> str:
    """Join names. Long lists are shortened, with a note if the random control is among the names left out."""
    if len(names) <= _MAX_NAMES:
        return enumerated(names, conjunction)
    drawn = " (a random choice among them)" if any(name.startswith(CONTROL) for name in names[1:]) else ""
    return f"{names[0]} {conjunction} {len(names) - 1} others{drawn}"
