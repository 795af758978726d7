"""The leaderboard as one self-contained page: an answer, a comparison of two policies, and all cells with pictures of their maps.

`page.html` embeds `page.css`, the scripts, and the data as JSON. Text from records is shown as text, never as markup. The page
loads nothing from elsewhere.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.errors import UserError
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import QuestionMetrics, StepMetrics
from kvbench.harness.report import keep_map, logit_maps
from kvbench.harness.report.chart import VARIANTS, make_visible, mark
from kvbench.harness.report.compare import MARGINS
from kvbench.harness.report.feed import of_questions
from kvbench.harness.report.feed.question import Question, questions
from kvbench.harness.report.markdown import title
from kvbench.harness.report.pairing import Common, common_perplexity, common_tokens, question
from kvbench.harness.report.sections import groups
from kvbench.harness.report.site.sums import sums
from kvbench.harness.report.task import task_of

COLUMNS = (
    "policy", "capacity", "perplexity", "right", "ms", "kib", "model", "suite", "task", "status", "device", "measured", "cell",
    "name",
)  # fmt: skip
_FIGURES = [COLUMNS.index(name) for name in ("perplexity", "right", "ms")]


def cells(groups: Sequence[Sequence[Record]]) -> list[list[Any]]:
    """Return a row per record, its figures in the order of `COLUMNS`; missing figures are None."""
    rows = []
    for group in groups:
        rivals: dict[str, list[Record]] = {}
        for record in group:
            rivals.setdefault(question(record), []).append(record)
        of = {id(record): common for same in rivals.values() for common in [common_tokens(same)] for record in same}
        rows += [_row(record, of[id(record)]) for record in group]
    return sorted(rows, key=lambda row: not any(row[place] is not None for place in _FIGURES))  # those with a figure first


def _row(record: Record, common: Common) -> list[Any]:
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
        record.finished[:10], record.cell_id[:8], cell.policy,
    ]  # fmt: skip


def _status(record: Record) -> str:
    if record.status != "ok":
        return record.error.kind if record.error else "failed"
    return "; ".join(record.metrics.flags) or "ok"


def _finite(value: Any, scale: float = 1) -> float | None:
    return float(f"{value * scale:.6g}") if isinstance(value, (int, float)) and math.isfinite(value) else None


_KEPT = ((230, 234, 238), (158, 202, 225), (0, 114, 178), (8, 48, 107))  # from no KV head to all
_LOGITS = ((178, 24, 43), (247, 247, 247), (33, 102, 172))  # from below 0 to above
_MAX_LAYERS = 16  # of a picture; of a deeper model, layers spread over its depth


def _maps(records: Sequence[Record], files: Mapping[int, Path]) -> dict[str, list[dict[str, Any]]]:
    """Pictures by cell id: {"kind", "layers": [{"layer", "png", "width", "height"}], "columns", "rows"}.

    Args:
        records: of the page.
        files: path of each record, by `id`.
    """
    result: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        folder = files[id(record)].parent if id(record) in files else None
        pictures = [] if folder is None else [p for p in (_kept(record, folder), _logits(record, folder)) if p is not None]
        if pictures:
            result[record.cell_id] = pictures
    return result


def _kept(record: Record, folder: Path) -> dict[str, Any] | None:
    """Which positions are held after which step: the share of a layer's KV heads that hold a position."""
    if record.facts.keep_map is None:
        return None
    try:
        shares, steps = keep_map.shares(keep_map.Map.read(keep_map.map_file(record, folder)).of_stream(0))
    except UserError:  # the file is missing or damaged: the row is shown without it
        return None
    layers = _spread(len(shares))
    return {
        "kind": "kept", "columns": f"steps {steps[0]:,} to {steps[-1]:,}", "rows": "positions, the first at the bottom",
        "layers": [_layer(i, shares[i].T[::-1], _KEPT) for i in layers],
    }  # fmt: skip


def _logits(record: Record, folder: Path) -> dict[str, Any] | None:
    """Mean attention logits among the first tokens, averaged over heads."""
    if not (folder / f"{record.stem}{logit_maps.SUFFIX}").is_file():
        return None
    try:
        logits = logit_maps.logits_in(record, folder, None, ())
    except UserError:
        return None
    most = [float(np.nanmax(np.abs(np.where(np.isfinite(x), x, np.nan)))) or 1.0 for x in logits]
    scaled = [np.where(np.isfinite(x), 0.5 + x / (2 * top), 0.5) for x, top in zip(logits, most, strict=True)]
    tokens = logits.shape[-1]
    return {
        "kind": "attention", "columns": f"the first {tokens} tokens, attended to", "rows": "queries, the first at the top",
        "layers": [_layer(i, scaled[i], _LOGITS) for i in _spread(len(scaled))],
    }  # fmt: skip


def _spread(layers: int) -> list[int]:
    return sorted(set(np.linspace(0, layers - 1, min(layers, _MAX_LAYERS)).round().astype(int).tolist()))


def _layer(layer: int, shades: NDArray[Any], colours: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """A picture of values from 0 to 1. shades: [rows, columns], the top row first."""
    height, width = shades.shape
    return {"layer": layer, "png": base64.b64encode(_png(shades, colours)).decode(), "width": width, "height": height}


def _png(shades: NDArray[Any], colours: Sequence[tuple[int, int, int]]) -> bytes:
    """A PNG in which 0 has the first colour, 1 the last, and what is between a mixture.

    Source: W3C, Portable Network Graphics (Second Edition): 8-bit palette, no filter, no interlacing.
    """
    height, width = shades.shape
    places = np.linspace(0, 1, len(colours))
    at = np.linspace(0, 1, 256)
    palette = np.stack([np.interp(at, places, [c[i] for c in colours]) for i in range(3)], axis=1).round().astype(np.uint8)
    pixels = (np.clip(shades, 0, 1) * 255).round().astype(np.uint8)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1)  # each line begins with its filter
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette.tobytes()), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


_HERE = Path(__file__).parent
_SCRIPTS = ("dom", "state", "pairs", "axes", "chart", "details", "answer", "good", "compare", "cells", "main")
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";\n', re.M)
_EXPORT = re.compile(r"^export (?=const|function|class)", re.M)


def render(
    records: Sequence[Record], files: Mapping[int, Path] | None = None, feed: dict[str, Any] | None = None,
    asked: Sequence[Question] | None = None,
) -> str:  # fmt: skip
    """The page in HTML, of the newest record of each cell; the same records always give the same bytes.

    Maps are found beside the path of their record, by `id` in `files`. `feed` and `asked` are those of the records, if
    they are made already.
    """
    asked, shown = questions(records) if asked is None else asked, groups(records)
    made, rows = feed or of_questions(asked), cells(shown)
    data = {
        "sums": sums(asked), "columns": COLUMNS, "cells": rows,
        "marks": {name: [asdict(mark(name, n)) for n in range(VARIANTS)] for name in sorted({row[-1] for row in rows})},
        "maps": _maps([r for group in shown for r in group], files or {}), "margins": MARGINS,
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
