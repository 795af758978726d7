"""A task of lm-eval under a policy: its questions, prompts and scores, read by the decode loop, evicting as it goes.

Source: the zero-shot tasks of Xiao et al. 2023, arXiv:2309.17453, Table 9, and LongBench in its Table 8, as lm-eval has them.
Differs: lm-eval's prompts and scores are taken as they are, and are not the ones that the paper used (docs/tasks/lm_eval.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.harness.records import Record
from kvbench.harness.records.aggregates import of_samples
from kvbench.harness.records.facts import Data
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.report import compare
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.difference import Difference, Traces
from kvbench.harness.tasks.common.answers import of_outcomes
from kvbench.harness.tasks.lm_eval import page
from kvbench.harness.tasks.lm_eval.schema import LmEvalFacts, LmEvalMetrics, LmEvalOptions
from kvbench.harness.tasks.task import Job, Options, Task, Tokenizer

if TYPE_CHECKING:
    from kvbench.harness.tasks.lm_eval.requests import LmEvalData


class LmEval(Task):
    """Scores of one of lm-eval's tasks."""

    options: ClassVar[type[Options]] = LmEvalOptions
    metrics: ClassVar[type[Metrics]] = LmEvalMetrics
    data_facts: ClassVar[type[Data]] = LmEvalFacts
    trace: ClassVar[str | None] = ".samples.jsonl"
    axes: ClassVar[tuple[str, ...]] = ("tasks", "metric", "limit", "num_fewshot", "max_seq_length")
    shown_options: ClassVar[tuple[str, ...] | None] = ("batch", "tasks", "prompt")
    never_pooled_over: ClassVar[tuple[str, ...]] = ("prompt",)  # query-aware and query-blind scores don't mix
    block_of_all: ClassVar[bool] = True

    @staticmethod
    def data(options: LmEvalOptions, tokenizer: Tokenizer, directory: Path | None) -> LmEvalData:
        """The task's questions, all requests built."""
        from kvbench.harness.tasks.lm_eval.requests import requests

        return requests(options, tokenizer())

    @staticmethod
    def total(options: LmEvalOptions) -> int:
        """A guess: four answers of a hundred tokens to each of a thousand questions."""
        return 400 * (options.limit or 1000)

    @classmethod
    def streams(cls, options: LmEvalOptions) -> int:
        """A batch of requests, at most."""
        return options.batch

    @classmethod
    def longest(cls, options: LmEvalOptions) -> int:
        """A guess, where the task does not make prompts of a length."""
        return options.max_seq_length or options.prompt_tokens or 1000

    @staticmethod
    def run(options: LmEvalOptions, job: Job) -> LmEvalMetrics:
        """Let lm-eval ask; the trace gets every question's score, with log-likelihoods or what was said."""
        from kvbench.harness.tasks.lm_eval.measure import measure

        return measure(options, job)

    @classmethod
    def from_trace(cls, record: Record, trace: Path) -> Mapping[str, Any]:
        """The scores, and what follows from them."""
        return of_samples([json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()])

    @classmethod
    def derived(cls, record: Record) -> Iterator[tuple[str, Any]]:
        """What follows from the outcomes; where they are there, they are the score."""
        yield from of_outcomes(record)
        metrics = record.measured(LmEvalMetrics)
        if metrics is not None and metrics.accuracy is not None:
            yield "score", metrics.accuracy

    @classmethod
    def cached_tokens(cls, record: Record) -> tuple[int, int] | None:
        """Of one request; what stays of a prompt that is not streamed is another count."""
        capacity = record.cell.capacity
        streamed = record.cell.task_options(LmEvalOptions).prompt == "stream"
        return (1, capacity) if streamed and capacity is not None else None

    @classmethod
    def headline(cls, record: Record) -> str:
        """The score, and of how many questions."""
        return page.headline(record)

    @classmethod
    def heading(cls, record: Record) -> str:
        """With how prompts are read: what is query-aware is never in one table with what is not."""
        return f"lm-eval, prompt {record.cell.task_options(LmEvalOptions).prompt}"

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Policies down, tasks across; then what each policy's scores lack to dense's, question by question."""
        return page.body(records)

    @classmethod
    def differences(cls, a: Record, b: Record, traces: Traces) -> list[Difference]:
        """Of the scores, question by question."""
        return [*compare.accuracy(a, b), *compare.score(a, b)]
