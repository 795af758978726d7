"""A task of lm-eval under a policy: lm-eval's questions, prompts and scores, with our decode loop.

Source: the zero-shot tasks of Xiao et al. 2023, arXiv:2309.17453, Table 9, and LongBench in its Table 8, in lm-eval's versions.
Differs: lm-eval's prompts and scores differ from those in the paper (docs/tasks/lm_eval.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from kvbench.harness.core.files import json_lines
from kvbench.harness.core.intervals import MIN_BLOCKS, clustered_share
from kvbench.harness.data.lookups import KINDS, is_contained, is_exact
from kvbench.harness.records import Record
from kvbench.harness.records.aggregates import sample_figures
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.compare import differences
from kvbench.harness.report.markdown import by_row, cache_bytes, md, percent, policy_table, status, with_ends
from kvbench.harness.report.rows import short_titles, shown_kv_bytes
from kvbench.harness.report.task_charts import Depths, over_depths
from kvbench.harness.tasks.lm_eval.lm_eval_options import GENERATION, LmEvalFacts, LmEvalMetrics, LmEvalOptions
from kvbench.harness.tasks.task import Job, Task, Tokenizer, Workload

if TYPE_CHECKING:
    from kvbench.harness.tasks.lm_eval.evaluate_requests import LmEvalData

_QUESTIONS, _PROMPT_TOKENS, _ANSWER_TOKENS = 1000, 400, 8  # guesses, for estimates
_RECALL = frozenset(f"kvbench_{kind}" for kind in (*KINDS, "anywhere"))
_FACTS = "kvbench_facts_"  # prefix of the names of tasks for pretrained models


class LmEval(Task):
    """Scores of one of lm-eval's tasks."""

    options = LmEvalOptions
    metrics = LmEvalMetrics
    data_facts = LmEvalFacts
    trace = ".samples.jsonl"

    @staticmethod
    def data(options: LmEvalOptions, tokenizer: Tokenizer, directory: Path | None) -> LmEvalData:
        """Return the task's questions as requests."""
        from kvbench.harness.tasks.lm_eval.evaluate_requests import requests

        return requests(options, tokenizer(), directory)

    @classmethod
    def workload(cls, options: LmEvalOptions) -> Workload:
        """Estimate sizes that no option sets. A task that scores whole texts has no prompt, which only the run can detect."""
        answers = (options.limit or _QUESTIONS) * (options.samples or 1)
        prompt, answer = options.max_seq_length or options.prompt_tokens or _PROMPT_TOKENS, options.max_gen_toks or _ANSWER_TOKENS
        whole = f"prompt reads the whole prompt and evicts at its end, so this task can't have prompt: {options.prompt}"
        return Workload(
            sequences=answers,
            length=prompt + answer,
            side_by_side=options.batch,
            block_of_all=True,
            steps=answer * math.ceil(answers / options.batch),
            prompt=options.max_seq_length,
            not_after_prompt="" if options.prompt == "stream" else whole,
        )

    @staticmethod
    def run(options: LmEvalOptions, job: Job) -> LmEvalMetrics:
        """Run the task, and write each question's score and log-likelihoods or answer to the trace."""
        from kvbench.harness.tasks.lm_eval.evaluate_requests import measure

        return measure(options, job)

    @classmethod
    def from_trace(cls, record: Record, trace: IO[bytes]) -> Mapping[str, Any]:
        """Recompute the figures that follow from scores. Answers of recall and facts tasks are compared with the right ones."""
        samples = json_lines(trace)
        options = record.cell.task_options(LmEvalOptions)
        if options.tasks in _RECALL or options.tasks.startswith(_FACTS):
            judge = is_contained if (options.metric or "").startswith("contained") else is_exact
            samples = [_checked(s, judge) for s in samples]
        return sample_figures(samples) | _lenient(record, samples)

    @classmethod
    def cached_tokens(cls, record: Record) -> int | None:
        """Return the largest number of a request's tokens in the cache; None unless prompts are streamed."""
        return super().cached_tokens(record) if record.cell.task_options(LmEvalOptions).prompt == "stream" else None

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Return a row per policy and a column per task: scores, then paired differences to dense."""
        names = sorted({_column(r) for r in records})
        rows = by_row(records)
        options = records[0].cell.task_options(LmEvalOptions)
        about = _UNSEEN if options.question else _PROMPTS[options.prompt]
        about += _LENIENT if any((m := r.measured(LmEvalMetrics)) and m.contained is not None for r in records) else ""
        about += _EVICT_PROMPT if any(r.cell.evict == "prompt" for r in records) else ""
        intro = (
            f"lm-eval's tasks. {about} Scores are percentages with their standard errors; for whole texts, perplexities. "
            "Over capacity: share of requests longer than the capacity; only these can differ from dense.\n"
        )
        scores = [(row[0], {_column(r): _score(r) for r in row} | _costs(row)) for row in rows]
        heads = {name: md(name) for name in names}
        result = [intro, *policy_table(scores, records, heads | {"over capacity": "over capacity", "K/V": "K/V"})]
        dense = next((row for row in rows if all(r.cell.is_dense for r in row)), None)
        others = [row for row in rows if row is not dense]
        if dense is not None and others:
            base = {_column(r): r for r in dense}
            changes = [(row[0], {_column(r): _difference(base.get(_column(r)), r) for r in row}) for row in others]
            about = "Differences to dense, paired by question (percentage points or nats, with 95 % intervals):\n"
            result += [about, *policy_table(changes, records, heads)]
        return [*result, *_passes(records), *_depths(records)]


_PROMPTS = {
    "stream": "Prompts are read token by token, so the policy evicts before it has seen the question (query-blind).",
    "once": "Prompts are read in full, then the policy evicts once, having seen the question (query-aware). The cache holds the "
    "whole prompt until then; K/V counts what remains.",
    "truncate": "Of a prompt that is too long, the model reads the first and the last tokens, half each.",
}
_UNSEEN = "Where a prompt is cut at its end, it ends before the question, which is read afterwards: the policy has not seen it."
_LENIENT = " The score counts answers that are the right one and nothing else; in parentheses, those that contain it."
_EVICT_PROMPT = " Rows with evict prompt read it in full, evict once, at its end, and evict no more."


def _lenient(record: Record, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of answers that contain the right answer, if the record has this score."""
    metrics = record.measured(LmEvalMetrics)
    if metrics is None or metrics.contained is None:
        return {}
    return {"lm_eval.contained,none": sum(is_contained(s["said"][0], s["target"]) for s in samples) / len(samples)}


def _checked(sample: Mapping[str, Any], judge: Callable[[str, str], bool]) -> dict[str, Any]:
    """Return a question's line in the trace, with its answers compared with the right answer again."""
    scores = [float(judge(completion, sample["target"])) for completion in sample["said"]]
    return {**sample, "score": sum(scores) / len(scores), **({"scores": scores} if "scores" in sample else {})}


def _column(record: Record) -> str:
    """Return the task's name with the options that differ within a section."""
    options = record.cell.task_options(LmEvalOptions)
    extra = [f"{options.num_fewshot}-shot"] if options.num_fewshot else []
    extra += [f"{options.max_seq_length:,} tokens"] if options.max_seq_length else []
    extra += [options.metric] if options.metric else []
    extra += [f"{name} {value}" for name in GENERATION if (value := getattr(options, name)) is not None]
    return options.tasks + (f" ({', '.join(extra)})" if extra else "")


def _score(record: Record) -> str:
    metrics = record.measured(LmEvalMetrics)
    if metrics is None:
        return status(record)
    return metrics.figure + ("" if metrics.contained is None else f" ({100 * metrics.contained:.1f})")


def _passes(records: Sequence[Record]) -> list[str]:
    """Return a table of pass@k for the records with several answers per question."""
    rows = [
        (record, {"task": md(_column(record))} | {f"pass@{k}": _pass_at(metrics, k) for k in metrics.pass_at})
        for record in records
        if (metrics := record.measured(LmEvalMetrics)) is not None and metrics.pass_at
    ]
    about = (
        "Percent of questions of which at least one of k answers is right: the unbiased estimate of Chen et al. 2021, "
        "arXiv:2107.03374, with 95 % intervals over questions.\n"
    )
    return [about, *policy_table(rows, records)] if rows else []


def _depths(records: Sequence[Record]) -> list[str | Chart]:
    """Return heat maps of right answers by depth, one per task."""
    measured = [(r, m.depths) for r in records if (m := r.measured(LmEvalMetrics)) and m.depths]
    by_task: dict[str, dict[str, Depths]] = {}
    for column in sorted({_column(r) for r, _ in measured}):
        rows = [(r, depths) for r, depths in measured if _column(r) == column]
        names = short_titles([r for r, _ in rows])
        by_task[column] = {_with_capacity(name, r): depths for name, (r, depths) in zip(names, rows, strict=True)}
    return [over_depths(by_task, measured[0][0])] if measured else []


def _with_capacity(name: str, record: Record) -> str:
    return name if record.cell.capacity is None else f"{name}, {record.cell.capacity:,}"


def _pass_at(metrics: LmEvalMetrics, k: str) -> str:
    """Return the percentage with an interval over questions, because the answers to one question are correlated."""
    if metrics.pass_at is None or metrics.samples is None:
        return ""
    answers = np.full(metrics.questions, metrics.samples, np.float64)
    ends = clustered_share(answers * metrics.solved(int(k)), answers) if metrics.questions >= MIN_BLOCKS else None
    return percent(metrics.pass_at[k], ends, "")


def _difference(base: Record | None, record: Record) -> str:
    """Return the paired difference; empty if a record is missing or failed."""
    metrics = record.measured(LmEvalMetrics)
    if base is None or base.status != "ok" or metrics is None:
        return ""
    difference = next((d for d in differences(base, record) if d.metric in ("accuracy", "score")), None)
    if difference is None or difference.change is None:
        return ""
    scale, form = (1.0, "{:+.3f}") if metrics.weights is not None else (100.0, "{:+.1f}")
    ends = [scale * end for end in (difference.low, difference.high) if end is not None]
    return with_ends(scale * difference.change, ends, form.format, missing="")


def _costs(records: Sequence[Record]) -> dict[str, str]:
    """Return the share of a row's requests that are longer than the capacity, and the largest caches."""
    metrics = [m for r in records if (m := r.measured(LmEvalMetrics))]
    requests = sum(m.requests for m in metrics)
    share = f"{100 * sum(m.over_capacity for m in metrics) / requests:.0f} %" if requests else ""
    held = [size for r in records if (size := shown_kv_bytes(r)) is not None]
    read = [m.kv_read_bytes for m in metrics if m.kv_read_bytes is not None]
    sizes = {"K/V": cache_bytes(max(held, default=None)), "read by a step": cache_bytes(max(read, default=None))}
    return {"over capacity": share, **sizes}
