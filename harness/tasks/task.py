"""What a task is: options of a suite, and a measurement of one cell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedTokenizerBase

from harness.data.stream import TokenStream
from harness.engine.loop import CacheConfig
from harness.engine.model import Model


class Options(BaseModel):
    """Options of a task, as a suite gives them; unknown ones are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Job:
    """One cell, ready to be measured.

    Attributes:
        model: adopted and checked.
        config: what the cache keeps.
        stream: the task's text as tokens.
        block: T, tokens that pass a layer at once.
        walk: token by token inside the layers, even where nothing can be evicted.
        trace: file to write per-token figures to.
        progress: called with (tokens done, running mean NLL).
    """

    model: Model
    config: CacheConfig
    stream: TokenStream
    block: int
    walk: bool
    trace: Path
    progress: Callable[[int, float], None]


class MeasurementError(RuntimeError):
    """A cell that could not be measured to its end: it becomes a failed record."""


class Task(ABC):
    """A measurement. Subclasses say what it needs and how it is done."""

    options: ClassVar[type[Options]]

    @staticmethod
    @abstractmethod
    def data(options: Any, tokenizer: PreTrainedTokenizerBase, directory: Path | None) -> TokenStream:
        """The text, as the model's tokens.

        Raises:
            UserError: there is none.
        """

    @staticmethod
    @abstractmethod
    def total(options: Any) -> int:
        """Tokens to process, for progress and estimates."""

    @staticmethod
    @abstractmethod
    def run(options: Any, job: Job) -> dict[str, Any]:
        """Measure.

        Raises:
            MeasurementError: no honest number came out.
        """
