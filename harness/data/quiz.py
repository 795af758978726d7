"""Streams of text with questions, and the tokens of each question, its answer and its evidence."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.errors import UserError
from kvbench.harness.data.stream import fingerprint, opening, tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class QuizQuestion:
    """A question in a stream. Places are token indices; ends are exclusive."""

    start: int
    prompt_end: int  # start of the answer
    answer_end: int  # end of the answer, its newline included
    answer: str  # the right answer
    evidence: tuple[int, int] | None  # (start, end) of the text that states the answer, if the stream has it
    about: Mapping[str, Any] = field(default_factory=dict)  # further entries for the trace, such as the question's kind


@dataclass(frozen=True)
class Quiz:
    """A stream of tokens with questions, each followed by its right answer."""

    ids: NDArray[np.int64]  # [N], prefix included
    prefix: int  # tokens
    questions: tuple[QuizQuestion, ...]
    line_tokens: NDArray[np.int64]  # tokens of each record line; empty if there are none
    prompt: int | None = None  # tokens of the prompt before the first question, prefix included; None without a prompt


@dataclass(frozen=True)
class QuizData:
    """The data of a question task: one or more independent streams."""

    quizzes: tuple[Quiz, ...]
    source: str
    tokenizer: PreTrainedTokenizerBase
    text_sha256: str
    stop: str | None = "\n"  # string that ends a model's answer
    most: int | None = None  # largest number of tokens of an answer; None: a few more than the longest right answer

    @property
    def ids_sha256(self) -> str:
        """Fingerprint of the token ids of all streams."""
        return fingerprint(np.concatenate([q.ids for q in self.quizzes]))

    @property
    def tokens(self) -> int:
        """Tokens of all streams, prefixes not counted."""
        return sum(len(q.ids) - q.prefix for q in self.quizzes)

    def facts(self) -> dict[str, Any]:
        """Return the facts about the data for the record."""
        lines = np.concatenate([q.line_tokens for q in self.quizzes])
        prompts = [q.prompt for q in self.quizzes if q.prompt is not None]
        first = self.quizzes[0]
        return {
            "source": self.source,
            "text_sha256": self.text_sha256,
            "ids_sha256": self.ids_sha256,
            "tokens": self.tokens,
            "prefix": [int(i) for i in first.ids[: first.prefix]],
            "streams": len(self.quizzes),
            "questions": sum(len(q.questions) for q in self.quizzes),
            **({"line_tokens": round(float(lines.mean()), 2)} if len(lines) else {}),
            **({"prompt_tokens": round(sum(prompts) / len(prompts), 1)} if prompts else {}),
        }


@dataclass
class Script:
    """Builder of a quiz as text, with the places of its lines and questions in characters."""

    text: str = ""
    lines: list[tuple[int, int]] = field(default_factory=list)  # (start, end) of every record line
    questions: list[tuple[int, int, int, str, int | None, Mapping[str, Any]]] = field(
        default_factory=list
    )  # fields of `QuizQuestion`, with the evidence as a line number
    prompt: int | None = None  # end of the prompt
    by_parts: bool = False  # whether each part is tokenised by itself, as if it were a text of its own

    def line(self, text: str) -> None:
        """Append a record line that questions can refer to. Lines are numbered from 0."""
        self.lines.append((len(self.text), len(self.text) + len(text)))
        self.text += text

    def ask(
        self, prompt: str, answer: str, completion: str, line: int | None = None, start: int | None = None, **about: Any
    ) -> None:
        """Append a question and its completion, which contains the answer.

        Args:
            prompt: text of the question.
            answer: the right answer.
            completion: text that follows the question in the stream.
            line: number of the line that states the answer.
            start: index of the question's first character, if the question includes earlier text.
            about: entries of the trace about the question.
        """
        middle = len(self.text) + len(prompt)
        self.questions.append((len(self.text) if start is None else start, middle, middle + len(completion), answer, line, about))
        self.text += prompt + completion


def quiz(script: Script, tokenizer: PreTrainedTokenizerBase) -> Quiz:
    """Tokenise a script as one text, after the tokenizer's own BOS.

    Raises:
        UserError: a token crosses the border of a line, a question or an answer.
    """
    prefix = opening(tokenizer)
    byte_at = np.cumsum([0, *(len(c.encode()) for c in script.text)])
    borders = {0, len(script.text)}
    if script.by_parts:
        borders |= {script.prompt or 0, *(place for question in script.questions for place in question[:3])}
    parts = [
        (tokenise(tokenizer, script.text[start:end], int(byte_at[end]) + 1), byte_at[start])
        for start, end in itertools.pairwise(sorted(borders))
    ]
    new, ends = (np.concatenate(x) for x in zip(*((ids, stops + before) for (ids, stops), before in parts), strict=True))

    def token(character: int) -> int:
        """Return the index of the token that starts at this character."""
        count = int(np.searchsorted(ends, byte_at[character], side="right"))
        if count and ends[count - 1] != byte_at[character]:
            around = script.text[character - 9 : character + 9]
            raise UserError(f"this tokenizer puts both sides of a question's or a line's border in one token: ...{around!r}...")
        return len(prefix) + count

    spans = [(token(start), token(end)) for start, end in script.lines]
    questions = [
        QuizQuestion(token(start), token(prompt_end), token(answer_end), answer, None if line is None else spans[line], about)
        for start, prompt_end, answer_end, answer, line, about in script.questions
    ]
    lengths = np.array([end - start for start, end in spans], np.int64)
    prompt = None if script.prompt is None else token(script.prompt)
    return Quiz(np.concatenate([np.array(prefix, np.int64), new]), len(prefix), tuple(questions), lengths, prompt)


def quiz_data(
    scripts: Sequence[Script], source: str, tokenizer: PreTrainedTokenizerBase, stop: str | None = "\n", most: int | None = None
) -> QuizData:
    """Tokenise scripts, each as a stream of its own. `stop` and `most` end a model's answers."""
    text_sha256 = hashlib.sha256("\0".join(s.text for s in scripts).encode()).hexdigest()
    return QuizData(tuple(quiz(s, tokenizer) for s in scripts), source, tokenizer, text_sha256, stop, most)
