"""The training curve that a reference model carries along: its log, thinned to what a picture shows."""

from __future__ import annotations

import json
from pathlib import Path

NAME = "training.jsonl"  # in a model's directory
_POINTS = 150


def curve(log: Path) -> str:
    """Lines of JSON, each of some steps: tokens seen by then, their mean loss, attention to the first token if probed.

    Args:
        log: of the training, a line of JSON a step.
    """
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    each = max(1, len(rows) // _POINTS)
    lines = []
    for start in range(0, len(rows), each):
        steps = rows[start : start + each]
        probes = [row["attention_to_first"] for row in steps if "attention_to_first" in row]
        line = {"tokens": steps[-1]["tokens"], "loss": round(sum(row["loss"] for row in steps) / len(steps), 5)}
        lines.append(line | ({"attention_to_first": {k: round(v, 5) for k, v in probes[-1].items()}} if probes else {}))
    return "".join(f"{json.dumps(line)}\n" for line in lines)
