"""A task of lm-eval under a policy: lm-eval's questions, prompts and scores, with our decode loop.

Source: the zero-shot tasks of Xiao et al. 2023, arXiv:2309.17453, Table 9, and LongBench in its Table 8, as lm-eval has them.
Differs: lm-eval's prompts and scores differ from those in the paper (docs/tasks/lm_eval.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.harness.core.packed import json_lines
from kvbench.harness.data.lookups import KINDS, is_exact
from kvbench.harness.records import Record
from kvbench.harness.records.aggregates import sample_figures
from kvbench.harness.records.facts import Data
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.report import compare
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.difference import Difference, Traces
from kvbench.harness.tasks.common.answers import right_answers
from kvbench.harness.tasks.common.side_by_side import Independent
from kvbench.harness.tasks.lm_eval import page
from kvbench.harness.tasks.lm_eval.schema import LmEvalFacts, LmEvalMetrics, LmEvalOptions
from kvbench.harness.tasks.task import Job, Options, Task, Tokenizer

if TYPE_CHECKING:
    from kvbench.harness.engine.decoder import Evict
    from kvbench.harness.tasks.lm_eval.requests import LmEvalData


_RECALL = frozenset(f"kvbench_{kind}" for kind in KINDS)


class LmEval(Task):
    """Scores of one of lm-eval's tasks."""

    options: ClassVar[type[Options]] = LmEvalOptions
    metrics: ClassVar[type[Metrics]] = LmEvalMetrics
    data_facts: ClassVar[type[Data]] = LmEvalFacts
    trace: ClassVar[str | None] = ".samples.jsonl"
    axes: ClassVar[tuple[str, ...]] = ("tasks", "metric", "limit", "num_fewshot", "max_seq_length")
    shown_options: ClassVar[tuple[str, ...] | None] = ("batch", "tasks", "prompt", "question")
    never_pooled_over: ClassVar[tuple[str, ...]] = ("prompt", "question")  # query-aware and query-blind scores don't mix
    block_of_all: ClassVar[bool] = True

    @staticmethod
    def data(options: LmEvalOptions, tokenizer: Tokenizer, directory: Path | None) -> LmEvalData:
        """The task's questions as requests."""
        from kvbench.harness.tasks.lm_eval.requests import requests

        return requests(options, tokenizer())

    @staticmethod
    def total(options: LmEvalOptions) -> int:
        """A guess: a thousand questions, four answers each, a hundred tokens per answer."""
        return 400 * (options.limit or 1000)

    @classmethod
    def streams(cls, options: LmEvalOptions) -> int:
        """The batch size, at least."""
        return 1 if options.batch == "auto" else options.batch

    @classmethod
    def independent(cls, options: LmEvalOptions, data: LmEvalData) -> Independent | None:
        """The requests, if a trial decides how many of them are read at once."""
        if options.batch != "auto":
            return None
        forked = 2  # what requests have in common is read once, and its cache is copied
        return Independent(len(data.lengths), max(data.lengths), caches=forked)

    @classmethod
    def longest(cls, options: LmEvalOptions) -> int:
        """A guess, unless an option sets the length of prompts."""
        return options.max_seq_length or options.prompt_tokens or 1000

    @classmethod
    def has_prompt(cls, options: LmEvalOptions) -> bool:
        """Every request begins with one. A task that scores whole texts is only found when it runs."""
        return True

    @classmethod
    def prompt_tokens(cls, options: LmEvalOptions) -> int | None:
        """The length that tasks make their prompts for (RULER)."""
        return options.max_seq_length

    @classmethod
    def why_not(cls, options: LmEvalOptions, evict: Evict) -> str:
        """Eviction after the prompt is a way of its own to read it."""
        if evict == "prompt" and options.prompt != "stream":
            return f"prompt reads the whole prompt and evicts at its end, so this task can't have prompt: {options.prompt}"
        return super().why_not(options, evict)

    @staticmethod
    def run(options: LmEvalOptions, job: Job) -> LmEvalMetrics:
        """Run the task; the trace gets each question's score and log-likelihoods or answer."""
        from kvbench.harness.tasks.lm_eval.measure import measure

        return measure(options, job)

    @classmethod
    def from_trace(cls, record: Record, trace: Path) -> Mapping[str, Any]:
        """All figures that follow from the scores; an answer of `kvbench_recall` is compared with the right one again."""
        samples = json_lines(trace)
        if record.cell.task_options(LmEvalOptions).tasks in _RECALL:
            samples = [s | {"score": float(is_exact(s["said"][0], s["target"]))} for s in samples]
        return sample_figures(samples)

    @classmethod
    def derived(cls, record: Record) -> Iterator[tuple[str, Any]]:
        """Right answers from the outcomes; if there are outcomes, accuracy is the score."""
        yield from right_answers(record)
        metrics = record.measured(LmEvalMetrics)
        if metrics is not None and metrics.accuracy is not None:
            yield "score", metrics.accuracy

    @classmethod
    def cached_tokens(cls, record: Record) -> tuple[int, int] | None:
        """One request's tokens; unknown unless prompts are streamed."""
        tokens = record.cell.most_kept
        streamed = record.cell.task_options(LmEvalOptions).prompt == "stream"
        return (1, tokens) if streamed and tokens is not None else None

    @classmethod
    def headline(cls, record: Record) -> str:
        """The score, and the number of questions."""
        return page.headline(record)

    @classmethod
    def heading(cls, record: Record) -> str:
        """Includes how prompts are read: query-aware and query-blind scores never share a table."""
        options = record.cell.task_options(LmEvalOptions)
        return f"lm-eval, prompt {options.prompt}{', question unseen' if options.question else ''}"

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """A row per policy and a column per task: scores, then paired differences to dense."""
        return page.body(records)

    @classmethod
    def differences(cls, a: Record, b: Record, traces: Traces) -> list[Difference]:
        """Scores, paired by question."""
        return [*compare.accuracy(a, b), *compare.score(a, b)]
