"""Which policy does best for a model at a budget, over all that was asked: a sentence and a table, from the feed alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.report.feed import feed
from kvbench.harness.report.feed.question import CONTROL
from kvbench.harness.report.feed.words import evicting, loss_text
from kvbench.harness.report.markdown import digits

_MAX_NAMES = 3  # in a sentence
_BEST = " *"  # behind a figure that no other beats at 95 % confidence
LEGEND = (
    "*: no other is better at 95 % confidence. text: perplexity lost to dense, beside which stands the perplexity itself; "
    "tokens are evicted at every step, and kept ones stand at their ranks. seen, unseen: right answers about a prompt that was "
    "cut once, after or before the question was seen; kept tokens stand at their positions in the text. K/V: of dense's bytes."
)


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
    questions = sorted(feed(records)["questions"], key=lambda q: (q["measure"] != "perplexity", "unseen" in q["subject"]))
    heads = {q["id"]: _head(q) for q in questions}
    asked = [(heads[q["id"]], q, b["rows"]) for q in questions for b in q["budgets"] if b["capacity"] == budget]
    figures: dict[str, dict[str, str]] = {}
    for head, question, rows in asked:
        for row in [*question["references"], *rows]:
            shown = figures.setdefault(row["name"], {"policy": row["name"]})
            shown[head] = _figure(row, question["measure"]) + (_BEST if _leads(row) else "")
            if row["kv_share"]:
                shown.setdefault("K/V", f"{100 * row['kv_share']:.0f} %")
            shown |= {"ms/token": digits(row["ms"], 3)} if row["ms"] is not None else {}
    counts = Counter(row["name"] for _, _, rows in asked for row in rows if _leads(row))
    ordered = sorted(figures.values(), key=lambda shown: (shown["policy"] != "dense", -counts[shown["policy"]]))
    columns = ["policy", *(head for head, _, _ in asked), *(c for c in ("K/V", "ms/token") if any(c in f for f in ordered))]
    model = questions[0]["model"] if questions else "this model"
    said = _sentence({head: [row["name"] for row in rows if _leads(row)] for head, _, rows in asked})
    return Answer(f"{model}, {budget:,} tokens: {said}", [{head: row.get(head, "") for head in columns} for row in ordered])


def _head(question: dict[str, Any]) -> str:
    """A few words for a column: what is read or asked."""
    if question["measure"] == "perplexity":
        return "text"
    name, *how = question["subject"].split(", ")
    if question["evict"] != evicting("prompt"):
        return str(name)
    return f"{name}, unseen" if "question unseen" in how else f"{name}, seen"


def _leads(row: dict[str, Any]) -> bool:
    """Whether no other is better at 95 % confidence."""
    return row["rank"] is not None and row["rank"][0] == 1


def _figure(row: dict[str, Any], measure: str) -> str:
    """What it loses of perplexity, or its share of right answers; for a reference, its perplexity."""
    if measure == "answers":
        return f"{100 * row['answers'][0]['share']:.0f} %" if row["answers"] else ""
    if row["loss"] is not None:
        return loss_text(row["loss"])
    return "" if row["perplexity"] is None else digits(row["perplexity"])


def _sentence(leaders: dict[str, list[str]]) -> str:
    """Who leads in everything, or who in what. leaders: of what was asked, those that no other beats at 95 % confidence."""
    judged = {head: names for head, names in leaders.items() if names}
    if not judged:
        return "nothing tells the policies apart."
    everywhere = [name for name in next(iter(judged.values())) if all(name in names for names in judged.values())]
    if everywhere:
        return f"{_names(everywhere)}: no other is better, at 95 % confidence, at anything that was measured."
    by_leaders: dict[str, list[str]] = {}
    for head, names in judged.items():
        by_leaders.setdefault(_names(sorted(names)), []).append(head)
    parts = [f"{' and '.join(heads)}: {names}" for names, heads in by_leaders.items()]
    return f"no policy leads in everything. At 95 % confidence no other is better than these. {'; '.join(parts)}."


def _names(names: Sequence[str]) -> str:
    if len(names) > _MAX_NAMES:
        drawn = ", a random choice among them" if any(name.startswith(CONTROL) for name in names[1:]) else ""
        return f"{names[0]} or {len(names) - 1} others{drawn}"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
