"""Tries the gate on unchanged runs, and on every regression of tests/injected.py and tests/tampered.py.

    python tests/gate_experiment.py --baseline leaderboard/baselines/quickstart --runs 20 --out gate.jsonl
    python tests/gate_experiment.py --only kernel --only RoPE --runs 0 --out gate.jsonl
    python tests/gate_experiment.py --elsewhere --runs 0 --out elsewhere.jsonl  # as if from another CPU: any red will do

Prints a line per run. Exits with 1 if any outcome is unexpected. Runs that are in the file
already are skipped, so it can be done in pieces. It needs an idle machine. On another CPU than the baseline's, as with
`--elsewhere`, broken code that only times or the choice of a method show is left out, and any red will do. Changed records
are compared with records of the same machine, so that they are tried anywhere.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from injected import INJECTIONS, Injection
from tampered import TAMPERED, Tampering, copied

from kvbench.harness.cli.rerun import request_from_baseline, with_groups
from kvbench.harness.core.device import device_name, instructions
from kvbench.harness.core.errors import RefusedModelError, UserError
from kvbench.harness.records import Record, RecordStore
from kvbench.harness.records.run_facts import Facts
from kvbench.harness.report import baseline, gate
from kvbench.harness.suite import Cell

WALKED = ("window", "h2o")  # measured if an injection needs the plain walk: one by position, one by attention
_SAME_MACHINE = ("method", "latency", "prompt", "speed")  # checks that say nothing of another CPU
_SAID = {0: "green", 1: "red", 2: "refused", 3: "not comparable", 5: "too little compared"}
Outcome = dict[str, Any]  # name, expected, red (checks with their numbers), code, says, surprise, seconds


class Experiment:
    """A baseline, and the file of the outcomes."""

    def __init__(self, folder: Path, out: Path, model: str | None, data: str | None, elsewhere: bool = False) -> None:
        self.folder, self.out, self.renamed = folder, out, elsewhere
        self.about, self.records = baseline.load(folder)
        facts, cpu = self.records[0].facts, torch.device("cpu")
        self.elsewhere = elsewhere or (facts.device, facts.instructions) != (device_name(cpu), instructions(cpu))
        self.request = request_from_baseline(self.about, folder, model, data)
        self.cells = self.request.cells()
        self.done: list[Outcome] = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    def unchanged(self, number: int) -> Outcome:
        """A whole run without a change. It must be green."""
        return self._outcome(f"nothing changed, run {number}", None, self._judged(nullcontext(), self.cells, False))

    def showing(self, injection: Injection) -> list[Cell]:
        """The cells that show a regression."""
        return [c for c in self.cells if c.task.name in injection.tasks and injection.shows(c)]

    def injected(self, name: str, injection: Injection) -> Outcome:
        """A run of broken code. The expected check must be red."""
        caught, because = injection.caught, injection.because
        if injection.hides is not None:
            policy, share = injection.hides
            above = self._band_of(policy)
            if above > share:
                caught, because = None, f"not caught: the band of {policy} reaches {above:.0%} above its ratio in this baseline"
        findings = self._judged(injection.broken(), self.showing(injection), injection.walk)
        found = self._outcome(name, caught, findings, because, hides=injection.hides is not None)
        if self.elsewhere and caught:
            found["surprise"] = not found["red"]  # which check catches it depends on how closely another CPU is held
        return found

    def tampered(self, name: str, tampering: Tampering) -> Outcome:
        """A check of records that were changed after measuring. Nothing is measured."""
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / "copy"
            if tampering.side == "now":
                tampering.change(copied(self.folder, copy))
                records = RecordStore(copy).read_all()[0]
                findings = gate.check((self.records, self.folder), (records, copy), self.about.bands)
                return self._outcome(name, tampering.caught, findings)
            tampering.change(copied(self.folder, copy))
            try:
                baseline.load(copy)
            except UserError as error:
                says = str(error).replace(str(copy), self.folder.name)
                return _outcome(name, tampering.caught, {"load": 1}, 2, says)
        return _outcome(name, tampering.caught, {}, 0, "the baseline was read as if nothing had happened")

    def _judged(self, broken: AbstractContextManager[None], cells: Sequence[Cell], walk: bool) -> list[gate.Finding]:
        """The findings of `bench check` in these cells while the code is broken, remeasurements included.

        If everything is walked token by token, two policies stand for all.
        """
        cells = [c for c in cells if not walk or c.name in WALKED]
        ids = {c.id for c in cells}
        base = ([r for r in self.records if r.cell_id in ids], self.folder)
        tries = itertools.count()
        with tempfile.TemporaryDirectory() as scratch, broken:

            def measured(chosen: set[str]) -> tuple[list[Any], Path]:
                target = Path(scratch) / f"{next(tries)}"
                records = replace(self.request, walk=walk).measure(target, with_groups(chosen, cells))
                return [_of_another_cpu(r) for r in records] if self.renamed else records, target

            try:
                now = measured(ids)
            except RefusedModelError as error:
                return gate.check(base, ([], Path(scratch)), self.about.bands, refused=str(error))
            findings = gate.check(base, now, self.about.bands)
            return gate.remeasure(findings, base[0], self.about.bands, lambda chosen: measured(set(chosen))[0])

    def _band_of(self, policy: str) -> float:
        """The upper part of a policy's band, as a share of its ratio."""
        ids = {r.cell_id for r in self.records if r.cell.policy == policy}
        return max((b.high / b.ratio for cell, b in self.about.bands.items() if cell in ids), default=float("inf")) - 1

    def _outcome(
        self, name: str, caught: str | None, findings: list[gate.Finding], because: str = "", hides: bool = False
    ) -> Outcome:
        bad = [f for f in findings if f.state in gate.CODES]
        red = dict(Counter(f.check for f in bad))
        first = next((f for f in bad if f.check == caught), bad[0] if bad else None)
        says = f"{first.cell.split(', ', 1)[1]}: {first.says}" if first else because or f"{len(findings)} checks"
        found = _outcome(name, caught, red, int(gate.exit_code(findings)), says)
        if hides and caught is None:
            found["surprise"] = False  # the gate may notice it anyway
        return found


def _of_another_cpu(record: Record) -> Record:
    return replace(record, facts=Facts.from_json(record.facts.as_json() | {"device": "another CPU"}))


def _outcome(name: str, caught: str | None, red: dict[str, int], code: int, says: str) -> Outcome:
    surprise = (caught not in red) if caught else bool(red)
    return {"name": name, "expected": caught, "red": red, "code": code, "says": says, "surprise": surprise}


def planned(experiment: Experiment, runs: int, only: list[str]) -> Iterator[tuple[str, Any]]:
    """The names of the runs to do, each with its function. Unchanged runs are named by number."""
    names = {o["name"] for o in experiment.done}
    for number in range(1, runs + 1):
        if f"nothing changed, run {number}" not in names:
            yield f"nothing changed, run {number}", lambda number=number: experiment.unchanged(number)
    for table, do in ((INJECTIONS, experiment.injected), (TAMPERED, experiment.tampered)):
        for name, what in table.items():
            broken = isinstance(what, Injection)
            if broken and ((experiment.elsewhere and what.caught in _SAME_MACHINE) or not experiment.showing(what)):
                continue
            if name not in names and (not only or any(part in name for part in only)):
                yield name, lambda name=name, what=what, do=do: do(name, what)


def line(outcome: Outcome) -> str:
    """A line of text about a run."""
    state = _SAID[outcome["code"]]
    red = ", ".join(f"{check} {count}" for check, count in outcome["red"].items())
    note = "  <-- NOT AS EXPECTED" if outcome["surprise"] else ""
    return f"{outcome['name']}: {state} ({red or 'nothing'}) in {outcome['seconds']} s. {outcome['says'][:200]}{note}"


def main() -> None:
    """Exit with 1 if any outcome is unexpected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, default=Path("leaderboard/baselines/quickstart"))
    parser.add_argument("--runs", type=int, default=20, help="runs without a change")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only injections with this in their name")
    parser.add_argument("--out", type=Path, default=Path("gate-experiment.jsonl"), help="what was seen, a line of JSON each")
    parser.add_argument("--elsewhere", action="store_true", help="records claim to come from another CPU")
    parser.add_argument("--model", help="where the baseline's model is, if it was a local one")
    parser.add_argument("--data", help="directory of the text")
    arguments = parser.parse_args()
    experiment = Experiment(arguments.baseline, arguments.out, arguments.model, arguments.data, arguments.elsewhere)
    for _, do in planned(experiment, arguments.runs, arguments.only):
        started = time.monotonic()
        outcome = do() | {"seconds": round(time.monotonic() - started)}
        experiment.done.append(outcome)
        with arguments.out.open("a") as file:
            file.write(json.dumps(outcome, ensure_ascii=False) + "\n")
        print(line(outcome), flush=True)
    sys.exit(any(o["surprise"] for o in experiment.done))


if __name__ == "__main__":
    main()
