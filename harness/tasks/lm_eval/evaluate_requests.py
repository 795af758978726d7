"""Running of a task of lm-eval: load the task as requests, and evaluate them with our decode loop."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from transformers import PreTrainedTokenizerBase

from kvbench.harness.core.errors import UserError
from kvbench.harness.data.stream import fingerprint
from kvbench.harness.lm_eval import catalogue
from kvbench.harness.lm_eval.generation import checked
from kvbench.harness.lm_eval.kvbench import KVBench
from kvbench.harness.lm_eval.reading import RequestReader
from kvbench.harness.records.aggregates import sample_figures
from kvbench.harness.tasks.lm_eval.lm_eval_options import LmEvalMetrics, LmEvalOptions
from kvbench.harness.tasks.task import Job, MeasurementError

_FIRST_VERSION = "1.0"
_BOOK_TASK = "kvbench_facts_book"
_AFTER_A_TEXT = r"\nQuestion: "
_PATTERNS = (  # pattern of task names, and pattern of the question's beginning; the first matching name applies
    ("kvbench_facts_.*", r"\n\nThe (two )?account numbers? of "),
    ("kvbench_(?!cloze|prose).*|ruler_.*", _AFTER_A_TEXT),
    ("kvbench_cloze.*", r"(?<=[.!?])\s[^.!?]*$"),  # the sentence that breaks off
    ("niah_.*", r"\nWhat (is|are all) the special magic "),
)


@dataclass(frozen=True)
class LmEvalData:
    """A task's questions, as requests."""

    loaded: dict[str, Any]  # the argument of lm-eval's `evaluate`
    tokenizer: PreTrainedTokenizerBase
    source: str  # name and version of the task
    version: str  # version of the task; raised when the same answer gets another score
    questions: int
    lengths: tuple[int, ...]  # tokens of each request, repeated for each of its answers
    ids_sha256: str  # fingerprint of the token ids of all requests

    def __reduce__(self) -> NoReturn:
        """Refuse pickling: a task of lm-eval holds functions from files that it loads itself, so each process loads its own."""
        raise TypeError("the questions of lm-eval can't be sent to another process")

    @property
    def tokens(self) -> int:
        """Tokens of all requests."""
        return sum(self.lengths)

    def facts(self) -> dict[str, Any]:
        """Return the record's `data`."""
        return {
            "source": self.source,
            "ids_sha256": self.ids_sha256,
            "tokens": self.tokens,
            "questions": self.questions,
            "requests": len(self.lengths),
            "longest_request": max(self.lengths),
            "lm_eval": metadata.version("lm-eval"),
            **({} if self.version == _FIRST_VERSION else {"task_version": self.version}),
        }


def requests(options: LmEvalOptions, tokenizer: PreTrainedTokenizerBase, directory: Path | None = None) -> LmEvalData:
    """Load a task and build its requests.

    Args:
        directory: directory of books, for the task that asks about books.
    """
    settings: dict[str, Any] = {} if options.max_seq_length is None else {"max_seq_lengths": (options.max_seq_length,)}
    settings |= {"tokenizer": tokenizer.name_or_path} if settings else {}
    settings |= {"data": str(directory)} if directory is not None and options.tasks == _BOOK_TASK else {}
    include = [] if options.include is None else [options.include]
    loaded = catalogue.task(options.tasks, options.num_fewshot, options.data_seed, include, settings)
    (task,) = loaded["tasks"].values()
    _set_generation(task, options)
    task.set_fewshot_seed(seed=options.data_seed)
    try:
        with catalogue.quiet():
            task.build_all_requests(
                limit=options.limit,
                rank=0,
                world_size=1,
                apply_chat_template=bool(options.chat_template),
                chat_template=_template(tokenizer) if options.chat_template else None,
                fewshot_as_multiturn=bool(options.chat_template),
            )
    except Exception as error:
        if (refused := catalogue.refused(error, options.tasks)) is None:
            raise
        raise refused from error
    if options.question == "unseen":
        for instance in task.instances:
            _start_of(instance, options)
    ids_of_requests = [
        tokenizer("".join(str(part) for part in i.args[:2] if isinstance(part, str)))["input_ids"] for i in task.instances
    ]
    if not ids_of_requests:
        raise UserError(f"lm-eval finds no questions in task {options.tasks}")
    lengths_of_all = tuple(len(x) for x, i in zip(ids_of_requests, task.instances, strict=True) for _ in range(i.repeats))
    questions = len({i.doc_id for i in task.instances})
    ids = fingerprint(np.concatenate([np.array(x, np.int64) for x in ids_of_requests]))
    version = str(task.VERSION)
    if options.include is not None:
        version += f"+{_digest_of_included(Path(options.include), task.instances)[:12]}"
    source = f"lm-eval, {options.tasks} version {version}"
    return LmEvalData(loaded, tokenizer, source, version, questions, lengths_of_all, ids)


def _digest_of_included(folder: Path, instances: Sequence[Instance]) -> str:
    """Return the sha256 of everything that decides the scores of a user's task: its files, and documents with right answers."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in (".yaml", ".py") and file.is_file())
    documents = [json.dumps(instance.doc, sort_keys=True, default=repr).encode() for instance in instances]
    return hashlib.sha256(b"\0".join([*(file.read_bytes() for file in files), *documents])).hexdigest()


def _set_generation(task: Any, options: LmEvalOptions) -> None:
    """Change the settings and the number of generated answers.

    Raises:
        UserError: the task generates no answers, or an option has no effect.
    """
    changes = options.generation
    if (changes or options.samples) and task.OUTPUT_TYPE != "generate_until":
        raise UserError(f"{options.tasks}: no answers are generated, so leave out {', '.join([*changes] or ['samples'])}")
    if changes:
        task.set_config("generation_kwargs", (task.config.generation_kwargs or {}) | changes)
    if options.samples:
        task.set_config("repeats", options.samples)
    settings = checked(task.config.generation_kwargs or {}, f"{options.tasks}: generation_kwargs")
    if not settings.get("do_sample", settings.get("temperature", 0) > 0):
        useless = {"top_p": options.top_p, "top_k": options.top_k, "sample_seed": options.sample_seed}
        useless |= {"samples": options.samples if options.samples != 1 else None}
        if names := [name for name, value in useless.items() if value is not None]:
            raise UserError(f"{options.tasks}: nothing is drawn, so {', '.join(names)} would have no effect; give a temperature")


def question_start(prompt: str, task: str, document: Mapping[str, Any], pattern: str | None = None) -> int:
    """Return the index of the question's first character: the last match of a pattern or, in LongBench, the end of the context.

    Args:
        prompt: text with examples and chat template.
        document: document from which the prompt was made.
        pattern: regular expression of the question's beginning; None: the known pattern for RULER and our tasks.

    Raises:
        UserError: the prompt has no question, or no text before the question.
    """
    pattern = pattern or next((p for names, p in _PATTERNS if re.fullmatch(names, task)), None)
    start = -1
    if pattern is not None:
        start = max((match.start() for match in re.finditer(pattern, prompt)), default=-1)
    elif isinstance(document.get("context"), str) and document["context"] in prompt:
        start = prompt.rindex(document["context"]) + len(document["context"])
    if not 0 < start < len(prompt):
        what = "it has no context before it" if pattern is None else f"nothing before its end matches {pattern!r}"
        raise UserError(f"{task}: where does the question begin? {what}; give question_from: REGEX")
    return start


def _start_of(instance: Instance, options: LmEvalOptions) -> int:
    return question_start(instance.args[0], options.tasks, instance.doc, options.question_from)


def _template(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the tokenizer's chat template as a function with lm-eval's signature."""

    def apply(history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            tokenizer.apply_chat_template(
                history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    return apply


def measure(options: LmEvalOptions, job: Job) -> LmEvalMetrics:
    """Run the task, and write each question's score and log-likelihoods or answer to the trace."""
    data: LmEvalData = job.data
    try:
        reader = RequestReader(job.model, job.config, options.prompt, options.prompt_tokens, options.batch, job.block, job.method)
    except ValueError as error:
        raise MeasurementError(str(error)) from None
    mean_tokens, done = data.tokens / len(data.lengths), 0

    def report_progress(requests: int) -> None:
        nonlocal done
        done += requests
        job.progress(min(data.tokens, round(done * mean_tokens)), f"{done} of {len(data.lengths)} requests")

    start = partial(_start_of, options=options) if options.question == "unseen" else None
    seed = options.sample_seed or 0
    model = KVBench(
        reader,
        data.tokenizer,
        add_bos_token=options.add_bos_token,
        sample_seed=seed,
        on_progress=report_progress,
        question_start=start,
    )
    ((name, task),) = data.loaded["tasks"].items()
    task.set_fewshot_seed(seed=options.data_seed)
    with catalogue.quiet():
        output = evaluate(
            model,
            data.loaded,
            limit=options.limit,
            bootstrap_iters=1000,
            apply_chat_template=bool(options.chat_template),
            fewshot_as_multiturn=bool(options.chat_template),
        )
    results = _numbers(output["results"][name])
    metric, chosen, filtered = _scored_samples(options, name, output["samples"][name])
    samples = [_sample(sample, metric) for sample in filtered]
    if task.config.repeats > 1:
        samples = [s | _of_answers(v) for s, v in zip(samples, _every_score(task, filtered, metric, chosen), strict=True)]
    job.trace.write_text("".join(json.dumps(s, ensure_ascii=False, default=str) + "\n" for s in samples), encoding="utf-8")
    cut_after_question = reader.reads_whole_prompts and start is None and model.over_capacity > 0
    flags = list(_chosen_before_the_cut(task, data.tokenizer)) if cut_after_question else []
    weighted = any("weight" in s for s in samples)  # then scores are log-likelihoods, even if the metric is a perplexity
    higher = weighted or output["higher_is_better"][name].get(metric) is not False
    return LmEvalMetrics.from_json(
        {
            **sample_figures(samples),
            "metric": options.metric or metric,
            "higher_is_better": higher,
            "lm_eval": results,
            "flags": flags,
            "over_capacity": model.over_capacity,
            "truncated": model.truncated,
            "requests": model.requests,
            **reader.sizes,
        }
    )


def _scored_samples(options: LmEvalOptions, name: str, samples: list[dict[str, Any]]) -> tuple[str, str, list[dict[str, Any]]]:
    """Return the metric, the filter, and the samples that passed the filter, in the order of the documents.

    Raises:
        MeasurementError: the task has no such metric.
    """
    metrics = list(samples[0]["metrics"])
    length = str(options.max_seq_length)  # RULER names its metrics after the prompt length
    metric, _, filter_name = (options.metric or (length if length in metrics else metrics[0])).partition(",")
    chosen = filter_name or samples[0]["filter"]
    filtered = sorted((s for s in samples if s["filter"] == chosen), key=lambda s: s["doc_id"])
    if metric not in metrics or not filtered:
        known = dict.fromkeys(f"{m},{s['filter']}" for s in samples for m in metrics)
        raise MeasurementError(f"{name} has no metric {options.metric or metric}; it has {', '.join(known)}")
    return metric, chosen, filtered


def _chosen_before_the_cut(task: Any, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield a flag if some answers have one token. That token is chosen from the whole prompt, before the eviction."""
    longest: dict[int, int] = {}
    for instance in task.instances:
        prompt, answer = instance.args[0], instance.args[1]
        if task.OUTPUT_TYPE == "generate_until":
            answer = f"{task.config.target_delimiter}{task.doc_to_target(instance.doc)}"
        tokens = len(tokenizer(prompt + answer)["input_ids"]) - len(tokenizer(prompt)["input_ids"])
        longest[instance.doc_id] = max(tokens, longest.get(instance.doc_id, 0))
    short = sum(tokens <= 1 for tokens in longest.values())
    if short:
        yield f"the first token of an answer was chosen before the cut, and {short} of {len(longest)} answers have no other"


def _numbers(results: dict[str, Any]) -> dict[str, Any]:
    """Return lm-eval's own figures and standard errors, by "metric,filter"."""
    return {k: v for k, v in results.items() if "," in k and isinstance(v, (int, float)) and not isinstance(v, bool)}


def _every_score(task: Any, samples: Sequence[dict[str, Any]], metric: str, chosen: str) -> Iterator[list[float]]:
    """Yield the scores of all answers to each question. lm-eval itself scores only the answers that its filter keeps."""
    (ensemble,) = [f for f in task._filters if f.name == chosen]
    repeats = []
    for repeat in range(task.config.repeats):
        answers = [replace(i, resps=[i.resps[repeat]], filtered_resps={}) for i in task.instances]
        ensemble.apply(answers)
        repeats.append({i.doc_id: i.filtered_resps[chosen] for i in answers})
    for sample in samples:
        results = [task.process_results(sample["doc"], [filtered[sample["doc_id"]]]) for filtered in repeats]
        yield [_sample(sample | result, metric)["score"] for result in results]


def _of_answers(scores: list[float]) -> dict[str, Any]:
    return {"score": sum(scores) / len(scores), "scores": scores}


def _sample(sample: dict[str, Any], metric: str) -> dict[str, Any]:
    """Return a question's line in the trace. The score of a text is its log-likelihood; the weight is its words or bytes."""
    value, weight = sample[metric], 1 if metric == "perplexity" else None
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(x, (int, float)) for x in value):
        value, weight = value
    if not isinstance(value, (int, float)):
        raise MeasurementError(f"metric {metric} has no number per question; choose another with the option metric")
    line: dict[str, Any] = {"question": sample["doc_id"], "score": round(float(value), 6)}
    line |= {} if weight is None else {"weight": weight}
    depth = _depth(sample["doc"])
    line |= {} if depth is None else {"depth": depth}
    return line | {"target": sample["target"], "said": [_rounded(x) for r in sample["resps"] for x in r]}


def _depth(document: Mapping[str, Any]) -> float | None:
    """Return the depth of the answer in the prompt, 0 to 1; None unless the task states it, or RULER's prompt has one match."""
    if isinstance(document.get("depth"), float):
        return float(document["depth"])
    answers, text = document.get("outputs"), document.get("input")
    if (
        "max_length" not in document
        or not isinstance(text, str)
        or not answers
        or len(answers) > 1
        or text.count(answers[0]) != 1
    ):
        return None
    return round(text.index(answers[0]) / len(text), 4)


def _rounded(answer: Any) -> Any:
    """Round a log-likelihood, alone or in a pair with the agreement of greedy decoding. Leave a text unchanged."""
    if isinstance(answer, (tuple, list)):
        return [round(x, 5) if isinstance(x, float) else x for x in answer]
    return round(answer, 5) if isinstance(answer, float) else answer
