"""The leaderboard in Markdown: one screen of answers, all from the feed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from kvbench.harness.core.grouped import grouped
from kvbench.harness.report.chart import Chart, Page, page
from kvbench.harness.report.feed.words import loss_text, size
from kvbench.harness.report.loss_charts import over_budgets, over_bytes
from kvbench.harness.report.markdown import cache_bytes, digits, md, rows_table

_HEAD = """# Leaderboard

Written by `bench leaderboard` from records; don't edit it. `index.html` has every question, budget and
cell; `feed.json` has their data. [Published figures beside ours](paper.md). `bench show table CELL` prints the table of
a cell's task. [Other projects](https://kv-bench.github.io/kv-bench/comparison/) compares policies with published code.
"""
_PICTURE = "answer"  # its file
_MOST_ROWS = 5  # of the table
_MOST_NAMES = 3  # of a question
_MOST_QUESTIONS = 20  # that get a line each; of more only the suites of the first model get a link


def render(feed: dict[str, Any], unasked: Sequence[str | Chart] = (), site: str = "index.html") -> Page:
    """Return the page with its charts: the default question, then a line for every question, or links if there are many.

    unasked: tables of suites that answer no question; left out if there are many questions. site: where links to the page of a
    question lead.
    """
    questions = feed["questions"]
    lines: list[str | Chart] = [_HEAD]
    if not questions and not unasked:
        lines.append("No record has a perplexity or right answers yet: `bench run suites/pg19.yaml`.\n")
    defaults = [question for question in questions if question["id"] == feed["default"]]
    for question in defaults:
        lines += _default(question)
    if len(questions) > _MOST_QUESTIONS:
        return page([*lines, *_links(questions, defaults[0]["model"], site)])
    lines += ["## All questions\n"] if questions else []
    for suite, group in itertools.groupby(questions, key=lambda q: (q["suite"], q["suite_version"])):
        lines += _suite(suite, list(group), [e for e in feed["equal_bytes"] if (e["suite"], e["suite_version"]) == suite], site)
    if questions and unasked:
        return page([*lines, "<details><summary>Times, memory and attention</summary>\n", *unasked, "\n</details>\n"])
    return page([*lines, *unasked])


def _default(question: dict[str, Any]) -> list[str | Chart]:
    """Return a sentence for three budgets, a chart, and a row for each of the best policies at the middle budget."""
    budgets, shown = question["budgets"], _middle(question)
    three = [budget for budget in budgets if budget in (budgets[0], shown, budgets[-1])]
    answers = [f"- {md(size(budget['capacity']))}: {md(budget['finding'])}" for budget in three]
    picture = over_budgets(question, _PICTURE)
    return [
        f"## {md(question['model'])}, {md(question['subject'])}\n",
        f"{md(question['about'])} Evicting {md(question['evict'])}.\n",
        *answers,
        "",
        *([picture] if picture else []),
        f"At {md(size(shown['capacity']))}; ranks are the best and the worst place at 95 % confidence, for all pairs together:\n",
        *_table(question, shown),
        _flagged(question, shown).strip(),
        "",
    ]


def _middle(question: dict[str, Any]) -> dict[str, Any]:
    """Return the budget that pages show first."""
    middle: dict[str, Any] = question["budgets"][len(question["budgets"]) // 2]
    return middle


def _links(questions: Sequence[dict[str, Any]], model: str, site: str) -> list[str]:
    """Return links to the first question of each suite that measured `model`, and a link to the page with every suite."""
    suites = grouped(questions, lambda question: question["suite"])
    links = []
    for suite, of_suite in suites.items():
        of_model = [question for question in of_suite if question["model"] == model]
        if of_model:
            links.append(f"- [{md(suite)}]({site}#q={of_model[0]['id']}): {_count(len(of_model))}")
    every = f"[The page]({site}) has {_count(len(questions))} of {len(suites)} suites, on other models too.\n"
    return [f"More on {md(model)}:\n", *links, "", every]


def _count(questions: int) -> str:
    return f"{questions} question{'' if questions == 1 else 's'}"


def _suite(
    suite: tuple[str, str], questions: list[dict[str, Any]], formats: list[dict[str, Any]], site: str
) -> list[str | Chart]:
    """Return the questions of a suite, folded; and the answers at equal bytes, if its K and V have several formats."""
    models = ", ".join(dict.fromkeys(question["model"] for question in questions))
    head = f"<details><summary>{md(suite[0])} v{md(suite[1])}: {_count(len(questions))} on {md(models)}</summary>\n"
    sizes = [f"- {md(size['answer'])}" for equal in formats for size in equal["sizes"]]
    pictures = [over_bytes(equal, equal["id"]) for equal in formats]
    return [
        head,
        *sizes,
        *([""] if sizes else []),
        *pictures,
        *(_line(question, site) for question in questions),
        "\n</details>\n",
    ]


def _line(question: dict[str, Any], site: str) -> str:
    """Return a question with the link to its page, the sentence of its middle budget, and the losses of the best policies."""
    budget = _middle(question)
    best_rows = budget["rows"][:_MOST_NAMES]
    named = [f"{_rank(row)} {row['name']}" + (f" {loss_text(row['loss'])}" if row["loss"] else "") for row in best_rows]
    best = f" Best: {md('; '.join(named))}." if len(budget["rows"]) > 1 else ""
    link = f"[{md(question['model'])}, {md(question['subject'])}]({site}#q={question['id']})"
    which = f"{link}, evicting {question['evict']}, {size(budget['capacity'])}"
    return f"- {which}: {md(budget['finding'])}{best}{_flagged(question, budget)}"


def _flagged(question: dict[str, Any], budget: dict[str, Any]) -> str:
    """Describe faults of a budget's rows and of the references they are compared with; empty if there are none."""
    flagged = (row for row in (*budget["rows"], *question["references"]) if row["status"] != "ok")
    return "".join(
        f" **Flagged**, {md(', '.join(row['name'] for row in rows))}: {md(status)}."
        for status, rows in grouped(flagged, lambda row: row["status"]).items()
    )


def _table(question: dict[str, Any], budget: dict[str, Any]) -> list[str]:
    """Return a table of the best policies of a budget, and the references."""
    tasks = list(dict.fromkeys(a["task"] for row in budget["rows"] for a in row["answers"]))
    rows = [*budget["rows"][:_MOST_ROWS], *question["references"]]
    unit = "perplexity lost" if question["measure"] == "perplexity" else "points lost"
    bases = {row["loss"]["to_name"] for row in rows if row["loss"]}
    unit += f" to {md(*bases)}" if len(bases) == 1 else ""
    strides = {row["loss"]["stride"] for row in rows if row["loss"]} - {1}
    unit += "".join(f" (1 token in {stride})" for stride in sorted(strides))
    lines = []
    for row in rows:
        elsewhere = row["kind"] == "reference" and row["capacity"] is not None  # its capacity is not the budget's
        perplexity, every = budget["references"].get(row["id"], row["perplexity"]), row["stride"]
        cells = {
            "rank": _rank(row),
            "policy": md(f"{row['name']} at {row['capacity']:,}" if elsewhere else row["name"]),
            unit: "" if row["loss"] is None else loss_text(row["loss"]),
            "perplexity": digits(perplexity) + (f" (1 token in {every})" if every > 1 and perplexity else ""),
            **{md(task): _right(row, task) for task in tasks},
            "K/V, all streams" if question["measure"] == "perplexity" else "K/V": cache_bytes(row["kv_bytes"]),
            "read by a step": cache_bytes(row["kv_read_bytes"]),
            "of dense": "" if row["kv_share"] is None else f"{digits(100 * row['kv_share'], 2)} %",
            "ms/token": digits(row["ms"], 3),
            "x dense": digits(row["times_dense"] and row["times_dense"][0], 3),
        }
        lines.append(cells)
    return rows_table(lines)


def _rank(row: dict[str, Any]) -> str:
    if row["rank"] is None:
        return "–"
    low, high = row["rank"]
    return f"{low}" if low == high else f"{low}–{high}"


def _right(row: dict[str, Any], task: str) -> str:
    answer = next((a for a in row["answers"] if a["task"] == task), None)
    if answer is None:
        return ""
    interval = "too few streams" if answer["low"] is None else f"{100 * answer['low']:.0f}, {100 * answer['high']:.0f}"
    return f"{100 * answer['share']:.0f} % [{interval}]"
