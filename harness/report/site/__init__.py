"""The leaderboard as one page that needs nothing else: a table to sort, filter and link to, and the charts, interactive.

`page.html` is the frame, `page.css` and `page.js` go into it, and so does the library that draws (Vega, out of its own package).
What comes from records goes in as JSON and is put on the page as text, never as markup.
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
_LIBRARY = "window.vegaEmbed = vegaEmbed;"  # all that the page needs of it


def render(records: Iterable[Record], charts: Sequence[chart.Chart]) -> str:
    """The page, in HTML; the same bytes for the same records.

    Args:
        records: of the table; of each cell the newest is shown.
        charts: of the markdown page of the same records.
    """
    data = {
        "rows": [_row(r, group) for group in leaderboard.groups(records) for r in group],
        "charts": [{"suite": c.suite, "model": c.model, "alt": c.alt, "spec": c.spec} for c in charts],
        "themes": {theme: chart.config(theme) for theme in ("light", "dark")},
    }
    frame, css, js = ((_HERE / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js"))
    parts = {"css": css, "data": _embedded(data), "library": _library(), "js": js}
    return re.sub(r"/\*(css|data|library|js)\*/", lambda mark: parts[mark[1]], frame)  # at once: parts may hold marks too


def _row(record: Record, group: Sequence[Record]) -> dict[str, Any]:
    """What the table shows of a record, its perplexity on the tokens that all scored; null where it has none."""
    cell, metrics = record.cell, record.metrics
    options, shown = cell.options, task_of(record).shown_options
    told = [f"{k} {options[k]}" for k in (options if shown is None else shown) if k in options and k != "name"]
    answers, steps = record.measured(QuestionMetrics), record.measured(StepMetrics)
    return {
        "suite": cell.suite, "model": cell.model.id, "task": " ".join([cell.task.name, *told]), "policy": title(record),
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
    """JSON that no text in it can end: a page's parser sees no markup."""
    text = json.dumps(chart.make_visible(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@lru_cache
def _library() -> str:
    import vl_convert

    return str(vl_convert.javascript_bundle(_LIBRARY, vl_version=chart.VEGA_LITE)).replace("</script", "<\\/script")
