"""Maps of mean attention logits, which the task `attention` keeps beside its records."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.errors import UserError
from kvbench.harness.records import Record
from kvbench.harness.records.beside import TraceFile, open_trace

SUFFIX = ".attention.npz"


def logits_in(record: Record, folder: Path, head: int | None, layers: Sequence[int]) -> NDArray[np.float32]:
    """The mean logits in a record's trace. [L, M, M].

    Args:
        record: of the task attention.
        folder: of its file.
        head: whose logits; the mean of all when None.
        layers: that must be there.

    Raises:
        UserError: it has no such trace, layer or head.
    """
    if record.cell.task.name != "attention" or record.status != "ok":
        raise UserError(f"{record.stem}: it has no maps: it is no finished cell of the task attention")
    path = folder / f"{record.stem}{SUFFIX}"
    trace = open_trace(record, folder)
    try:
        if not isinstance(trace, TraceFile):
            raise FileNotFoundError(trace.reason if trace else "missing")
        with np.load(trace) as noted:
            logits: NDArray[np.float32] = noted["logits"]
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: can't be read ({str(error) or 'empty'}); measure the cell again with --fresh") from None
    for what, given, count in (("layer", layers, len(logits)), ("head", () if head is None else (head,), logits.shape[1])):
        if any(x >= count for x in given):
            raise UserError(f"--{what} {max(given)}: the model has {count}, counted from 0")
    return logits.mean(1) if head is None else logits[:, head]


def maps(logits: NDArray[np.float32], layers: Sequence[int], title: str) -> dict[str, Any]:
    """Vega-Lite: mean logits among the first tokens, a panel a layer.

    Args:
        logits: of one head, or means over heads. [L, M, M].
        layers: to draw.
        title: of the picture.
    """
    panels = []
    for layer in layers:
        values = [
            {"query": int(q), "key": int(k), "logit": round(float(logits[layer, q, k]), 3)}
            for q, k in np.argwhere(np.isfinite(logits[layer]))
        ]
        axis = {"type": "ordinal", "axis": {"labelOverlap": True, "labelAngle": 0, "ticks": False}}
        panels.append(
            {
                "title": f"layer {layer}",
                "data": {"values": values},
                "mark": "rect",
                "width": 180,
                "height": 180,
                "encoding": {
                    "x": {"field": "key", **axis, "title": "token attended to"},
                    "y": {"field": "query", **axis, "title": "query"},
                    "color": {
                        "field": "logit",
                        "type": "quantitative",
                        "title": "mean logit",
                        "scale": _logit_scale(logits[layer]),
                    },
                },
            }
        )
    return {
        "title": {"text": title},
        "concat": panels,
        "columns": min(4, max(1, math.isqrt(len(panels) - 1) + 1)),
        "resolve": {"scale": {"color": "independent"}},
    }


def _logit_scale(logits: NDArray[np.float32]) -> dict[str, Any]:
    """Logits have a sign: two colours that meet at 0."""
    most = float(np.nanmax(np.abs(logits))) or 1.0
    return {"domain": [-most, most], "scheme": "redblue", "domainMid": 0}
