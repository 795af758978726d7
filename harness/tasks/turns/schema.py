"""Options of the task `turns`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from kvbench.harness.data.scbench import PROMPTS
from kvbench.harness.records.cell import Options
from kvbench.harness.tasks.turns.conversation import STYLES

_MAX_LINES = 10**6  # of all streams, generated in memory


class TurnsOptions(Options):
    """Options of the task `turns`; those from `system` to `data_seed` are of generated conversations."""

    name: Literal["turns"] = "turns"
    data: Literal["keys", "words", "scbench"] = Field(
        "keys", description="generated, for builtin:recall (keys) or a model of `bench pretrain machine` (words); or SCBench's"
    )
    mode: Literal["turns", "requests"] = Field(
        "turns",
        description="turns: one cache reads the text, every question and every answer; requests: each is asked on a copy of the "
        "text's cache",
    )
    subset: str = Field("scbench_kv", description="of SCBench")
    turns: int = Field(12, ge=1, description="turns of a conversation, with one question each")
    streams: int = Field(20, ge=1, description="independent conversations; each is read with a fresh cache")
    context: Literal["gold", "model"] = Field(
        "gold", description="what stays of an answer in mode turns: the right one (gold), or the model's (model)"
    )
    system: int = Field(4, ge=0, description="facts that stand first")
    facts: int = Field(32, ge=0, description="facts of the text after them")
    told: int = Field(1, ge=0, description="facts that a turn tells or corrects, before its question")
    corrections: float = Field(0.5, ge=0, le=1, description="share of these that correct an earlier fact")
    filler: int = Field(4, ge=0, description="facts that a turn tells after those, and nobody asks about")
    data_seed: int = Field(0, ge=0, description="seed of names, values and questions")

    @property
    def names(self) -> int:
        """Different names that a generated conversation may need for its facts, without filler."""
        return self.system + self.facts + self.turns * self.told

    @field_validator("subset")
    @classmethod
    def _is_right_or_wrong(cls, subset: str) -> str:
        if subset not in PROMPTS:
            raise ValueError(f"{subset[:40]}: only {' and '.join(PROMPTS)} are scored by whether the right string was said")
        return subset

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if self.data == "scbench":
            return self
        needed, names = self.names + (self.filler > 0), len(STYLES[self.data].names)
        if needed > names:
            raise ValueError(
                f"system + facts + turns x told, and one name for filler, are {needed:,} names, but {self.data} has {names}"
            )
        if not self.system + self.facts:
            raise ValueError("system and facts are 0, so the first turn has nothing to ask about")
        lines = self.streams * (self.system + self.facts + self.turns * (self.told + self.filler + 1))
        if lines > _MAX_LINES:
            raise ValueError(f"{self.streams:,} conversations have {lines:,} lines together, more than {_MAX_LINES:,}")
        return self
