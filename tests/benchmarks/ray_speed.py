"""How much faster a suite is with more workers, and what a cell costs beside its own work.

Times are from the first group that is sent to the last record that is written: workers load their model in them, but the start of
Ray, Python and torch, and what is checked before anything is measured, are printed apart.

python tests/benchmarks/ray_speed.py --workers 1 2 --cells 24 --tokens 6000 --rounds 3
python tests/benchmarks/ray_speed.py --workers 1 2 --cells 200 --tokens 32 --rounds 1
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

from kvbench.harness.records import RecordStore
from kvbench.harness.run.executor import RunWatcher
from kvbench.harness.run.on_ray import ray_executor
from kvbench.harness.run.request import RunRequest
from kvbench.harness.run.runner import run

SUITE = """
suite: speed
version: 1
model: {{id: "builtin:sink_1"}}
task: {{name: perplexity, data: prose, tokens: {tokens}}}
capacity: [{capacities}]
policies: [h2o]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cells", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    walls: dict[int, list[float]] = {count: [] for count in args.workers}
    with tempfile.TemporaryDirectory() as folder:
        suite = Path(folder) / "speed.yaml"
        suite.write_text(SUITE.format(tokens=args.tokens, capacities=", ".join(str(16 + i % 16) for i in range(16))))
        for number in range(args.rounds):
            for count in args.workers:  # interleaved
                walls[count].append(wall(suite, count, args.cells, Path(folder) / f"{number}-{count}"))
    first = median(walls[args.workers[0]])
    for count, seconds in walls.items():
        print(f"{count} workers: {median(seconds):.1f} s, {first / median(seconds):.2f} times {args.workers[0]}; {seconds}")


class Timed:
    """An executor that notes how long it measures."""

    def __init__(self, executor) -> None:
        self.executor, self.seconds = executor, 0.0

    def measure(self, *args) -> None:
        started = time.perf_counter()
        self.executor.measure(*args)
        self.seconds = time.perf_counter() - started


def wall(suite: Path, workers: int, count: int, results: Path) -> float:
    """Seconds of the measurement of a suite."""
    request = RunRequest(str(suite), settings=(f"seed={list(range(-(-count // 16)))}",), threads=1, device="cpu")
    cells = request.cells()[:count]
    options = request._options(None, False, False, None)
    started = time.perf_counter()
    with ray_executor("local", workers, 1, "cpu", options, cells) as executor:
        timed = Timed(executor)
        records = run(cells, RecordStore(results), options, RunWatcher(), timed, executor.machine)
    before, seconds = time.perf_counter() - started - timed.seconds, timed.seconds
    inside = sum(record.facts.seconds or 0 for record in records)
    assert all(record.status == "ok" for record in records)
    print(
        f"{workers} workers, {len(cells)} cells: {seconds:.2f} s, and {before:.1f} s to start and end; cells {inside:.2f} s; "
        f"beside them {1e3 * (workers * seconds - inside) / len(cells):.1f} ms of a worker a cell",
        flush=True,
    )
    return seconds


if __name__ == "__main__":
    main()
