"""A stream of text with questions in it: which tokens ask, which answer, and where the answer could be read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.errors import UserError
from kvbench.harness.data.stream import fingerprint, opening, tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Question:
    """One question of a stream, in token indices.

    Attributes:
        start: of the first token of the question.
        prompt_end: of the first token of the answer.
        answer_end: behind the answer's last token, its line end included.
        answer: the right one, as text.
        evidence: first token of the place that tells the answer, and the one behind its last; None if there is none.
    """

    start: int
    prompt_end: int
    answer_end: int
    answer: str
    evidence: tuple[int, int] | None


@dataclass(frozen=True)
class Quiz:
    """A stream of tokens with its questions, right answers in place."""

    ids: NDArray[np.int64]  # [N], prefix included
    prefix: int
    questions: tuple[Question, ...]
    line_tokens: NDArray[np.int64]  # lengths of the record lines; empty where there are none


@dataclass(frozen=True)
class QuizData:
    """What a question task reads: one or more independent streams.

    Attributes:
        quizzes: the streams.
        source: where they came from, in words.
        tokenizer: turns answers back into text.
        text_sha256: of all texts.
    """

    quizzes: tuple[Quiz, ...]
    source: str
    tokenizer: PreTrainedTokenizerBase
    text_sha256: str

    @property
    def ids_sha256(self) -> str:
        """Fingerprint of the token ids of all streams."""
        return fingerprint(np.concatenate([q.ids for q in self.quizzes]))

    @property
    def tokens(self) -> int:
        """Of all streams, prefixes not counted."""
        return sum(len(q.ids) - q.prefix for q in self.quizzes)

    def facts(self) -> dict[str, Any]:
        """For the record."""
        lines = np.concatenate([q.line_tokens for q in self.quizzes])
        first = self.quizzes[0]
        return {
            "source": self.source, "text_sha256": self.text_sha256, "ids_sha256": self.ids_sha256, "tokens": self.tokens,
            "prefix": [int(i) for i in first.ids[: first.prefix]], "streams": len(self.quizzes),
            "questions": sum(len(q.questions) for q in self.quizzes),
            **({"line_tokens": round(float(lines.mean()), 2)} if len(lines) else {}),
        }  # fmt: skip


@dataclass
class Script:
    """A quiz in the making: text is appended, and places in it are remembered."""

    text: str = ""
    lines: list[tuple[int, int]] = field(default_factory=list)  # spans in characters, as all below
    asked: list[tuple[int, int, int, str, int | None]] = field(default_factory=list)  # as `Question`; a line's number

    def line(self, text: str) -> None:
        """Append a record line that can be asked for. Its number is the count of those before it."""
        self.lines.append((len(self.text), len(self.text) + len(text)))
        self.text += text

    def ask(self, prompt: str, answer: str, completion: str, line: int | None = None) -> None:
        """Append a question with its completion, which holds the answer, and the number of the line that tells it."""
        start, middle = len(self.text), len(self.text) + len(prompt)
        self.asked.append((start, middle, middle + len(completion), answer, line))
        self.text += prompt + completion


def quiz(script: Script, tokenizer: PreTrainedTokenizerBase) -> Quiz:
    """The script in tokens, tokenised as a whole, opened by the tokenizer's own BOS.

    Raises:
        UserError: a token lies across the border of a line, a question or an answer.
    """
    prefix = opening(tokenizer)
    new, ends = tokenise(tokenizer, script.text, len(script.text.encode()) + 1)
    byte_at = np.cumsum([0, *(len(c.encode()) for c in script.text)])

    def token(at: int) -> int:
        """Index of the first token behind a character, which must be where a token ends."""
        count = int(np.searchsorted(ends, byte_at[at], side="right"))
        if count and ends[count - 1] != byte_at[at]:
            raise UserError(f"this tokenizer joins what should be apart in one token: ...{script.text[at - 9 : at + 9]!r}...")
        return len(prefix) + count

    spans = [(token(start), token(end)) for start, end in script.lines]
    questions = [
        Question(token(start), token(prompt_end), token(answer_end), answer, None if line is None else spans[line])
        for start, prompt_end, answer_end, answer, line in script.asked
    ]
    lengths = np.array([end - start for start, end in spans], np.int64)
    return Quiz(np.concatenate([np.array(prefix, np.int64), new]), len(prefix), tuple(questions), lengths)


def quiz_data(scripts: Sequence[Script], source: str, tokenizer: PreTrainedTokenizerBase) -> QuizData:
    """Streams from scripts."""
    seen = hashlib.sha256("\0".join(s.text for s in scripts).encode()).hexdigest()
    return QuizData(tuple(quiz(s, tokenizer) for s in scripts), source, tokenizer, seen)
