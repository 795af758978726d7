"""Contents of the page for notebooks and papers: a frame of the feed's rows, comparisons of two policies, and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.harness.core.errors import UserError, did_you_mean
from kvbench.harness.core.shown import visible
from kvbench.harness.records import Record
from kvbench.harness.report import chart
from kvbench.harness.report.doubts import with_doubts
from kvbench.harness.report.feed import answers, words
from kvbench.harness.report.feed.question import Question, is_reference, questions
from kvbench.harness.report.feed.row import loss_to
from kvbench.harness.report.feed.words import loss_text
from kvbench.harness.report.loss_charts import over_budgets
from kvbench.harness.report.rows import Row

if TYPE_CHECKING:
    from pandas import DataFrame

_UNITS = {"perplexity": "% of perplexity", "answers": "points"}
_COUNTS = ("capacity", "best_rank", "worst_rank", "kv_bytes")
_FIGURES = ("loss", "low", "high", "perplexity", "right", "kv_share", "ms")
_ABOUT = ("suite", "model", "subject")  # columns about the question in every frame


def losses(records: Sequence[Record]) -> DataFrame:
    """Return a row per policy, capacity and question, as in `feed.json`: by budget and rank, then the references.

    `loss`, `low` and `high` are relative to `reference`, in `unit`; above 0 is worse. `interval` has these as text,
    `+2.1 [+1.9, +2.3]`. `perplexity` and `right` (%) are the figures themselves. `kv_share` is the share of dense's bytes, `ms`
    the milliseconds per token. `status` is "ok" or the faults of the row.
    """
    from pandas import DataFrame

    table = [
        {name: question[name] for name in _ABOUT} | _figures(row, question["measure"])
        for question in answers(questions(with_doubts(records)))["questions"]
        for row in [*(row for budget in question["budgets"] for row in budget["rows"]), *question["references"]]
    ]
    return _typed(DataFrame.from_records(table))


def _figures(row: dict[str, Any], measure: str) -> dict[str, Any]:
    """Return the columns of a row. row: row of the feed."""
    best_rank, worst_rank = row["rank"] or (None, None)
    answer = row["answers"][0] if measure == "answers" and row["answers"] else None
    return {
        "evict": row["evict"],
        "positions": row["positions"],
        "capacity": row["capacity"],
        "policy": row["name"],
        "kind": row["kind"],
        "best_rank": best_rank,
        "worst_rank": worst_rank,
        **_loss(row["loss"], measure),
        "perplexity": row["perplexity"],
        "right": None if answer is None else 100 * answer["share"],
        "kv_bytes": row["kv_bytes"],
        "kv_share": row["kv_share"],
        "ms": row["ms"],
        "status": row["status"],
    }


def _loss(lost: dict[str, Any] | None, measure: str) -> dict[str, Any]:
    """Return a loss of the feed as columns, with hyphens for the page's minus signs, which pdfLaTeX does not know."""
    text = "" if lost is None else loss_text(lost).replace("−", "-").replace(" %", "")
    lost = lost or {}
    ends = {name: lost.get(key) for name, key in (("loss", "value"), ("low", "low"), ("high", "high"))}
    figures = {name: None if value is None else value + 0.0 for name, value in ends.items()}  # 0 has no sign
    return {**figures, "interval": text, "unit": _UNITS[measure], "reference": lost.get("to_name")}


def _typed(frame: DataFrame) -> DataFrame:
    """Return the frame with numeric column types, even if some numbers are missing."""
    kinds = dict.fromkeys(_COUNTS, "Int64") | dict.fromkeys(_FIGURES, "float64")
    return frame.astype({name: kind for name, kind in kinds.items() if name in frame})


def compare(records: Sequence[Record], a: str, b: str) -> DataFrame:
    """Return the loss of policy `a` relative to policy `b`, one row per question and budget; above 0, `a` is worse.

    The intervals equal those of the page: among the caches of a budget, they are corrected for the number of pairs. `loss` is
    missing if the two policies can't be paired.

    Args:
        records: records of one or several suites.
        a: name of a row on the page, such as `sink_window (sinks 2)`, or of a policy, which selects all its rows.
        b: name of the row or policy with which `a` is compared.

    Raises:
        UserError: no row has one of the names, or no question has both.
    """
    from pandas import DataFrame

    open_questions = questions(with_doubts(records))
    known = {name for question in open_questions for row in question.rows for name in (question.names[row.id], row.cell.policy)}
    for name in (a, b):
        if name not in known:
            raise UserError(f"no policy is called '{name}'{did_you_mean(name, known)}")
    table = [
        _compared(question, x, y)
        for question in open_questions
        for x in _named(question, a)
        for y in _named(question, b)
        if x is not y and (x.cell.capacity == y.cell.capacity or any(is_reference(row.records[0]) for row in (x, y)))
    ]
    if not table:
        raise UserError(f"'{a}' and '{b}' were not measured for the same question at the same capacity")
    return _typed(DataFrame.from_records(table))


def _named(question: Question, name: str) -> list[Row]:
    """Return the rows with a name; at a capacity without such rows, the rows of the policy with the name."""
    exact = {row.cell.capacity for row in question.rows if question.names[row.id] == name}
    return [
        row
        for row in question.rows
        if question.names[row.id] == name or (row.cell.policy == name and row.cell.capacity not in exact)
    ]


def _compared(question: Question, row: Row, base: Row) -> dict[str, Any]:
    """Return a row of the comparison."""
    cell, lost = question.first.cell, loss_to(question, row, base)
    cache = base if is_reference(row.records[0]) else row
    return {
        "suite": visible(cell.suite),
        "model": visible(cell.model.id),
        "subject": words.subject(question),
        "evict": visible(cache.cell.evicts),
        "positions": visible(cache.cell.positions),
        "capacity": cache.cell.capacity,
        "policy": question.names[row.id],
        **_loss(lost, question.measure),
        "reference": question.names[base.id],
        "verdict": lost["verdict"] if lost else "can't tell",
    }


def figures(records: Sequence[Record], folder: str | Path, *, format: str = "pdf") -> list[Path]:  # noqa: A002 - as in matplotlib
    """Draw the loss of each policy at each budget, in a file per question.

    Args:
        records: records of one or several suites.
        folder: folder of the files, whose names are the questions' ids in `feed.json`.
        format: pdf, svg or png.

    Raises:
        UserError: the format is unknown.
    """
    target = Path(folder).expanduser()
    target.mkdir(parents=True, exist_ok=True)
    return draw(answers(questions(with_doubts(records))), target, format)


def draw(data: dict[str, Any], folder: Path, form: str) -> list[Path]:
    """Draw the losses of each question of the feed whose losses have intervals, in a file of the folder. Return the files."""
    charts = (over_budgets(question, question["id"]) for question in data["questions"])
    files = {folder / f"{drawn.name}.{form}": drawn.spec for drawn in charts if drawn is not None}
    for path, spec in files.items():
        chart.picture(spec, path)
    return list(files)
