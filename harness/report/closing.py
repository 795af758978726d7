"""Tables at the end of a run: a row per policy, the best policy and its cost. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.harness.core.grouped import grouped
from kvbench.harness.core.intervals import MIN_BLOCK_TOKENS, MIN_BLOCKS, long_enough
from kvbench.harness.core.perplexity import perplexity
from kvbench.harness.core.shown import duration, visible
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics, PeakMetrics, QuestionMetrics, StepMetrics
from kvbench.harness.report import sections
from kvbench.harness.report.feed import answers, words
from kvbench.harness.report.feed.question import Question, is_reference, questions
from kvbench.harness.report.feed.words import size
from kvbench.harness.report.markdown import cache_bytes, digits, in_bytes, model_name, rounded
from kvbench.harness.report.pairing import describe_tokens, past_training, question, strided, units
from kvbench.harness.report.rows import Row, rows, short_names
from kvbench.harness.report.sections import by_machine
from kvbench.harness.report.shares import answers as total_answers
from kvbench.harness.report.shares import is_answered
from kvbench.harness.report.task_report import kv_title

WHICH = "which"  # suite of `bench which`, which chooses the length of its text itself
_MAX_TEXTS = 4  # texts in one table, a column each
_TOKENS_STEP = 4096  # suggested numbers of tokens are rounded up to a multiple
_TOKENS_BEYOND = 128  # tokens that a stream should have after its cache has filled: a few runs


@dataclass(frozen=True)
class Table:
    """Policies that can be compared with each other.

    Attributes:
        heading: properties that the rows share.
        head: names of the columns; the first column is the policy.
        lines: cells of each policy's row, as text.
        notes: the feed's sentences on the best policy and its cost, and explanations of the columns.
    """

    heading: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    notes: Sequence[str]


def closing(records: Sequence[Record]) -> list[Table]:
    """Return the tables of a run, one for most runs, several if the run has several models or texts.

    The records are those of all cells, including cells that were already finished.
    """
    models = grouped(records, lambda record: repr(record.cell.as_json()["model"])).values()
    machines = [named_group for of_model in models for named_group in by_machine(of_model)]
    parts = [
        (machine, mode, part)
        for machine, group in machines
        for comparable in _comparable(group)
        for mode, part in _by_positions(comparable)
    ]
    subjects = [_subject(part) for _, _, part in parts]
    several = len(set(subjects)) > 1
    tables = [
        _table(part, (subject if several or any(r.measures(NllMetrics) for r in part) else "", mode, machine))
        for (machine, mode, part), subject in zip(parts, subjects, strict=True)
    ]
    for machine, group in machines:
        if _has_overview(group):
            tables += [_overview(part, mode, machine) for mode, part in _by_positions(group)]
    return tables


def _subject(records: Sequence[Record]) -> str:
    """Return the text of a table, or its tasks. Tasks with the same manner of asking are named together."""
    read = next((r for r in records if r.measures(NllMetrics)), None)
    if read is not None:
        return words.text(read)
    evicts = "prompt" if any(r.cell.evicts == "prompt" for r in records) else ""
    labels = (words.task_and_question(r, evicts) if r.measures(QuestionMetrics) else r.cell.task.name for r in records)
    tasks = grouped((label.partition(", ") for label in dict.fromkeys(labels)), lambda parts: parts[1:])
    return "; ".join(f"{words.enumerated([name for name, *_ in same])}{comma}{manner}" for (comma, manner), same in tasks.items())


def _comparable(records: list[Record]) -> list[list[Record]]:
    """Split the records of one model and machine into tables if they have several texts or prompt methods."""
    parts = grouped(records, _text_or_prompt)
    if sum(map(bool, parts)) < 2:
        return [records]
    if _has_overview(records):
        parts.pop("", None)
    return list(parts.values())


def _has_overview(records: Sequence[Record]) -> bool:
    """Return whether the records of one model and machine have a table with a column per text, and columns of times or peaks.

    Questions have separate tables, so a suite with questions has no such table.
    """
    costs = any(record.measures(StepMetrics) or record.measures(PeakMetrics) for record in records)
    asks = any(record.measures(QuestionMetrics) for record in records)
    return costs and not asks and 1 < len(_texts(records)) <= _MAX_TEXTS


def _texts(records: Sequence[Record]) -> dict[str, Record]:
    """Return the first record of each text, by the question that makes records comparable."""
    return {key: group[0] for key, group in grouped((r for r in records if r.measures(NllMetrics)), question).items()}


def _by_positions(records: list[Record]) -> list[tuple[str, list[Record]]]:
    """Return (mode of positions, records) of each table. References are in all tables.

    The mode is empty if no policy has several modes.
    """
    cells = [r.cell for r in records if not is_reference(r)]
    alike = grouped(cells, lambda cell: (cell.policy, repr(cell.parameters), cell.capacity, cell.evicts, cell.stored))
    if all(len({cell.positions for cell in of_policy}) < 2 for of_policy in alike.values()):
        return [("", records)]
    modes = dict.fromkeys(cell.positions for cell in cells)
    return [(mode, [r for r in records if is_reference(r) or r.cell.positions == mode]) for mode in modes]


def _text_or_prompt(record: Record) -> str:
    """Return the text or prompt method of a record; empty without either. Records that differ in it never share a column."""
    if record.measures(NllMetrics):
        return question(record)
    options = record.cell.options
    return " ".join(str(options[name]) for name in record.cell.task.never_pooled_over if name in options)


def _table(records: Sequence[Record], context: tuple[str, str, str]) -> Table:
    """Return the table of comparable records. context: parts of the heading, as in `_costed`."""
    policies = _policies(records)
    scored = [row.perplexity for row in policies if row.perplexity is not None and row.nll is not None]
    together = Question("perplexity", scored, policies, "", "", "")
    nlls = [together.figure(row) for row in policies]
    quality = {
        "perplexity": [_perplexity(row, nll) for row, nll in zip(policies, nlls, strict=True)],
        **_right(policies),
        "result": [_other_figure(row) for row in policies],
    }
    longer = _longer_text(scored)
    notes = [f"For intervals, read a longer text: {longer}."] if longer else []
    if "–" in quality["perplexity"]:
        notes.append("–: no mean perplexity, because the text is longer than those of the model's training.")
    notes += [f"Perplexity is over {describe_tokens(scored, together.common)}."] if not together.common.are_all else []
    shown = [(nll, row.nll) for nll, row, cell in zip(nlls, policies, quality["perplexity"], strict=True) if cell != "–"]
    if any(nll and whole and not math.isclose(nll, whole, rel_tol=1e-6) for nll, whole in shown):
        notes.append("Perplexity in the table leaves out tokens before the cache has filled, and at the ends of streams.")
    if sum(head.startswith("right") for head in quality) > 1:
        notes.append("K/V is the largest of the tasks'; a share of dense's bytes is that of one task.")
    elif any(r.measures(PeakMetrics) for r in records) and any(r.measures(QuestionMetrics) for r in records):
        notes.append("K/V is that of the task memory; a share of dense's bytes is that of the questions.")
    return _costed(policies, quality, context, [*_findings(records), *notes])


def _right(policies: Sequence[Row]) -> dict[str, list[str]]:
    """Return a column of right answers for each task, or one for all tasks if they are many or share a name."""
    answered = [grouped(filter(is_answered, row.records), lambda record: repr(record.cell.options)) for row in policies]
    tasks = {task: words.task(records[0]).partition(", ")[0] for of_row in answered for task, records in of_row.items()}
    if 1 < len(set(tasks.values())) == len(tasks) <= _MAX_TEXTS:
        return {f"right, {name}": [_share(of_row.get(task, ())) for of_row in answered] for task, name in tasks.items()}
    complete = [row.records if of_row.keys() == tasks.keys() else () for row, of_row in zip(policies, answered, strict=True)]
    return {"right": [_share(records) for records in complete]}


def _share(records: Sequence[Record]) -> str:
    """Return the share of right answers over some records of a row; empty without answers."""
    right = total_answers(records)
    return "" if right is None else f"{100 * right.share:.0f} %"


def _overview(records: Sequence[Record], positions: str, machine: str) -> Table:
    """Return a row per policy with its perplexity on each text, its times and its bytes."""
    policies, texts = _policies(records), _texts(records)
    short = [words.text(record).split(",")[0] for record in texts.values()]
    names = short if len(set(short)) == len(short) else [words.text(record) for record in texts.values()]
    quality = {}
    for name, text in zip(names, texts, strict=True):
        read = [Row([r for r in row.records if r.measures(NllMetrics) and question(r) == text]) for row in policies]
        quality[f"perplexity, {name}"] = [_perplexity(row, row.nll) for row in read]
    return _costed(policies, quality, ("", positions, machine), [])


def _policies(records: Sequence[Record]) -> list[Row]:
    return sorted(rows(records), key=lambda row: row.cell.capacity or 0)


def _costed(policies: Sequence[Row], quality: dict[str, list[str]], context: tuple[str, str, str], notes: Sequence[str]) -> Table:
    """Return a table of the quality columns, the cost columns and the status. Empty columns are left out.

    context: subject, mode of positions and machine, each empty if it is equal in all tables of the run.
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
    moments = {row.cell.evicts for row in policies if not is_reference(row.records[0])}
    when = f"evicting {words.evicting(*moments)}" if len(moments) == 1 else ""
    parts = [f"{first.cell.suite}, {model_name(first)}", sized, when, subject, positions and f"positions {positions}"]
    heading = visible(", ".join(part for part in [*parts, machine and f"on {machine}"] if part))
    return Table(heading, list(shown), list(zip(*shown.values(), strict=True)), notes)


def _costs(policies: Sequence[Row]) -> dict[str, list[str]]:
    """Return columns of bytes and times. K/V is taken from measured peaks if any, because a text may be read as many streams."""
    metered = [next((r for r in row.records if r.measured(PeakMetrics)), None) for row in policies]
    peaks = [record and record.measured(PeakMetrics) for record in metered]
    times = [row.latency for row in policies]
    of_peaks = [cache_bytes(peak and peak.kv_bytes) for peak in peaks]
    summed = [r for r in metered if r] if any(of_peaks) else [row.perplexity or row.records[0] for row in policies]
    return {
        kv_title(summed): of_peaks if any(of_peaks) else [cache_bytes(_kv_bytes(row)) for row in policies],
        "peak": [in_bytes(peak and peak.peak_bytes) for peak in peaks],
        "TTFT ms": [digits(m.first_token_ms, 3) if m else "" for m in times],
        "TPOT ms": [digits(m.step_ms, 3) if m else "" for m in times],
        "tokens/s": [rounded(m.tokens_per_second) if m else "" for m in times],
    }


def _kv_bytes(row: Row) -> int | None:
    """Return the bytes of K and V of a row's text, or of the task that takes the most."""
    if row.perplexity is not None:
        return row.kv_bytes
    return max((size for record in row.records if (size := Row([record]).kv_bytes) is not None), default=None)


def _longer_text(records: Sequence[Record]) -> str:
    """Return the options that give a text an interval, and the time needed if known; empty if it has an interval."""
    scored = [(r, metrics) for r in records if (metrics := r.measured(NllMetrics))]
    if not scored:
        return ""
    record, metrics = scored[0]
    capacity = max(r.cell.capacity or 0 for r, _ in scored)
    read = units(metrics.all_tokens, capacity, metrics.stream_tokens, len(record.data.prefix))
    if read.independent or long_enough(len(read.tokens), metrics.blocks.size, capacity):
        return ""
    if record.cell.suite == WHICH:
        return "a larger --minutes"
    stream_tokens = metrics.stream_tokens or (record.data.tokens if record.cell.options.get("prompt") else None)
    if stream_tokens is None:
        needed = MIN_BLOCKS * max(MIN_BLOCK_TOKENS, 2 * capacity) + capacity + _TOKENS_BEYOND
        tokens = _TOKENS_STEP * math.ceil(needed / _TOKENS_STEP)
        setting = f"--set tokens={tokens}"
    else:
        streams = max(MIN_BLOCKS, record.data.tokens // stream_tokens)
        tokens = streams * max(stream_tokens, 2 * capacity + _TOKENS_BEYOND)
        setting = f"--set streams={streams} --set tokens={tokens}"
    seconds = sum(r.facts.seconds or 0.0 for r, _ in scored) * tokens / max(1, record.data.tokens)
    return f"{setting}, {duration(seconds)}"


def _capacity(row: Row) -> str:
    """Return the number of tokens that a row's policy keeps; "its own" for a third-party cache without a capacity."""
    if row.cell.capacity is not None:
        return f"{row.cell.capacity:,}"
    return "all" if row.records[0].facts.code is None else "its own"


def _perplexity(row: Row, nll: float | None) -> str:
    """Return the perplexity; a dash if it has a trend, because the mean then depends on the length of the text."""
    if nll is None or row.perplexity is None:
        return ""
    return "–" if past_training(row.perplexity) else digits(perplexity(nll)) + strided(row.perplexity)


def _findings(records: Sequence[Record]) -> list[str]:
    """Return the feed's sentences on the records' texts, or on their tasks without a text; at equal bytes if formats differ."""
    data = answers(questions(records))
    answered, formats = data["questions"], data["equal_bytes"]
    if formats:
        return [sized["answer"] for equal in formats for sized in equal["sizes"]]
    chosen = [question for question in answered if question["measure"] == "perplexity"] or answered
    several = {name for name in ("subject", "evict") if len({question[name] for question in chosen}) > 1}
    subjects = {question["id"]: f", {question['subject']}" if "subject" in several else "" for question in chosen}
    moments = {question["id"]: f", evicting {question['evict']}" if "evict" in several else "" for question in chosen}
    return [
        f"At {size(budget['capacity'])}{subjects[question['id']]}{moments[question['id']]}: {budget['finding']}"
        for question in chosen
        for budget in question["budgets"]
    ]


def _other_figure(row: Row) -> str:
    """Return the figure of a task without a column of its own, if the row has no other figure."""
    if row.nll is not None or row.answers is not None or row.step_ms is not None:
        return ""
    if any(record.measures(PeakMetrics) for record in row.records):
        return ""
    figures = [figure for record in row.records if (figure := sections.headline(record))]
    return "" if not figures else figures[0] + (f" (+ {len(figures) - 1})" if len(figures) > 1 else "")


def _status(records: Sequence[Record]) -> str:
    """Return "ok", "flagged" or "failed", with the number of failed cells if some succeeded."""
    failed = sum(record.status != "ok" for record in records)
    if failed:
        return "failed" if failed == len(records) else f"{failed} of {len(records)} failed"
    return "flagged" if any(record.metrics.flags for record in records) else "ok"
