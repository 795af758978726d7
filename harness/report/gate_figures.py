"""The gate's checks of figures: all that a record has by the table of rules, and its trace token by token, answer by answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvbench.harness.core import plugins
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics, QuestionMetrics
from kvbench.harness.records.rules import RUN_NATS, SUM, Held
from kvbench.harness.report.compare import largest_difference
from kvbench.harness.report.gate_pair import Pair, Result, State
from kvbench.harness.report.gate_rules import figures, rule_of
from kvbench.harness.report.verify import problems

LARGEST_NATS = 1e-3  # that one token may differ by, in float32 on the same machine
_FEW = 3  # differences that are told one by one
_ASKED = ("stream", "question", "gold", "target", "weight")  # of an answer: what does not depend on the model
_PLAIN = ("walk", "plain", "eager")  # the slow ways, in `method` and `step`
_BUSY = "unsettled"  # begins a flag that says the machine was busy
_TIMED = "a step takes"  # begins a refusal that was a matter of a moment's time


def table(pair: Pair) -> Iterator[Result]:
    """Every figure by its rule: a finding a check, with what is not as it was."""
    if not plugins.known_task(pair.base.cell.task.name):
        yield "figures", "could not compare", f"the task {pair.base.cell.task.name} is not installed here"
        return
    now = dict(figures(pair.now))
    wrong: dict[str, list[str]] = {}
    count: dict[str, int] = {}
    for name, value in figures(pair.base):
        rule = rule_of(pair.base, name)
        if rule is None:
            yield "figures", "could not compare", f"nothing says how {'.'.join(name)} is held"
        elif isinstance(rule, Held) and _applies(rule, pair):
            count[rule.check] = count.get(rule.check, 0) + 1
            if name not in now or not rule.allows(value, now[name]):
                wrong.setdefault(rule.check, []).append(f"{_short('.'.join(name))} {_told(value)} -> {_told(now.get(name))}")
    for check, held in count.items():
        if check in wrong:
            yield check, "regression", _some(wrong[check])
        else:
            yield check, "ok", f"{held} as in the baseline"


def _applies(rule: Held, pair: Pair) -> bool:
    if rule.where == "bounded":
        return pair.base.cell.capacity is not None
    return rule.where == "everywhere" or not pair.not_rounded_alike


def consistent(pair: Pair) -> Iterator[Result]:
    """Whether both records say what their traces say, computed by the code of now."""
    for whose, record, path in zip(("the baseline's", "this"), (pair.base, pair.now), pair.traces, strict=True):
        if record.trace is None:
            if whose == "this" and pair.base.trace is not None:
                yield "trace", "could not compare", "this record has no trace, the baseline's has one"
            continue
        found = None if path is None else problems(record, path.parent)
        if found is None:
            yield "trace", "could not compare", f"{whose} record's trace {record.trace.file} is missing"
        else:
            yield "trace", "regression" if found else "ok", f"{whose} record: {_some(found)}" if found else "says the same"


def exactness(pair: Pair) -> Iterator[Result]:
    """Of per-token NLLs. Where rounding differs, attention may choose other tokens: there the paired mean decides."""
    if pair.base.measured(NllMetrics) is None:
        return
    largest = _largest(pair)
    if largest is None:
        yield "exactness", "could not compare", "a trace is missing, unreadable, or of another length"
        return
    says = f"largest difference of a token {largest:.3g} nats, at most {LARGEST_NATS:g}"
    if largest <= LARGEST_NATS:
        yield "exactness", "ok", says
    else:
        why = pair.not_rounded_alike
        yield "exactness", "not compared" if why else "regression", f"{says}{why and '; ' + why}"


def _largest(pair: Pair) -> float | None:
    try:
        return largest_difference(pair.traces)
    except (OSError, ValueError, EOFError):
        return None


def answers(pair: Pair) -> Iterator[Result]:
    """Question by question: what was asked is the same everywhere, what was answered on the same machine."""
    if pair.base.measured(QuestionMetrics) is None:
        return
    try:
        base, now = (_lines(path) for path in pair.traces)
    except (OSError, ValueError):
        yield "answers", "could not compare", "a trace is not readable"
        return
    if base is None or now is None or len(base) != len(now):
        yield "answers", "could not compare", "a trace is missing, or of other questions"
        return
    keys = _ASKED if pair.not_rounded_alike else None
    wrong = [
        f"question {number}: {key} {_told(a.get(key))} -> {_told(b.get(key))}"
        for number, (a, b) in enumerate(zip(base, now, strict=True))
        for key in (keys or a)
        if not _alike(a.get(key), b.get(key))
    ]
    state: State = "regression" if wrong else "ok"
    yield "answers", state, _some(wrong) if wrong else f"{len(base)} questions and their answers as in the baseline"


def _lines(path: Path | None) -> list[dict[str, Any]] | None:
    if path is None or not path.exists():
        return None
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not all(isinstance(line, dict) for line in found):
        raise ValueError("a line is no answer")
    return found


def method(pair: Pair) -> Iterator[Result]:
    """Whether tokens are still read the fast way: the walk gives the same numbers, and takes its time."""
    base, now = pair.base.facts, pair.now.facts
    if base.method is None:
        return
    if pair.setup_changes:
        yield "method", "not compared", pair.setup_changes
        return
    refused = "" if base.refused is not None else now.refused or ""
    if refused.startswith(_TIMED):
        yield "method", "not compared", refused
        return
    ways = {"method": (base.method, now.method), "step": (base.step, now.step)}
    slower = [f"{k} {a} -> {b}" for k, (a, b) in ways.items() if a not in (*_PLAIN, None) and b in _PLAIN]
    if refused or slower:
        told = "; ".join(part for part in (", ".join(slower), refused) if part)
        yield "method", "regression", f"falls back to the plain walk: {told}" if slower else f"a fast way is refused: {refused}"
    else:
        yield "method", "ok", ", ".join(way for way in (now.method, now.step) if way is not None)


def flags(pair: Pair) -> Iterator[Result]:
    """What a task found wrong with its own figures, and did not find then."""
    if "flags" not in pair.base.metrics.as_json():
        return
    before, new = ([f for f in r.metrics.flags if not f.startswith(_BUSY)] for r in (pair.base, pair.now))
    if new and not before:
        yield "flags", "regression", _some(new)
    else:
        yield "flags", "ok", _some(new) if new else "none"


def other_question(pair: Pair) -> str:
    """In words, why the two can't be compared: another text, other weights; empty where they can."""
    texts = ("text: token ids", pair.base.data.ids_sha256, pair.now.data.ids_sha256)
    for what, base, now in (texts, ("weights", pair.base.facts.weights_sha256, pair.now.facts.weights_sha256)):
        if base != now and base:
            return f"another {what} {base[:8]} -> {now[:8]}"
    return ""


def _alike(a: Any, b: Any) -> bool:
    """Equal, log-likelihoods but for rounding."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=SUM, abs_tol=RUN_NATS)
    return bool(a == b)


def _some(items: list[str]) -> str:
    more = f"; and {len(items) - _FEW} more" if len(items) > _FEW else ""
    return "; ".join(items[:_FEW]) + more


def _short(name: str) -> str:
    return name.removeprefix("metrics.")


def _told(value: Any) -> str:
    text = f"{value:.7g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def status(base: Record, now: Record) -> Result | None:
    """Of a cell that failed, then or now; None of two that went well."""
    if base.status == "ok" and now.status == "ok":
        return None
    kinds = ["ok" if r.status == "ok" else r.error.kind if r.error else "failed" for r in (base, now)]
    return "status", "regression" if base.status == "ok" else "ok", f"{kinds[0]} -> {kinds[1]}"
