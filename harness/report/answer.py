"""The top of the Markdown page: the answer to the default question of the feed, and its table."""

from __future__ import annotations

from typing import Any

from kvbench.harness.report.chart import Chart
from kvbench.harness.report.charts.lost import over_budgets
from kvbench.harness.report.feed.sentence import signed
from kvbench.harness.report.markdown import cache_bytes, md, table

_PICTURE = "answer"  # its file


def answer(feed: dict[str, Any]) -> list[str | Chart]:
    """A sentence for every budget of the default question, a chart, and a row a policy; empty without questions."""
    question = next((q for q in feed["questions"] if q["id"] == feed["default"]), None)
    if question is None:
        return []
    budget = question["budgets"][len(question["budgets"]) // 2]
    picture = over_budgets(question, _PICTURE)
    others = [f"- {md(other['answer'])}" for other in question["budgets"] if other is not budget]
    head = f"## {md(question['model'])}, {md(question['subject'])}\n"
    return [
        head, f"**{md(budget['answer'])}**\n", *([*others, ""] if others else []), *([picture] if picture else []),
        *_table(question, budget),
        "`index.html` answers this for every model, text, task and budget, and compares any two policies. `feed.json` has all\n"
        "of it as data.\n",
    ]  # fmt: skip


def _table(question: dict[str, Any], budget: dict[str, Any]) -> list[str]:
    """The policies of a budget, the best first, and the references."""
    tasks = list(dict.fromkeys(a["task"] for row in budget["rows"] for a in row["answers"]))
    rows = [*budget["rows"], *question["references"]]
    timed = any(row["ms"] is not None for row in rows)
    lost = "perplexity lost" if question["measure"] == "perplexity" else "points lost"
    head = ["rank", "policy", lost, "perplexity", *map(md, tasks), "K/V", "of dense", *(["ms/token", "x dense"] if timed else [])]
    lines = [
        [
            _rank(row), md(_name(row)), _loss(row), "" if row["perplexity"] is None else f"{row['perplexity']:.4g}",
            *(_right(row, task) for task in tasks), cache_bytes(row["kv_bytes"]),
            "" if row["kv_share"] is None else f"{100 * row['kv_share']:.2g} %",
            *([_number(row["ms"]), _number(row["times_dense"] and row["times_dense"][0])] if timed else []),
        ]
        for row in rows
    ]  # fmt: skip
    return table(head, lines, "rl" + "r" * (len(head) - 2))


def _name(row: dict[str, Any]) -> str:
    elsewhere = row["kind"] == "reference" and row["capacity"] is not None
    return f"{row['name']} at {row['capacity']:,}" if elsewhere else row["name"]


def _rank(row: dict[str, Any]) -> str:
    if row["rank"] is None:
        return "–"
    low, high = row["rank"]
    return f"{low}" if low == high else f"{low}–{high}"


def _loss(row: dict[str, Any]) -> str:
    """With its interval, and to which reference."""
    lost = row["loss"]
    if lost is None:
        return ""
    short = "too short" if lost["nats"] else "too few streams"
    interval = short if lost["low"] is None else f"{signed(lost['low'])}, {signed(lost['high'])}"
    return f"{signed(lost['value'])}{' %' if lost['nats'] else ''} [{interval}]"


def _right(row: dict[str, Any], task: str) -> str:
    found = next((a for a in row["answers"] if a["task"] == task), None)
    if found is None:
        return ""
    interval = "too few streams" if found["low"] is None else f"{100 * found['low']:.0f}, {100 * found['high']:.0f}"
    return f"{100 * found['share']:.0f} % [{interval}]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
