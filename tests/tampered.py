"""Records, traces and baselines that are changed after measuring, and the gate's check that must notice."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factories import working_copy

from kvbench.harness.report.baseline import FILE

Edit = Callable[[dict[str, Any]], None]  # changes a record's JSON value


@dataclass(frozen=True)
class Tampering:
    """A change to a folder of records.

    Attributes:
        change: a function that changes the folder.
        side: "baseline", or the records under test.
        caught: the check that is red or "not comparable"; "load" if the baseline is refused.
    """

    change: Callable[[Path], None]
    side: str
    caught: str


def _records(folder: Path, task: str) -> list[Path]:
    """Records of a task."""
    found = [path for path in sorted(folder.rglob("*.json")) if json.loads(path.read_text())["cell"]["task"]["name"] == task]
    assert found, f"no records of {task} in {folder}"
    return found


def edited(task: str, edit: Edit) -> Callable[[Path], None]:
    """Change all records of a task."""

    def change(folder: Path) -> None:
        for path in _records(folder, task):
            value = json.loads(path.read_text())
            edit(value)
            path.write_text(json.dumps(value, indent=1), encoding="utf-8")

    return change


def _times(name: str, factor: float) -> Edit:
    def edit(value: dict[str, Any]) -> None:
        value["metrics"][name] *= factor

    return edit


def _buckets(value: dict[str, Any]) -> None:
    for bucket in value["metrics"]["buckets"]:
        bucket["nll"] /= 2


def _on_stride(value: dict[str, Any]) -> None:
    sums = value["metrics"].get("on_stride", {"nll_sum": []})["nll_sum"]
    sums[:] = [1.2 * x for x in sums]


def _half_lost(value: dict[str, Any]) -> None:
    """Every second right answer is wrong."""
    metrics, seen, outcomes = value["metrics"], 0, ""
    for outcome in metrics["outcomes"]:
        seen += outcome == "1"
        outcomes += "0" if outcome == "1" and seen % 2 else outcome
    right = outcomes.count("1")
    metrics |= {"outcomes": outcomes, "right": right, "accuracy": right / len(outcomes)}


def _all_lost(value: dict[str, Any]) -> None:
    metrics = value["metrics"]
    metrics |= {"outcomes": "0" * len(metrics["outcomes"]), "right": 0, "accuracy": 0.0}


def _leaked(value: dict[str, Any]) -> None:
    value["metrics"]["peak_bytes"] *= 100
    value["metrics"]["flags"].append("its peak rose by 30,000,000 bytes after the cache had filled")


def _fifth_of_the_peak(value: dict[str, Any]) -> None:
    value["metrics"]["peak_bytes"] //= 5
    for point in value["metrics"]["curve"]:
        point["peak_bytes"] //= 5


def _failed(value: dict[str, Any]) -> None:
    value |= {"status": "failed", "error": {"kind": "injected", "message": ""}, "metrics": {}}


def _delete(folder: Path) -> None:
    _records(folder, "perplexity")[0].unlink()


def _trace(folder: Path) -> Path:
    return sorted(folder.rglob("*.nll.npy"))[0]


def _truncated(folder: Path) -> None:
    path = _trace(folder)
    path.write_bytes(path.read_bytes()[:-400])


def _flipped(folder: Path) -> None:
    path = _trace(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def _no_trace(folder: Path) -> None:
    _trace(folder).unlink()


TAMPERED: dict[str, Tampering] = {
    "record: nll halved": Tampering(edited("perplexity", _times("nll", 0.5)), "now", "trace"),
    "record: perplexity halved": Tampering(edited("perplexity", _times("perplexity", 0.5)), "now", "trace"),
    "record: bits per byte halved": Tampering(edited("perplexity", _times("bits_per_byte", 0.5)), "now", "figures"),
    "record: buckets halved": Tampering(edited("perplexity", _buckets), "now", "trace"),
    "record: on_stride x1.2": Tampering(edited("perplexity", _on_stride), "now", "trace"),
    "record: half of the right answers lost": Tampering(edited("streameval", _half_lost), "now", "trace"),
    "record: all answers wrong": Tampering(edited("streameval", _all_lost), "now", "trace"),
    "record: peak x100, with a flag": Tampering(edited("memory", _leaked), "now", "memory"),
    "record: a fifth of the peak": Tampering(edited("memory", _fifth_of_the_peak), "now", "memory"),
    "record: its trace truncated": Tampering(_truncated, "now", "trace"),
    "record: its trace flipped in one bit": Tampering(_flipped, "now", "trace"),
    "baseline: a record deleted": Tampering(_delete, "baseline", "load"),
    "baseline: a record set failed": Tampering(edited("perplexity", _failed), "baseline", "load"),
    "baseline: nll doubled": Tampering(edited("perplexity", _times("nll", 2.0)), "baseline", "load"),
    "baseline: a trace truncated": Tampering(_truncated, "baseline", "load"),
    "baseline: a trace flipped in one bit": Tampering(_flipped, "baseline", "load"),
    "baseline: a trace deleted": Tampering(_no_trace, "baseline", "load"),
}


def copied(folder: Path, to: Path) -> Path:
    """Records to tamper with, a file for each, and the manifest if they are a baseline."""
    working_copy(folder, to)
    if (folder / FILE).exists():
        shutil.copy(folder / FILE, to / FILE)
    return to
