"""What a task is: options of a suite, and a measurement of one cell or of several side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kvbench.harness.records.cell import Options
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.report.task import TaskReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvbench.harness.engine.decoder import CacheConfig, Decoder
    from kvbench.harness.engine.method import Method
    from kvbench.harness.engine.model import Model

__all__ = ["LONGEST", "Data", "Job", "MeasurementError", "Metrics", "Options", "RandomTokens", "Task", "Tokenizer"]

Tokenizer = Callable[[], "PreTrainedTokenizerBase"]  # loaded when called: not every task needs one


LONGEST = 10**9  # tokens that a task may be asked for: days of work


class Data(Protocol):
    """What a task reads."""

    @property
    def ids_sha256(self) -> str:
        """Fingerprint of all token ids."""

    @property
    def tokens(self) -> int:
        """How many will be read, for progress and speed; the prefix is not counted."""

    def facts(self) -> dict[str, Any]:
        """For the record: source, fingerprints, tokens, prefix."""


@dataclass(frozen=True)
class RandomTokens:
    """Token ids drawn uniformly by the task itself, where what they say does not matter."""

    tokens: int
    ids_sha256: str = "uniform random token ids"

    def facts(self) -> dict[str, Any]:
        """What the record says of what was read."""
        return {"source": self.ids_sha256, "tokens": self.tokens}


def _open(*what: Any, **how: Any) -> Decoder:
    """A decoder (`engine/loop.py`)."""
    from kvbench.harness.engine.loop import decoder

    return decoder(*what, **how)


@dataclass(frozen=True)
class Job:
    """One cell, ready to be measured.

    Attributes:
        model: adopted and checked.
        config: what the cache keeps.
        data: what the task's `data` returned.
        block: T, tokens that pass a layer at once.
        method: shortcuts that decoders may take.
        trace: file to write per-token or per-question figures to.
        progress: called with (tokens done, the figure so far in words).
        open: makes the decoder; replaced by tests.
    """

    model: Model
    config: CacheConfig
    data: Any
    block: int
    method: Method
    trace: Path
    progress: Callable[[int, str], None]
    open: Callable[..., Decoder] = field(default=_open)

    def decoder(self, streams: int = 1) -> Decoder:
        """A fresh decoder for the cell."""
        return self.open(self.model, self.config, streams, self.method)


class MeasurementError(RuntimeError):
    """A cell that could not be measured to its end: it becomes a failed record."""


class Task(TaskReport, ABC):
    """A measurement, in one file: what it needs, how it is done (`run` or `run_together`), and what its records say.

    A task's module imports torch, transformers and the engine inside of functions only: pages of records are made without them.

    Attributes:
        of_device: device and thread count are part of what is measured, and so of a record's key.
        together: cells of one model and the same options are measured side by side, interleaved, and finish together.
        apart: on a CPU every cell runs in a process of its own.
        block_of_all: a job's `block` counts the tokens of all streams together, not those of each.
    """

    of_device: ClassVar[bool] = False
    together: ClassVar[bool] = False
    apart: ClassVar[bool] = False
    block_of_all: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def data(options: Any, tokenizer: Tokenizer, directory: Path | None) -> Data:
        """What the cells of a model read.

        Raises:
            UserError: there is none.
        """

    @staticmethod
    @abstractmethod
    def total(options: Any) -> int:
        """Tokens to process, at most, for estimates before there is any data."""

    @classmethod
    def longest(cls, options: Any) -> int:
        """Tokens of its longest stream, about, for estimates."""
        return cls.total(options) // cls.streams(options)

    @classmethod
    def windows(cls, options: Any) -> float:
        """How many windows a policy that recomputes them runs, about, for estimates."""
        return cls.total(options)

    @staticmethod
    def run(options: Any, job: Job) -> Metrics:
        """Measure one cell.

        Raises:
            MeasurementError: no honest number came out.
        """
        raise NotImplementedError

    @classmethod
    def run_together(cls, options: Any, jobs: Sequence[Job]) -> list[Metrics | Exception]:
        """Measure cells side by side: for each its figures, or the error it failed with."""
        results: list[Metrics | Exception] = []
        for job in jobs:
            try:
                results.append(cls.run(options, job))
            except Exception as error:  # whatever goes wrong in a cell, the others go on
                results.append(error)
        return results
