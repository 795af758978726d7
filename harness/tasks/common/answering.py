"""Reading a stream with questions in it, and answering them on the way, in the one decode loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.harness.data.questions import Question, Quiz, QuizData
from kvbench.harness.engine.decoder import Decoder
from kvbench.harness.records.aggregates import of_answers
from kvbench.harness.records.metrics import AnswerMetrics
from kvbench.harness.tasks.common.answers import Context
from kvbench.harness.tasks.task import Job, MeasurementError

_LONGER = 4  # tokens that an answer may have beyond the longest right one


@dataclass(frozen=True)
class Answer:
    """What came of one question."""

    stream: int
    question: int
    gold: str
    said: str
    right: bool
    held: float | None  # share of (layer, KV head, token) of the evidence in the cache when the answer began
    reach: int | None  # tokens from the beginning of the evidence to the beginning of the answer


def answered(job: Job, context: Context, said_by: Callable[[str], str]) -> AnswerMetrics:
    """Read all streams of the job's data, each with a fresh cache, and answer every question greedily.

    Args:
        job: its data is a `QuizData`. The trace gets one line of JSON per question.
        context: what stays in the stream: the question with the right answer, or with the model's, or neither.
        said_by: the answer that a completion gives, to be compared with the right one.

    Returns:
        The figures, over all questions of all streams.
    """
    data: QuizData = job.data
    answers: list[Answer] = []
    kv_bytes = state_bytes = done = 0
    with job.trace.open("w", encoding="utf-8") as trace:
        for number, quiz in enumerate(data.quizzes):
            reader = _Reader(job, quiz, context)
            for index, question in enumerate(quiz.questions):
                text, held, reach = reader.answer(question)
                said = said_by(text)
                answers.append(Answer(number, index, question.answer, said, said == question.answer, held, reach))
                trace.write(json.dumps(vars(answers[-1]), ensure_ascii=False) + "\n")
                done_now = done + question.answer_end - quiz.prefix
                job.progress(done_now, f"accuracy {sum(a.right for a in answers) / len(answers):.1%}")
            done += len(quiz.ids) - quiz.prefix
            kv_bytes, state_bytes = max(kv_bytes, reader.read.kv_bytes), max(state_bytes, reader.read.state_bytes)
    figures = of_answers([vars(a) for a in answers])
    return AnswerMetrics.from_json({**figures, "kv_bytes": kv_bytes, "state_bytes": state_bytes})


class _Reader:
    """A stream on its way through a decoder."""

    def __init__(self, job: Job, quiz: Quiz, context: Context) -> None:
        self.read = job.decoder()
        self._job, self._quiz, self._context = job, quiz, context
        self._tokenizer = job.data.tokenizer
        self._ids = torch.from_numpy(quiz.ids)
        self._at = 0  # tokens of the script that are behind us
        self._position = 0  # tokens taken in: fewer or more, where the model's answers stay in the stream
        self._shifts: list[tuple[int, int]] = []  # (script index, position of it and what follows minus index)
        self._longest = max((q.answer_end - q.prompt_end for q in quiz.questions), default=0) + _LONGER

    def answer(self, question: Question) -> tuple[str, float | None, int | None]:
        """Read on to the question, and answer it: the completion, the share of its evidence held, and how far it is."""
        asked_aside = self._context == "none"
        self._shifts.append((self._at, self._position - self._at))
        logits = self._take_in(self.read, self._ids[self._at : question.start if asked_aside else question.prompt_end])
        read = self.read if self._context == "model" else self.read.fork([0])
        if asked_aside:
            logits = self._take_in(read, self._ids[question.start : question.prompt_end])
        held = reach = None
        if question.evidence is not None:
            places = [self._place(index) for index in range(*question.evidence)]
            held, reach = read.held(places), self._position - places[0]
        if asked_aside:
            self._position -= question.prompt_end - question.start
        said = self._generate(read, logits)
        self._at = question.prompt_end if self._context == "gold" else question.answer_end
        if self._context == "model":
            self._position += len(said) - 1
            ended = "\n" in self._text(said)
            self._take_in(read, torch.tensor(said[-1:] + ([] if ended else [int(self._ids[self._at - 1])])))
        return self._text(said), held, reach

    def _place(self, index: int) -> int:
        """Where a token of the script stands in the stream."""
        return index + next(shift for start, shift in reversed(self._shifts) if start <= index)

    def _generate(self, read: Decoder, logits: Tensor) -> list[int]:
        """Greedy tokens up to the first that ends a line, or as many as answers have; the last is not taken in."""
        said = [int(logits[0, -1].argmax())]
        while "\n" not in self._text(said) and len(said) < self._longest:
            logits = read(torch.tensor([said[-1:]], device=self._job.model.device))
            said.append(int(logits[0, -1].argmax()))
        return said

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _take_in(self, read: Decoder, tokens: Tensor) -> Tensor:
        """Read tokens in blocks; the logits after the last. -> [1, 1, V]."""
        for block in tokens.split(self._job.block):
            last = torch.tensor([len(block) - 1], device=self._job.model.device)
            logits = read(block[None].to(self._job.model.device), keep=last)
        if not bool(torch.isfinite(logits).all()):
            raise MeasurementError(f"logits are not finite at token {self._position + len(tokens)}")
        self._position += len(tokens)
        return logits
