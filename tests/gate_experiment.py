"""The gate on the whole quickstart suite: runs between which nothing changed, and four regressions. Half an hour.

`python tests/gate_experiment.py --baseline leaderboard/baselines/quickstart --runs 20` prints a line a run: what the gate said.
Quality regressions are measured by the plain walk, which is what they break; the baseline agrees with it to rounding.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import injected

from harness.cli.judge import _again, _latency_run
from harness.cli.running import Asked
from harness.report import baseline, gate

_RED: dict[str, tuple[Callable[[], AbstractContextManager[None]], set[str], bool]] = {
    "H2O 30 % slower": (injected.slowdown, {"latency"}, False),
    "a wrong rank": (injected.wrong_rank, {"perplexity"}, True),
    "a slot too many": (injected.larger_cache, {"perplexity", "streameval"}, True),
    "perplexity +0.5 %": (injected.worse, {"perplexity"}, False),
}


def judged(folder: Path, broken: AbstractContextManager[None], tasks: set[str] | None, walk: bool) -> list[gate.Finding]:
    """What the gate finds in a run of the baseline's suite, with the second chance that a run gives."""
    about, records = baseline.load(folder)
    asked = Asked(about.suite, **about.options)
    cells = [c for c in asked.cells() if tasks is None or c.task.name in tasks]
    held = [r for r in records if r.cell_id in {c.id for c in cells}]
    with tempfile.TemporaryDirectory() as scratch, broken:
        now = asked.measured(Path(scratch) / "now", cells, fresh=True, walk=walk)
        findings = gate.check((held, folder), (now, Path(scratch) / "now"), about.bands)
        return _again(findings, lambda n: _latency_run(asked, Path(scratch) / str(n)), about.bands, records)


def main() -> None:
    """Exit 1 if a run without a change was red, or one with a change was green."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baseline", type=Path, default=Path("leaderboard/baselines/quickstart"))
    parser.add_argument("--runs", type=int, default=20)
    asked = parser.parse_args()
    wrong = 0
    for number in range(asked.runs):
        wrong += _told(f"nothing changed, {number + 1} of {asked.runs}", judged(asked.baseline, nullcontext(), None, False), 0)
    for name, (broken, tasks, walk) in _RED.items():
        wrong += _told(name, judged(asked.baseline, broken(), tasks, walk), 1)
    sys.exit(wrong > 0)


def _told(what: str, findings: list[gate.Finding], expected: int) -> bool:
    code = gate.exit_code(findings)
    red = [f for f in findings if f.state == "regression"]
    why = "; ".join(f"{f.check}: {f.cell.split(', ', 1)[1]}: {f.says}" for f in red[:2])
    verdict = {0: "green", 1: "RED", 2: "not to be told"}[code]
    print(f"{what}: {verdict}, {len(red)} of {len(findings)} checks. {why}", flush=True)
    return code != expected


if __name__ == "__main__":
    main()
