"""Tasks, one file or package each, and the names that a task imports ("A task of your own" in CONTRIBUTING.md).

In a package, `__init__` holds the task and its page, and `<task>_options`, if present, holds its options and figures. Both work
without torch. One more module measures the task.
"""

from kvbench.harness.records import Record
from kvbench.harness.records.figure_rules import ANSWERED, BYTES, EXACT, TIME, Compared, Unchecked, near
from kvbench.harness.records.metrics import AnswerMetrics, NllMetrics, PeakMetrics, SampleMetrics, ScoreMetrics, StepMetrics
from kvbench.harness.records.types import Amount, Count, Duration, Nats, Number, Part, Positive, Share
from kvbench.harness.tasks.task import Data, Job, MeasurementError, Metrics, Options, RandomTokens, Task, Tokenizer, Workload

__all__ = [
    "ANSWERED",
    "BYTES",
    "EXACT",
    "TIME",
    "Amount",
    "AnswerMetrics",
    "Compared",
    "Count",
    "Data",
    "Duration",
    "Job",
    "MeasurementError",
    "Metrics",
    "Nats",
    "NllMetrics",
    "Number",
    "Options",
    "Part",
    "PeakMetrics",
    "Positive",
    "RandomTokens",
    "Record",
    "SampleMetrics",
    "ScoreMetrics",
    "Share",
    "StepMetrics",
    "Task",
    "Tokenizer",
    "Unchecked",
    "Workload",
    "near",
]
