"""Keep maps of records: read the file beside a record, draw it, and compute the eviction step of each token. Imports no torch.

Axis letters: L layers, H KV heads, C columns (steps) of the picture, N positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.errors import UserError
from kvbench.harness.records import Record
from kvbench.harness.records.beside import file_problem
from kvbench.harness.report import chart

Map = np.recarray[Any, Any]  # positions held after each step: an entry per position, with the fields `_COLUMNS`
_COLUMNS = ("stream", "step", "layer", "head", "position")  # number, last processed token, number, KV head, held position
SUFFIX = ".kept.parquet"  # suffix of the file beside the record
_MAX_COLUMNS, _MAX_BANDS = 64, 128  # largest size of a panel; longer streams are drawn with some steps and bands of positions
_PANEL_PIXELS, _SPACING_PIXELS = 230, 36
_GREY = "#57606a"
_STEP_LABELS = {"labelOverlap": True, "labelAngle": 0, "labelExpr": "format(datum.value, ',')"}
SHADES = ["#e6eaee", "#9ecae1", "#0072b2", "#08306b"]  # from no KV head to all


def keep_map(*columns: NDArray[Any]) -> Map:
    """Return the keep map with these columns: stream, step, layer, head, position. [n] integers each."""
    return np.rec.fromarrays(columns, dtype=[(name, np.int64) for name in _COLUMNS])


def read_map(path: Path) -> Map:
    """Read the file of a keep map.

    Raises:
        UserError: the file is not a keep map.
    """
    from pyarrow import parquet

    try:
        table = parquet.read_table(path).combine_chunks()
        positions = table["positions"].combine_chunks()
        counts = np.diff(positions.offsets.to_numpy())
        columns = (np.repeat(table[name].to_numpy(), counts) for name in _COLUMNS[:-1])
        return keep_map(*columns, positions.flatten().to_numpy())
    except Exception as error:  # pyarrow does not document which errors a damaged file raises
        raise UserError(f"{path}: not a keep map ({type(error).__name__})") from None


def of_stream(kept: Map, stream: int) -> Map:
    """Return the part of one stream.

    Raises:
        UserError: the keep map lacks the stream.
    """
    part: Map = kept[kept.stream == stream]
    if not len(part):
        raise UserError(f"the keep map has no stream {stream}: its last one is {int(kept.stream.max(initial=-1))}")
    return part


def map_file(record: Record, folder: Path) -> Path:
    """Return the file of a record's keep map, in the folder of the record's file.

    Raises:
        UserError: the record has no keep map, or the file is missing or has changed.
    """
    fact = record.facts.keep_map
    if fact is None:
        raise UserError(f"{record.stem}: has no keep map: measure it again with 'bench run {record.cell_id[:8]} --trace kept'")
    path = folder / Path(fact.file).name
    problem = file_problem(path, fact.sha256)
    if problem:
        raise UserError(f"{path}: the keep map of {record.stem} {problem}")
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows {"stream", "step", "layer", "head", "positions"}, ordered by step, layer, stream and head."""
    from pyarrow import parquet

    table: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return table


def evictions(kept: Map) -> NDArray[np.int32]:
    """Return the step after which each token of one stream was evicted; the number of steps for tokens never evicted. [L, H, N].

    Raises:
        UserError: a step is missing, or the layers have different numbers of KV heads.
    """
    steps = int(kept.step.max()) + 1
    if len(np.unique(kept.step)) != steps:
        raise UserError("only a map of every step can be replayed: measure it with --trace kept=all")
    layers, heads = int(kept.layer.max()) + 1, int(kept.head.max()) + 1
    if len(np.unique(kept.layer * heads + kept.head)) != layers * heads:
        raise UserError("only a model with the same number of KV heads in every layer can be replayed")
    last = np.tile(np.arange(steps) - 1, (layers, heads, 1))  # a token may be evicted at its own step
    np.maximum.at(last, (kept.layer, kept.head, kept.position), kept.step)
    return (last + 1).astype(np.int32)


def replayable_capacities(record: Record, evicted: NDArray[np.int32]) -> list[int]:
    """Return the capacities to which the record's layers were bound: the cell's, and smaller ones of sliding-window layers.

    evicted: `evictions` of the record's keep map. [L, H, N].

    Raises:
        UserError: KV heads kept different numbers of tokens.
    """
    steps = evicted.shape[2]
    capacity = record.cell.capacity or steps
    windows = {s.sliding_window - 1 for s in record.facts.kv_shapes or () if s.sliding_window}
    capacities = {capacity} | {min(capacity, w) for w in windows}
    kept = (evicted == steps).sum(-1)  # at the end. [L, H]
    alike = bool((kept == kept[:, :1]).all())
    if not alike or (len(np.unique(kept)) > 1 and not set(kept.flat) <= {min(c, steps) for c in capacities}):
        raise UserError("the KV heads of this map keep different numbers of tokens, and replay gives each the capacity")
    return sorted(capacities)


def specification(kept: Map, title: str) -> dict[str, Any]:
    """Return a Vega-Lite specification with a panel per layer: position against step, shaded by the share of KV heads."""
    layers = int(kept.layer.max()) + 1
    scale = {"domain": [0, 1], "range": SHADES, "interpolate": "rgb"}
    header = {"titleFontSize": 0, "labelExpr": "'layer ' + datum.value"}
    held, columns, width = shares(kept)
    subtitle = f"A band of {width} positions has the shade of the one that most KV heads hold." if width > 1 else ""
    panels = chart.heat_map(
        list(_bars(held, columns, width)),
        _PANEL_PIXELS,
        _PANEL_PIXELS,
        x=chart.channel("step", "after step", "ordinal", axis=_STEP_LABELS),
        y=chart.channel("low", "position", scale={"nice": False}),
        y2={"field": "high"},
        color=chart.channel("share", "share of KV heads", scale=scale, legend={"format": ".0%"}),
        facet=chart.channel("layer", None, "ordinal", header=header, columns=min(4, layers), spacing=_SPACING_PIXELS),
    )
    return {"title": {"text": title, "subtitle": subtitle, "subtitleColor": _GREY}} | panels


def shares(kept: Map) -> tuple[NDArray[np.float64], list[int], int]:
    """Return the share of the KV heads that hold a position of one stream, as the largest share of a band of positions.

    The maximum keeps a single held token of a band visible.

    Returns:
        Shares [L, C, bands], the steps of the C columns, the last one included, and the number of positions in a band.
    """
    steps = np.unique(kept.step)
    if len(steps) > _MAX_COLUMNS:
        steps = steps[np.ceil(len(steps) * np.arange(1, _MAX_COLUMNS + 1) / _MAX_COLUMNS).astype(int) - 1]
    width = -(-(int(steps[-1]) + 1) // _MAX_BANDS)
    layers, bands = int(kept.layer.max()) + 1, -(-(int(steps[-1]) + 1) // width)
    positions = bands * width
    largest = np.empty((layers, len(steps), bands))
    for column, step in enumerate(steps):
        in_step = kept.step == step
        held = np.bincount(kept.layer[in_step] * positions + kept.position[in_step], minlength=layers * positions)
        largest[:, column] = held.reshape(layers, bands, width).max(-1)
    heads = np.array([len(np.unique(kept.head[kept.layer == layer])) for layer in range(layers)])
    return largest / heads[:, None, None], steps.tolist(), width


def _bars(held: NDArray[np.float64], columns: list[int], width: int) -> Iterator[dict[str, Any]]:
    """Yield the bars of all panels: tokens that have been read, then held bands of positions. Equal neighbours are joined.

    The arguments are the results of `shares`.
    """
    for layer, of_layer in enumerate(held):
        for step, of_step in zip(columns, of_layer, strict=True):
            column = {"layer": layer, "step": step}
            yield column | {"low": 0, "high": step + 1, "share": 0}
            for share, bands in itertools.groupby(range(len(of_step)), key=lambda b, s=of_step: round(float(s[b]), 3)):  # type: ignore[misc]
                if share:
                    band = list(bands)
                    yield column | {"low": band[0] * width, "high": min((band[-1] + 1) * width, step + 1), "share": share}
