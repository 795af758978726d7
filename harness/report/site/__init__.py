"""The leaderboard as one self-contained page: an answer, a comparison of two policies, and all cells.

`page.html` embeds `page.css`, the scripts, and the data as JSON. Text from records is shown as text, never as markup. The page
loads nothing from elsewhere.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvbench.harness.records import Record, Submitted, standing
from kvbench.harness.records.metrics import QuestionMetrics, StepMetrics
from kvbench.harness.report.chart import VARIANTS, make_visible, mark
from kvbench.harness.report.common_tokens import Common, common_perplexity, common_tokens
from kvbench.harness.report.compare import MARGINS
from kvbench.harness.report.feed import of_questions
from kvbench.harness.report.feed.question import Question, questions
from kvbench.harness.report.markdown import title
from kvbench.harness.report.pairing import question
from kvbench.harness.report.sections import groups
from kvbench.harness.report.site.maps import maps
from kvbench.harness.report.site.sums import sums
from kvbench.harness.report.task import task_of

COLUMNS = (
    "policy", "capacity", "perplexity", "right", "ms", "kib", "model", "suite", "task", "status", "device", "measured", "cell",
    "standing", "name",
)  # fmt: skip
_FIGURES = [COLUMNS.index(name) for name in ("perplexity", "right", "ms")]


def cells(groups: Sequence[Sequence[Record]], submitted: Mapping[str, Submitted]) -> list[list[Any]]:
    """A row per record, its figures in the order of `COLUMNS`; missing figures are None. submitted: from `read_submitted`."""
    rows = []
    for group in groups:
        rivals: dict[str, list[Record]] = {}
        for record in group:
            rivals.setdefault(question(record), []).append(record)
        of = {id(record): common for same in rivals.values() for common in [common_tokens(same)] for record in same}
        rows += [_row(record, of[id(record)], submitted) for record in group]
    return sorted(rows, key=lambda row: not any(row[place] is not None for place in _FIGURES))  # those with a figure first


def _row(record: Record, common: Common, submitted: Mapping[str, Submitted]) -> list[Any]:
    """Perplexity is over the `common` tokens of all rivals. `name` is the policy's, without parameters, for its mark."""
    cell, metrics = record.cell, record.metrics
    options, shown = cell.options, task_of(record).shown_options
    task_options = [f"{k} {options[k]}" for k in (options if shown is None else shown) if k in options and k != "name"]
    answers, steps = record.measured(QuestionMetrics), record.measured(StepMetrics)
    return [
        title(record), cell.capacity, _finite(common_perplexity(record, common)),
        _finite(answers.accuracy if answers else None, 100), _finite(steps.step_ms if steps else None),
        _finite(metrics.kv_bytes or None, 1 / 1024) if record.status == "ok" else None,
        cell.model.id, cell.suite, " ".join([cell.task.name, *task_options]), _status(record), record.facts.device,
        record.finished[:10], record.cell_id[:8], standing(record, submitted), cell.policy,
    ]  # fmt: skip


def _status(record: Record) -> str:
    if record.status != "ok":
        return record.error.kind if record.error else "failed"
    return "; ".join(record.metrics.flags) or "ok"


def _finite(value: Any, scale: float = 1) -> float | None:
    return float(f"{value * scale:.6g}") if isinstance(value, (int, float)) and math.isfinite(value) else None


_HERE = Path(__file__).parent
_SCRIPTS = ("dom", "state", "pairs", "axes", "chart", "details", "answer", "good", "compare", "cells", "main")
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";\n', re.M)
_EXPORT = re.compile(r"^export (?=const|function|class)", re.M)


def render(
    records: Sequence[Record], files: Mapping[int, Path] | None = None, submitted: Mapping[str, Submitted] | None = None,
    feed: dict[str, Any] | None = None, asked: Sequence[Question] | None = None,
) -> str:  # fmt: skip
    """The page in HTML, of the newest record of each cell; the same records always give the same bytes.

    Maps are found beside the path of their record, by `id` in `files`. `feed` and `asked` are those of the records, if
    they are made already.
    """
    asked, shown = questions(records) if asked is None else asked, groups(records)
    made, rows = feed or of_questions(asked, submitted), cells(shown, submitted or {})
    data = {
        "sums": sums(asked), "columns": COLUMNS, "cells": rows,
        "marks": {name: [asdict(mark(name, n)) for n in range(VARIANTS)] for name in sorted({row[-1] for row in rows})},
        "maps": maps([r for group in shown for r in group], files or {}), "margins": MARGINS,
    }  # fmt: skip
    frame, css = ((_HERE / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css"))
    parts = {"css": css, "data": _embedded({"feed": made} | make_visible(data)), "js": script()}
    return re.sub(r"/\*(css|data|js)\*/", lambda place: parts[place[1]], frame)  # in one pass, because parts may contain marks


def script() -> str:
    """The modules of the page, joined to one: what they import is defined above."""
    modules = ((_HERE / "js" / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", module)) for module in modules)


def _embedded(data: dict[str, Any]) -> str:
    """JSON in which no text can end the script element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
