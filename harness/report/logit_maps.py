"""Maps of mean attention logits, which the task `attention` stores beside its records."""

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
from kvbench.harness.report.chart import channel, heat_map

SUFFIX = ".attention.npz"
SHADES = ["#b2182b", "#ef8a62", "#fddbc7", "#f7f7f7", "#d1e5f0", "#67a9cf", "#2166ac"]  # from below 0 to above: ColorBrewer, RdBu
_PANEL_PIXELS = 180


def logits_in(record: Record, folder: Path, head: int | None, layers: Sequence[int]) -> NDArray[np.float32]:
    """Return the mean logits in the trace of a record of the task attention. [L, M, M].

    Args:
        folder: folder of the record's file.
        head: head whose logits are returned; None: the mean over all heads.
        layers: layers that the trace must have.

    Raises:
        UserError: the record has no such trace, layer or head.
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
    for name, numbers, count in (("layer", layers, len(logits)), ("head", () if head is None else (head,), logits.shape[1])):
        if any(number >= count for number in numbers):
            raise UserError(f"--{name} {max(numbers)}: the model has {count}, counted from 0")
    return logits.mean(1) if head is None else logits[:, head]


def maps(logits: NDArray[np.float32], layers: Sequence[int], title: str) -> dict[str, Any]:
    """Return a Vega-Lite specification of mean logits among the first tokens, with a panel for each of `layers`.

    logits: logits of one head, or means over heads. [L, M, M].
    """
    axis = {"labelOverlap": True, "labelAngle": 0, "ticks": False}
    panels = []
    for layer in layers:
        finite = np.argwhere(np.isfinite(logits[layer])).tolist()
        values = [{"query": q, "key": k, "logit": round(float(logits[layer, q, k]), 3)} for q, k in finite]
        x, y = channel("key", "token attended to", "ordinal", axis=axis), channel("query", "query", "ordinal", axis=axis)
        most = largest(logits[layer])
        shade = channel("logit", "mean logit", scale={"domain": [-most, most], "range": SHADES, "interpolate": "rgb"})
        panels.append({"title": f"layer {layer}"} | heat_map(values, _PANEL_PIXELS, _PANEL_PIXELS, x=x, y=y, color=shade))
    return {
        "title": {"text": title},
        "concat": panels,
        "columns": min(4, max(1, math.isqrt(len(panels) - 1) + 1)),
        "resolve": {"scale": {"color": "independent"}},
    }


def largest(logits: NDArray[np.float32]) -> float:
    """Return the largest absolute logit, at which the colours end; 1.0 if all are 0. Masked logits are NaN."""
    return float(np.nanmax(np.abs(logits))) or 1.0
