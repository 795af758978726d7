"""Draws how long answers stay right, from the `long-answers` suite's records: `make picture`. CI draws it again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.harness.records import Record, RecordStore
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.report.chart import Chart, draw, write
from kvbench.harness.tasks.trace import still_right
from kvbench.harness.tasks.trace.trace_options import TraceOptions

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "leaderboard" / "records"
CAPACITY, EVICT = 192, "step"
POSITIONS = ("stream", "cache")  # a panel each
_ALT = "Share of answers without a wrong word, over the words written, a line a policy, a panel for each mode of positions."


def measured(positions: str, results: Path = RESULTS, capacity: int = CAPACITY) -> list[Record]:
    """The greedy answers of one mode of positions, evicted at every step; and dense."""
    records, _ = RecordStore(results / "long_answers.jsonl").read_all()
    greedy = [r for r in records if r.status == "ok" and _is_greedy(r.cell.task_options(TraceOptions))]
    return [r for r in greedy if r.cell.policy == "dense" or (r.cell.capacity == capacity and _is_shown(r.cell, positions))]


def _is_greedy(options: TraceOptions) -> bool:
    return options.samples == 1 and not options.teacher


def _is_shown(cell: CellSpec, positions: str) -> bool:
    """Whether a bounded cell belongs to a panel; what is recomputed has no moment of eviction, and the same positions in both."""
    return cell.policy == "recompute_window" or (cell.evict == EVICT and cell.positions == positions)


def picture(panels: Sequence[Sequence[Record]]) -> Chart:
    """A panel per mode of positions, a line per policy."""
    size = {"width": 300, "height": 260}
    drawn = [{"title": f"{p} positions"} | size | still_right(r, CAPACITY) for p, r in zip(POSITIONS, panels, strict=True)]
    return Chart("while-it-writes", _ALT, {"hconcat": drawn})


def drawings(results: Path = RESULTS) -> dict[str, str]:
    """The picture for a light and a dark page, by file name."""
    return draw([picture([measured(positions, results) for positions in POSITIONS])])


if __name__ == "__main__":
    write(drawings(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS), FOLDER)
