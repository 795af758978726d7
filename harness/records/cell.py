"""Specification of a cell: suite, model, task, policy. The cell's id is the hash of this JSON. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError, model_validator

from kvbench.harness.core import plugins
from kvbench.harness.core.codec import QUANTIZED_CACHE, Codec, quantized_cache
from kvbench.harness.core.evict import By, Evict, Pages, Worth, at_once, evict_words
from kvbench.harness.records.types import BadRecordError, Document, Name, Part, Plain, Positive, Whole

OptionsT = TypeVar("OptionsT", bound="Options")


class Options(BaseModel):
    """Options of a task in a suite. An unknown option is an error.

    Attributes:
        not_recorded: options that affect how a cell is read but no figure; they are not part of the cell.
        shown: options shown with the task's name on the sortable page and in comparisons; None: all.
        axes: options that vary within one section of a page.
        never_pooled_over: options over whose values right answers are never added up.
    """

    not_recorded: ClassVar[frozenset[str]] = frozenset()
    shown: ClassVar[tuple[str, ...] | None] = None
    axes: ClassVar[tuple[str, ...]] = ()
    never_pooled_over: ClassVar[tuple[str, ...]] = ()
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str

    @property
    def heading(self) -> str:
        """Heading of a section of a page."""
        return self.name


@cache
def recorded(options: type[Options]) -> type[Options]:
    """Return a subclass of these options for reading records: types are strict, and options that no longer exist are kept."""

    class Recorded(options):  # type: ignore[valid-type, misc]
        model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
        __pydantic_extra__: dict[str, Plain]

    return Recorded


class AnyOptions(Options):
    """Options of a task that is not installed."""

    name: Name


class CellModel(Part):
    """A cell's model."""

    id: Name = Field(description="a hub id, or the name of a local directory or file")
    dtype: Name = Field(description="dtype of weights and cache")
    revision: Name | None = Field(None, description="commit of a hub model")
    gguf_file: Name | None = Field(None, description="the GGUF file read, of several")
    rope_length: Positive | None = Field(None, description="longest position in tokens, for RoPE types that depend on it")
    devices: Positive = Field(1, description="number of devices that the model was spread over")
    parallel: Name | None = Field(
        None, description="way of spreading the model: whole layers on each device (layers); older records may have tensor"
    )


class Every(Part):
    """Several tokens evicted at once."""

    model_config = ConfigDict(extra="forbid")

    every: Positive = Field(description="tokens evicted at once")


class Paged(Part):
    """Eviction of whole pages."""

    model_config = ConfigDict(extra="forbid")

    pages: Positive = Field(description="tokens of a page")
    by: By = Field(description="decision: by the heads of a layer together (union), or by each head itself (per_head)")
    worth: Worth = Field(description="importance of a page: the mean or the maximum of its tokens' importance")


class CellExempt(Part):
    """Tokens that a codec leaves in the model's dtype."""

    sinks: Whole = Field(description="number of first tokens of a stream")
    recent: Whole = Field(description="number of newest tokens")


class CellKV(Part):
    """Codec of stored K and V."""

    codec: Literal["int8", "int4", "int2", "kivi4", "kivi2"] = Field(description="codec, named after the bits of a number")
    group: Positive = Field(description="channels, or tokens, that share a scale and a zero")
    exempt: CellExempt | None = Field(None, description="tokens held in the model's dtype; None with kivi")
    residual: Positive | None = Field(None, description="number of newest tokens that kivi holds in the model's dtype")
    keys: Literal["unrotated", "rotated"] = Field("unrotated", description="whether keys are coded before or after RoPE")

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse settings that are no codec."""
        if self.codec.startswith("kivi") != (self.residual is not None) or (self.exempt is None) != (self.residual is not None):
            raise ValueError(f"{self.codec} without what it needs: residual with kivi, else exempt")
        self.read()
        return self

    def read(self) -> Codec:
        """Return the codec."""
        return Codec.from_json(self.model_dump())


class CellSpec(Document):
    """Specification of a cell, with all defaults filled in."""

    suite: Name = Field(description="name of the suite")
    suite_version: Whole = Field(description="version of the suite, raised when a change makes old records incomparable")
    model: CellModel = Field(description="the model")
    task: SkipValidation[Options] = Field(description="the task's name and its options")
    policy: Name = Field(description="name of the policy, or file.py:Class")
    parameters: dict[str, Plain] = Field(
        description="parameters, bound to the capacity; a policy that the policy holds is a mapping with name and parameters"
    )
    capacity: Positive | None = Field(description="tokens per KV head kept between steps; None: all, or an outcome of the prompt")
    positions: Name = Field(description="position that RoPE gives a cached token")
    limit: Positive | None = Field(description="largest distance in tokens, for positions 'clamped'")
    seed: Whole = Field(description="seed of the policy's random numbers")
    evict: Literal["step", "prompt"] | Every | Paged = Field(
        "step", description="moment of eviction: after every step, several at once, whole pages, or once after the prompt"
    )

    kv: CellKV | None = Field(None, description="format of K and V; None: the model's dtype")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Validate a mapping; the task validates its options, if it is installed.

        Raises:
            BadRecordError: the mapping is invalid. The message names the first mistake.
        """
        task = value.get("task")
        if not isinstance(task, dict) or not isinstance(task.get("name"), str):
            raise BadRecordError(("task",), "a mapping with the task's name")
        task_class = plugins.known_task(task["name"])
        return cls._with_options(value, AnyOptions if task_class is None else task_class.options)

    @classmethod
    def _with_options(cls, value: Mapping[str, Any], options_of_task: type[Options]) -> Self:
        """Validate a mapping whose task has these options."""
        task, recorded_options = value["task"], recorded(options_of_task)
        try:
            options = recorded_options.model_validate(task)
        except ValidationError as error:
            if any(mistake["loc"] for mistake in error.errors()):
                raise BadRecordError.from_validation(error).inside("task") from None
            options = recorded_options.model_construct(**task)  # a run checks whether options contradict each other
        spec = super().from_json({**value, "task": options})
        spec._json = dict(value)
        return spec

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the JSON and the task's own options class, because another process can't import the class of `task`."""
        return type(self)._with_options, (self.as_json(), type(self.task).__base__)

    @property
    def options(self) -> dict[str, Any]:
        """The task's name and options from the record's file, unknown options included."""
        task: dict[str, Any] = self.as_json()["task"]
        return task

    @property
    def settings(self) -> dict[str, Any]:
        """The policy's parameters, and the parameters of policies inside, named like "score.window"."""
        return flat(self.parameters)

    @property
    def moment(self) -> Evict:
        """Time of eviction: tokens evicted at once, whole pages, or once after the prompt."""
        match self.evict:
            case Every(every=tokens):
                return tokens
            case Paged(pages=size, by=by, worth=worth):
                return Pages(size, by, worth)
            case "prompt":
                return "prompt"
        return 1

    @property
    def evicts(self) -> str:
        """Phrase that says when tokens are evicted."""
        return next(evict_words(self.moment), "step")

    @property
    def codec(self) -> Codec | None:
        """Codec of stored K and V; None if they are stored in the model's dtype."""
        return None if self.kv is None else self.kv.read()

    @property
    def stored(self) -> str:
        """Label of the format of stored K and V, also for transformers' quantized cache; empty for the model's dtype."""
        return quantized_cache(self.parameters) if self.policy == QUANTIZED_CACHE else str(self.codec or "")

    @property
    def is_dense(self) -> bool:
        """Whether the cache loses neither tokens nor precision."""
        return self.policy == "dense" and self.kv is None

    @property
    def most_kept(self) -> int | None:
        """Largest number of tokens that a KV head keeps between steps, on average; None if unbounded."""
        if self.capacity is None or self.evict == "prompt":
            return None
        return self.capacity + at_once(self.moment) - 1

    def task_options(self, options: type[OptionsT]) -> OptionsT:
        """Return the task's options, typed by the task's own class."""
        assert isinstance(self.task, options), f"{self.task.name} has other options"
        return self.task


def flat(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's parameters by name. A policy inside becomes its name ("score") and its parameters ("score.window")."""
    result: dict[str, Any] = {}
    for key, value in parameters.items():
        if isinstance(value, Mapping) and "name" in value:
            inside = flat({k: v for k, v in value.items() if k != "name"})
            result |= {key: value["name"]} | {f"{key}.{k}": v for k, v in inside.items()}
        else:
            result[key] = value
    return result
