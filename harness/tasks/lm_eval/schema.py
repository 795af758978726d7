"""Options and figures of lm-eval's tasks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvbench.harness.records.facts import Data
from kvbench.harness.records.metrics import ScoreMetrics
from kvbench.harness.records.rules import BYTES, EXACT, PART_NATS, NotHeld, near
from kvbench.harness.records.types import Count, Number
from kvbench.harness.tasks.task import Options


class LmEvalOptions(Options):
    """Options of lm-eval's tasks."""

    name: Literal["lm_eval"] = "lm_eval"
    tasks: str = Field(description="a task of lm-eval, or of ours in its format; a list of them is a cell each")
    num_fewshot: int | None = Field(None, ge=0, description="examples before each question; what the task says when not given")
    limit: int | None = Field(None, ge=1, description="only the first so many questions")
    data_seed: int = Field(1234, ge=0, description="of the examples drawn, and of what a task draws")
    prompt: Literal["stream", "once", "truncate"] = Field(
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


class LmEvalMetrics(ScoreMetrics):
    """Figures of lm-eval's tasks."""

    lm_eval: Annotated[dict[str, Number], near(PART_NATS, 1e-3)] = Field(
        default_factory=dict, description="lm-eval's own figures with their standard errors, by metric and filter"
    )
    over_capacity: Annotated[Count, EXACT] = Field(description="requests that did not fit the cache")
    truncated: Annotated[Count, EXACT] = Field(0, description="requests that were cut off at the model's length")
    requests: Annotated[Count, EXACT] = Field(description="all of them")
    kv_bytes: Annotated[Count, BYTES] = Field(description="bytes of K and V that a request holds at most")
    state_bytes: Annotated[Count, BYTES] = Field(description="bytes of the policy's statistics")


class LmEvalFacts(Data):
    """What lm-eval asked."""

    questions: Annotated[Count | None, EXACT] = Field(None, description="how many")
    requests: Annotated[Count | None, EXACT] = Field(None, description="how many")
    longest_request: Annotated[Count | None, EXACT] = Field(None, description="tokens")
    lm_eval: Annotated[str | None, NotHeld("a version: the token ids say whether it asked something else")] = Field(
        None, description="version of lm-eval"
    )
