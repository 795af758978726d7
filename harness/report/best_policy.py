"""Find the best policy for a model at a budget, over all questions: a sentence and a table, from the feed alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.harness.core.intervals import MIN_BLOCKS
from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record
from kvbench.harness.report.feed import answers
from kvbench.harness.report.feed.question import CONTROL, questions
from kvbench.harness.report.feed.words import evicting, loss_text
from kvbench.harness.report.markdown import digits

_MAX_NAMES = 3  # in a sentence
_BEST = " *"  # behind a figure that no other beats at 95 % confidence
_LEGEND = {  # by what the head of a column contains
    "text": "text: perplexity lost to dense; a token is evicted at every step, and kept tokens are renumbered.",
    "after a prompt": "after a prompt: perplexity lost after a prompt that was cut once; kept tokens keep their positions.",
    "seen": "seen, unseen: right answers about a prompt that was cut once, after or before the policy saw the question.",
    "K/V": "K/V: share of dense's bytes.",
}


@dataclass(frozen=True)
class BestPolicy:
    """Best policy for a model at a budget.

    Attributes:
        sentence: who, in what, and who is better elsewhere.
        rows: one per policy, figures as text; a column for the text and for each kind of question.
    """

    sentence: str
    rows: Sequence[dict[str, str]]


def which(records: Sequence[Record], model: str, budget: int) -> BestPolicy:
    """The answer for a model at a budget in tokens, from what was measured."""
    once = evicting("prompt")
    answered = answers(questions(records))["questions"]
    answered.sort(key=lambda q: (q["measure"] != "perplexity", q["evict"] == once, "unseen" in q["subject"]))
    of_budget = [(_head(q), q, b) for q in answered for b in q["budgets"] if b["capacity"] == budget]
    figures: dict[str, dict[str, str]] = {}
    for head, question, shown_budget in of_budget:
        for row in [*question["references"], *shown_budget["rows"]]:
            shown = figures.setdefault(row["name"], {"policy": row["name"]})
            shown[head] = _figure(row, question["measure"]) + (_BEST if _leads(row) else "")
            if row["kv_share"]:
                shown.setdefault("K/V", f"{100 * row['kv_share']:.0f} %")
            shown |= {"ms/token": digits(row["ms"], 3)} if row["ms"] is not None else {}
    leaders = {head: [row["name"] for row in shown_budget["rows"] if _leads(row)] for head, _, shown_budget in of_budget}
    counts = Counter(name for names in leaders.values() for name in names)
    ordered = sorted(figures.values(), key=lambda shown: (shown["policy"] != "dense", -counts[shown["policy"]]))
    columns = ["policy", *leaders, *(c for c in ("K/V", "ms/token") if any(c in f for f in ordered))]
    findings = " ".join(f"{head}: {shown_budget['finding']}" for head, _, shown_budget in of_budget)
    sentence = _sentence(leaders) if any(leaders.values()) else findings or "no policy was measured in this time."
    measured = {head: len(shown_budget["rows"]) for head, _, shown_budget in of_budget}
    table = [{head: row.get(head, "") for head in columns} for row in ordered]
    return BestPolicy(f"{visible(model)}, {budget:,} tokens: {sentence}{_certainty(records, measured)}", table)


def legend(rows: Sequence[dict[str, str]]) -> str:
    """Explain the columns of a table."""
    heads = rows[0] if rows else {}
    known = [text for part, text in _LEGEND.items() if any(part in head for head in heads)]
    return " ".join(["*: no other policy is better at 95 % confidence.", *known])


def _certainty(records: Sequence[Record], counts: dict[str, int]) -> str:
    """Sentences on streams that are too few for an interval, and on tasks that few policies were measured with.

    counts: policies by column.
    """
    fewest = min((r.cell.options["streams"] for r in records if "streams" in r.cell.options), default=MIN_BLOCKS)
    few = (
        f" No intervals: there {'are' if fewest > 1 else 'is'} {fewest} stream{'s' * (fewest > 1)}, and {MIN_BLOCKS} are needed."
        if fewest < MIN_BLOCKS
        else ""
    )
    most = max(counts.values(), default=0)
    return few + "".join(
        f" Column '{head}': only {count} of {most} policies were measured." for head, count in counts.items() if count < most
    )


def _head(question: dict[str, Any]) -> str:
    """A few words for a column: what is read or asked."""
    once = question["evict"] == evicting("prompt")
    if question["measure"] == "perplexity":
        return "after a prompt" if once else "text"
    name, *how = question["subject"].split(", ")
    if not once:
        return str(name)
    return f"{name}, unseen" if "question unseen" in how else f"{name}, seen"


def _leads(row: dict[str, Any]) -> bool:
    """Whether no other is better at 95 % confidence."""
    return row["rank"] is not None and row["rank"][0] == 1


def _figure(row: dict[str, Any], measure: str) -> str:
    """Return a row's loss of perplexity or its share of right answers; for a reference, its perplexity."""
    if measure == "answers":
        return f"{100 * row['answers'][0]['share']:.0f} %" if row["answers"] else ""
    if row["loss"] is not None:
        return loss_text(row["loss"])
    return "" if row["perplexity"] is None else digits(row["perplexity"])


def _sentence(leaders: dict[str, list[str]]) -> str:
    """Name the policies that lead everywhere, or each question's leaders: those that none beats at 95 % confidence."""
    judged = {head: names for head, names in leaders.items() if names}
    everywhere = [name for name in next(iter(judged.values())) if all(name in names for names in judged.values())]
    if everywhere:
        return f"choose {_names(everywhere)}: no policy has better quality (95 % confidence)."
    by_leaders: dict[str, list[str]] = {}
    for head, names in judged.items():
        by_leaders.setdefault(_names(sorted(names)), []).append(head)
    parts = [f"{' and '.join(heads)}: {names}" for names, heads in by_leaders.items()]
    return f"no policy leads in every column. Leaders (95 % confidence): {'; '.join(parts)}."


def _names(names: Sequence[str]) -> str:
    if len(names) > _MAX_NAMES:
        drawn = ", a random choice among them" if any(name.startswith(CONTROL) for name in names[1:]) else ""
        return f"{names[0]} or {len(names) - 1} others{drawn}"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
