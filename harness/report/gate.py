"""The gate: whether records are as good as a baseline's. Pass, regression, or not comparable."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.harness.core.errors import Exit
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import ScoreMetrics
from kvbench.harness.records.rules import compared
from kvbench.harness.report import gate_figures, gate_times
from kvbench.harness.report.bands import Band
from kvbench.harness.report.compare import MARGINS, differences
from kvbench.harness.report.difference import Difference
from kvbench.harness.report.gate_pair import Pair, Result, State
from kvbench.harness.report.verdicts import cell_name

CODES: dict[State, Exit] = {"regression": Exit.NO, "could not compare": Exit.NOT_COMPARABLE}
_ORDER: tuple[State, ...] = ("regression", "could not compare", "not compared", "ok")
_QUALITY = {name: MARGINS[name] for name in ("nll", "accuracy", "score")}
Measured = tuple[Sequence[Record], Path]  # records, and the folder that holds them and their traces


@dataclass(frozen=True)
class Finding:
    """One check of one cell.

    Attributes:
        cell: in words.
        cell_id: of it.
        check: status, data, method, trace, exactness, figures, answers, bytes, flags, quality, latency, prompt, speed or memory.
        state: "could not compare" is a failure of the gate, "not compared" is none: nothing was asked that could be answered.
        says: the figures.
    """

    cell: str
    cell_id: str
    check: str
    state: State
    says: str


def check(base: Measured, now: Measured, bands: Mapping[str, Band], refused: str = "") -> list[Finding]:
    """Every check of every cell of the baseline, regressions first.

    Args:
        base: the baseline's records and their folder.
        now: the records that are judged, and theirs.
        bands: of the baseline's latency ratios, by cell id.
        refused: why no further cell could be measured: a model that was fine then is refused now.
    """
    ours = {r.cell_id: r for r in now[0]}
    findings = []
    for record in base[0]:
        other = ours.get(record.cell_id)
        if other is not None:
            results = _readable(Pair(record, other, (base[1], now[1]), now[0], base[0]), bands)
        elif refused:
            results = iter([("status", "regression", f"the model is refused: {refused}")])
        else:
            results = iter([("status", "could not compare", "there is no record of it")])
        name = cell_name(record, other or record)
        findings += [Finding(name, record.cell_id, *result) for result in results]
    return in_order(findings)


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Regressions first."""
    return sorted(findings, key=lambda f: _ORDER.index(f.state))


def exit_code(findings: Sequence[Finding]) -> Exit:
    """OK: as good as the baseline; NO: a regression; NOT_COMPARABLE: something, or everything, could not be compared."""
    codes = {CODES.get(f.state, Exit.OK) for f in findings}
    return next((code for code in (Exit.NO, Exit.NOT_COMPARABLE) if code in codes), Exit.OK if codes else Exit.NOT_COMPARABLE)


def remeasure(
    findings: Sequence[Finding], base: Sequence[Record], bands: Mapping[str, Band],
    measure: Callable[[Collection[str]], Sequence[Record]],
) -> list[Finding]:  # fmt: skip
    """What looked slower or larger, measured again until two of three agree.

    Args:
        findings: of the first run.
        base: the baseline's records.
        bands: of its latency ratios.
        measure: the cells of these ids, and whatever must be measured beside them, measured anew.
    """
    looks = {(f.cell_id, f.check): [f] for f in findings if f.check in gate_times.CHECKS and f.state == "regression"}
    while unsure := {of for of, seen in looks.items() if _majority(seen) is None}:
        again = measure({cell_id for cell_id, _ in unsure})
        judged = {(f.cell_id, f.check): f for f in _timed(base, again, bands)}
        for of in unsure:
            lost = replace(looks[of][0], state="could not compare", says="it failed when measured again")
            looks[of].append(judged.get(of, lost))
    decided = {of: _majority(seen) for of, seen in looks.items()}
    return in_order([decided.get((f.cell_id, f.check)) or f for f in findings])


def _majority(looks: Sequence[Finding]) -> Finding | None:
    """What two of three measurements say, or the last of three; None if there must be another one."""
    for finding in reversed(looks):
        if [f.state for f in looks].count(finding.state) >= 2:
            return finding
    return looks[-1] if len(looks) >= 3 else None


def _timed(base: Sequence[Record], run: Sequence[Record], bands: Mapping[str, Band]) -> Iterator[Finding]:
    """The checks of time and memory alone, of what was measured and went well."""
    ours = {r.cell_id: r for r in run if r.status == "ok"}
    for record in (r for r in base if r.cell_id in ours):
        for result in gate_times.timed(Pair(record, ours[record.cell_id], (Path(), Path()), run, base), bands):
            yield Finding(cell_name(record, record), record.cell_id, *result)


def _readable(pair: Pair, bands: Mapping[str, Band]) -> Iterator[Result]:
    """All checks of a cell, as far as its figures are of the kinds that they should be."""
    try:
        yield from _cell(pair, bands)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        yield "figures", "could not compare", f"a figure of another kind than it should be ({type(error).__name__}: {error})"


def _cell(pair: Pair, bands: Mapping[str, Band]) -> Iterator[Result]:
    failed = gate_figures.status(pair.base, pair.now)
    if failed is not None:
        yield failed
        return
    other = gate_figures.other_question(pair)
    if other:
        yield "data", "could not compare", other
        return
    for judge in (
        gate_figures.method, gate_figures.consistent, gate_figures.exactness, gate_figures.table, gate_figures.answers,
        gate_figures.flags, _quality,
    ):  # fmt: skip
        yield from judge(pair)
    yield from gate_times.timed(pair, bands)


def _quality(pair: Pair) -> Iterator[Result]:
    """The paired mean, with its interval: what decides wherever rounding differs."""
    marks = {name: mark.margin for name, mark in compared(type(pair.now.metrics)).items()}
    for difference in differences(pair.base, pair.now):
        margin = _QUALITY.get(difference.metric) or marks.get(difference.metric)
        if margin is None:
            continue
        state: State = "regression" if difference.verdict == "worse" else "ok"
        if difference.low is None:
            off = _worse(difference, pair.now)  # without an interval the margin alone decides: rounding is no regression
            state = "could not compare" if off is None else "regression" if off > margin else "ok"
        interval = f" [{difference.low:+.4g}, {difference.high:+.4g}]" if difference.low is not None else ""
        change = "" if difference.change is None else f"{difference.change:+.4g}{interval}"
        yield "quality", state, f"{difference.metric} {difference.a:.5g} -> {difference.b:.5g}: {change} {difference.why}".strip()


def _worse(difference: Difference, record: Record) -> float | None:
    """By how much, in the metric's own unit; negative if better."""
    scores = record.measured(ScoreMetrics)
    if difference.change is None or difference.metric == "nll" or (scores is not None and not scores.higher_is_better):
        return difference.change
    return -difference.change
