"""Draws who beats a random choice, on SmolLM2 and on a built-in model: `make picture`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import recall

from kvbench.harness.core.intervals import Interval
from kvbench.harness.records import Record, RecordStore
from kvbench.harness.report.chart import Chart, draw, write
from kvbench.harness.report.pairing import paired, question
from kvbench.lab.studies.controls import holm, mean_of

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "leaderboard" / "records"
MOMENTS = {"step": "at every step", "prompt": "once, after the prompt"}
PANELS = {  # title of two panels: the folder of records of each moment, and tokens per head
    "SmolLM2": ({"step": "smollm2_step", "prompt": "smollm2_prompt"}, 256),
    "built-in": ({"step": "zoo", "prompt": "zoo"}, 64),
}
POSITIONS = {"step": "cache", "prompt": "stream"}  # of each panel
BETTER, ALIKE, WORSE = _VERDICTS = ("better (95 % confidence)", "within the noise", "worse (95 % confidence)")
_COLOURS = ("#009e73", "#8c8c8c", "#d55e00")  # legible on light and dark pages
_ALT = (
    "Perplexity that each policy loses to a random choice beside sinks and newest tokens, a panel for every moment of eviction."
)


class Row(NamedTuple):
    """Policies that kept the same tokens, beside the control.

    Attributes:
        policy: its name, or their names.
        loss, low, high: perplexity lost to the control, in %, with its 95 % interval.
        p: that there is no difference.
        closed: share of the control's gap to dense that it closes; 1 for dense itself.
        verdict: adjusted for all rows (Holm).
    """

    policy: str
    loss: float
    low: float
    high: float
    p: float
    closed: float
    verdict: str = ALIKE

    @classmethod
    def of(cls, policy: str, lost: Interval, closed: float = 0.0) -> Row:
        """Return the row of a difference of NLL, in nats per token."""
        assert lost.p is not None
        loss, low, high = (round(x, 3) for x in percents(lost))
        return cls(policy, loss, low, high, lost.p, closed)


def percents(difference: Interval) -> tuple[float, float, float]:
    """Return a difference of NLL and the ends of its interval, in nats per token, as differences of perplexity in percent."""
    assert difference.low is not None
    assert difference.high is not None
    mean, low, high = (100 * math.expm1(x) for x in (difference.mean, difference.low, difference.high))
    return mean, low, high


def measured(suite: str = "zoo", capacity: int = 64, results: Path = RESULTS) -> list[Record]:
    """The perplexity records of a suite at one capacity, and dense."""
    records, _ = RecordStore(results / f"{suite}.jsonl").read_all()
    of_text = [r for r in records if r.status == "ok" and r.cell.task.name == "perplexity" and not r.cell.stored]
    return [r for r in of_text if r.cell.capacity in (None, capacity) and r.cell.policy not in recall.MERGING]


def of_moment(records: Sequence[Record], moment: str, positions: str = "") -> list[Record]:
    """The bounded caches that evict then, in these positions or those of the panel; and dense, which read the same text."""
    caches = [r for r in records if r.cell.evict == moment and r.cell.capacity is not None]
    caches = [r for r in caches if r.cell.positions == (positions or POSITIONS[moment])]
    texts = {question(r) for r in caches}
    return caches + [r for r in records if r.cell.policy == "dense" and question(r) in texts]


def is_control(record: Record) -> bool:
    """Whether it keeps sinks, the newest tokens, and a random choice of the others."""
    return record.cell.policy == "random" and bool(record.cell.parameters.get("window"))


def losses(records: Sequence[Record], moment: str, positions: str = "") -> list[Row]:
    """Perplexity lost to the mean of the control's seeds, least first; positions: instead of the panel's."""
    chosen = of_moment(records, moment, positions)
    control = mean_of([r for r in chosen if is_control(r)])
    others = [r for r in chosen if not is_control(r)]
    differences = [difference for r in others if (difference := paired(r, control))]
    assert len(differences) == len(others)
    dense = next(d.mean for r, d in zip(others, differences, strict=True) if r.cell.policy == "dense")
    names = dict[Interval, list[str]]()
    for policy, difference in zip(others, differences, strict=True):
        names.setdefault(difference, []).append(recall.name(policy, others))
    return judged([Row.of(" = ".join(same), difference, round(difference.mean / dense, 2)) for difference, same in names.items()])


def judged(rows: Sequence[Row]) -> list[Row]:
    """The rows with a verdict after Holm's correction over all of them, the least loss first."""
    adjusted = zip(rows, holm([row.p for row in rows]), strict=True)
    verdicts = [row._replace(verdict=ALIKE if p >= 0.05 else BETTER if row.loss < 0 else WORSE) for row, p in adjusted]
    return sorted(verdicts, key=lambda row: row.loss)


def picture(results: Path = RESULTS) -> Chart:
    """A row of panels per model, a panel per moment of eviction, a row per policy."""
    rows = [
        {
            "hconcat": [
                panel(
                    losses(measured(suite, capacity, results), moment),
                    f"{model}, {MOMENTS[moment]}; {POSITIONS[moment]} positions",
                )
                for moment, suite in suites.items()
            ]
        }
        for model, (suites, capacity) in PANELS.items()
    ]
    return Chart("who-beats-random", _ALT, {"vconcat": rows})


def panel(rows: Sequence[Row], title: str, against: str = "the random control") -> dict[str, Any]:
    """A row per policy: perplexity lost to something, with its interval."""
    ticks = [-10, -3, -1, 0, 1, 3, 10, 30, 100, 300, 1000]
    x = {
        "field": "loss",
        "type": "quantitative",
        "title": f"perplexity against {against}, %",
        "scale": {"type": "symlog", "nice": False},
        "axis": {"values": ticks, "format": "+,d"},
    }
    y = {"field": "policy", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 220}}
    verdict = {
        "field": "verdict",
        "type": "nominal",
        "title": None,
        "legend": {"orient": "bottom"},
        "scale": {"domain": _VERDICTS, "range": _COLOURS},
    }
    shape = verdict | {"scale": {"domain": _VERDICTS, "range": ["circle", "square", "triangle-up"]}}
    interval = {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y, "color": verdict}
    layers = [
        {"mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": interval},
        {"mark": {"type": "point", "filled": True, "size": 50}, "encoding": {"x": x, "y": y, "color": verdict, "shape": shape}},
    ]
    values = {"values": [row._asdict() for row in rows]}
    return {"title": title, "width": 240, "height": 15 * len(rows), "data": values, "layer": layers}


def drawings(results: Path = RESULTS) -> dict[str, str]:
    """The picture for a light and a dark page, by file name."""
    return draw([picture(results)])


if __name__ == "__main__":
    write(drawings(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS), FOLDER)
