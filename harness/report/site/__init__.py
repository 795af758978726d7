"""The leaderboard as an HTML page: the losses of each policy at each budget, over all questions of a suite, and every cell.

`page.html` embeds `page.css`, the scripts, and the data of the first suites up to `EMBEDDED_BYTES`. The data of every other suite
are a script in the folder `page`, which is loaded when the suite is chosen. Scripts are used because a page opened as a file can
load scripts, but no JSON. Text from records is shown as text, never as markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.harness.report.chart import file_name
from kvbench.harness.report.feed import rows_of

FOLDER = "page"  # folder beside the page, with the data that are not embedded
EMBEDDED_BYTES = 300_000
_BY_SUITE = ("questions", "equal_bytes", "cells")
_HERE = Path(__file__).parent
_SCRIPTS = ("dom", "state", "details", "matrix", "answer", "cells", "main")
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";\n', re.M)
_EXPORT = re.compile(r"^export (?=const|function|class)", re.M)


def render(
    feed: dict[str, Any], pictures: Mapping[str, Any] | None = None, embedded_bytes: int = EMBEDDED_BYTES
) -> tuple[str, dict[str, str]]:
    """Return the page of a feed, and the files of its folder by name. Equal feeds give equal bytes.

    pictures: pictures by cell (`maps.maps`). embedded_bytes: largest number of bytes of data that the page itself may hold.
    """
    shown, scripts, side_files, room = [], [], {}, embedded_bytes
    for suite, data in _suites(feed, pictures or {}):
        script = f"kvbench({_literal(suite['file'])}, {_literal(data)});\n"
        size = len(script.encode())
        if size <= room:
            room -= size
            scripts.append(script)
        else:
            side_files[f"{suite['file']}.js"] = script
        shown.append(suite)
    index = _literal({"folder": FOLDER, "measured": feed["measured"], "default": feed["default"], "suites": shown})
    frame, css = ((_HERE / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css"))
    parts = {"css": css, "data": f"const index = {index};\n{''.join(scripts)}", "js": program()}
    text = re.sub(r"/\*(css|data|js)\*/", lambda place: parts[place[1]], frame)  # in one pass, because parts may contain marks
    return text, side_files


def _suites(feed: dict[str, Any], pictures: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each suite's entry in the index and its data. The default question's suite comes first, then suites of its model."""
    default = next((question for question in feed["questions"] if question["id"] == feed["default"]), None)
    suites = []
    for suite, version in dict.fromkeys((cell["suite"], cell["suite_version"]) for cell in feed["cells"]):
        data: dict[str, Any] = {
            name: [part for part in feed[name] if (part["suite"], part["suite_version"]) == (suite, version)]
            for name in _BY_SUITE
        }
        policies = {row["policy"] for question in data["questions"] for row in rows_of(question)}
        data["papers"] = {name: paper for name, paper in feed["papers"].items() if name in policies}
        data["provenance"] = {cell["provenance"]: feed["provenance"][cell["provenance"]] for cell in data["cells"]}
        data["pictures"] = {cell["cell"]: pictures[cell["cell"]] for cell in data["cells"] if cell["cell"] in pictures}
        entry = {
            "file": file_name(f"{suite} v{version}", repr((suite, version))),
            "suite": suite,
            "version": version,
            "models": list(dict.fromkeys(cell["model"] for cell in data["cells"])),
            "questions": [question["id"] for question in data["questions"]],
        }
        suites.append((entry, data))
    return sorted(
        suites,
        key=lambda part: default is not None and (default not in part[1]["questions"], default["model"] not in part[0]["models"]),
    )


def program() -> str:
    """Return the modules of the page as one script, in an order that defines every import before its use."""
    modules = ((_HERE / "js" / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", module)) for module in modules)


def _literal(data: Any) -> str:
    """Return JSON in which no text can end the script element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
