"""The training curve stored with a reference model: its log, thinned to enough points for a chart."""

from __future__ import annotations

import json
from pathlib import Path

NAME = "training.jsonl"  # in a model's directory
_MAX_POINTS = 150


def curve(log: Path) -> str:
    """The thinned log as lines of JSON: tokens so far, mean loss, and the latest attention to the first token, if any.

    Args:
        log: training log, one line of JSON per step.
    """
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    stride = max(1, len(rows) // _MAX_POINTS)
    lines = []
    for start in range(0, len(rows), stride):
        steps = rows[start : start + stride]
        probes = [row["attention_to_first"] for row in steps if "attention_to_first" in row]
        line = {"tokens": steps[-1]["tokens"], "loss": round(sum(row["loss"] for row in steps) / len(steps), 5)}
        lines.append(line | ({"attention_to_first": {k: round(v, 5) for k, v in probes[-1].items()}} if probes else {}))
    return "".join(f"{json.dumps(line)}\n" for line in lines)
