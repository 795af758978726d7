"""Runs a task of lm-eval with our decode loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from lm_eval.evaluator import evaluate

from kvbench.harness.lm_eval import catalogue
from kvbench.harness.lm_eval.kvbench import KVBench
from kvbench.harness.lm_eval.reading import Reader
from kvbench.harness.records.aggregates import sample_figures
from kvbench.harness.tasks.lm_eval.requests import LmEvalData, start_of
from kvbench.harness.tasks.lm_eval.schema import LmEvalMetrics, LmEvalOptions
from kvbench.harness.tasks.task import Job, MeasurementError


def measure(options: LmEvalOptions, job: Job) -> LmEvalMetrics:
    """Run the task; the trace gets each question's score and log-likelihoods or answer."""
    data: LmEvalData = job.data
    batch = job.at_once or (1 if options.batch == "auto" else options.batch)
    try:
        reader = Reader(job.model, job.config, options.prompt, options.prompt_tokens, batch, job.block, job.method)
    except ValueError as error:
        raise MeasurementError(str(error)) from None
    mean_tokens, done = data.tokens / len(data.lengths), 0

    def report_progress(requests: int) -> None:
        nonlocal done
        done += requests
        job.progress(min(data.tokens, round(done * mean_tokens)), f"{done} of {len(data.lengths)} requests")

    start = partial(start_of, options=options) if options.question == "unseen" else None
    model = KVBench(reader, data.tokenizer, on_progress=report_progress, question_start=start)
    ((name, task),) = data.loaded["tasks"].items()
    task.set_fewshot_seed(seed=options.data_seed)
    with catalogue.quiet():
        output = evaluate(
            model, data.loaded, limit=options.limit, bootstrap_iters=1000, apply_chat_template=bool(options.chat_template),
            fewshot_as_multiturn=bool(options.chat_template),
        )  # fmt: skip
    results = _numbers(output["results"][name])
    metrics = list(output["samples"][name][0]["metrics"])
    length = str(options.max_seq_length)  # RULER names its metrics after the prompt length
    metric = options.metric or (length if length in metrics else metrics[0])
    if metric not in metrics:
        raise MeasurementError(f"{name} has no metric {metric}; it has {', '.join(metrics)}")
    samples = [_sample(sample, metric) for sample in _of_first_filter(output["samples"][name])]
    job.trace.write_text("".join(json.dumps(s, ensure_ascii=False, default=str) + "\n" for s in samples), encoding="utf-8")
    weighted = any("weight" in s for s in samples)  # then scores are log-likelihoods, even if the metric is a perplexity
    higher = weighted or output["higher_is_better"][name].get(metric) is not False
    return LmEvalMetrics.from_json({
        **sample_figures(samples), "metric": metric, "higher_is_better": higher, "lm_eval": results,
        "over_capacity": model.over_capacity, "truncated": model.truncated, "requests": model.requests,
        "kv_bytes": reader.kv_bytes, "kv_held_bytes": reader.held_bytes, "state_bytes": reader.state_bytes,
    })  # fmt: skip


def _numbers(results: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's own figures and standard errors, by "metric,filter"."""
    return {k: v for k, v in results.items() if "," in k and isinstance(v, (int, float)) and not isinstance(v, bool)}


def _of_first_filter(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One sample per question, in order."""
    first = samples[0]["filter"]
    return sorted((s for s in samples if s["filter"] == first), key=lambda s: s["doc_id"])


def _sample(sample: dict[str, Any], metric: str) -> dict[str, Any]:
    """A question's line in the trace. The score of a text is its log-likelihood; the weight is its words or bytes."""
    value, weight = sample[metric], 1 if metric == "perplexity" else None
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(x, (int, float)) for x in value):
        value, weight = value
    if not isinstance(value, (int, float)):
        raise MeasurementError(f"metric {metric} has no number per question; choose another with the option metric")
    line: dict[str, Any] = {"question": sample["doc_id"], "score": round(float(value), 6)}
    line |= {} if weight is None else {"weight": weight}
    return line | {"target": sample["target"], "said": [_rounded(r[0]) for r in sample["resps"]]}


def _rounded(answer: Any) -> Any:
    """Round a log-likelihood, or a pair of it and whether greedy decoding agrees. A text stays as it is."""
    if isinstance(answer, (tuple, list)):
        return [round(x, 5) if isinstance(x, float) else x for x in answer]
    return round(answer, 5) if isinstance(answer, float) else answer
