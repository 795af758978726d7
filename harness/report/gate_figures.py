"""The gate's checks of figures: every figure by its rule, and traces token by token and answer by answer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kvbench.harness.core import plugins
from kvbench.harness.core.files import json_lines
from kvbench.harness.records import Record
from kvbench.harness.records.beside import TraceFile
from kvbench.harness.records.figure_rules import RUN_NATS, SUM, Checked, Rule, rule_in
from kvbench.harness.records.metrics import NllMetrics, QuestionMetrics
from kvbench.harness.records.types import Document
from kvbench.harness.report.compare import differences, setup_changes, token_differences
from kvbench.harness.report.difference import Traces
from kvbench.harness.report.sources import find_trace
from kvbench.harness.report.verify import problems

_BY_POSITION = ("closed form", "windows run afresh")  # ways to read blocks
State = Literal["ok", "better", "regression", "could not compare", "not compared"]
Result = tuple[str, State, str]  # (check, state, figures)


@dataclass(frozen=True)
class Pair:
    """Records of a cell: the baseline's and the one to judge.

    Attributes:
        base: the baseline's record.
        now: the record to judge.
        folders: of the two records and their traces.
        run: all records of the run that measured `now`.
        base_run: all records of the baseline.
    """

    base: Record
    now: Record
    folders: tuple[Path, Path]
    run: Sequence[Record] = ()
    base_run: Sequence[Record] = ()

    @cached_property
    def setup_changes(self) -> str:
        """Differences in device, threads, instructions, TF32 and torch; empty on the same machine."""
        return setup_changes(self.base, self.now, "torch")

    @cached_property
    def rounding_differs(self) -> str:
        """Why figures may differ by more than rounding in float32; empty if they may not."""
        return self.setup_changes or ("" if self.base.cell.model.dtype == "float32" else "not float32")

    @cached_property
    def between_cpus(self) -> bool:
        """Whether float32 was rounded otherwise, by another CPU or another number of its threads, and nothing else differs."""
        cpus = all(r.facts.instructions and not r.facts.instructions.startswith("sm_") for r in (self.base, self.now))
        return bool(self.setup_changes) and cpus and self.base.cell.model.dtype == "float32"

    @property
    def by_position(self) -> bool:
        """Whether the policy keeps tokens by their positions alone, so that rounding can't change which."""
        return self.base.facts.method in _BY_POSITION

    @cached_property
    def traces(self) -> Traces:
        """Traces: figures per token or question. The baseline's stands in for a missing one of the same hash."""
        base, now = find_trace(self.base, self.folders[0]), find_trace(self.now, self.folders[1])
        return base, base if now is None and self.base.trace == self.now.trace else now


Name = tuple[str, ...]  # of a figure in a record: ("metrics", "buckets", "3", "nll")


def figures(record: Record) -> Iterator[tuple[Name, Any]]:
    """Every plain value of a record's metrics, data and facts, with its name; an empty list or mapping is a value too."""
    for part in ("metrics", "data", "facts"):
        yield from _leaves((part,), getattr(record, part).as_json())


def rule_of(record: Record, name: Name) -> Rule | None:
    """The rule of a figure; None if its field declares none."""
    part, *path = name
    model: type[Document] = type(getattr(record, part))
    return rule_in(model, tuple(path)) if path else None


def _leaves(name: Name, value: Any) -> Iterator[tuple[Name, Any]]:
    if isinstance(value, dict) and (value or len(name) == 1):
        for key, inner in value.items():
            yield from _leaves((*name, str(key)), inner)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves((*name, str(index)), inner)
    else:
        yield name, value


MAX_TOKEN_NATS = 1e-3  # difference of one token's NLL, in float32 on the same machine
# Share of tokens, or of questions, that another CPU may change where a policy keeps what it computes to be important: a token
# that rounding keeps instead of another changes what comes after it. Three ways to round, with one and two threads, changed none.
MAX_MOVED = 0.05
_MAX_SHOWN = 3  # differences in one finding
_MODEL_INDEPENDENT = ("stream", "question", "gold", "target", "weight")  # fields of an answer
_SLOW_METHODS = ("walk", "plain", "eager")  # in `method` and `step`
_BUSY_FLAG_PREFIX = "unsettled"
_NUMBER = re.compile(r"\d[\d.,]*")
_TIMING_REFUSALS = ("a step takes", "a block takes")  # such a refusal depends on how busy the machine was


def table(pair: Pair) -> Iterator[Result]:
    """Compare every figure by its rule; a finding per check, with the figures that changed."""
    if not plugins.known_task(pair.base.cell.task.name):
        yield "figures", "could not compare", f"the task {pair.base.cell.task.name} is not installed: install it to compare"
        return
    now = dict(figures(pair.now))
    changed: dict[str, list[str]] = {}
    count: dict[str, int] = {}
    for name, value in figures(pair.base):
        rule = rule_of(pair.base, name)
        if rule is None:
            yield "figures", "could not compare", f"{'.'.join(name)} has no rule: its task must say how the gate compares it"
        elif isinstance(rule, Checked) and _applies(rule, pair):
            count[rule.check] = count.get(rule.check, 0) + 1
            if name not in now or not rule.allows(value, now[name]):
                label = ".".join(name).removeprefix("metrics.")
                changed.setdefault(rule.check, []).append(f"{label} {_short(value)} -> {_short(now.get(name))}")
    for check, compared in count.items():
        if check in changed:
            yield check, "regression", _first(changed[check])
        else:
            yield check, "ok", f"{compared} as in the baseline"


def _applies(rule: Checked, pair: Pair) -> bool:
    if rule.scope == "bounded":
        return pair.base.cell.capacity is not None
    if rule.scope == "same machine" and rule.check != "answers" and pair.between_cpus and pair.by_position:
        return True  # what a mean or a sum may move by is more than another CPU moves it
    return rule.scope == "everywhere" or not pair.rounding_differs


def consistent(pair: Pair) -> Iterator[Result]:
    """Whether the figures of both records follow from their traces, computed by the current code."""
    for whose, record, trace in zip(("the baseline's", "the new"), (pair.base, pair.now), pair.traces, strict=True):
        if record.trace is None:
            if record is pair.now and pair.base.trace is not None:
                yield "trace", "could not compare", "the baseline's record has a trace, the new record has none"
            elif impossible := [*record.metrics.impossible()]:
                yield "trace", "regression", _first(impossible, f"{whose} record: ")
            continue
        inconsistencies = None if trace is None else problems(record, trace.folder)
        if inconsistencies is None:
            yield "trace", "could not compare", f"{whose} record's trace {record.trace.file} is missing"
        else:
            agrees = f"{whose} record agrees with its trace"
            yield "trace", "regression" if inconsistencies else "ok", _first(inconsistencies, f"{whose} record: ") or agrees


def exactness(pair: Pair) -> Iterator[Result]:
    """Compare every token's NLL. Where rounding differs, a policy may keep another token here and there."""
    if pair.base.measured(NllMetrics) is None:
        return
    try:
        off = token_differences(pair.traces)
    except (OSError, ValueError, EOFError, MemoryError):
        off = None
    if off is None:
        yield "exactness", "could not compare", "a trace is missing, unreadable or of another length"
        return
    says = f"largest difference of a token: {off.max(initial=0.0):.3g} nats (allowed: {MAX_TOKEN_NATS:g})"
    moved, allowed = float((off > MAX_TOKEN_NATS).mean()) if off.size else 0.0, 0.0
    if pair.between_cpus and not pair.by_position:
        allowed = MAX_MOVED
        says += f"; {moved:.1%} of the tokens differ by more (allowed: {allowed:.0%}, because of {pair.rounding_differs})"
    if moved <= allowed:
        yield "exactness", "ok", says
    elif pair.rounding_differs and not pair.between_cpus:
        yield "exactness", "not compared", f"{says}; {pair.rounding_differs}"
    else:
        yield "exactness", "regression", says


def answers(pair: Pair) -> Iterator[Result]:
    """Compare question by question: questions must be equal on all machines, answers nearly so on all CPUs."""
    if pair.base.measured(QuestionMetrics) is None:
        return
    try:
        base, now = map(_lines, pair.traces)
    except (OSError, ValueError):
        yield "answers", "could not compare", "a trace can't be read"
        return
    if base is None or now is None or len(base) != len(now):
        yield "answers", "could not compare", "a trace is missing, or has other questions"
        return
    other_questions = _changed(base, now, _MODEL_INDEPENDENT)
    answered = {} if pair.rounding_differs and not pair.between_cpus else _judged_otherwise(pair) | _changed(base, now, None)
    allowed = 0 if not pair.between_cpus else 1 if pair.by_position else max(1, int(MAX_MOVED * len(base)))
    if other_questions or len(answered) > allowed:
        changes = [f"question {number}: {change}" for number, change in (other_questions or answered).items()]
        yield "answers", "regression", _first(changes)
    else:
        but = f", except {len(answered)}; rounding may change {allowed}" if answered else ""
        yield "answers", "ok", f"{len(base)} questions and their answers as in the baseline{but}"


def _changed(base: list[dict[str, Any]], now: list[dict[str, Any]], keys: tuple[str, ...] | None) -> dict[int, str]:
    """Return the first change in each changed question's line. keys: to compare; all keys of the baseline when None."""
    return {
        number: f"{key} {_short(a.get(key))} -> {_short(b.get(key))}"
        for number, (a, b) in enumerate(zip(base, now, strict=True))
        for key in reversed(keys or list(a))
        if not _equal(a.get(key), b.get(key))
    }


def _judged_otherwise(pair: Pair) -> dict[int, str]:
    """The questions that are right now and were not, or the other way round."""
    judged = [m.outcomes or "" if (m := r.measured(QuestionMetrics)) else "" for r in (pair.base, pair.now)]
    words = {"0": "wrong", "1": "right"}
    return {i: f"{words[a]} -> {words[b]}" for i, (a, b) in enumerate(zip(*judged, strict=False)) if a != b}


def _lines(trace: TraceFile | None) -> list[dict[str, Any]] | None:
    if trace is None:
        return None
    lines = json_lines(trace)
    if not all(isinstance(line, dict) for line in lines):
        raise ValueError("a line is not an answer")
    return lines


def method(pair: Pair) -> Iterator[Result]:
    """Whether tokens are still read by a fast method; the plain walk gives the same numbers, but slowly."""
    base, now = pair.base.facts, pair.now.facts
    if base.method is None:
        return
    if pair.setup_changes:
        yield "method", "not compared", pair.setup_changes
        return
    refused = "" if base.refused is not None else now.refused or ""
    if all(reason.startswith(_TIMING_REFUSALS) for reason in refused.split("; ")):
        yield "method", "not compared", refused
        return
    methods = {"method": (base.method, now.method), "step": (base.step, now.step)}
    slower = [f"{k} {a} -> {b}" for k, (a, b) in methods.items() if a not in (*_SLOW_METHODS, None) and b in _SLOW_METHODS]
    if refused or slower:
        reason = "; ".join(part for part in (", ".join(slower), refused) if part)
        yield "method", "regression", f"{'falls back to the plain walk' if slower else 'a fast method is refused'}: {reason}"
    else:
        yield "method", "ok", ", ".join(name for name in (now.method, now.step) if name is not None)


def flags(pair: Pair) -> Iterator[Result]:
    """Yield the flags of the task whose kind the baseline's record does not have; the numbers in a flag may differ."""
    if "flags" not in pair.base.metrics.as_json():
        return
    before, new = ([f for f in r.metrics.flags if not f.startswith(_BUSY_FLAG_PREFIX)] for r in (pair.base, pair.now))
    known = {_NUMBER.sub("", flag) for flag in before}
    if added := [flag for flag in new if _NUMBER.sub("", flag) not in known]:
        yield "flags", "regression", _first(added)
    else:
        yield "flags", "ok", _first(new) or "none"


def different_data(pair: Pair) -> Result | None:
    """Describe how text, task version or weights differ, so that figures can't be compared; None if they agree."""
    texts = ("text (token ids)", pair.base.data.ids_sha256, pair.now.data.ids_sha256)
    versions = ("version of the task", pair.base.data.task_version or "first", pair.now.data.task_version or "first")
    for what, base, now in (texts, versions, ("weights", pair.base.facts.weights_sha256, pair.now.facts.weights_sha256)):
        if base != now and base:
            return "data", "could not compare", f"different {what}: {base[:8]} -> {now[:8]}"
    return None


def _equal(a: Any, b: Any) -> bool:
    """Equal, up to rounding of log-likelihoods."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=SUM, abs_tol=RUN_NATS)
    return bool(a == b)


def _first(items: list[str], prefix: str = "") -> str:
    """The first few items; empty if there are none."""
    more = f"; and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else ""
    return prefix + "; ".join(items[:_MAX_SHOWN]) + more if items else ""


def _short(value: Any) -> str:
    text = f"{value:.7g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def status(base: Record, now: Record) -> Result | None:
    """Compare the status of a cell that failed then or now; None if neither failed."""
    if base.status == "ok" and now.status == "ok":
        return None
    (difference,) = differences(base, now)
    return "status", "regression" if difference.verdict == "worse" else "ok", difference.why


CHECKS = (method, consistent, exactness, table, answers, flags)  # in the order of findings
