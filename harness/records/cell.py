"""What was asked of a cell: suite, model, task, policy. Its JSON is what a cell's id is the hash of. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError

from kvbench.harness.core import plugins
from kvbench.harness.records.types import BadRecordError, Document, Name, Part, Plain, Positive, Whole

OptionsT = TypeVar("OptionsT", bound="Options")


class Options(BaseModel):
    """Options of a task, as a suite gives them; unknown ones are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str


@cache
def recorded(options: type[Options]) -> type[Options]:
    """The same options as records keep them: of their very types, and those that nobody knows any more are kept, too."""

    class Recorded(options):  # type: ignore[valid-type, misc]
        model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
        __pydantic_extra__: dict[str, Plain]

    return Recorded


class AnyOptions(Options):
    """Options of a task that is not installed."""

    name: Name


def options_class(task: str) -> type[Options]:
    """What a task's options are; any, if it is not installed."""
    kind = plugins.known_task(task)
    options: type[Options] = AnyOptions if kind is None else kind.options
    return options


class AskedModel(Part):
    """A cell's model."""

    id: Name = Field(description="a hub id, or the name of a local directory")
    dtype: Name = Field(description="of weights and cache")
    revision: Name | None = Field(None, description="of a hub model: a commit")
    rope_length: Positive | None = Field(None, description="longest position, for RoPE types that depend on it; tokens")


class CellSpec(Document):
    """What was asked, resolved."""

    suite: Name = Field(description="its name")
    suite_version: Whole = Field(description="raised when a change makes old records incomparable")
    model: AskedModel = Field(description="which model")
    task: SkipValidation[Options] = Field(description="the task's name and its options")
    policy: Name = Field(description="its name; of a user's, file.py:Class")
    parameters: dict[str, Plain] = Field(description="of the policy, bound to the capacity")
    capacity: Positive | None = Field(description="tokens a KV head keeps between steps; None: all")
    positions: Name = Field(description="where RoPE puts a cached token")
    limit: Positive | None = Field(description="largest distance of positions 'clamped'; tokens")
    seed: Whole = Field(description="of the policy's randomness")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Check a mapping, and keep it; its task's options by the task, if that is installed.

        Raises:
            BadRecordError: the first mistake in it.
        """
        task = value.get("task")
        if not isinstance(task, dict) or not isinstance(task.get("name"), str):
            raise BadRecordError(("task",), "a mapping with the task's name")
        kind = recorded(options_class(task["name"]))
        try:
            options = kind.model_validate(task)
        except ValidationError as error:
            if any(mistake["loc"] for mistake in error.errors()):
                raise BadRecordError.from_validation(error).inside("task") from None
            options = kind.model_construct(**task)  # what options say together is checked when they are asked for
        made = super().from_json({**value, "task": options})
        made._json = dict(value)
        return made

    @property
    def options(self) -> dict[str, Any]:
        """The task's name and options as they were asked for, those that this program doesn't know included."""
        task: dict[str, Any] = self.as_json()["task"]
        return task

    def task_options(self, kind: type[OptionsT]) -> OptionsT:
        """The task's options, by its own model."""
        assert isinstance(self.task, kind), f"{self.task.name} has other options"
        return self.task
