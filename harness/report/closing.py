"""The summary at the end of a run: a row per policy, which is best and at what price, and what went wrong. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvbench.harness.core.durations import about
from kvbench.harness.core.intervals import MIN_BLOCK_TOKENS, MIN_BLOCKS, long_enough
from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics, PeakMetrics, QuestionMetrics, StepMetrics
from kvbench.harness.records.run_facts import Failure
from kvbench.harness.report import sections
from kvbench.harness.report.feed import answers, words
from kvbench.harness.report.feed.question import Question, is_reference, questions
from kvbench.harness.report.feed.words import size
from kvbench.harness.report.markdown import cache_bytes, digits, in_bytes, model_name
from kvbench.harness.report.pairing import describe_tokens, on_all_tokens, past_training, question, units
from kvbench.harness.report.rows import Row, rows, short_names, without_folder
from kvbench.harness.report.sections import by_machine

_MAX_NAMES = 3  # in a line, before "and 4 more"
_MAX_TEXTS = 4  # in one table, a column each
_TOKENS_STEP = 4096  # what a number of tokens is rounded up to
_TOKENS_BEYOND = 128  # tokens that a stream should have beyond those that fill its cache: a few runs


@dataclass(frozen=True)
class Table:
    """Policies that can be compared with each other.

    Attributes:
        heading: what the rows have in common.
        head: names of the columns; the first is the policy.
        lines: one row per policy, as text.
        notes: the feed's sentences on which policy is best and at what price, and on what the columns mean.
    """

    heading: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    notes: Sequence[str]


@dataclass(frozen=True)
class Closing:
    """The summary at the end of a run.

    Attributes:
        tables: one for most runs; more if the run has several models or texts.
        troubles: a line for each failure or flag, with the reason.
    """

    tables: Sequence[Table]
    troubles: Sequence[str]


def closing(records: Sequence[Record]) -> Closing:
    """Summarize a run. records: those of cells that were already finished, too."""
    groups = [(machine, mode, part) for machine, group in _comparable(records) for mode, part in _by_positions(group)]
    subjects = [_subject(group) for _, _, group in groups]
    several = len(set(subjects)) > 1
    tables = [
        _table(group, subject if several else "", mode, machine)
        for (machine, mode, group), subject in zip(groups, subjects, strict=True)
    ]
    for machine, together in ((machine, group) for machine, group in _of_one_model(records) if _has_overview(group)):
        tables += [_overview(group, mode, machine) for mode, group in _by_positions(together)]
    return Closing(tables, [*_failures(records), *_flags(records)])


def _subject(records: Sequence[Record]) -> str:
    """The text of a table, or its tasks, those with the same words behind them together."""
    read = next((r for r in records if r.measures(NllMetrics)), None)
    if read is not None:
        prompt = read.cell.options.get("prompt")
        return words.text(read) + (f", prompts of {prompt:,} tokens" if prompt else "")
    labels = (words.task(r) if r.measures(QuestionMetrics) else _task(r) for r in records)
    tasks: dict[str, list[str]] = {}
    for name, _, how in (label.partition(", ") for label in dict.fromkeys(labels)):
        tasks.setdefault(how, []).append(name)
    return "; ".join(", ".join([" and ".join(names), *([how] if how else [])]) for how, names in tasks.items())


def _comparable(records: Sequence[Record]) -> Iterable[tuple[str, list[Record]]]:
    """(machine, records) of each table; the machine's name is empty if the run has only one.

    A table has one model and one machine. It is split further if the run has several texts or ways to prompt.
    """
    for machine, group in _of_one_model(records):
        parts: dict[str, list[Record]] = {}
        for record in group:
            parts.setdefault(_text_or_prompt(record), []).append(record)
        several = sum(map(bool, parts)) > 1
        if several and _has_overview(group):
            parts.pop("", None)
        yield from ((machine, part) for part in (parts.values() if several else [group]))


def _of_one_model(records: Sequence[Record]) -> Iterable[tuple[str, list[Record]]]:
    """(machine, records) of each model on each machine."""
    models: dict[str, list[Record]] = {}
    for record in records:
        models.setdefault(repr(record.cell.as_json()["model"]), []).append(record)
    for same_model in models.values():
        yield from by_machine(same_model)


def _has_overview(records: Sequence[Record]) -> bool:
    """Return whether a table has a column for each of several texts, beside times or peaks. records: of one model and machine.

    Questions have tables of their own, so a suite with questions has no such table.
    """
    costs = any(record.measures(StepMetrics) or record.measures(PeakMetrics) for record in records)
    asks = any(record.measures(QuestionMetrics) for record in records)
    return costs and not asks and 1 < len(_texts(records)) <= _MAX_TEXTS


def _texts(records: Sequence[Record]) -> dict[str, Record]:
    """The first record of each text, by what makes records of it comparable."""
    first: dict[str, Record] = {}
    for record in records:
        if record.measures(NllMetrics):
            first.setdefault(question(record), record)
    return first


def _by_positions(records: list[Record]) -> list[tuple[str, list[Record]]]:
    """(mode of positions, records) of each table; the mode is empty if no policy has several. References are in all tables."""
    modes: dict[tuple[object, ...], set[str]] = {}
    for record in (r for r in records if not is_reference(r)):
        cell = record.cell
        modes.setdefault((cell.policy, repr(cell.parameters), cell.capacity, cell.evicts, cell.stored), set()).add(cell.positions)
    if all(len(several) < 2 for several in modes.values()):
        return [("", records)]
    positions = list(dict.fromkeys(r.cell.positions for r in records if not is_reference(r)))
    return [(mode, [r for r in records if is_reference(r) or r.cell.positions == mode]) for mode in positions]


def _text_or_prompt(record: Record) -> str:
    """Its text or way to prompt: records that differ in it never share a column. Empty if the task has neither."""
    if record.measures(NllMetrics):
        return question(record)
    options = record.cell.options
    return " ".join(str(options[name]) for name in record.cell.task.never_pooled_over if name in options)


def _table(records: Sequence[Record], subject: str, positions: str, machine: str) -> Table:
    """The table of comparable records.

    The rest is for the heading, where the run has several: texts or tasks, modes of positions, machines.
    """
    policies = _policies(records)
    scored = [row.perplexity for row in policies if row.perplexity is not None and row.nll is not None]
    together, tasks = Question("perplexity", scored, policies, "", "", ""), {task for row in policies for task in _answered(row)}
    nlls = [together.figure(row) for row in policies]
    shares = [row.answers.share if row.answers and set(_answered(row)) == tasks else None for row in policies]
    quality = {
        "perplexity": [_perplexity(row, nll) for row, nll in zip(policies, nlls, strict=True)],
        "right": ["" if share is None else f"{100 * share:.0f} %" for share in shares],
        "result": [_other_figure(row) for row in policies],
    }
    longer = _longer_text(scored)
    notes = [f"For intervals, read a longer text: {longer}."] if longer else []
    if "–" in quality["perplexity"]:
        notes.append("–: no mean perplexity, because the text is longer than those of the model's training.")
    notes += [f"Perplexity is over {describe_tokens(scored, together.common)}."] if not together.common.are_all else []
    if any(nll and row.nll and not math.isclose(nll, row.nll, rel_tol=1e-6) for nll, row in zip(nlls, policies, strict=True)):
        notes.append("Perplexity in the table is over the tokens after the cache has filled.")
    return _costed(policies, quality, (subject, positions, machine), [*_findings(records), *notes])


def _overview(records: Sequence[Record], positions: str, machine: str) -> Table:
    """A row per policy with its perplexity on each text, its times and its bytes."""
    policies, texts = _policies(records), _texts(records)
    short = [words.text(record).split(",")[0] for record in texts.values()]
    names = short if len(set(short)) == len(short) else [words.text(record) for record in texts.values()]
    quality = {}
    for name, text in zip(names, texts, strict=True):
        read = [Row([r for r in row.records if r.measures(NllMetrics) and question(r) == text]) for row in policies]
        quality[f"perplexity, {name}"] = [_perplexity(row, row.nll) if row.records else "" for row in read]
    return _costed(policies, quality, ("", positions, machine), [])


def _policies(records: Sequence[Record]) -> list[Row]:
    return sorted(rows(records), key=lambda row: row.cell.capacity or 0)


def _costed(policies: Sequence[Row], quality: dict[str, list[str]], context: tuple[str, str, str], notes: Sequence[str]) -> Table:
    """The table of these columns, those of costs and the status; columns that say nothing are left out.

    context: subject, mode of positions and machine, each empty if all tables of the run have the same.
    """
    capacities = {row.cell.capacity for row in policies if row.cell.capacity is not None}
    columns = {"policy": short_names(policies), "capacity": [_capacity(row) for row in policies]} | quality | _costs(policies)
    columns["status"] = [_status(row.records) for row in policies]
    if len(set(columns["capacity"]) - {"all"}) < 2 and "its own" not in columns["capacity"]:
        del columns["capacity"]
    shown = {head: cells for head, cells in columns.items() if any(cells)}
    subject, positions, machine = context
    first = policies[0].records[0]
    sized = f"{next(iter(capacities)):,} tokens cached" if len(capacities) == 1 else ""
    parts = [f"{first.cell.suite}, {model_name(first)}", sized, subject, positions and f"positions {positions}"]
    heading = visible(", ".join(part for part in [*parts, machine and f"on {machine}"] if part))
    return Table(heading, list(shown), list(zip(*shown.values(), strict=True)), notes)


def _costs(policies: Sequence[Row]) -> dict[str, list[str]]:
    """Return columns of bytes and times. K/V is that of the peaks if any was measured: a text may be read as many streams."""
    peaks = [next((m for r in row.records if (m := r.measured(PeakMetrics))), None) for row in policies]
    times = [None if row.latency is None else row.latency.measured(StepMetrics) for row in policies]
    rates = [None if m is None else m.tokens_per_second for m in times]
    of_peaks = ["" if peak is None else cache_bytes(peak.kv_bytes) for peak in peaks]
    return {
        "K/V": of_peaks if any(of_peaks) else [cache_bytes(row.kv_bytes) for row in policies],
        "peak": ["" if peak is None else in_bytes(peak.peak_bytes) for peak in peaks],
        "TTFT ms": ["" if m is None else digits(m.first_token_ms, 3) for m in times],
        "TPOT ms": ["" if m is None else digits(m.step_ms, 3) for m in times],
        "tokens/s": ["" if rate is None else f"{rate:,.0f}" for rate in rates],
    }


def _longer_text(records: Sequence[Record]) -> str:
    """Return the options that give the text an interval, and the time needed; empty if it has one. records: of one text."""
    scored = [(r, metrics) for r in records if (metrics := r.measured(NllMetrics))]
    if not scored:
        return ""
    record, metrics = scored[0]
    capacity = max(r.cell.capacity or 0 for r, _ in scored)
    read = units(on_all_tokens(metrics), capacity, metrics.stream_tokens, len(record.data.prefix))
    if read.independent or long_enough(len(read.tokens), metrics.blocks.size, capacity):
        return ""
    if metrics.stream_tokens is None:
        needed = MIN_BLOCKS * max(MIN_BLOCK_TOKENS, 2 * capacity) + capacity + _TOKENS_BEYOND
        tokens = _TOKENS_STEP * math.ceil(needed / _TOKENS_STEP)
        setting = f"--set tokens={tokens}"
    else:
        streams = max(MIN_BLOCKS, record.data.tokens // metrics.stream_tokens)
        tokens = streams * max(metrics.stream_tokens, 2 * capacity + _TOKENS_BEYOND)
        setting = f"--set streams={streams} --set tokens={tokens}"
    seconds = sum(r.facts.seconds or 0.0 for r, _ in scored) * tokens / max(1, record.data.tokens)
    return f"{setting}, {about(seconds)}"


def _capacity(row: Row) -> str:
    """Tokens that it keeps; what somebody else's cache keeps, only its code says."""
    if row.cell.capacity is not None:
        return f"{row.cell.capacity:,}"
    return "all" if row.records[0].facts.code is None else "its own"


def _perplexity(row: Row, nll: float | None) -> str:
    """The perplexity; a dash where it has a trend, so that its mean depends on where reading stopped."""
    if nll is None:
        return ""
    return (
        "–" if row.perplexity is not None and past_training(row.perplexity) else digits(math.exp(min(nll, 700))) + _of_tokens(row)
    )


def _of_tokens(row: Row) -> str:
    return f" (1 token in {row.stride})" if row.stride > 1 else ""


def _findings(records: Sequence[Record]) -> list[str]:
    """The sentences of the feed on the records' texts; on their tasks if they have no text; at equal bytes if formats differ."""
    data = answers(questions(records))
    answered, formats = data["questions"], data["equal_bytes"]
    if formats:
        return [sized["answer"] for equal in formats for sized in equal["sizes"]]
    chosen = [question for question in answered if question["measure"] == "perplexity"] or answered
    about = {question["id"]: f", {question['subject']}" if len(chosen) > 1 else "" for question in chosen}
    return [
        f"At {size(budget['capacity'])}{about[question['id']]}: {budget['finding']}"
        for question in chosen
        for budget in question["budgets"]
    ]


def _answered(row: Row) -> list[str]:
    """The tasks whose questions it answered."""
    return [repr(r.cell.options) for r in row.records if (m := r.measured(QuestionMetrics)) and m.right is not None]


def _other_figure(row: Row) -> str:
    """The figure of a task without its own column, if the row has no other figure."""
    if row.nll is not None or row.answers is not None or row.step_ms is not None:
        return ""
    if any(record.measures(PeakMetrics) for record in row.records):
        return ""
    figures = [figure for record in row.records if (figure := sections.headline(record))]
    return "" if not figures else figures[0] + (f" (+ {len(figures) - 1})" if len(figures) > 1 else "")


def _status(records: Sequence[Record]) -> str:
    """ok, flagged or failed, and how many of the cells failed."""
    failed = sum(record.status != "ok" for record in records)
    if failed:
        return "failed" if failed == len(records) else f"{failed} of {len(records)} failed"
    return "flagged" if any(record.metrics.flags for record in records) else "ok"


def _failures(records: Sequence[Record]) -> list[str]:
    """A line per policy and reason."""
    reasons: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.status != "ok":
            error = record.error or Failure(kind="", message="")
            place = f" ({error.where})" if error.where else ""
            reason = ": ".join(part for part in (error.kind, error.message) if part) or "no reason given"
            reasons.setdefault((without_folder(record.cell.policy), reason + place), []).append(record)
    lines = []
    for (policy, reason), failed in reasons.items():
        cells = f"{len(failed)} cells" if len(failed) > 1 else _task(failed[0])
        lines.append(visible(f"{policy} failed ({cells}): {reason}"))
    return lines


def _flags(records: Sequence[Record]) -> list[str]:
    """A line per task and kind of flag; flags are of one kind if they agree up to the first colon or digit."""
    kinds: dict[tuple[str, str], list[tuple[Record, str]]] = {}
    for record in records:
        for flag in record.metrics.flags:
            kind = flag.split(":")[0].rstrip("0123456789,. ")
            kinds.setdefault((_task(record), kind), []).append((record, flag))
    lines = []
    for (task, _), flagged in kinds.items():
        names = list(dict.fromkeys(without_folder(record.cell.policy) for record, _ in flagged))
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        lines.append(visible(f"{', '.join(names[:_MAX_NAMES])}{more} flagged ({task}): {flagged[0][1]}"))
    return lines


def _task(record: Record) -> str:
    return record.cell.task.name
