"""Reading of a stream with questions, which are answered in the same decode loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from operator import eq
from typing import Any

import torch
from torch import Tensor

from kvbench.harness.data.quiz import Quiz, QuizData, QuizQuestion
from kvbench.harness.engine.decoder import Decoder
from kvbench.harness.records.aggregates import answer_figures
from kvbench.harness.records.metrics import AnswerMetrics
from kvbench.harness.tasks.common.answers import Context
from kvbench.harness.tasks.task import Job, MeasurementError

_EXTRA_ANSWER_TOKENS = 4  # tokens of an answer beyond the longest right answer


@dataclass(frozen=True)
class Answer:
    """The answer to one question: a line of the trace."""

    stream: int
    question: int
    gold: str
    said: str
    right: bool
    held: float | None  # share of the evidence's (layer, KV head, token) in the cache when the answer began
    reach: int | None  # tokens from the start of the evidence to the start of the answer


def answer_questions(
    job: Job, context: Context, parse: Callable[[str], str], is_right: Callable[[str, str], bool] = eq
) -> AnswerMetrics:
    """Read each stream of the job's `QuizData` with an empty cache, and answer its questions greedily.

    The trace gets one line of JSON per question.

    Args:
        parse: extracts the answer from a completion.
        is_right: compares an answer with the right answer.
    """
    data: QuizData = job.data
    answers: list[dict[str, Any]] = []
    sizes, tokens_before = {"kv_bytes": 0, "kv_held_bytes": 0, "state_bytes": 0}, 0
    with job.trace.open("w", encoding="utf-8") as trace:
        for number, quiz in enumerate(data.quizzes):
            reader = _StreamReader(job, quiz, context)
            for index, question in enumerate(quiz.questions):
                completion, held, reach = reader.answer(question)
                answer = parse(completion)
                right = is_right(answer, question.answer)
                answers.append(vars(Answer(number, index, question.answer, answer, right, held, reach)) | dict(question.about))
                trace.write(json.dumps(answers[-1], ensure_ascii=False) + "\n")
                tokens_done = tokens_before + question.answer_end - quiz.prefix
                job.progress(tokens_done, f"accuracy {sum(a['right'] for a in answers) / len(answers):.1%}")
            tokens_before += len(quiz.ids) - quiz.prefix
            read = reader.read
            now = {"kv_bytes": read.kv_bytes, "kv_held_bytes": read.held_bytes, "state_bytes": read.state_bytes}
            sizes = {name: max(size, now[name]) for name, size in sizes.items()}
    return AnswerMetrics.from_json({**answer_figures(answers), **sizes})


class _StreamReader:
    """Reader of one stream, which starts with an empty cache."""

    def __init__(self, job: Job, quiz: Quiz, context: Context) -> None:
        self.read = job.decoder()
        self._job, self._context = job, context
        self._tokenizer = job.data.tokenizer
        self._ids = torch.from_numpy(quiz.ids)
        self._index = 0  # index of the script's next token
        self._position = 0  # position of the stream's next token; differs from the index unless the context is "gold"
        self._shifts = [(0, 0)]  # (script index, position - index from there on)
        longest = max((q.answer_end - q.prompt_end for q in quiz.questions), default=0)
        self._stop, self._most = job.data.stop, job.data.most or longest + _EXTRA_ANSWER_TOKENS
        if quiz.prompt is not None:
            self.read.read_prompt(self._ids[None, : quiz.prompt].to(job.model.device), job.block)
            self._index = self._position = quiz.prompt

    def answer(self, question: QuizQuestion) -> tuple[str, float | None, int | None]:
        """Read up to a question and answer it. Return the completion, and `held` and `reach` of an `Answer`."""
        leaves_nothing = self._context == "none"
        self._shifts.append((self._index, self._position - self._index))
        start = question.start if leaves_nothing else question.prompt_end
        if start > self._index:
            logits = self._read_tokens(self.read, self._ids[self._index : start])
        read = self.read if self._context == "model" else self.read.fork([0])
        if leaves_nothing:
            logits = self._read_tokens(read, self._ids[question.start : question.prompt_end])
        held = reach = None
        if question.evidence is not None:
            positions = [self._stream_position(index) for index in range(*question.evidence)]
            held, reach = read.held(positions), self._position - positions[0]
        if leaves_nothing:
            self._position -= question.prompt_end - question.start
        answer = self._generate(read, logits)
        self._index = question.prompt_end if self._context == "gold" else question.answer_end
        if self._context == "model":
            self._position += len(answer) - 1
            whole = self._stop is None or self._ends(answer)
            self._read_tokens(read, torch.tensor(answer[-1:] + ([] if whole else [int(self._ids[self._index - 1])])))
        return self._text(answer), held, reach

    def _stream_position(self, index: int) -> int:
        return index + next(shift for start, shift in reversed(self._shifts) if start <= index)

    def _generate(self, read: Decoder, logits: Tensor) -> list[int]:
        """Decode greedily until the stop text or the limit is reached. The decoder does not read the last token."""
        tokens = [int(logits[0, -1].argmax())]
        while not self._ends(tokens) and len(tokens) < self._most:
            logits = read(torch.tensor([tokens[-1:]], device=self._job.model.device))
            tokens.append(int(logits[0, -1].argmax()))
        return tokens

    def _ends(self, answer: list[int]) -> bool:
        return self._stop is not None and self._stop in self._tokenizer.decode(answer)

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _read_tokens(self, read: Decoder, tokens: Tensor) -> Tensor:
        """Read tokens in blocks. Return the logits after the last token, [1, 1, V].

        Raises:
            MeasurementError: the logits are not finite.
        """
        for block in tokens.split(self._job.block):
            last = torch.tensor([len(block) - 1], device=self._job.model.device)
            logits = read(block[None].to(self._job.model.device), keep=last)
        if not bool(torch.isfinite(logits).all()):
            raise MeasurementError(f"logits are not finite at token {self._position + len(tokens)}")
        self._position += len(tokens)
        return logits
