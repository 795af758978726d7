"""Which policy does best for a model at a budget, over all that was asked: a sentence and a table, from the feed alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.report.feed import feed
from kvbench.harness.report.feed.sentence import loss_text

_MAX_NAMES = 3  # in a sentence
BEST = " *"  # behind a figure than which no other is surely better


@dataclass(frozen=True)
class Answer:
    """Which policy does best.

    Attributes:
        sentence: who, in what, and who is better elsewhere.
        rows: one per policy, figures as text; a column for the text and for each kind of question.
    """

    sentence: str
    rows: Sequence[dict[str, str]]


def which(records: Sequence[Record], budget: int) -> Answer:
    """The answer, at a budget in tokens."""
    questions = feed(records)["questions"]
    asked = [(q, b["rows"]) for q in questions for b in q["budgets"] if b["capacity"] == budget]
    figures: dict[str, dict[str, str]] = {}
    for question, rows in asked:
        for row in [*question["references"], *rows]:
            shown = figures.setdefault(row["name"], {"policy": row["name"]})
            shown[question["subject"]] = _figure(row, question["measure"]) + (BEST if _leads(row) else "")
            shown |= {"K/V": f"{100 * row['kv_share']:.0f} %"} if row["kv_share"] else {}
            shown |= {"ms/token": f"{row['ms']:.3g}"} if row["ms"] is not None else {}
    counts = Counter(row["name"] for _, rows in asked for row in rows if _leads(row))
    costs = ("K/V", "ms/token")
    heads = ["policy", *(question["subject"] for question, _ in asked)]
    heads += [head for head in costs if any(head in shown for shown in figures.values())]
    ordered = sorted(figures.values(), key=lambda shown: (shown["policy"] != "dense", -counts[shown["policy"]]))
    model = questions[0]["model"] if questions else "this model"
    said = _sentence([(q["subject"], rows) for q, rows in asked], counts)
    return Answer(f"{model}, {budget:,} tokens: {said}", [{head: row.get(head, "") for head in heads} for row in ordered])


def _leads(row: dict[str, Any]) -> bool:
    """Whether no other is surely better."""
    return row["rank"] is not None and row["rank"][0] == 1


def _figure(row: dict[str, Any], measure: str) -> str:
    """What it loses of perplexity, or its share of right answers; for a reference, its perplexity."""
    if measure == "answers":
        return f"{100 * row['answers'][0]['share']:.0f} %" if row["answers"] else ""
    if row["loss"] is not None:
        return loss_text(row["loss"])
    return "" if row["perplexity"] is None else f"{row['perplexity']:.4g}"


def _sentence(asked: Sequence[tuple[str, Sequence[dict[str, Any]]]], counts: Counter[str]) -> str:
    """Who leads in most of what was asked, and who is surely better in the rest."""
    if not counts:
        return "nothing tells the policies apart."
    most = max(counts.values())
    best = [name for name, count in counts.items() if count == most]
    where = [subject for subject, rows in asked if any(_leads(r) and r["name"] == best[0] for r in rows)]
    said = [f"{_names(best)}. No other is surely better at: {'; '.join(where) if len(best) == 1 else f'{most} of {len(asked)}'}."]
    for subject, rows in asked:
        leaders = [r["name"] for r in rows if _leads(r)]
        if leaders and not set(best) & set(leaders):
            said.append(f"At {subject}, {_names(leaders)} {'is' if len(leaders) == 1 else 'are'} surely better.")
    return " ".join(said)


def _names(names: Sequence[str]) -> str:
    if len(names) > _MAX_NAMES:
        return f"{names[0]} or one of {len(names) - 1} others"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
