"""Interface of a task: options in a suite, and the measurement of one cell or of several cells side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvbench.harness.core.workload import Workload
from kvbench.harness.records import Record
from kvbench.harness.records.cell import Options
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.report.task_report import TaskReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvbench.harness.engine.decoder import CacheConfig, Decoder
    from kvbench.harness.engine.method import Method
    from kvbench.harness.engine.model import Model

__all__ = [
    "MAX_TOKENS",
    "Data",
    "Job",
    "MeasurementError",
    "Metrics",
    "Options",
    "RandomTokens",
    "Task",
    "Tokenizer",
    "Workload",
]

MAX_TOKENS = 10**9  # largest length of a stream, which takes days to read


class Tokenizer(Protocol):
    """Function that loads the tokenizer of a cell's model."""

    @property
    def directory(self) -> Path:
        """Directory of the model's files, for a task that reads other data than text."""

    def __call__(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer."""


class Data(Protocol):
    """Data that a task reads."""

    @property
    def ids_sha256(self) -> str:
        """Hash of all token ids."""

    @property
    def tokens(self) -> int:
        """Number of tokens to read, without the prefix, for progress and speed."""

    def facts(self) -> dict[str, Any]:
        """Return the record's `data`: source, hashes, tokens, prefix."""


@dataclass(frozen=True)
class RandomTokens:
    """Token ids that the task draws uniformly, for figures that do not depend on the text."""

    tokens: int
    ids_sha256: str = "uniform random token ids"

    def facts(self) -> dict[str, Any]:
        """Return the record's `data`."""
        return {"source": self.ids_sha256, "tokens": self.tokens}


def _new_decoder(*args: Any, **kwargs: Any) -> Decoder:
    from kvbench.harness.engine.loop import decoder

    return decoder(*args, **kwargs)


@dataclass(frozen=True)
class Job:
    """A cell that is ready to be measured."""

    model: Model  # has passed the self-check
    config: CacheConfig
    data: Any  # returned by the task's `data`
    block: int  # tokens per block
    method: Method  # faster methods that decoders may use
    trace: Path  # file for figures per token, question or step
    progress: Callable[[int, str], None]  # called with (tokens done, the figure so far as text)
    open: Callable[..., Decoder] = field(default=_new_decoder)  # creates a decoder; tests replace it
    reference: Record | None = None  # record of the cell that the workload's `reference` names
    all_at_once: bool = False  # whether to read all streams at once despite the options, because a keep map wraps one decoder

    def decoder(self, streams: int = 1) -> Decoder:
        """Return a decoder with an empty cache."""
        return self.open(self.model, self.config, streams, self.method)


class MeasurementError(RuntimeError):
    """The cell can't be measured; its record says that it failed."""


class Task(TaskReport, ABC):
    """A kind of measurement: its data, its method (`run` or `run_together`), and the display of its records.

    A task's module imports torch, transformers and the engine inside functions only, because pages are rendered without them.
    """

    @staticmethod
    @abstractmethod
    def data(options: Any, tokenizer: Tokenizer, directory: Path | None) -> Data:
        """Return the data that all cells of a model read.

        Raises:
            UserError: the data is missing.
        """

    @classmethod
    @abstractmethod
    def workload(cls, options: Any) -> Workload:
        """Return the sizes of the work of a cell with these options."""

    @classmethod
    def load_model(cls, directory: Path, *args: Any, **kwargs: Any) -> Model:
        """Load the model of the task's cells. The arguments are passed to `load_model` in `harness/models/load.py`."""
        from kvbench.harness.models.load import load_model

        return load_model(directory, *args, **kwargs)

    @classmethod
    def tokens_read(cls, options: Any, data: Any) -> int | None:
        """Return the number of tokens of every stream that one decoder reads, streams side by side; None for other methods.

        Keep maps (`--trace kept`) need the number, because they are written by wrapping the decoder.
        """
        return None

    @staticmethod
    def run(options: Any, job: Job) -> Metrics:
        """Measure one cell.

        Raises:
            MeasurementError: the cell can't be measured.
        """
        raise NotImplementedError

    @classmethod
    def run_together(cls, options: Any, jobs: Sequence[Job]) -> Iterator[tuple[int, Metrics | Exception]]:
        """Measure cells side by side.

        Yields:
            The index of a job, and its figures or its error, as soon as they are known. The record is written at once, so that
            an interrupted run keeps it.
        """
        for number, job in enumerate(jobs):
            try:
                result: Metrics | Exception = cls.run(options, job)
            except Exception as error:  # the other cells go on
                result = error
            yield number, result
