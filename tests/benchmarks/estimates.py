"""Compare the estimates of `bench run --dry-run` with the seconds that each cell then takes.

    python tests/benchmarks/estimates.py path/to/model [--capacity 128] [--streams 8] [--length 384] [--threads 1]

Prints a row per cell: estimated and measured seconds, the seconds of reading alone, and the ratio of the first two. The first
cell's measured seconds include loading the model.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import yaml

from kvbench.harness.run.estimate import estimates
from kvbench.harness.run.request import RunRequest

POLICIES = (
    "dense",
    "window",
    "sink_window",
    "random",
    "h2o",
    "snapkv",
    "tova",
    "keydiff",
    "expected_attention",
    "lagkv",
    "rkv",
    "knorm",
)


def suite(model: str, capacity: int, streams: int, length: int) -> str:
    """YAML of a suite with a step, a prompt and a question cell of each policy."""
    text = {"name": "perplexity", "data": "prose", "tokens": streams * length, "streams": streams}
    moments = {"step": {"positions": "cache"}, "prompt": {"positions": "stream"}}
    entries = [{"name": name, "evict": evict} | rest for name in POLICIES[1:] for evict, rest in moments.items()]
    tasks = [text | {"evict": "step"}, text | {"prompt": length * 3 // 4, "evict": "prompt"}]
    return yaml.safe_dump(
        {
            "suite": "estimates",
            "version": 1,
            "model": {"id": model},
            "task": tasks,
            "capacity": capacity,
            "policies": [{"name": "dense"}, *entries],
        }
    )


def main() -> None:
    """Parse the command line, estimate, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, value in (("capacity", 128), ("streams", 8), ("length", 384), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "estimates.yaml"
        path.write_text(suite(given.model, given.capacity, given.streams, given.length))
        request = RunRequest(str(path), device="cpu", threads=given.threads)
        request.use_threads()
        cells = request.cells()
        expected = {row.cell.id: row.seconds or 0.0 for row in estimates(cells, "cpu", tried=True)}
        records = {r.cell_id: r for r in request.measure(Path(folder) / "results", cells)}
    print(f"{'policy':20} {'evict':7} {'estimated':>9} {'measured':>9} {'reading':>8} {'ratio':>6} method")
    for cell in cells:
        facts, seconds = records[cell.id].facts, expected[cell.id]
        times = f"{seconds:9.1f} {facts.seconds:9.1f} {facts.measured_seconds:8.1f} {seconds / facts.seconds:6.2f}"
        print(f"{cell.name:20} {cell.evict!s:7} {times} {facts.method}")


if __name__ == "__main__":
    main()
