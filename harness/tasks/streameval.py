"""StreamEval: an endless record of numbered lines, and questions about the line `distance` lines back.

Source: Xiao et al. 2023, arXiv:2309.17453, Section 4.3, Figures 8 and 9, Table 7. Lines follow LongEval (Li et al. 2023). The
authors released neither data nor code; details that the paper leaves open are options here (docs/tasks/streameval.md).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from kvbench.harness.data.lookups import REGISTER_HEADER, register_answer, register_line, register_question, stated_value
from kvbench.harness.data.quiz import QuizData, Script, quiz_data
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import AnswerMetrics
from kvbench.harness.report import chart
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.markdown import by_row, cache_bytes, on_device, policy_table, task_line
from kvbench.harness.report.rows import short_titles, shown_kv_bytes
from kvbench.harness.report.shares import answers
from kvbench.harness.report.task_charts import marks, panels, policy_lines
from kvbench.harness.tasks.common.answers import AnsweringTask, Context, QuizFacts, about_intervals, percent_or_status, summed
from kvbench.harness.tasks.task import Job, MeasurementError, Options, Tokenizer, Workload

_MAX_LINES = 10**6  # lines of all streams, which are generated in memory


class StreamEvalOptions(Options):
    """Options of the StreamEval task."""

    shown = ("distance", "streams")
    axes = ("distance",)

    name: Literal["streameval"] = "streameval"
    lines: int = Field(1000, ge=1, description="record lines per stream")
    query_every: int = Field(10, ge=1, description="lines between questions")
    distance: int = Field(20, ge=1, description="lines from a question back to the line that it is about; 1 is the last line")
    streams: int = Field(1, ge=1, description="number of independent streams; each is read with a fresh cache")
    lowest: int = Field(1, ge=0, description="smallest register content")
    highest: int = Field(50000, ge=1, description="largest register content")
    context: Context = Field(
        "gold",
        description="answer that a question leaves in the stream: the right one (gold), the model's (model), or none (none)",
    )
    data_seed: int = Field(0, ge=0, description="seed of the registers' contents")

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if self.distance > self.lines - self.lines % self.query_every:
            raise ValueError(
                f"distance {self.distance} is beyond the stream: its last question comes after line "
                f"{self.lines - self.lines % self.query_every}"
            )
        if self.streams * self.lines > _MAX_LINES:
            raise ValueError(f"{self.streams:,} streams of {self.lines:,} lines have more than {_MAX_LINES:,} lines together")
        if self.highest < self.lowest:
            raise ValueError(f"highest {self.highest} is below lowest {self.lowest}")
        return self


class StreamEval(AnsweringTask):
    """Accuracy of answers about an earlier line of an endless record."""

    options = StreamEvalOptions

    @staticmethod
    def data(options: StreamEvalOptions, tokenizer: Tokenizer, directory: Path | None) -> QuizData:
        """Return generated text, which is equal for every policy and machine."""
        scripts = [script(options, stream) for stream in range(options.streams)]
        return quiz_data(scripts, f"generated, data seed {options.data_seed}", tokenizer())

    @classmethod
    def workload(cls, options: StreamEvalOptions) -> Workload:
        """Estimate 25 tokens per line and ten per answer."""
        answers = options.streams * options.lines // options.query_every
        return Workload(sequences=options.streams, length=25 * options.lines, steps=10 * answers)

    @staticmethod
    def run(options: StreamEvalOptions, job: Job) -> AnswerMetrics:
        """Read the streams, answer their questions, and write each answer to the trace."""
        from kvbench.harness.tasks.common.answering import answer_questions

        longest = max(int(q.line_tokens.max()) for q in job.data.quizzes)
        if job.config.capacity is not None and longest > job.config.capacity:
            raise MeasurementError(f"a record line takes {longest} tokens, but the cache holds {job.config.capacity}")
        return answer_questions(job, options.context, stated_value)

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Return the accuracy by distance, and by the share of the line that was in the cache."""
        length = _line_tokens(records[0])
        heads = {distance: f"{distance} lines back" for distance in sorted({_distance(r) for r in records})}
        rows = [(row[0], {_distance(r): percent_or_status(r) for r in row}) for row in by_row(records)]
        about = (
            f"{task_line(records[0])}A line takes {length} tokens on average. Percent right with {about_intervals(records)}:\n"
        )
        return [about, *policy_table(rows, records, heads), *over_distance(records), *_by_cache(records)]


def script(options: StreamEvalOptions, stream: int) -> Script:
    """Return the text of one stream. The lines depend only on the data seed and the stream's number."""
    draw = random.Random(f"{options.data_seed}/{stream}")
    text, contents = Script(REGISTER_HEADER), []
    for number in range(1, options.lines + 1):
        contents.append(draw.randint(options.lowest, options.highest))
        text.line(register_line(number, contents[-1]))
        target = number - options.distance
        if number % options.query_every == 0 and target >= 0:
            text.ask(register_question(1 + target), str(contents[target]), register_answer(contents[target]), target)
    return text


def _by_cache(records: Sequence[Record]) -> list[str]:
    """Return a table of accuracy by the share of the line that was in the cache when the answer began."""
    rows = []
    for row in by_row(records):
        cells = {part: f"{100 * right / total:.1f} of {total:,}" for part, (right, total) in summed(row, "in_cache").items()}
        measured = next((r for r in row if r.measured(AnswerMetrics)), None)
        rows += [] if measured is None else [(row[0], cells | {"K/V": cache_bytes(shown_kv_bytes(measured))})]
    heads = {"K/V": "K/V", "whole": "whole line in the cache", "in part": "in part", "gone": "gone"}
    about = "Over all distances, by how much of the line was in the cache when the answer began:\n"
    return [about, *policy_table(rows, records, heads)]


def _distance(record: Record) -> int:
    """Return the number of lines between a question and the line that it asks about."""
    return record.cell.task_options(StreamEvalOptions).distance


def _line_tokens(record: Record) -> float | None:
    """Return the mean number of tokens per line."""
    return record.data.line_tokens if isinstance(record.data, QuizFacts) else None


def over_distance(records: Sequence[Record]) -> list[chart.Chart]:
    """Return a panel per capacity with a line per policy; empty if all records have one distance."""
    measured = [r for r in records if r.measured(AnswerMetrics)]
    if len({_distance(r) for r in measured}) < 2:
        return []
    return panels(
        measured, "Share of right answers of {model} over how many lines back the answer is, one line per policy", _panel
    )


def _panel(records: Sequence[Record], capacity: int) -> dict[str, Any]:
    values: list[dict[str, Any]] = []
    pairs = []
    for name, record in zip(short_titles(records), records, strict=True):
        accuracy = answers([record])
        assert accuracy is not None
        pairs.append((name + on_device(record, records), record.cell.policy))
        low, high = accuracy.ends or (accuracy.share, accuracy.share)
        share = {"right": accuracy.share, "low": low, "high": high}
        values.append(
            {
                "policy": pairs[-1][0],
                "lines back": _distance(record),
                **{k: round(100 * v, 2) for k, v in share.items()},
            }
        )
    values.sort(key=lambda v: v["lines back"])
    line = _line_tokens(records[0])
    reach = [{"at": round(capacity / line, 2), "what": "reach of the cache"}] if line else []
    axis = {"format": ",d", "values": sorted({v["lines back"] for v in values})}
    back = chart.channel("lines back", "lines back", scale={"type": "log", "base": 2}, axis=axis)
    right = chart.channel("right", "percent right", scale={"domain": [0, 100]})
    ends = {"x": back, "y": {**right, "field": "low"}, "y2": {"field": "high"}, "color": chart.by_policy("color", pairs)}
    intervals = {"data": {"values": values}, "mark": {"type": "rule", "strokeWidth": 1}, "encoding": ends}
    lines = policy_lines(values, {"x": back, "y": right}, pairs, point={"size": 50})
    return {"layer": [*marks(reach), intervals, lines]}
