"""A task of lm-eval under a policy: its questions, prompts and scores, read by the decode loop, evicting as it goes.

Source: the zero-shot tasks of Xiao et al. 2023, arXiv:2309.17453, Table 9, and LongBench in its Table 8, as lm-eval has them.
Differs: lm-eval's prompts and scores are taken as they are, and are not the ones that the paper used (docs/tasks/lm_eval.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from kvbench.harness.core.errors import UserError
from kvbench.harness.data.stream import fingerprint
from kvbench.harness.lm_eval.reading import Prompt, Reader
from kvbench.harness.records.aggregates import of_samples
from kvbench.harness.tasks.task import Job, MeasurementError, Options, Task, Tokenizer


class LmEvalOptions(Options):
    """Options of lm-eval's tasks."""

    name: Literal["lm_eval"] = "lm_eval"
    tasks: str = Field(description="a task of lm-eval, or of ours in its format; a list of them is a cell each")
    num_fewshot: int | None = Field(None, ge=0, description="examples before each question; what the task says when not given")
    limit: int | None = Field(None, ge=1, description="only the first so many questions")
    data_seed: int = Field(1234, ge=0, description="of the examples drawn, and of what a task draws")
    prompt: Prompt = Field(
        "stream",
        description="how a prompt longer than the cache is taken in: stream (token by token, evicting), once (all of it "
        "attended, then evicted once), truncate (its first and last tokens, the rest never seen)",
    )
    prompt_tokens: int | None = Field(
        None, ge=2, description="tokens that truncate leaves of a prompt; the capacity if not given"
    )
    metric: str | None = Field(None, description="what counts as the score; the task's first metric when not given")
    chat_template: bool | None = Field(None, description="prompts in the tokenizer's chat template")
    max_seq_length: int | None = Field(None, ge=1, description="tokens of the prompts, for tasks that make them (RULER)")
    include: str | None = Field(None, description="a folder of further tasks in lm-eval's format")
    batch: int = Field(16, ge=1, description="requests side by side")


@dataclass(frozen=True)
class LmEvalData:
    """A task's questions.

    Attributes:
        loaded: as lm-eval's `evaluate` takes it.
        tokenizer: of the model.
        source: where the questions came from, in words.
        questions: how many.
        lengths: tokens of every request.
        ids_sha256: of the token ids of all requests.
    """

    loaded: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase
    source: str
    questions: int
    lengths: tuple[int, ...]
    ids_sha256: str

    @property
    def tokens(self) -> int:
        """Of all requests."""
        return sum(self.lengths)

    def facts(self) -> dict[str, Any]:
        """For the record."""
        return {
            "source": self.source, "ids_sha256": self.ids_sha256, "tokens": self.tokens, "questions": self.questions,
            "requests": len(self.lengths), "longest_request": max(self.lengths), "lm_eval": version("lm-eval"),
        }  # fmt: skip


class LmEval(Task):
    """Scores of one of lm-eval's tasks."""

    options: ClassVar[type[Options]] = LmEvalOptions
    trace: ClassVar[str] = ".samples.jsonl"
    block_of_all: ClassVar[bool] = True

    @staticmethod
    def data(options: LmEvalOptions, tokenizer: Tokenizer, directory: Path | None) -> LmEvalData:
        """The task's questions, all requests built."""
        from kvbench.harness.lm_eval import catalogue

        made = tokenizer()
        metadata: dict[str, Any] = {} if options.max_seq_length is None else {"max_seq_lengths": (options.max_seq_length,)}
        metadata |= {"tokenizer": made.name_or_path} if metadata else {}
        include = [] if options.include is None else [options.include]
        loaded = catalogue.task(options.tasks, options.num_fewshot, options.data_seed, include, metadata)
        (task,) = loaded["tasks"].values()
        task.set_fewshot_seed(seed=options.data_seed)
        with catalogue.quiet():
            task.build_all_requests(
                limit=options.limit, rank=0, world_size=1, apply_chat_template=bool(options.chat_template),
                chat_template=_template(made) if options.chat_template else None,
                fewshot_as_multiturn=bool(options.chat_template),
            )  # fmt: skip
        asked = [made("".join(str(part) for part in i.args[:2] if isinstance(part, str)))["input_ids"] for i in task.instances]
        if not asked:
            raise UserError(f"{options.tasks}: lm-eval finds no questions in it")
        questions = len({i.doc_id for i in task.instances})
        ids = fingerprint(np.concatenate([np.array(x, np.int64) for x in asked]))
        source = f"lm-eval, {options.tasks} version {task.VERSION}"
        return LmEvalData(loaded, made, source, questions, tuple(len(x) for x in asked), ids)

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
    def run(options: LmEvalOptions, job: Job) -> dict[str, Any]:
        """Let lm-eval ask; the trace gets every question's score, with log-likelihoods or what was said."""
        from lm_eval.evaluator import evaluate

        from kvbench.harness.lm_eval import catalogue
        from kvbench.harness.lm_eval.kvbench import KVBench

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
        return {
            **of_samples(samples), "metric": metric, "higher_is_better": higher, "lm_eval": results,
            "over_capacity": model.over_capacity, "truncated": model.truncated, "requests": model.requests,
            "kv_bytes": reader.kv_bytes, "state_bytes": reader.state_bytes,
        }  # fmt: skip


def _template(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The tokenizer's chat template, as lm-eval applies one."""

    def applied(history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            tokenizer.apply_chat_template(
                history, tokenize=False, add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )  # fmt: skip

    return applied


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
