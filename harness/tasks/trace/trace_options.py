"""Options and figures of the trace task."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvbench.harness.data.register_machine import LINES, REGISTERS, prompt_words, step_words
from kvbench.harness.records.figure_rules import ANSWERED, BYTES, EXACT
from kvbench.harness.records.metrics import QuestionMetrics
from kvbench.harness.records.run_facts import DataFacts
from kvbench.harness.records.types import Amount, Count, Part, Positive, Share
from kvbench.harness.tasks.task import Options

_MAX_ANSWERS, _MAX_WORDS = 10**5, 10**5


class TraceOptions(Options):
    """Options of the trace task."""

    not_recorded = frozenset({"side_by_side"})
    shown = ("programs", "lines", "registers", "steps", "restate", "tell", "samples", "teacher")
    never_pooled_over = ("registers", "steps", "samples", "temperature", "top_p", "teacher")

    name: Literal["trace"] = "trace"
    programs: int = Field(32, ge=1, le=_MAX_ANSWERS, description="number of programs; each is a prompt")
    lines: int = Field(8, ge=2, le=LINES, description="lines of a program, which are its prompt")
    registers: int = Field(4, ge=3, le=REGISTERS, description="registers of a program")
    steps: int = Field(24, ge=1, description="fewest steps after which a program ends; the most are twice as many")
    restate: Literal["full", "reads"] = Field(
        "full", description="whether a step says its line again (full) or what it reads and writes, and which way it goes (reads)"
    )
    tell: bool = Field(False, description="the prompt names a register whose value every step must say, too")
    tokens: int | None = Field(
        None, ge=1, le=_MAX_WORDS, description="most words of an answer; a quarter more than the longest right one if not given"
    )
    samples: int = Field(1, ge=1, le=_MAX_ANSWERS, description="answers for each program, each drawn with a seed of its own")
    temperature: float = Field(
        0.0, ge=0, le=100, description="temperature of the softmax that words are drawn from; 0: the likeliest word"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="draw only from the likeliest words that together have this probability")
    teacher: bool = Field(False, description="read the right trace, and say at each word which is likeliest, instead of writing")
    data_seed: int = Field(0, ge=0, description="seed of the programs")
    sample_seed: int = Field(0, ge=0, description="seed of the words that are drawn")
    side_by_side: int | None = Field(None, ge=1, description="number of answers written at once; all if not given")

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.answers > _MAX_ANSWERS or self.longest > _MAX_WORDS:
            raise ValueError(f"more than {_MAX_ANSWERS:,} answers, or than {_MAX_WORDS:,} words of one")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(f"samples {self.samples}: at temperature 0 all of them are the same")
        if self.teacher and (self.temperature or self.tokens):
            raise ValueError("teacher reads the right trace and writes nothing: leave out tokens, samples and temperature")
        if self.tokens is not None and self.tokens < self.longest:
            raise ValueError(f"tokens {self.tokens:,} can't hold the trace of {2 * self.steps:,} steps: {self.longest:,} words")
        return self

    @property
    def heading(self) -> str:
        """Heading with the sizes of programs."""
        how = ", right traces read" if self.teacher else f", {self.samples} answers each" if self.samples > 1 else ""
        return f"trace, {self.lines} lines, {self.registers} registers, {self.steps} to {2 * self.steps} steps{how}"

    @property
    def answers(self) -> int:
        """Number of answers."""
        return self.programs * self.samples

    @property
    def step(self) -> int:
        """Words of a step."""
        return step_words(self.restate, self.tell)

    @property
    def longest(self) -> int:
        """Words of the longest possible right trace of a program."""
        return 2 * self.steps * self.step

    @property
    def limit(self) -> int:
        """Words after which an answer is cut."""
        return self.longest if self.teacher else self.tokens or self.longest + self.longest // 4

    @property
    def prompt(self) -> int:
        """Words of a prompt, equal for all prompts."""
        return prompt_words(self.lines, self.registers, self.tell)


class Between(Part):
    """Counts of steps or reads between two distances in words."""

    from_: Annotated[Count, EXACT] = Field(alias="from", description="smallest distance")
    to: Annotated[Count, EXACT] = Field(description="first distance after the bucket")
    count: Annotated[Positive, ANSWERED] = Field(description="number of steps, or reads")
    right: Annotated[Count, ANSWERED] = Field(description="number of right steps, or reads")


class PassAt(Part):
    """Probability that at least one of `k` answers is right, mean over programs."""

    k: Annotated[Positive, EXACT] = Field(description="number of answers")
    share: Annotated[Share, ANSWERED] = Field(description="the unbiased estimate of Chen et al. 2021")
    low: Annotated[Share | None, ANSWERED] = Field(None, description="lower end of the share's 95 % interval over programs")
    high: Annotated[Share | None, ANSWERED] = Field(None, description="upper end of the interval")


class TraceMetrics(QuestionMetrics):
    """Figures of answers and their errors. An answer is right if it equals the program's trace, word by word."""

    pass_at: Annotated[list[PassAt], ANSWERED] = Field(
        default_factory=list,
        description="pass@k for k = 2, 4, ... and all answers, if programs have several; pass@1 is `accuracy`",
    )
    words: Annotated[Positive, ANSWERED] = Field(description="words of all answers, or read by `teacher`")
    words_right: Annotated[list[Count], ANSWERED] = Field(description="words of each answer before the first wrong one")
    final: Annotated[Count | None, ANSWERED] = Field(
        None, description="answers after which every register, as last said, has the value with which the program ends"
    )
    endings: Annotated[dict[str, Count] | None, ANSWERED] = Field(
        None, description="answers that ended, those that came to repeat themselves (looped), and the others (cut)"
    )
    word_accuracy: Annotated[Share | None, ANSWERED] = Field(None, description="share of right words, with `teacher`")
    told: Annotated[list[Between], ANSWERED] = Field(
        default_factory=list, description="steps that obey `tell`, by their distance from the prompt"
    )
    reads: Annotated[list[Between], ANSWERED] = Field(
        default_factory=list, description="values said again, by their distance from where they were said last"
    )
    held: Annotated[Share | None, ANSWERED] = Field(
        None, description="share of what the first wrong words follow from that was cached then; None if none is wrong"
    )
    kv_bytes: Annotated[Count, BYTES] = Field(description="largest number of bytes allocated for K and V per answer")
    state_bytes: Annotated[Count, BYTES] = Field(description="bytes of the policy's statistics per answer")

    def headline(self) -> str:
        """Return the share of right answers, and the number of answers."""
        return f"solved {self.accuracy:.1%} of {self.questions}"

    def question_streams(self, options: TraceOptions, data: DataFacts) -> int | None:
        """Return the number of programs if each has several answers, else None."""
        return options.programs if options.samples > 1 else None


class TraceFacts(DataFacts):
    """Data of the trace task."""

    steps: Annotated[Amount | None, EXACT] = Field(None, description="mean steps of a program")
