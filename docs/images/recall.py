"""Draws which policies still have what is asked for, from the `recall` suite's records: `make picture`. CI draws it again."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.harness.records import Record, RecordStore
from kvbench.harness.records.metrics import QuestionMetrics
from kvbench.harness.report.chart import Chart, draw, write

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "leaderboard" / "records"
TASKS = ("recent", "once", "popular", "distracted", "values", "chain", "needle")
POSITIONS = "stream"  # of the picture: public codes leave the keys of a prompt where they were
QUESTIONS = {"seen": "cut after the question; stream positions", "unseen": "cut before the question; stream positions"}
MERGING = ("cam", "merging", "d2o")  # policies with a page of their own
_TOLD = ("kernel", "sinks", "window", "normalise")
_ALT = "Share of questions still answered under each policy, by what has to be kept, whether or not the policy saw the question."


def measured(results: Path = RESULTS, positions: str = POSITIONS) -> list[Record]:
    """The records of `kvbench_recall` in one mode of positions, dense among them.

    Left out are policies whose size follows from the prompt: they keep two thirds of it, and answer accordingly.
    """
    records, _ = RecordStore(results / "recall.jsonl").read_all()
    records = [r for r in records if r.status == "ok" and (r.cell.capacity is not None or r.cell.policy == "dense")]
    records = [r for r in records if r.cell.positions == positions or r.cell.policy == "dense"]
    return [r for r in records if str(r.cell.options.get("tasks", "")).removeprefix("kvbench_") in TASKS]


def answered(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Percent right of each policy, task and moment, the mean over its seeds; the policy with the best mean first."""
    shares = dict[tuple[str, str, str], list[float]]()
    for record in records:
        metrics = record.measured(QuestionMetrics)
        assert metrics is not None
        assert metrics.accuracy is not None
        task, question = asked(record)
        shares.setdefault((name(record, records), task, question), []).append(100 * metrics.accuracy)
    rows: list[dict[str, Any]] = [
        {"policy": policy, "task": task, "question": question, "right": round(statistics.mean(right), 1), "seeds": len(right)}
        for (policy, task, question), right in shares.items()
    ]
    means = {name: statistics.mean(row["right"] for row in rows if row["policy"] == name) for name in {r["policy"] for r in rows}}
    return sorted(rows, key=lambda row: (-means[row["policy"]], row["policy"], TASKS.index(row["task"]), row["question"]))


def asked(record: Record) -> tuple[str, str]:
    """(task, whether the question was seen)."""
    return str(record.cell.options["tasks"]).removeprefix("kvbench_"), str(record.cell.options.get("question") or "seen")


def name(record: Record, rivals: Sequence[Record]) -> str:
    """The policy with what tells it from others of its name, but not with what follows from that."""
    cell, same = record.cell, [r.cell for r in rivals if r.cell.policy == record.cell.policy]
    told = {k: v for k, v in cell.settings.items() if len({repr(c.settings.get(k)) for c in same}) > 1}
    words = [f"of {told['score']}"] if "score" in told else []
    words += [str(told["variant"])] if told.get("variant", "paper") != "paper" else []
    words += [f"{k} {v}" for k, v in told.items() if k in _TOLD and v is not None]
    return f"{cell.policy} ({', '.join(words)})" if words else cell.policy


def picture(rows: Sequence[dict[str, Any]]) -> Chart:
    """A panel per moment, a row per policy, a column per task."""
    return Chart("what-is-kept", _ALT, {"hconcat": [_panel(rows, question) for question in QUESTIONS]})


def _panel(rows: Sequence[dict[str, Any]], question: str) -> dict[str, Any]:
    shown = [row for row in rows if row["question"] == question]
    first = question == next(iter(QUESTIONS))
    axis = {"labelLimit": 330} if first else None
    encoding = {
        "x": {
            "field": "task",
            "type": "nominal",
            "sort": list(TASKS),
            "title": None,
            "axis": {"orient": "top", "labelAngle": -35},
        },
        "y": {
            "field": "policy",
            "type": "nominal",
            "sort": list(dict.fromkeys(r["policy"] for r in rows)),
            "title": None,
            "axis": axis,
        },
    }
    colour = {
        "field": "right",
        "type": "quantitative",
        "legend": None,
        "scale": {"domain": [0, 100], "scheme": "blues"},
    }
    ink = {"condition": {"test": "datum.right > 55", "value": "white"}, "value": "#24292f"}
    layers = [
        {"mark": "rect", "encoding": {"color": colour}},
        {"mark": {"type": "text", "fontSize": 10}, "encoding": {"text": {"field": "right", "format": ".0f"}, "color": ink}},
    ]
    return {
        "title": QUESTIONS[question],
        "width": 32 * len(TASKS),
        "height": 16 * len({r["policy"] for r in shown}),
        "data": {"values": shown},
        "encoding": encoding,
        "layer": layers,
    }


def drawings(results: Path = RESULTS) -> dict[str, str]:
    """The picture for a light and a dark page, by file name."""
    return draw([picture(answered(measured(results)))])


if __name__ == "__main__":
    write(drawings(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS), FOLDER)
