"""Options and figures of lm-eval's tasks."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from kvbench.harness.records.facts import Data
from kvbench.harness.records.metrics import ScoreMetrics
from kvbench.harness.records.rules import BYTES, EXACT, PART_NATS, Unchecked, near
from kvbench.harness.records.types import Count, Number
from kvbench.harness.tasks.task import Options, SideBySide


class LmEvalOptions(Options):
    """Options of lm-eval's tasks."""

    name: Literal["lm_eval"] = "lm_eval"
    tasks: str = Field(description="a task of lm-eval, or one of ours in its format; a list makes one cell per task")
    num_fewshot: int | None = Field(None, ge=0, description="examples before each question; the task's own number if not given")
    limit: int | None = Field(None, ge=1, description="number of questions to ask, from the first; all if not given")
    data_seed: int = Field(1234, ge=0, description="seed for drawing examples and everything else that a task draws")
    prompt: Literal["stream", "once", "truncate"] = Field(
        "stream",
        description="how a prompt longer than the cache is read: stream (token by token, evicting), once (in full, then "
        "evicting once), truncate (only its first and last tokens)",
    )
    prompt_tokens: int | None = Field(None, ge=2, description="tokens of a prompt that truncate keeps; the capacity if not given")
    question: Literal["seen", "unseen"] | None = Field(
        None,
        description="whether a prompt that is cut at its end has the question in it (seen, the default) or ends before it",
    )
    question_from: str | None = Field(
        None, description="regular expression that the question begins with; known for RULER, LongBench and our tasks"
    )
    metric: str | None = Field(None, description="metric that is the score; the task's first metric if not given")
    chat_template: bool | None = Field(None, description="put prompts into the tokenizer's chat template")
    max_seq_length: int | None = Field(
        None, ge=1, description="length of prompts in tokens, for tasks that generate them (RULER)"
    )
    include: str | None = Field(None, description="folder with more tasks in lm-eval's format")
    batch: SideBySide = Field(16, description="number of requests read at once; auto: as many as fit and make reading faster")

    @field_validator("question")
    @classmethod
    def _seen_is_the_default(cls, value: str | None) -> str | None:
        return None if value == "seen" else value  # the cell is the one that it was before there was a choice

    @model_validator(mode="after")
    def _question_is_found(self) -> Self:
        if self.question == "unseen" and self.prompt == "truncate":
            raise ValueError("question unseen needs the whole prompt before it, so prompt can't be truncate")
        if self.question_from is not None and self.question is None:
            raise ValueError("question_from is for question unseen")
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
    over_capacity: Annotated[Count, EXACT] = Field(description="requests longer than the capacity")
    truncated: Annotated[Count, EXACT] = Field(0, description="requests cut to the model's maximum length")
    requests: Annotated[Count, EXACT] = Field(description="number of requests")
    kv_bytes: Annotated[Count, BYTES] = Field(description="largest number of bytes allocated for K and V per request")
    state_bytes: Annotated[Count, BYTES] = Field(description="bytes of the policy's statistics")


class LmEvalFacts(Data):
    """Data of a task of lm-eval."""

    questions: Annotated[Count | None, EXACT] = Field(None, description="number of questions")
    requests: Annotated[Count | None, EXACT] = Field(None, description="number of requests")
    longest_request: Annotated[Count | None, EXACT] = Field(None, description="tokens of the longest request")
    lm_eval: Annotated[str | None, Unchecked("a version; the token ids show whether the questions changed")] = Field(
        None, description="version of lm-eval"
    )
