"""Checks of figures in the gate: every figure by its rule, and traces token by token and answer by answer."""

from __future__ import annotations

import re
from collections import defaultdict
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
from kvbench.harness.report.compare import COSTS, differences, mark_of, setup_changes, token_differences
from kvbench.harness.report.pairing import Traces, Verdict, judge_interval
from kvbench.harness.report.sources import find_trace
from kvbench.harness.report.verify import equal, problems, short

State = Literal["ok", "better", "regression", "could not compare", "not compared"]
Result = tuple[str, State, str]  # (check, state, figures)
Name = tuple[str, ...]  # name of a figure in a record: ("metrics", "buckets", "3", "nll")

MAX_TOKEN_NATS = 1e-3  # difference of one token's NLL, in float32 on the same machine
# Share of tokens, or of questions, that another CPU may change under a policy that keeps tokens by computed importance. If
# rounding changes a kept token, the figures of later tokens change. Three roundings, with one and two threads, changed none.
MAX_MOVED = 0.05
_MAX_SHOWN = 3  # differences in one finding
_BY_POSITION = ("closed form", "windows run afresh")  # methods of reading blocks
_MODEL_INDEPENDENT = ("stream", "question", "gold", "target", "weight")  # fields of an answer
_SLOW_METHODS = ("walk", "plain", "eager")  # in `method` and `step`
_BUSY_FLAG_PREFIX = "unsettled"
_NUMBER = re.compile(r"\d[\d.,]*")
_TIMING_REFUSALS = ("a step takes", "a block takes")  # refusals that depend on the load of the machine
_STATES: dict[Verdict, State] = {"worse": "regression", "better": "better", "same": "ok", "can't tell": "ok"}


@dataclass(frozen=True)
class Pair:
    """Two records of a cell: the baseline's record and the record to judge.

    Attributes:
        folders: folders of the two records and their traces.
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
        """Reason that figures may differ by more than rounding in float32; empty if they may not."""
        return self.setup_changes or ("" if self.base.cell.model.dtype == "float32" else "not float32")

    @cached_property
    def between_cpus(self) -> bool:
        """Whether the records differ only in the rounding of float32, due to another CPU or another number of threads."""
        cpus = all(r.facts.instructions and not r.facts.instructions.startswith("sm_") for r in (self.base, self.now))
        return bool(self.setup_changes) and cpus and self.base.cell.model.dtype == "float32"

    @property
    def by_position(self) -> bool:
        """Whether the policy keeps tokens by their positions alone, so that rounding can't change the kept tokens."""
        return self.base.facts.method in _BY_POSITION

    @cached_property
    def traces(self) -> Traces:
        """Traces with figures per token or question. The baseline's trace replaces a missing trace of equal hash."""
        base, now = find_trace(self.base, self.folders[0]), find_trace(self.now, self.folders[1])
        return base, base if now is None and self.base.trace == self.now.trace else now


def figures(record: Record) -> Iterator[tuple[Name, Any]]:
    """Yield every plain value of a record's metrics, data and facts, with its name. An empty list or mapping is a value, too."""
    for part in ("metrics", "data", "facts"):
        yield from _leaves((part,), getattr(record, part).as_json())


def _leaves(name: Name, value: Any) -> Iterator[tuple[Name, Any]]:
    inner = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    if not inner and name[1:]:
        yield name, value
    for key, item in inner:
        yield from _leaves((*name, str(key)), item)


def rule_of(record: Record, name: Name) -> Rule | None:
    """Return the rule of a figure; None if its field declares none."""
    part, *path = name
    model: type[Document] = type(getattr(record, part))
    return rule_in(model, tuple(path)) if path else None


def unusable(pair: Pair) -> Result | None:
    """Return the reason that the figures of two records can't be compared; None if they can."""
    if pair.base.status != "ok" or pair.now.status != "ok":
        (status,) = differences(pair.base, pair.now)
        return "status", "regression" if status.verdict == "worse" else "ok", status.why
    texts = ("text (token ids)", pair.base.data.ids_sha256, pair.now.data.ids_sha256)
    versions = ("version of the task", pair.base.data.task_version or "first", pair.now.data.task_version or "first")
    for what, base, now in (texts, versions, ("weights", pair.base.facts.weights_sha256, pair.now.facts.weights_sha256)):
        if base != now and base:
            return "data", "could not compare", f"different {what}: {base[:8]} -> {now[:8]}"
    return None


def _by_rule(pair: Pair) -> Iterator[Result]:
    """Compare every figure by its rule. Yield a result per check, with the figures that changed."""
    if not plugins.known_task(pair.base.cell.task.name):
        yield "figures", "could not compare", f"the task {pair.base.cell.task.name} is not installed: install it to compare"
        return
    now = dict(figures(pair.now))
    compared: dict[str, list[str]] = defaultdict(list)  # by check: a text per figure, empty if it is as in the baseline
    for name, value in figures(pair.base):
        rule = rule_of(pair.base, name)
        if rule is None:
            yield "figures", "could not compare", f"{'.'.join(name)} has no rule: its task must say how the gate compares it"
        elif isinstance(rule, Checked) and _applies(rule, pair):
            label, same = ".".join(name).removeprefix("metrics."), name in now and rule.allows(value, now[name])
            compared[rule.check].append("" if same else f"{label} {short(value)} -> {short(now.get(name))}")
    for check, texts in compared.items():
        changed = _first([text for text in texts if text])
        yield check, "regression" if changed else "ok", changed or f"{len(texts)} as in the baseline"


def _applies(rule: Checked, pair: Pair) -> bool:
    if rule.scope == "bounded":
        return pair.base.cell.capacity is not None
    if rule.scope == "same machine" and rule.check != "answers" and pair.between_cpus and pair.by_position:
        return True  # the tolerances of means and sums exceed the differences between CPUs
    return rule.scope == "everywhere" or not pair.rounding_differs


def _consistent(pair: Pair) -> Iterator[Result]:
    """Check that the figures of both records follow from their traces, computed by the current code."""
    whose = ("the baseline's record", "the new record")
    for name, record, trace, folder in zip(whose, (pair.base, pair.now), pair.traces, pair.folders, strict=True):
        needs_trace = pair.base.trace is not None or record.trace is not None
        wrong = problems(record, trace.folder if trace else folder) if needs_trace else [*record.metrics.impossible()]
        if wrong is None:
            yield "trace", "could not compare", f"the trace of {name} is missing"
        elif wrong or needs_trace:
            yield "trace", "regression" if wrong else "ok", f"{name}: {_first(wrong) or 'it agrees with its trace'}"


def _exactness(pair: Pair) -> Iterator[Result]:
    """Compare every token's NLL. Where rounding differs, a policy may keep a few other tokens."""
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


def _answers(pair: Pair) -> Iterator[Result]:
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
    answered = [] if pair.rounding_differs and not pair.between_cpus else _changed(base, now)
    allowed = 0 if not pair.between_cpus else 1 if pair.by_position else max(1, int(MAX_MOVED * len(base)))
    if other_questions or len(answered) > allowed:
        yield "answers", "regression", _first(other_questions or answered)
    else:
        but = f", except {len(answered)}; rounding may change {allowed}" if answered else ""
        yield "answers", "ok", f"{len(base)} questions and their answers as in the baseline{but}"


def _lines(trace: TraceFile | None) -> list[dict[str, Any]] | None:
    lines = None if trace is None else json_lines(trace)
    if lines is not None and not all(isinstance(line, dict) for line in lines):
        raise ValueError("a line is not an answer")
    return lines


def _changed(base: list[dict[str, Any]], now: list[dict[str, Any]], keys: tuple[str, ...] = ()) -> list[str]:
    """Describe the first change in each changed question's line. keys: keys to compare; empty: all keys of the baseline."""
    changes = {
        number: f"question {number}: {key} {short(a.get(key))} -> {short(b.get(key))}"
        for number, (a, b) in enumerate(zip(base, now, strict=True))
        for key in reversed(keys or list(a))
        if not equal(a.get(key), b.get(key), RUN_NATS, SUM)
    }
    return list(changes.values())


def _method(pair: Pair) -> Iterator[Result]:
    """Check that tokens are still read by a fast method. The plain walk gives the same numbers, but slowly."""
    base, now = pair.base.facts, pair.now.facts
    if base.method is None:
        return
    refused = "" if base.refused is not None else now.refused or ""
    of_machine = pair.setup_changes or (refused if all(x.startswith(_TIMING_REFUSALS) for x in refused.split("; ")) else "")
    methods = {"method": (base.method, now.method), "step": (base.step, now.step)}
    slower = [f"{k} {a} -> {b}" for k, (a, b) in methods.items() if a not in (*_SLOW_METHODS, None) and b in _SLOW_METHODS]
    reason = "; ".join(part for part in (", ".join(slower), refused) if part)
    if of_machine:
        yield "method", "not compared", of_machine
    elif reason:
        yield "method", "regression", f"{'falls back to the plain walk' if slower else 'a fast method is refused'}: {reason}"
    else:
        yield "method", "ok", ", ".join(name for name in (now.method, now.step) if name is not None)


def _flags(pair: Pair) -> Iterator[Result]:
    """Check that the task raises no flag of a kind that the baseline's record lacks. The numbers in a flag may differ."""
    if "flags" not in pair.base.metrics.as_json():
        return
    before, now = ([f for f in r.metrics.flags if not f.startswith(_BUSY_FLAG_PREFIX)] for r in (pair.base, pair.now))
    known = {_NUMBER.sub("", flag) for flag in before}
    added = [flag for flag in now if _NUMBER.sub("", flag) not in known]
    yield "flags", "regression" if added else "ok", _first(added or now) or "none"


def _quality(pair: Pair) -> Iterator[Result]:
    """Judge paired mean differences by their intervals, as `bench compare` does; without an interval, by the margin."""
    for difference in differences(pair.base, pair.now):
        mark = None if difference.metric in COSTS else mark_of(difference.metric, pair.now)
        if mark is None:
            continue
        change, verdict, interval = difference.change, difference.verdict, ""
        if difference.low is None:
            verdict = judge_interval(change, change, mark.margin, mark.more_is_better)
        else:
            interval = f" [{difference.low:+.4g}, {difference.high:+.4g}]"
        shown = "" if change is None else f"{change:+.4g}{interval}"
        says = f"{difference.metric} {difference.a:.5g} -> {difference.b:.5g}: {shown} {difference.why}".strip()
        yield "quality", "could not compare" if change is None else _STATES[verdict], says


def _first(items: Sequence[str]) -> str:
    """Return the first few items as text; empty without items."""
    more = f"; and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else ""
    return "; ".join(items[:_MAX_SHOWN]) + more


CHECKS = (_method, _consistent, _exactness, _by_rule, _answers, _flags, _quality)  # in the order of findings
