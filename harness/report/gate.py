"""The regression gate: comparison of records with a baseline. Verdict: pass, regression, better than before, not comparable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.harness.core.errors import Exit
from kvbench.harness.records import Record
from kvbench.harness.report import gate_figures, gate_times
from kvbench.harness.report.compare import cell_name
from kvbench.harness.report.gate_figures import Pair, Result, State
from kvbench.harness.report.gate_times import Band

CODES: dict[State, Exit] = {"regression": Exit.NO, "better": Exit.NO, "could not compare": Exit.NOT_COMPARABLE}
_ORDER: tuple[State, ...] = ("regression", "better", "could not compare", "not compared", "ok")
_BAD: dict[State, str] = {"regression": "worse", "better": "better", "could not compare": "could not be compared"}
_FEWEST_COMPARED = 0.75  # smallest share of checks compared for a verdict
Measured = tuple[Sequence[Record], Path]  # records, and the folder of their files and traces
Checks = Sequence[Callable[[Pair], Iterator[Result]]]


@dataclass(frozen=True)
class Finding:
    """Result of a check of a cell.

    Attributes:
        cell: description of the cell.
        cell_id: id of the cell.
        check: status, data, method, trace, exactness, figures, answers, bytes, flags, quality, latency, prompt, speed or memory.
        state: result. "better" fails the gate unless allowed. "could not compare" fails the gate. "not compared" does not fail
            it, because the check does not apply on this machine.
        says: figures, or reason.
    """

    cell: str
    cell_id: str
    check: str
    state: State
    says: str


def check(
    base: Measured, now: Measured, bands: Mapping[str, Band], refused: str = "", checks: Checks = gate_figures.CHECKS
) -> list[Finding]:
    """Run the checks of figures, times and memory on every cell of the baseline. Regressions come first.

    Args:
        bands: latency bands of the baseline, by cell id.
        refused: reason that the model is now refused, so that nothing was measured; empty if it is not refused.
        checks: checks of figures.
    """
    missing: Result = ("status", "could not compare", "the cell has no record: measure it")
    if refused:
        missing = ("status", "regression", f"the model is refused: {refused}")
    ours, findings = {r.cell_id: r for r in now[0]}, []
    for record in base[0]:
        other = ours.get(record.cell_id)
        results = [missing]
        if other is not None:
            results = [*_results(Pair(record, other, (base[1], now[1]), now[0], base[0]), bands, checks)]
        findings += [Finding(cell_name(record, other or record), record.cell_id, *result) for result in results]
    return sorted(findings, key=lambda finding: _ORDER.index(finding.state))


def _results(pair: Pair, bands: Mapping[str, Band], checks: Checks) -> Iterator[Result]:
    """Yield the results of all checks of a cell, up to the first figure of a wrong type."""
    try:
        if (unusable := gate_figures.unusable(pair)) is not None:
            yield unusable
            return
        for compare in checks:
            yield from compare(pair)
        yield from gate_times.timed(pair, bands)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        yield "figures", "could not compare", f"a figure has the wrong type ({type(error).__name__}: {error})"


def exit_code(findings: Sequence[Finding], allow_better: bool = False) -> Exit:
    """Return the verdict as an exit code.

    Returns:
        NO for a regression, or for a figure that is better than its band; NOT_COMPARABLE if any check or all cells could not be
        compared; TOO_FEW_COMPARED if nothing failed, but too few checks apply on this machine; else OK.
    """
    codes = {CODES.get(f.state, Exit.OK) for f in findings if not (allow_better and f.state == "better")}
    code = next((code for code in (Exit.NO, Exit.NOT_COMPARABLE) if code in codes), None)
    if code is not None or not findings:
        return code or Exit.NOT_COMPARABLE
    compared = sum(f.state != "not compared" for f in findings)
    return Exit.OK if compared >= _FEWEST_COMPARED * len(findings) else Exit.TOO_FEW_COMPARED


def verdict(findings: Sequence[Finding], allow_better: bool = False) -> str:
    """Summarise the findings and the number of checks in a line."""
    counts = Counter(f.state for f in findings)
    parts = [f"{len(findings) - counts['not compared'] - counts['could not compare']} of {len(findings)} checks compared"]
    parts += [f"{counts[state]} {words}" for state, words in _BAD.items() if counts[state]]
    left_out = Counter(f.check for f in findings if f.state == "not compared")
    parts += [f"not applicable: {', '.join(f'{check} {count}' for check, count in left_out.items())}"] if left_out else []
    summary = {
        Exit.OK: "as good as the baseline",
        Exit.NO: "REGRESSION" if counts["regression"] else "BETTER than the baseline: update it, or allow it (--allow-better)",
        Exit.TOO_FEW_COMPARED: "too few checks apply on this machine for a verdict",
    }.get(exit_code(findings, allow_better), "incomplete")
    return f"{summary}: {'; '.join(parts)}"


def remeasure(
    findings: Sequence[Finding], base: Sequence[Record], bands: Mapping[str, Band], measure: Callable[..., Sequence[Record]]
) -> list[Finding]:
    """Measure cells again that were slower, faster, larger or smaller, until two of three measurements agree.

    measure: function that measures the cells with given ids again, with the cells they are compared with.
    """
    differing = [f for f in findings if f.check in gate_times.CHECKS and f.state in ("regression", "better")]
    repeats = {(f.cell_id, f.check): [f] for f in differing}
    while undecided := [key for key, measured in repeats.items() if _majority(measured) is None]:
        run = measure({cell_id for cell_id, _ in undecided})
        again = {(f.cell_id, f.check): f for f in check((base, Path()), (run, Path()), bands, checks=())}
        for key in undecided:
            failed = replace(repeats[key][0], state="could not compare", says="the cell failed when measured again")
            repeats[key].append(again.get(key, failed))
    decided = {key: _majority(measured) for key, measured in repeats.items()}
    return sorted((decided.get((f.cell_id, f.check)) or f for f in findings), key=lambda f: _ORDER.index(f.state))


def _majority(repeats: Sequence[Finding]) -> Finding | None:
    """Return a finding on which two measurements agree, or the last of three; None if another measurement is needed."""
    states = [f.state for f in repeats]
    agreed = next((f for f in reversed(repeats) if states.count(f.state) >= 2), None)
    return agreed or (repeats[-1] if len(repeats) >= 3 else None)
