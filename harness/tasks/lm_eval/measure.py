"""Letting lm-eval ask its questions, and reading them by the decode loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.evaluator import evaluate

from kvbench.harness.lm_eval import catalogue
from kvbench.harness.lm_eval.kvbench import KVBench
from kvbench.harness.lm_eval.reading import Reader
from kvbench.harness.records.aggregates import of_samples
from kvbench.harness.tasks.lm_eval.requests import LmEvalData
from kvbench.harness.tasks.lm_eval.schema import LmEvalMetrics, LmEvalOptions
from kvbench.harness.tasks.task import Job, MeasurementError


def measure(options: LmEvalOptions, job: Job) -> LmEvalMetrics:
    """Let lm-eval ask; the trace gets every question's score, with log-likelihoods or what was said."""
    data: LmEvalData = job.data
    try:
        reader = Reader(job.model, job.config, options.prompt, options.prompt_tokens, options.batch, job.block, job.method)
    except ValueError as error:
        raise MeasurementError(str(error)) from None
    share, done = data.tokens / len(data.lengths), 0

    def told(more: int) -> None:
        nonlocal done
        done += more
        job.progress(min(data.tokens, round(done * share)), f"{done} of {len(data.lengths)} requests")

    model = KVBench(reader, data.tokenizer, on_progress=told)
    ((name, task),) = data.loaded["tasks"].items()
    task.set_fewshot_seed(seed=options.data_seed)
    with catalogue.quiet():
        found = evaluate(
            model, data.loaded, limit=options.limit, bootstrap_iters=1000, apply_chat_template=bool(options.chat_template),
            fewshot_as_multiturn=bool(options.chat_template),
        )  # fmt: skip
    results = _numbers(found["results"][name])
    metrics = list(found["samples"][name][0]["metrics"])
    length = str(options.max_seq_length)  # RULER's metrics are called after the length of the prompt
    metric = options.metric or (length if length in metrics else metrics[0])
    if metric not in metrics:
        raise MeasurementError(f"{name} has no metric {metric}: {', '.join(metrics)}")
    samples = [_sample(sample, metric) for sample in _filtered(found["samples"][name])]
    job.trace.write_text("".join(json.dumps(s, ensure_ascii=False, default=str) + "\n" for s in samples), encoding="utf-8")
    weighted = any("weight" in s for s in samples)  # then scores are log-likelihoods, whatever the metric makes of them
    higher = weighted or found["higher_is_better"][name].get(metric) is not False
    return LmEvalMetrics.from_json({
        **of_samples(samples), "metric": metric, "higher_is_better": higher, "lm_eval": results,
        "over_capacity": model.over_capacity, "truncated": model.truncated, "requests": model.requests,
        "kv_bytes": reader.kv_bytes, "state_bytes": reader.state_bytes,
    })  # fmt: skip


def _numbers(results: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's figures of a task, with its standard errors, by "metric,filter"."""
    return {k: v for k, v in results.items() if "," in k and isinstance(v, (int, float)) and not isinstance(v, bool)}


def _filtered(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the task's first filter, one a question, in order."""
    first = samples[0]["filter"]
    return sorted((s for s in samples if s["filter"] == first), key=lambda s: s["doc_id"])


def _sample(sample: dict[str, Any], metric: str) -> dict[str, Any]:
    """One question: its score, and what the model gave. A text's score is its log-likelihood, weighted by its words or bytes."""
    value, weight = sample[metric], 1 if metric == "perplexity" else None
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(x, (int, float)) for x in value):
        value, weight = value
    if not isinstance(value, (int, float)):
        raise MeasurementError(f"the metric {metric} is no number for a single question; name another")
    line: dict[str, Any] = {"question": sample["doc_id"], "score": round(float(value), 6)}
    line |= {} if weight is None else {"weight": weight}
    return line | {"target": sample["target"], "said": [_plain(r[0]) for r in sample["resps"]]}


def _plain(answer: Any) -> Any:
    """A log-likelihood, with whether it is what greedy decoding says; or a text."""
    if isinstance(answer, (tuple, list)):
        return [round(x, 5) if isinstance(x, float) else x for x in answer]
    return round(answer, 5) if isinstance(answer, float) else answer
