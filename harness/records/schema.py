"""What a record's file must hold, so that whoever reads the record may rely on it. Unknown keys are fine. Imports no torch."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from kvbench.harness.records.metrics import BY_TASK, LatencyMetrics, Metrics
from kvbench.harness.records.types import Amount, Count, Duration, FileName, Name, Part, Plain, Positive, Whole


class ModelAsked(Part):
    """A cell's model."""

    id: Name
    dtype: Name
    revision: Name | None = None
    rope_length: Positive | None = None


class TaskAsked(Part):
    """A cell's task: its name, and the options that pages look at."""

    name: Name
    stride: Positive = 1
    streams: Positive = 1
    batch: Positive = 1
    tokens: Positive = 1
    prompt: Name | Positive | None = None
    newlines: Positive | None = None
    metric: Name | None = None
    num_fewshot: Count | None = None
    max_seq_length: Positive | None = None


class _LatencyAsked(TaskAsked):
    batch: Positive
    tokens: Positive
    rounds: Positive


class _StreamEvalAsked(TaskAsked):
    distance: Positive


class _ArcAsked(TaskAsked):
    subset: Name


class _LmEvalAsked(TaskAsked):
    tasks: Name


class CellSpec(Part):
    """What was asked."""

    suite: Name
    suite_version: Whole
    model: ModelAsked
    task: TaskAsked
    policy: Name
    parameters: dict[str, Plain]
    capacity: Positive | None
    positions: Name
    limit: Positive | None
    seed: Whole


class Data(Part):
    """Where the text came from."""

    source: str = ""
    text_sha256: str = ""
    ids_sha256: str = ""
    tokens: Count = 0
    prefix: list[Whole] = Field(default_factory=list)
    texts: list[str] = Field(default_factory=list)
    line_tokens: Duration = 1.0


class Facts(Part):
    """What may differ without changing the numbers."""

    device: str = ""
    instructions: str = ""
    threads: Positive = 1
    block: Positive = 1
    method: str = ""
    training_length: Positive | None = None
    seconds: Amount = 0.0
    measured_seconds: Amount = 0.0
    tokens_per_second: Amount = 0.0
    versions: dict[str, str] = Field(default_factory=dict)
    weights_sha256: str = ""
    policy_sha256: str = ""


class Failure(Part):
    """What a cell died of."""

    kind: str
    message: str


class Trace(Part):
    """The file beside the record."""

    file: FileName
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def _time(text: str) -> str:
    datetime.datetime.fromisoformat(text)
    return text


class RecordFile(BaseModel):
    """A record's file; the fields are those of `records.Record`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    cell: CellSpec
    cell_id: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    key: Annotated[str, Field(pattern="^[0-9A-Za-z]{1,128}$")]
    status: Literal["ok", "failed"]
    error: Failure | None
    metrics: Metrics
    data: Data
    facts: Facts
    finished: Annotated[str, Field(max_length=40), AfterValidator(_time)]
    trace: Trace | None
    numerics: Whole
    version: Whole


_TASKS: dict[str, type[TaskAsked]] = {
    "latency": _LatencyAsked, "streameval": _StreamEvalAsked, "arc_stream": _ArcAsked, "lm_eval": _LmEvalAsked,
}  # fmt: skip


def mistake(value: dict[str, Any]) -> str | None:
    """The first thing that is wrong with a record's file, in words; None if nothing is."""
    try:
        record = RecordFile.model_validate(value)
        task = value["cell"]["task"]
        if task["name"] in _TASKS:
            _TASKS[task["name"]].model_validate(task)
        if record.status == "ok" and task["name"] in BY_TASK:
            figures = BY_TASK[task["name"]].model_validate(value["metrics"])
            if isinstance(figures, LatencyMetrics) and len(figures.rounds_ms) != figures.sittings * task["rounds"]:
                return "metrics.rounds_ms: one a round of every sitting"
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
    return None
