"""The gate: whether records are as good as a baseline's. Yes, no, or not to be told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.errors import Exit
from harness.records import Record
from harness.report.baseline import Band, ratio
from harness.report.compare import MARGINS, Difference, differences, largest_difference, moved
from harness.report.sources import trace
from harness.report.verdicts import cell_name

State = Literal["ok", "regression", "could not compare", "not compared"]
LARGEST = {"float32": 1e-3}  # nats a token may differ, by dtype; others are not held to it
CODES: dict[State, Exit] = {"regression": Exit.NO, "could not compare": Exit.NOT_COMPARABLE}


@dataclass(frozen=True)
class Finding:
    """One check of one cell.

    Attributes:
        cell: in words.
        cell_id: of it.
        check: status, data, exactness, quality, bytes or latency.
        state: "could not compare" is a failure of the gate, "not compared" is none: nothing was asked that could be answered.
        says: the figures.
    """

    cell: str
    cell_id: str
    check: str
    state: State
    says: str


def check(
    base: tuple[Sequence[Record], Path], now: tuple[Sequence[Record], Path], bands: dict[str, Band]
) -> list[Finding]:  # fmt: skip
    """Every check of every cell of the baseline, regressions first.

    Args:
        base: the baseline's records and their folder.
        now: the records that are judged, and theirs.
        bands: of the baseline's latency ratios, by cell id.
    """
    ours = {r.cell_id: r for r in now[0]}
    findings = []
    for record in base[0]:
        other = ours.get(record.cell_id)
        name = cell_name(record, other or record)
        for check, state, says in _cell(record, other, (base[1], now[1]), now[0], bands):
            findings.append(Finding(name, record.cell_id, check, state, says))
    order: list[State] = ["regression", "could not compare", "not compared", "ok"]
    return sorted(findings, key=lambda f: order.index(f.state))


def exit_code(findings: Sequence[Finding]) -> Exit:
    """OK: as good as the baseline; NO: a regression; NOT_COMPARABLE: something, or everything, could not be compared."""
    codes = {CODES.get(f.state, Exit.OK) for f in findings}
    return next((code for code in (Exit.NO, Exit.NOT_COMPARABLE) if code in codes), Exit.OK if codes else Exit.NOT_COMPARABLE)


Result = tuple[str, State, str]


def _cell(
    base: Record, now: Record | None, folders: tuple[Path, Path], run: Sequence[Record], bands: dict[str, Band]
) -> Iterator[Result]:
    if now is None:
        yield "status", "could not compare", "there is no record of it"
        return
    if base.status != "ok" or now.status != "ok":
        kinds = [(r.error or {}).get("kind", "failed") if r.status != "ok" else "ok" for r in (base, now)]
        yield "status", "regression" if base.status == "ok" else "ok", f"{kinds[0]} -> {kinds[1]}"
        return
    texts = [str(r.data.get("ids_sha256", "")) for r in (base, now)]
    if texts[0] != texts[1]:
        yield "data", "could not compare", f"another text: token ids {texts[0][:8]} -> {texts[1][:8]}"
        return
    yield from _exactness(base, now, folders)
    for difference in differences(base, now):
        if difference.metric in ("nll", "accuracy", "score"):
            state: State = "regression" if difference.verdict == "worse" else "ok"
            if difference.low is None:
                off = _worse(difference, now)  # without an interval the margin alone decides: rounding is no regression
                state = "could not compare" if off is None else "regression" if off > MARGINS[difference.metric] else "ok"
            interval = f" [{difference.low:+.4g}, {difference.high:+.4g}]" if difference.low is not None else ""
            change = "" if difference.change is None else f"{difference.change:+.4g}{interval}"
            yield (
                "quality",
                state,
                f"{difference.metric} {difference.a:.5g} -> {difference.b:.5g}: {change} {difference.why}".strip(),
            )
        elif difference.metric in ("kv_bytes", "state_bytes") and "rounds_ms" not in base.metrics:
            state = "ok" if difference.change == 0 else "regression"
            yield "bytes", state, f"{difference.metric} {difference.a:,.0f} -> {difference.b:,.0f}"
    if "rounds_ms" in base.metrics and base.cell["policy"] != "dense":
        yield _latency(base, now, run, bands.get(base.cell_id))


def _worse(difference: Difference, record: Record) -> float | None:
    """By how much, in the metric's own unit; negative if better."""
    if difference.change is None or difference.metric == "nll" or record.metrics.get("higher_is_better") is False:
        return difference.change
    return -difference.change


def _exactness(base: Record, now: Record, folders: tuple[Path, Path]) -> Iterator[Result]:
    """Of per-token NLLs. Where rounding differs, attention may choose other tokens: there the paired mean decides."""
    if "nll" not in base.metrics:
        return
    if base.metrics == now.metrics:
        yield "exactness", "ok", "the same to the last digit"
        return
    most = LARGEST.get(str(base.cell["model"].get("dtype")))
    if most is None:
        yield "exactness", "not compared", "not float32"
        return
    largest = largest_difference((trace(base, folders[0]), trace(now, folders[1])))
    if largest is None:
        yield "exactness", "could not compare", "a trace is missing, or of another length"
        return
    says = f"largest difference of a token {largest:.3g} nats, at most {most:g}"
    elsewhere = moved(base, now, "torch")
    if largest <= most:
        yield "exactness", "ok", says
    else:
        yield "exactness", "not compared" if elsewhere else "regression", f"{says}{elsewhere and '; ' + elsewhere}"


def _latency(base: Record, now: Record, run: Sequence[Record], band: Band | None) -> Result:
    elsewhere = moved(base, now)
    if elsewhere:
        return "latency", "not compared", elsewhere
    if band is None:
        return "latency", "not compared", "the baseline knows no noise of it"
    found = ratio(now, run)
    if found is None:
        return "latency", "could not compare", "no yardstick was measured beside it"
    says = f"{found:.3g} of dense's step; {band.ratio:.3g} in the baseline, [{band.low:.3g}, {band.high:.3g}] in {band.runs} runs"
    return "latency", "regression" if found > band.high else "ok", says
