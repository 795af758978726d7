"""Task in which a model runs the program in its prompt: it writes a trace far longer than the prompt.

Every step of the trace needs a line of the prompt. A word of the trace is a copy, a look-up or a sum of two digits, so a wrong
word is one that the model could no longer look up. The model writes the answers itself, whereas other tasks read a text. An
answer with one wrong word is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from kvbench.harness.core.files import json_lines
from kvbench.harness.records import Record
from kvbench.harness.report import chart
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.feed.question import is_reference
from kvbench.harness.report.markdown import cache_bytes, digits, measured_table, number, percent, policy_table, task_line
from kvbench.harness.report.rows import kv_cells, short_titles, shown_kv_bytes, without_seeds
from kvbench.harness.report.task_charts import marks, panels, policy_lines
from kvbench.harness.tasks.common.answers import about_intervals, percent_or_status
from kvbench.harness.tasks.task import Job, Task, Tokenizer, Workload
from kvbench.harness.tasks.trace.programs import TraceData, figures, trace_data
from kvbench.harness.tasks.trace.trace_options import TraceFacts, TraceMetrics, TraceOptions


class Trace(Task):
    """Share of programs that a model runs to the end, and place of its first wrong word."""

    options = TraceOptions
    metrics = TraceMetrics
    data_facts = TraceFacts
    trace = ".trace.jsonl"

    @staticmethod
    def data(options: TraceOptions, tokenizer: Tokenizer, directory: Path | None) -> TraceData:
        """Return generated programs, which are equal for every policy and machine."""
        return trace_data(options, tokenizer())

    @classmethod
    def workload(cls, options: TraceOptions) -> Workload:
        """Return prompts, and answers at their longest."""
        at_once = min(options.side_by_side or options.answers, options.answers)
        steps = 0 if options.teacher else options.answers * options.limit // at_once
        return Workload(
            sequences=options.answers,
            length=options.prompt + options.limit,
            side_by_side=at_once,
            steps=steps,
            prompt=options.prompt,
        )

    @classmethod
    def tokens_read(cls, options: TraceOptions, data: TraceData) -> int | None:
        """Return the tokens of the prompt and the longest right trace, without the last word, which no word follows."""
        if not options.teacher or options.side_by_side is not None:
            return None
        return data.prompts.shape[1] + max(map(len, data.traces)) - 1

    @staticmethod
    def run(options: TraceOptions, job: Job) -> TraceMetrics:
        """Write or read the traces, and write each answer to the trace file."""
        from kvbench.harness.tasks.trace.run_programs import measure

        return measure(options, job)

    @classmethod
    def from_trace(cls, record: Record, trace: IO[bytes]) -> Mapping[str, Any]:
        """Recompute all figures except bytes, by running the programs again."""
        return figures(json_lines(trace), record.cell.task_options(TraceOptions))

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Return a row per policy, tables of right words by distance, and charts of answers that are still right."""
        about = (
            f"{task_line(records[0])}Solved: percent of the answers that are right to the last word, with "
            f"{about_intervals(records)}. First wrong word: its number in half of the answers, or before it, and its step.\n"
        )
        return [
            about,
            *measured_table(records, TraceMetrics, _row),
            *_by_distance(records, "Values said again that are right, by how many words back they were said last:", "reads"),
            *_by_distance(records, "Steps that obey `tell`, by how many words after the prompt they end:", "told"),
            *_still_right(records),
        ]


def _row(record: Record, m: TraceMetrics) -> dict[str, str]:
    """Return the cells of a record's row, by heading; empty where a figure does not apply."""
    seconds, endings, judgements = record.facts.measured_seconds, m.endings or {}, m.told
    return {
        "solved": percent_or_status(record),
        **{f"pass@{p.k}": percent(p.share, [end for end in (p.low, p.high) if end is not None], "") for p in m.pass_at},
        "words right": percent(m.word_accuracy),
        "first wrong word": _first_wrong(m, record.cell.task_options(TraceOptions).step),
        "final state": number(m.final),
        "ended, looped, cut": ", ".join(number(endings[name]) for name in ("ended", "looped", "cut") if endings),
        "told": percent(sum(b.right for b in judgements) / sum(b.count for b in judgements)) if judgements else "",
        "held at the first wrong word": percent(m.held),
        **kv_cells(record, [record]),
        "K/V a solved one": cache_bytes(round((shown_kv_bytes(record) or 0) * m.questions / m.right)) if m.right else "",
        "s a solved one": digits(seconds / m.right, 3) if seconds and m.right else "",
    }


def wrong_words(metrics: TraceMetrics) -> Iterator[int]:
    """Yield the number of each answer's first wrong word, counted from 1."""
    return (right + 1 for right, digit in zip(metrics.words_right, metrics.outcomes or "", strict=True) if digit == "0")


def first_wrong(metrics: TraceMetrics) -> int | None:
    """Return the number of the word by which half of the answers are wrong, counted from 1; None if fewer than half are."""
    wrong, half = sorted(wrong_words(metrics)), (metrics.questions + 1) // 2
    return wrong[half - 1] if len(wrong) >= half else None


def _first_wrong(metrics: TraceMetrics, step: int) -> str:
    """Return the number of the word and of its step. step: words of a step."""
    word = first_wrong(metrics)
    return "–" if word is None else f"{word:,} (step {(word - 1) // step + 1:,})"


def _by_distance(records: Sequence[Record], about: str, figure: Literal["reads", "told"]) -> list[str]:
    """Return a table of percent right by distance, with the number of judgements; empty without judgements."""
    rows = [
        (r, {(p.from_, p.to): f"{100 * p.right / p.count:.1f} of {p.count:,}" for p in judged})
        for r in records
        if (m := r.measured(TraceMetrics)) and (judged := getattr(m, figure))
    ]
    return [f"{about}\n", *policy_table(rows, records, lambda words: f"{words[0]:,} to {words[1] - 1:,}")] if rows else []


def _still_right(records: Sequence[Record]) -> Iterator[str | Chart]:
    """Yield charts of the answers without a wrong word, per `evict` and positions: a panel per capacity, a line per policy."""
    measured = [r for r in records if r.measured(TraceMetrics)]
    caches = [r.cell for r in measured if not is_reference(r)]
    for evicts, positions in dict.fromkeys((cell.evicts, cell.positions) for cell in caches):
        shown = [r for r in measured if is_reference(r) or (r.cell.evicts, r.cell.positions) == (evicts, positions)]
        alt = "Share of the answers of {model} without a wrong word, over the words written, one line per policy"
        only = f"evict {evicts}, {positions} positions"
        charts = panels(shown, alt, still_right, only)
        if charts:
            yield f"Without a wrong word, over the words written, {only}:\n"
            yield from charts


def still_right(records: Sequence[Record], capacity: int) -> dict[str, Any]:
    """Return a panel of answers without a wrong word, over the words written: a line per policy, with all seeds pooled."""
    seeds = without_seeds(records)
    names = short_titles([group[0] for group in seeds])
    pairs = [(name, group[0].cell.policy) for name, group in zip(names, seeds, strict=True)]
    values: list[dict[str, Any]] = [
        point | {"policy": name} for name, group in zip(names, seeds, strict=True) for point in _curve(group)
    ]
    axes = {
        "x": chart.channel("words", "words written"),
        "y": chart.channel("right", "percent without a wrong word", scale={"domain": [0, 100]}),
    }
    lines = policy_lines(values, axes, pairs, ("color", "strokeDash"), interpolate="step-after")
    kept = [r.cell.most_kept or 0 for r in records if r.cell.capacity == capacity and not is_reference(r)]
    full = max(kept, default=0) - len(records[0].data.prefix) - records[0].cell.task_options(TraceOptions).prompt
    return {"layer": [*marks([{"at": full, "what": "cache full"}] if full > 0 else []), lines]}


def _curve(records: Sequence[Record]) -> list[dict[str, float]]:
    """Return the percentage of answers without a wrong word, after 0 words and after each first wrong word of an answer."""
    measured = [m for r in records if (m := r.measured(TraceMetrics))]
    wrong = sorted(word for m in measured for word in wrong_words(m))
    answers, last = sum(m.questions for m in measured), max(right for m in measured for right in m.words_right)
    points = {0: 100.0} | {word: 100 - 100 * number / answers for number, word in enumerate(wrong, 1)}
    points[max(last, *points)] = 100 - 100 * len(wrong) / answers
    return [{"words": word, "right": round(share, 2)} for word, share in sorted(points.items())]
