"""Comparison of records: differences with intervals, a verdict per metric, and tables.

Differences are paired wherever two records have the same tokens or questions, so that the noise of the text cancels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.intervals import MIN_BLOCKS, Ends, clustered, median_interval, over_samples
from kvbench.harness.records import Record
from kvbench.harness.records.figure_rules import Compared, compared
from kvbench.harness.records.metrics import NllMetrics, PeakMetrics, QuestionMetrics, SampleMetrics, ScoreMetrics, StepMetrics
from kvbench.harness.report.markdown import digits, md, model_name, rows_table, task_name, title
from kvbench.harness.report.pairing import Difference, Traces, Verdict, paired, task_version
from kvbench.harness.report.ranks import outcome_comparison
from kvbench.harness.report.shares import count, shares, streams_of, too_few
from kvbench.harness.report.sources import find_trace
from kvbench.harness.report.task_report import plain


def speed_up(record: Record, bases: Sequence[Record]) -> str:
    """Return the speed-up over the base that was timed in the same rounds, with its interval; empty without such a base."""
    times = record.measured(StepMetrics)
    ratios = next((r for base in bases if (r := round_ratios(base.measured(StepMetrics), times)) is not None), None)
    if ratios is None:
        return ""
    low, high = median_interval(ratios)
    return f"{digits(np.median(ratios), 3)}× [{digits(low, 3)}, {digits(high, 3)}]"


def round_ratios(a: StepMetrics | None, b: StepMetrics | None) -> list[float] | None:
    """Return the step time of a over that of b in each round; None if they are not two cells timed in the same rounds."""
    if a is b or a is None or b is None or a.together != b.together:
        return None
    return [x / y for x, y in zip(a.rounds_ms, b.rounds_ms, strict=True)]


# Margins of differences that are too small to matter: an interval inside the margin is "same".
MARKS = {
    "nll": Compared(0.001, more_is_better=False),
    "accuracy": Compared(0.01, more_is_better=True),
    "score": Compared(0.01, more_is_better=True),
    "step_ms": Compared(0.03, more_is_better=False),
}
_BYTES = {name: Compared(0.0, more_is_better=False) for name in ("kv_bytes", "state_bytes")}  # compared in every task
_KINDS = (NllMetrics, QuestionMetrics, StepMetrics, PeakMetrics)  # kinds whose undeclared plain figures are not compared
COSTS = ("step_ms", *_BYTES)
_UNCHANGED = (0.0, 0.0)
_ORDER: tuple[Verdict, ...] = ("worse", "can't tell", "better", "same")


def differences(a: Record, b: Record, traces: Traces = (None, None)) -> list[Difference]:
    """Compare every metric of a record `b` with that of a reference `a`.

    traces: files of the records' per-token figures, where available.
    """
    if a.status != "ok" or b.status != "ok":
        verdict: Verdict = "same" if a.status == b.status else "worse" if a.status == "ok" else "better"
        return [Difference("status", None, None, None, None, None, verdict, f"{a.failure or 'ok'} -> {b.failure or 'ok'}")]
    of_kind = [nll(a, b, traces), accuracy(a, b), score(a, b), step_time(a, b)]
    return [*(difference for difference in of_kind if difference is not None), *_plain_figures(a, b)]


def mark_of(metric: str, record: Record) -> Compared | None:
    """Return the margin and direction by which a metric is judged; None if its task does not declare the direction."""
    scores = record.measured(ScoreMetrics) if metric == "score" else None
    mark = MARKS.get(metric) or _BYTES.get(metric) or compared(type(record.metrics)).get(metric)
    return mark if mark is None or scores is None else replace(mark, more_is_better=scores.higher_is_better)


def _plain_figures(a: Record, b: Record) -> Iterator[Difference]:
    """Compare the figures that declare a direction, then bytes. For metrics of no kind, compare all plain numbers."""
    x, y = plain(a), plain(b)
    declared = compared(type(b.metrics)) or ({} if isinstance(b.metrics, _KINDS) else x)
    for name in (*(name for name in declared if name not in _BYTES), *_BYTES):
        if name in x and name in y:
            yield _figure(a, b, name, x[name], y[name])


def _figure(a: Record, b: Record, name: str, x: float, y: float) -> Difference:
    mark, change = mark_of(name, b), y - x
    if mark is None and not change:
        return Difference(name, x, y, 0.0, 0.0, 0.0, "same")
    if mark is None:
        return Difference.judged(name, x, y, change, None, None, "the task does not say whether more is better")
    ends, why = _by_sample(a, b, mark.sums) if mark.sums else ((change, change), "")
    return Difference.judged(name, x, y, change, ends, mark, why)


def _by_sample(a: Record, b: Record, sums: str) -> tuple[Ends | None, str]:
    """Return the interval of b's mean minus a's, paired sample by sample, or the reason that there is none.

    sums: name of the list of sums over each sample.
    """
    ours, theirs = a.measured(SampleMetrics), b.measured(SampleMetrics)
    same_size = ours is not None and theirs is not None and (ours.samples, ours.tokens) == (theirs.samples, theirs.tokens)
    if ours is None or not same_size or a.data.ids_sha256 != b.data.ids_sha256:
        return None, "different samples"
    less, more = (np.array(attrgetter(sums)(record.metrics), np.float64) for record in (a, b))
    mean = over_samples(more - less, ours.tokens // ours.samples)
    return mean.ends, "" if mean.low is not None else "the samples are too short for an interval"


def token_differences(traces: Traces) -> NDArray[np.float64] | None:
    """Return the difference in each token's NLL in nats, 0 where neither trace scored it; None unless lengths are equal."""
    files = [trace for trace in traces if trace is not None]
    if len(files) < 2:
        return None
    x, y = (np.load(trace.rewound()).astype(np.float64) for trace in files)
    if x.shape != y.shape:
        return None
    off = np.abs(x - y)
    off[np.isnan(x) & np.isnan(y)] = 0.0  # tokens scored in neither trace
    return np.where(np.isnan(off), np.inf, off)


def setup_changes(a: Record, b: Record, *packages: str) -> str:
    """Describe the differences in device, threads, instructions, TF32 and package versions; empty without differences."""
    names = ("device", "threads", "instructions", "tf32")  # older records lack some
    pairs = [(n, getattr(a.facts, n), getattr(b.facts, n)) for n in names]
    pairs += [(n, a.facts.versions.get(n), b.facts.versions.get(n)) for n in packages]
    return ", ".join(f"{n} {x} -> {y}" for n, x, y in pairs if x not in (None, "") and y not in (None, "") and x != y)


def nll(a: Record, b: Record, traces: Traces = (None, None)) -> Difference | None:
    """Compare the NLL of a text, paired on the tokens that both records scored."""
    ours, theirs = a.measured(NllMetrics), b.measured(NllMetrics)
    if ours is None or theirs is None:
        return None
    x, y, mark = ours.nll, theirs.nll, MARKS["nll"]
    if ours == theirs:
        return Difference.judged("nll", x, y, 0.0, _UNCHANGED, mark, "identical to the last digit")
    interval = paired(b, a, trend=a.cell_id == b.cell_id)
    if interval is None:
        return Difference.judged("nll", x, y, None, None, mark, "different tokens, or a trend past the training length")
    off = token_differences(traces) if a.cell_id == b.cell_id else None
    reasons = ["the text is too short for an interval"] if interval.low is None else []
    if not math.isclose(y - x, interval.mean, rel_tol=1e-3, abs_tol=1e-6):
        reasons.append("change over the tokens that both scored after the caches filled")
    reasons += [f"largest difference of a token: {off.max(initial=0.0):.2g}"] if off is not None else []
    return Difference.judged("nll", x, y, interval.mean, interval.ends, mark, "; ".join(reasons))


def accuracy(a: Record, b: Record) -> Difference | None:
    """Compare the share of right answers, paired question by question."""
    ours, theirs = a.measured(QuestionMetrics), b.measured(QuestionMetrics)
    if ours is None or theirs is None or ours.accuracy is None or theirs.accuracy is None:
        return None
    x, y, mark = ours.accuracy, theirs.accuracy, MARKS["accuracy"]
    if task_version(a) != task_version(b):
        return Difference.judged("accuracy", x, y, y - x, None, mark, "answers were judged by different rules")
    same_questions = a.cell.options == b.cell.options and a.data.ids_sha256 == b.data.ids_sha256
    if same_questions and a.cell_id == b.cell_id and ours.outcomes == theirs.outcomes:
        return Difference.judged("accuracy", x, y, 0.0, _UNCHANGED, mark, "the same answers are right")
    ends, why = _share_difference(a, ours, b, theirs, same_questions)
    return Difference.judged("accuracy", x, y, y - x, ends, mark, why)


def _share_difference(
    a: Record, ours: QuestionMetrics, b: Record, theirs: QuestionMetrics, same_questions: bool
) -> tuple[Ends | None, str]:
    """Return the interval of b's share of right answers minus a's, or None; and the pairing used, or the reason for None.

    Two measurements of one cell have the same streams, so their differences are paired question by question.
    """
    streams = None if same_questions and a.cell_id == b.cell_id else streams_of(b)
    if same_questions and len(ours.outcomes or "") == len(theirs.outcomes or "") > 0:
        ends = outcome_comparison(ours.outcomes or "", theirs.outcomes or "", streams).ends
        if ends is not None or streams is None:
            return ends, "question by question" if streams is None else "stream by stream"
        return None, too_few(count(streams))
    if streams is not None or streams_of(a) is not None:
        return None, "different questions in streams"
    return shares((ours.right or 0, ours.questions), (theirs.right or 0, theirs.questions)), "different questions"


def score(a: Record, b: Record) -> Difference | None:
    """Compare the scores of questions that are not just right or wrong, paired question by question."""
    ours, theirs = a.measured(ScoreMetrics), b.measured(ScoreMetrics)
    if ours is None or theirs is None or ours.scores is None or theirs.scores is None:
        return None
    x, y, mark = ours.score, theirs.score, mark_of("score", b)
    if a.data.ids_sha256 != b.data.ids_sha256 or ours.metric != theirs.metric:
        return Difference.judged("score", x, y, y - x, None, mark, "different questions")
    if a.cell_id == b.cell_id and ours.scores == theirs.scores:
        return Difference.judged("score", x, y, 0.0, _UNCHANGED, mark, "the same score for every question")
    off = np.array(theirs.scores) - np.array(ours.scores)
    if len(off) < MIN_BLOCKS:
        return Difference.judged("score", x, y, y - x, None, mark, f"{len(off)} questions are too few")
    mean = clustered(off, np.ones(len(off)) if theirs.weights is None else np.array(theirs.weights))
    return Difference.judged("score", x, y, y - x, mean.ends, mark, "question by question")


def step_time(a: Record, b: Record) -> Difference | None:
    """Compare the time of a decode step, round by round if both records were timed in the same rounds."""
    ours, theirs = a.measured(StepMetrics), b.measured(StepMetrics)
    if ours is None or theirs is None:
        return None
    x, y = ours.step_ms, theirs.step_ms
    ends, why = (None, elsewhere) if (elsewhere := setup_changes(a, b)) else _ratio_ends(ours, theirs)
    return Difference.judged("step_ms", x, y, y / x - 1, ends, MARKS["step_ms"], why)


def _ratio_ends(ours: StepMetrics, theirs: StepMetrics) -> tuple[Ends | None, str]:
    """Return the interval of the ratio of step times minus 1, or None; and the pairing used, or the reason for None."""
    if ours.together == theirs.together:
        low, high = median_interval([j / i - 1 for i, j in zip(ours.rounds_ms, theirs.rounds_ms, strict=False)])
        why = "round by round"
    else:
        (low_a, high_a), (low_b, high_b) = median_interval(ours.rounds_ms), median_interval(theirs.rounds_ms)
        low, high, why = low_b / high_a - 1, high_b / low_a - 1, "two runs; the interval does not include variation between runs"
    return ((low, high), why) if math.isfinite(low) and math.isfinite(high) else (None, "too few rounds")


@dataclass(frozen=True)
class JudgedMetric:
    """Comparison of a metric between two records."""

    a: Record
    b: Record
    difference: Difference

    @property
    def cell(self) -> str:
        """Description of the cell."""
        return cell_name(self.a, self.b)

    def cells(self) -> dict[str, Any]:
        """Return the row of the table."""
        d = self.difference
        interval = "" if d.low is None or d.high is None else f"[{_signed(d.low, d)}, {_signed(d.high, d)}]"
        change = "" if d.change is None else _signed(d.change, d)
        return {
            "cell": self.cell,
            "metric": d.metric,
            "a": _plain(d.a),
            "b": _plain(d.b),
            "change": change,
            "95 % interval": interval,
            "verdict": d.verdict,
            "why": d.why,
        }

    def as_json(self) -> dict[str, Any]:
        """Return all figures, unrounded."""
        return {"cell": self.cell, "cell_ids": [self.a.cell_id, self.b.cell_id], **vars(self.difference)}


def judge_all(a: tuple[Sequence[Record], Path], b: tuple[Sequence[Record], Path]) -> list[JudgedMetric]:
    """Judge the records `b` against the reference records `a`, each with their folder: every metric of every cell, worst first.

    Two single records are compared even if they are of different cells.
    """
    others = {r.cell_id: r for r in b[0]}
    pairs = [(r, others[r.cell_id]) for r in a[0] if r.cell_id in others]
    if len(a[0]) == len(b[0]) == 1:
        pairs = [(a[0][0], b[0][0])]
    traces = [(find_trace(x, a[1]), find_trace(y, b[1])) for x, y in pairs]
    judged = [JudgedMetric(x, y, d) for (x, y), both in zip(pairs, traces, strict=True) for d in _differences(x, y, both)]
    return sorted(judged, key=lambda j: _ORDER.index(j.difference.verdict))


def _differences(a: Record, b: Record, traces: Traces) -> list[Difference]:
    """Return the differences of two records; if their figures or traces are invalid, a difference with the error."""
    try:
        return differences(a, b, traces)
    except Exception as error:  # after any error, the remaining pairs are still compared
        why = f"can't be compared ({type(error).__name__}: {error})"
        return [Difference("record", None, None, None, None, None, "can't tell", why)]


def summary(judged: Sequence[JudgedMetric]) -> str:
    """Return the number of each verdict as text."""
    counts = Counter(j.difference.verdict for j in judged)
    return ", ".join(f"{counts[v]} {v}" for v in _ORDER if counts[v])


def markdown(judged: Sequence[JudgedMetric], a: str, b: str) -> str:
    """Return a comment for a pull request: a table of changes, with unchanged metrics folded."""
    rows = [{name: md(value) for name, value in j.cells().items()} for j in judged]
    heads = {name: name for row in rows for name in row} | {"a": md(a), "b": md(b)}
    changed = [r for r, j in zip(rows, judged, strict=True) if j.difference.verdict != "same"]
    unchanged = [r for r, j in zip(rows, judged, strict=True) if j.difference.verdict == "same"]
    lines = [f"### {md(b)} compared with {md(a)}: {summary(judged)}\n"]
    lines += rows_table(changed, heads) if changed else ["Nothing changed that matters.\n"]
    if unchanged:
        lines += [f"<details><summary>{len(unchanged)} same</summary>\n", *rows_table(unchanged, heads), "</details>\n"]
    return "\n".join(lines)


def cell_name(a: Record, b: Record) -> str:
    """Return the description of a cell, or of the two cells that are compared."""
    contexts, policies = zip(*(_named(r) for r in (a, b)), strict=True)
    return f"{' -> '.join(dict.fromkeys(contexts))}, {' -> '.join(dict.fromkeys(policies))}"


def _named(record: Record) -> tuple[str, str]:
    cell = record.cell
    capacity = f" at {cell.capacity}" if cell.capacity is not None else ""
    return f"{cell.suite}: {model_name(record)}, {task_name(record)}", f"{title(record)}{capacity}"


def _plain(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 100 else f"{value:.5g}"


def _signed(value: float, difference: Difference) -> str:
    if difference.metric == "step_ms":
        return f"{100 * value:+.1f} %"
    if difference.metric == "accuracy":
        return f"{100 * value:+.1f} points"
    return f"{value:+,.0f}" if value == int(value) and abs(value) >= 100 else f"{value:+.4g}"
