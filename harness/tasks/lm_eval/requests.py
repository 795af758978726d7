"""The questions of a task of lm-eval, as requests."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Any, NoReturn

import numpy as np
from lm_eval.api.instance import Instance
from transformers import PreTrainedTokenizerBase

from kvbench.harness.core.errors import UserError
from kvbench.harness.data.stream import fingerprint
from kvbench.harness.lm_eval import catalogue
from kvbench.harness.lm_eval.question import question_start
from kvbench.harness.tasks.lm_eval.schema import LmEvalOptions

_FIRST_VERSION = "1.0"


@dataclass(frozen=True)
class LmEvalData:
    """A task's questions.

    Attributes:
        loaded: the argument of lm-eval's `evaluate`.
        tokenizer: of the model.
        source: name and version of the task.
        version: of the task. It is raised when the same answer gets another score.
        questions: number of questions.
        lengths: tokens of each request.
        ids_sha256: hash of the token ids of all requests.
    """

    loaded: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase
    source: str
    version: str
    questions: int
    lengths: tuple[int, ...]
    ids_sha256: str

    def __reduce__(self) -> NoReturn:
        """A task of lm-eval holds functions from files that it loads itself, so each process loads its own."""
        raise TypeError("the questions of lm-eval can't be sent to another process")

    @property
    def tokens(self) -> int:
        """Tokens of all requests."""
        return sum(self.lengths)

    def facts(self) -> dict[str, Any]:
        """The record's `data`."""
        return {
            "source": self.source, "ids_sha256": self.ids_sha256, "tokens": self.tokens, "questions": self.questions,
            "requests": len(self.lengths), "longest_request": max(self.lengths), "lm_eval": metadata.version("lm-eval"),
            **({} if self.version == _FIRST_VERSION else {"task_version": self.version}),
        }  # fmt: skip


def requests(options: LmEvalOptions, tokenizer: PreTrainedTokenizerBase) -> LmEvalData:
    """Load a task and build its requests."""
    lengths: dict[str, Any] = {} if options.max_seq_length is None else {"max_seq_lengths": (options.max_seq_length,)}
    lengths |= {"tokenizer": tokenizer.name_or_path} if lengths else {}
    include = [] if options.include is None else [options.include]
    loaded = catalogue.task(options.tasks, options.num_fewshot, options.data_seed, include, lengths)
    (task,) = loaded["tasks"].values()
    task.set_fewshot_seed(seed=options.data_seed)
    with catalogue.quiet():
        task.build_all_requests(
            limit=options.limit, rank=0, world_size=1, apply_chat_template=bool(options.chat_template),
            chat_template=_template(tokenizer) if options.chat_template else None,
            fewshot_as_multiturn=bool(options.chat_template),
        )  # fmt: skip
    if options.question == "unseen":
        for instance in task.instances:
            start_of(instance, options)
    ids_of_requests = [
        tokenizer("".join(str(part) for part in i.args[:2] if isinstance(part, str)))["input_ids"] for i in task.instances
    ]
    if not ids_of_requests:
        raise UserError(f"lm-eval finds no questions in task {options.tasks}")
    questions = len({i.doc_id for i in task.instances})
    ids = fingerprint(np.concatenate([np.array(x, np.int64) for x in ids_of_requests]))
    version = str(task.VERSION)
    source = f"lm-eval, {options.tasks} version {version}"
    return LmEvalData(loaded, tokenizer, source, version, questions, tuple(len(x) for x in ids_of_requests), ids)


def start_of(instance: Instance, options: LmEvalOptions) -> int:
    """The index of the first character of a request's question.

    Raises:
        UserError: it is not found.
    """
    try:
        return question_start(instance.args[0], options.tasks, instance.doc, options.question_from)
    except ValueError as error:
        raise UserError(str(error)) from None


def _template(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The tokenizer's chat template with the signature that lm-eval calls."""

    def apply(history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            tokenizer.apply_chat_template(
                history, tokenize=False, add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )  # fmt: skip

    return apply
