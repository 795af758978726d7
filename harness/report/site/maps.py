"""Pictures of a cell's kept positions and attention, as PNG in base64."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.errors import UserError
from kvbench.harness.records import Record
from kvbench.harness.report import keep_map, logit_maps

_MAX_LAYERS = 16  # largest number of layers in a picture; for a deeper model, layers spread over its depth


def maps(records: Sequence[Record], files: Mapping[int, Path]) -> dict[str, list[dict[str, Any]]]:
    """Return pictures by the cell ids of the feed: {"kind", "layers": [{"layer", "png", "width", "height"}], "columns", "rows"}.

    files: path of each record, by `id`.
    """
    result: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        folder = files[id(record)].parent if id(record) in files else None
        pictures = [] if folder is None else [p for p in (_kept(record, folder), _logits(record, folder)) if p is not None]
        if pictures:
            result[record.cell_id[:12]] = pictures
    return result


def _kept(record: Record, folder: Path) -> dict[str, Any] | None:
    """Draw the positions held after each step: the share of a layer's KV heads that hold a position."""
    if record.facts.keep_map is None:
        return None
    try:
        shares, steps, _ = keep_map.shares(keep_map.of_stream(keep_map.read_map(keep_map.map_file(record, folder)), 0))
    except UserError:  # the file is missing or damaged: the row is shown without it
        return None
    layers = _spread(len(shares))
    return {
        "kind": "kept",
        "columns": f"steps {steps[0]:,} to {steps[-1]:,}",
        "rows": "positions, the first at the bottom",
        "layers": [_layer(i, shares[i].T[::-1], keep_map.SHADES) for i in layers],
    }


def _logits(record: Record, folder: Path) -> dict[str, Any] | None:
    """Draw mean attention logits among the first tokens, averaged over heads."""
    if record.trace is None or not record.trace.file.endswith(logit_maps.SUFFIX):
        return None
    try:
        logits = logit_maps.logits_in(record, folder, None, ())
    except UserError:
        return None
    scaled = [np.nan_to_num(0.5 + x / (2 * logit_maps.largest(x)), nan=0.5) for x in logits]
    tokens = logits.shape[-1]
    return {
        "kind": "attention",
        "columns": f"the first {tokens} tokens, attended to",
        "rows": "queries, the first at the top",
        "layers": [_layer(i, scaled[i], logit_maps.SHADES) for i in _spread(len(scaled))],
    }


def _spread(layers: int) -> list[int]:
    return sorted(set(np.linspace(0, layers - 1, min(layers, _MAX_LAYERS)).round().astype(int).tolist()))


def _layer(layer: int, shades: NDArray[Any], colours: Sequence[str]) -> dict[str, Any]:
    """Return a picture of values from 0 to 1. shades: values, top row first. [rows, columns]."""
    height, width = shades.shape
    return {"layer": layer, "png": base64.b64encode(_png(shades, colours)).decode(), "width": width, "height": height}


def _png(shades: NDArray[Any], colours: Sequence[str]) -> bytes:
    """Return a PNG in which 0 has the first colour (#rrggbb), 1 the last, and values in between are interpolated.

    Source: W3C, Portable Network Graphics (Second Edition): 8-bit palette, no filter, no interlacing.
    """
    height, width = shades.shape
    places = np.linspace(0, 1, len(colours))
    levels = np.linspace(0, 1, 256)
    channels = zip(*(bytes.fromhex(colour[1:]) for colour in colours), strict=True)  # red, green and blue
    palette = np.stack([np.interp(levels, places, channel) for channel in channels], axis=1).round().astype(np.uint8)
    pixels = (np.clip(shades, 0, 1) * 255).round().astype(np.uint8)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1)  # each line begins with its filter
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette.tobytes()), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
