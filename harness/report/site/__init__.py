"""The leaderboard as one self-contained page: a table to sort, filter and link to, and interactive charts.

`page.html` embeds `page.css`, `page.js` and Vega, which draws the charts. Data from records is embedded as JSON and shown as
text, never as markup.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import QuestionMetrics, StepMetrics
from kvbench.harness.report import chart, leaderboard
from kvbench.harness.report.common_tokens import common_perplexity
from kvbench.harness.report.markdown import title
from kvbench.harness.report.task import task_of

_HERE = Path(__file__).parent
_VEGA_EXPORT = "window.vegaEmbed = vegaEmbed;"


def render(records: Iterable[Record], charts: Sequence[chart.Chart]) -> str:
    """The page in HTML; the same records always give the same bytes.

    Args:
        records: to show; only the newest of each cell appears.
        charts: of the Markdown page of the same records.
    """
    data = {
        "rows": [_row(r, group) for group in leaderboard.groups(records) for r in group],
        "charts": [{"suite": c.suite, "model": c.model, "alt": c.alt, "spec": c.spec} for c in charts],
        "themes": {theme: chart.config(theme) for theme in ("light", "dark")},
    }
    frame, css, js = ((_HERE / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js"))
    parts = {"css": css, "data": _embedded(data), "library": _library(), "js": js}
    return re.sub(
        r"/\*(css|data|library|js)\*/", lambda mark: parts[mark[1]], frame
    )  # in one pass, because parts may contain marks


def _row(record: Record, group: Sequence[Record]) -> dict[str, Any]:
    """The row of a record. Perplexity is over the tokens that all scored; missing figures are null."""
    cell, metrics = record.cell, record.metrics
    options, shown = cell.options, task_of(record).shown_options
    task_options = [f"{k} {options[k]}" for k in (options if shown is None else shown) if k in options and k != "name"]
    answers, steps = record.measured(QuestionMetrics), record.measured(StepMetrics)
    return {
        "suite": cell.suite, "model": cell.model.id, "task": " ".join([cell.task.name, *task_options]), "policy": title(record),
        "capacity": cell.capacity, "perplexity": _finite(common_perplexity(record, group)),
        "right": _finite(answers.accuracy if answers else None, 100), "ms": _finite(steps.step_ms if steps else None),
        "kib": _finite(metrics.kv_bytes or None, 1 / 1024) if record.status == "ok" else None,
        "device": record.facts.device, "measured": record.finished[:10],
        "status": _status(record),
        "cell": record.cell_id[:8],
    }  # fmt: skip


def _status(record: Record) -> str:
    if record.status != "ok":
        return record.error.kind if record.error else "failed"
    return "; ".join(record.metrics.flags) or "ok"


def _finite(value: Any, scale: float = 1) -> float | None:
    return float(f"{value * scale:.6g}") if isinstance(value, (int, float)) and math.isfinite(value) else None


def _embedded(data: dict[str, Any]) -> str:
    """JSON in which no text can end the script element."""
    text = json.dumps(chart.make_visible(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@lru_cache
def _library() -> str:
    import vl_convert

    return str(vl_convert.javascript_bundle(_VEGA_EXPORT, vl_version=chart.VEGA_LITE)).replace("</script", "<\\/script")
