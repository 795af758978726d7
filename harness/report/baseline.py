"""Baselines: records that later runs are held to, and how much their latency varies when nothing has changed."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from harness.errors import UserError
from harness.records import Record, RecordStore, newest

FILE = "baseline.yaml"
_WIDTHS = 4  # standard deviations of the log ratio that a band has on either side
_NARROWEST = 0.10  # a band is never narrower, in log ratio: machines have days
_TOO_WIDE = 0.25  # beyond this a slowdown of 30 % could hide: told when a baseline is made


@dataclass(frozen=True)
class Band:
    """Where the ratio of a cell's step to its yardstick's lies while nothing has changed.

    Attributes:
        ratio: of the medians of the runs, the middle one.
        low: lower end.
        high: upper end.
        runs: that it was learnt from.
    """

    ratio: float
    low: float
    high: float
    runs: int


@dataclass(frozen=True)
class Baseline:
    """What a baseline says of itself; its records lie beside it.

    Attributes:
        suite: that it was measured with: a name or a file.
        options: of `bench run` that changed the suite: model, data, threads and so on.
        who: made it.
        when: ISO 8601, UTC.
        why: in a sentence.
        bands: of latency, by cell id.
    """

    suite: str
    options: dict[str, Any]
    who: str
    when: str
    why: str
    bands: dict[str, Band] = field(default_factory=dict)


def load(folder: Path) -> tuple[Baseline, list[Record]]:
    """A baseline and its records.

    Raises:
        UserError: it is none, or has no records.
    """
    try:
        found = yaml.safe_load((folder / FILE).read_text(encoding="utf-8"))
        bands = {name: Band(**band) for name, band in (found.pop("bands") or {}).items()}
        baseline = Baseline(**found, bands=bands)
    except OSError:
        raise UserError(f"{folder}: no baseline ({FILE} is missing); 'bench baseline update' makes one") from None
    except (yaml.YAMLError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise UserError(f"{folder / FILE}: not a baseline ({type(error).__name__})") from None
    records, problems = RecordStore(folder).read_all()
    if problems or not records:
        reason = f"{problems[0].path.name}: {problems[0].reason}" if problems else "no records"
        raise UserError(f"{folder}: a baseline that can't be read ({reason})")
    return baseline, newest(records)


def store(folder: Path, baseline: Baseline, records: Path) -> None:
    """Put a baseline in the place of what is there, all at once.

    Args:
        folder: of the baseline.
        baseline: what it says.
        records: folder of its records and traces, which is moved.
    """
    text = yaml.safe_dump(asdict(baseline), sort_keys=False, allow_unicode=True, width=120)
    (records / FILE).write_text(f"# Written by `bench baseline update`; don't edit.\n{text}", encoding="utf-8")
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rename(old)
    shutil.move(records, folder)
    shutil.rmtree(old, ignore_errors=True)


def bands(runs: Sequence[Sequence[Record]]) -> dict[str, Band]:
    """Bands learnt from runs between which nothing changed.

    Args:
        runs: the latency records of each.
    """
    seen: dict[str, list[float]] = {}
    for records in runs:
        for record in records:
            found = ratio(record, records)
            if found is not None:
                seen.setdefault(record.cell_id, []).append(math.log(found))
    made = {}
    for cell, logs in seen.items():
        middle = float(np.median(logs))
        spread = max(_NARROWEST, _WIDTHS * float(np.std(logs, ddof=1)) if len(logs) > 1 else _TOO_WIDE)
        low, at, high = (round(math.exp(x), 5) for x in (middle - spread, middle, middle + spread))
        made[cell] = Band(at, low, high, len(logs))
    return made


def too_noisy(bands: dict[str, Band]) -> list[str]:
    """Cells, by id, in whose bands a slowdown of 30 % could hide."""
    return [cell for cell, band in bands.items() if band.high / band.ratio > 1 + _TOO_WIDE]


def ratio(record: Record, run: Sequence[Record]) -> float | None:
    """How long a step takes beside dense's, measured in turn: the median over the rounds. None without such a yardstick."""
    ours = record.metrics
    if record.status != "ok" or "rounds_ms" not in ours or record.cell["policy"] == "dense":
        return None
    beside = (r.metrics for r in run if r.status == "ok" and r.cell["policy"] == "dense" and r.metrics.get("rounds_ms"))
    base = next((m for m in beside if m["together"] == ours["together"]), None)
    return None if base is None else float(np.median(np.array(ours["rounds_ms"]) / np.array(base["rounds_ms"])))
