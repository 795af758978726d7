"""Options and figures of lm-eval's tasks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from kvbench.harness.core.perplexity import perplexity
from kvbench.harness.records.aggregates import pass_at, pass_sizes
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.records.figure_rules import BYTES, EXACT, PART_NATS, SUM, Unchecked, near
from kvbench.harness.records.metrics import AnswerCounts, ScoreMetrics
from kvbench.harness.records.run_facts import DataFacts
from kvbench.harness.records.types import Count, Number, Share
from kvbench.harness.report.markdown import digits
from kvbench.harness.tasks.task import Options

GENERATION = ("max_gen_toks", "temperature", "top_p", "top_k", "samples", "sample_seed")
MOST_SAMPLES = 10_000  # largest number of answers to a question


class LmEvalOptions(Options):
    """Options of lm-eval's tasks."""

    shown = ("batch", "tasks", "prompt", "question")
    axes = ("tasks", "metric", "limit", "num_fewshot", "max_seq_length", *GENERATION)
    never_pooled_over = ("prompt", "question")  # query-aware and query-blind scores don't mix

    name: Literal["lm_eval"] = "lm_eval"
    tasks: str = Field(description="a task of lm-eval, or one of ours in its format; a list makes one cell per task")
    num_fewshot: int | None = Field(None, ge=0, description="examples before each question; the task's own number if not given")
    limit: int | None = Field(None, ge=1, description="number of questions to ask, from the first; all if not given")
    data_seed: int = Field(1234, ge=0, le=2**32 - 1, description="seed for all that a task draws")
    prompt: Literal["stream", "once", "truncate"] = Field(
        "stream",
        description="way of reading a prompt longer than the cache: stream (token by token, evicting), once (in full, then "
        "evicting once), truncate (only its first and last tokens)",
    )
    prompt_tokens: int | None = Field(None, ge=2, description="tokens of a prompt that truncate keeps; the capacity if not given")
    question: Literal["seen", "unseen"] | None = Field(
        None,
        description="whether a prompt that is cut at its end contains the question (seen, the default) or ends before it",
    )
    question_from: str | None = Field(
        None, description="regular expression that the question begins with; known for RULER, LongBench and our tasks"
    )
    metric: str | None = Field(None, description="metric that is the score; the task's first metric if not given")
    chat_template: bool | None = Field(None, description="put prompts into the tokenizer's chat template")
    add_bos_token: bool | None = Field(
        None, description="begin requests with the tokenizer's special tokens; the tokenizer's default"
    )
    max_seq_length: int | None = Field(
        None, ge=1, description="length of prompts in tokens, for tasks that generate them (RULER)"
    )
    temperature: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="draw answers at this temperature, 0: don't; the task's own if not given"
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="draw from the likeliest tokens of this total probability; the model's by default"
    )
    top_k: int | None = Field(
        None, ge=0, description="draw from so many of the likeliest tokens, 0: all; the model's or 50 by default"
    )
    samples: int | None = Field(
        None, ge=1, le=MOST_SAMPLES, description="answers to each question; the task's own number if not given"
    )
    sample_seed: int | None = Field(None, ge=0, description="seed of the answers; 0 if not given")
    max_gen_toks: int | None = Field(None, ge=1, description="tokens of an answer at most; the task's own if not given")
    include: str | None = Field(None, description="folder with more tasks in lm-eval's format")
    batch: int = Field(16, ge=1, description="number of requests that are read at once")

    @model_validator(mode="before")
    @classmethod
    def _seen_is_the_default(cls, options: Any) -> Any:
        """Remove `seen`, and the pattern that only `unseen` needs, so that the cell has the id of older records."""
        if not isinstance(options, dict) or options.get("question") != "seen":
            return options
        return {name: value for name, value in options.items() if name not in ("question", "question_from")}

    @field_validator("sample_seed")
    @classmethod
    def _zero_is_the_default(cls, value: int | None) -> int | None:
        return value or None

    @property
    def heading(self) -> str:
        """Heading with the method of reading prompts, because query-aware and query-blind scores never share a table."""
        return f"lm-eval, prompt {self.prompt}{', question unseen' if self.question else ''}"

    @property
    def generation(self) -> dict[str, Any]:
        """Generation settings that override the task's."""
        settings = self.model_dump(include={"temperature", "top_p", "top_k", "max_gen_toks"}, exclude_none=True)
        return settings if self.temperature is None else settings | {"do_sample": self.temperature > 0}

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.prompt_tokens is not None and self.prompt != "truncate":
            raise ValueError(f"prompt_tokens is for prompt truncate, not {self.prompt}")
        if self.question == "unseen" and self.prompt == "truncate":
            raise ValueError("question unseen needs the whole prompt before it, so prompt can't be truncate")
        if self.question_from is not None and self.question is None:
            raise ValueError("question_from is for question unseen, or both: [seen, unseen]")
        try:
            re.compile(self.question_from or "")
        except re.error as error:
            raise ValueError(f"question_from is no regular expression ({error})") from None
        return self


class LmEvalMetrics(ScoreMetrics):
    """Figures of lm-eval's tasks."""

    lm_eval: Annotated[dict[str, Number], near(PART_NATS, 1e-3)] = Field(
        default_factory=dict, description="lm-eval's own figures with their standard errors, by metric and filter"
    )
    samples: Annotated[int | None, EXACT] = Field(
        None, ge=2, le=MOST_SAMPLES, description="answers to each question, if several; its score is their mean"
    )
    pass_at: Annotated[dict[str, Share] | None, near(PART_NATS, SUM)] = Field(
        None, description="chance that one of k answers is right, by k, mean over questions, if answers are right or wrong"
    )
    depths: Annotated[dict[str, AnswerCounts] | None, EXACT] = Field(
        None, description="counts by the tenth of the prompt in which the answer was told, 0 to 9, where that is known"
    )
    over_capacity: Annotated[Count, EXACT] = Field(description="requests longer than the capacity")
    truncated: Annotated[Count, EXACT] = Field(0, description="requests cut to the model's maximum length")
    requests: Annotated[Count, EXACT] = Field(description="number of requests")
    kv_bytes: Annotated[Count, BYTES] = Field(description="largest number of bytes allocated for K and V per request")
    state_bytes: Annotated[Count, BYTES] = Field(description="bytes of the policy's statistics")

    def headline(self) -> str:
        """Return the score and the number of questions."""
        return f"{self.metric} {self.figure} of {self.questions}"

    @property
    def figure(self) -> str:
        """Score in percent with its standard error; for log-likelihoods, perplexity per word or byte."""
        parts = [self.score] + ([] if self.stderr is None else [self.stderr])
        if self.weights is None:
            return " ± ".join(f"{100 * part:.1f}" for part in parts)
        whole = perplexity(-self.score)
        return " ± ".join(digits(part, 3) for part in [whole, *(whole * part for part in parts[1:])])

    def derived(self, cell: CellSpec) -> Iterator[tuple[str, Any]]:
        """Yield right answers from the outcomes, the score from the accuracy, and pass@k from the scores of answers."""
        yield from super().derived(cell)
        if self.accuracy is not None:
            yield "score", self.accuracy
        yield from ((f"pass_at.{k}", float(self.solved(int(k)).mean())) for k in self.pass_at or ())

    @property
    def evicted_questions(self) -> int:
        """Number of questions whose requests are longer than the cache, if all questions have equally many requests."""
        return self.questions * self.over_capacity // max(1, self.requests)

    @model_validator(mode="after")
    def _passes_have_scores(self) -> Self:
        if self.pass_at is not None and (self.samples is None or self.scores is None):
            raise ValueError("pass_at needs samples and scores")
        if self.pass_at is not None and {*self.pass_at} != {str(k) for k in pass_sizes(self.samples or 0)}:
            raise ValueError("pass_at must have 1, 2, 4, ... and the number of samples")
        return self

    @property
    def contained(self) -> float | None:
        """Lenient score, the share of answers that contain the right answer; None if the task has no such score."""
        return self.lm_eval.get("contained,none")

    def solved(self, k: int) -> NDArray[np.float64]:
        """Return the chance that at least one of k answers to each question is right. [questions]."""
        assert self.samples is not None
        return pass_at(np.round(np.array(self.scores) * self.samples), self.samples, k)


class LmEvalFacts(DataFacts):
    """Data of a task of lm-eval."""

    questions: Annotated[Count | None, EXACT] = Field(None, description="number of questions")
    requests: Annotated[Count | None, EXACT] = Field(None, description="number of requests")
    longest_request: Annotated[Count | None, EXACT] = Field(None, description="tokens of the longest request")
    lm_eval: Annotated[str | None, Unchecked("a version; the token ids show whether the questions changed")] = Field(
        None, description="version of lm-eval"
    )
