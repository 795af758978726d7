"""The leaderboard as one self-contained page: an answer, a comparison of two policies, and all cells.

`page.html` embeds `page.css`, the scripts, and the data as JSON. Text from records is shown as text, never as markup. The page
loads nothing from elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvbench.harness.records import Record, Submitted
from kvbench.harness.report.chart import make_visible
from kvbench.harness.report.compare import MARGINS
from kvbench.harness.report.feed import of_questions
from kvbench.harness.report.feed.question import questions
from kvbench.harness.report.groups import groups
from kvbench.harness.report.marks import VARIANTS, mark
from kvbench.harness.report.site.cells import COLUMNS, cells
from kvbench.harness.report.site.maps import maps
from kvbench.harness.report.site.sums import sums

_HERE = Path(__file__).parent
_SCRIPTS = ("dom", "state", "pairs", "axes", "chart", "details", "answer", "good", "compare", "cells", "main")
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";\n', re.M)
_EXPORT = re.compile(r"^export (?=const|function|class)", re.M)


def render(
    records: Sequence[Record], files: Mapping[int, Path] | None = None, submitted: Mapping[str, Submitted] | None = None,
    feed: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """The page in HTML, of the newest record of each cell; the same records always give the same bytes.

    Maps are found beside the path of their record, by `id` in `files`. `feed` is that of the records, if it is made already.
    """
    asked, shown = questions(records), groups(records)
    rows = cells(shown, submitted or {})
    data = {
        "feed": feed or of_questions(asked, submitted), "sums": sums(asked), "columns": COLUMNS, "cells": rows,
        "marks": {name: [asdict(mark(name, n)) for n in range(VARIANTS)] for name in sorted({row[-1] for row in rows})},
        "maps": maps([r for group in shown for r in group], files or {}), "margins": MARGINS,
    }  # fmt: skip
    frame, css = ((_HERE / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css"))
    parts = {"css": css, "data": _embedded(data), "js": script()}
    return re.sub(r"/\*(css|data|js)\*/", lambda place: parts[place[1]], frame)  # in one pass, because parts may contain marks


def script() -> str:
    """The modules of the page, joined to one: what they import is defined above."""
    modules = ((_HERE / "js" / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", module)) for module in modules)


def _embedded(data: dict[str, Any]) -> str:
    """JSON in which no text can end the script element."""
    text = json.dumps(make_visible(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
