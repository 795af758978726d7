"""Contents of a record besides figures: data, method, machine, and the error of a failed cell. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from kvbench.harness.records.figure_rules import CODE, EXACT, MACHINE, TIME, Elsewhere, Rule, Unchecked
from kvbench.harness.records.types import Amount, Count, Document, FileName, Name, Number, Part, Positive, Sha256, Whole

_DRAWN = Unchecked("says what a run was asked to write, and changes rounding only")

_MACHINES = Unchecked("depends on free memory, and changes rounding only")


class DataFacts(Document):
    """The data that a cell read."""

    other_fields: ClassVar[Rule] = EXACT  # the rule for fields that a task adds

    source: Annotated[str, EXACT] = Field("", description="source of the text or the images, in words")
    text_sha256: Annotated[str, EXACT] = Field("", description="hash of the text")
    ids_sha256: Annotated[str, Elsewhere("data")] = Field("", description="hash of the token ids, or of the pixels of images")
    tokens: Annotated[Count, EXACT] = Field(0, description="tokens read, without the prefix")
    prefix: Annotated[list[Whole], EXACT] = Field(default_factory=list, description="token ids that open each stream")
    texts: Annotated[list[str], EXACT] = Field(default_factory=list, description="titles of the texts")
    task_version: Annotated[Name | None, EXACT] = Field(
        None, description="raised when the same answer gets another score, which then is in the key; None for the first"
    )


class KVShape(Part):
    """Layers of a model whose K and V have the same shape."""

    layers: Annotated[Count, EXACT] = Field(description="number of layers")
    heads: Annotated[Count, EXACT] = Field(description="KV heads per layer")
    key_dim: Annotated[Count, EXACT] = Field(description="dimension of a key")
    value_dim: Annotated[Count, EXACT] = Field(description="dimension of a value")
    sliding_window: Annotated[Positive | None, EXACT] = Field(None, description="in tokens; None: unbounded")


class KeepMap(Part):
    """The file beside a record with the positions that every layer and KV head keeps at some steps (`--trace kept`)."""

    file: Annotated[FileName, _DRAWN] = Field(description="name of the file")
    sha256: Annotated[Sha256, _DRAWN] = Field(description="hash of its content")
    steps: Annotated[str, _DRAWN] = Field(description="the steps that were asked for; empty: spread over the stream")


class AtOnce(Part):
    """Number of independent streams that were read at once."""

    streams: Annotated[Positive, _MACHINES] = Field(description="number of streams read at once")


class Facts(Document):
    """Facts that may differ without changing the figures. Older records lack some of these."""

    weights_sha256: Annotated[str, Elsewhere("data")] = Field("", description="hash of the model's weights")
    dequantised_from: Annotated[str | None, EXACT] = Field(
        None, description="quantisation that the weights were stored in before they were converted, such as Q4_1"
    )
    policy_sha256: Annotated[str, CODE] = Field("", description="hash of the source of the policy and its statistics")
    code: Annotated[str | None, CODE] = Field(
        None, description="code of a third-party cache that ran, with versions; None: a policy in our loop"
    )
    wrong_length: Annotated[str | None, EXACT] = Field(
        None, description="wrong statement of a third-party cache about the tokens that it has read; positions don't depend on it"
    )
    task_sha256: Annotated[str, CODE] = Field("", description="hash of the source of a task outside this package")
    block: Annotated[Positive | None, _MACHINES] = Field(None, description="tokens per block")
    side_by_side: Annotated[AtOnce | None, _MACHINES] = Field(
        None, description="number of independent streams read at once; None: all"
    )
    method: Annotated[str | None, Elsewhere("method")] = Field(None, description="method of reading blocks")
    step: Annotated[str | None, Elsewhere("method")] = Field(None, description="method of reading single tokens")
    refused: Annotated[str | None, Elsewhere("method")] = Field(None, description="reason that a faster method was rejected")
    plain_because: Annotated[str | None, Elsewhere("method")] = Field(
        None, description="reason that no faster method exists for blocks"
    )
    budgets: Annotated[str | None, EXACT] = Field(
        None,
        description="reason that heads hold different numbers of tokens: a table, a pool or the prompt; None: equal numbers",
    )
    differs_from_walk: Annotated[Amount | None, Unchecked("the check at load rejects a method beyond its bound")] = Field(
        None, description="largest difference to the plain walk, as a share of the rounding tolerance"
    )
    self_check: Annotated[Number | None, Unchecked("the check at load rejects a model beyond its bound")] = Field(
        None, description="difference to the model's own forward pass, as a share of the rounding tolerance"
    )
    model_type: Annotated[str | None, EXACT] = Field(None, description="the model's family")
    training_length: Annotated[Positive | None, EXACT] = Field(None, description="longest sequence in training, in tokens")
    vocab_size: Annotated[Positive | None, EXACT] = Field(None, description="entries of the model's vocabulary")
    tokenizer_differs: Annotated[str | None, EXACT] = Field(
        None, description="disagreement of the tokenizer with the model's config; None without one"
    )
    kv_shapes: Annotated[list[KVShape] | None, EXACT] = Field(None, description="shapes of K and V, by layer")
    device: Annotated[str, MACHINE] = Field("", description="name of the device")
    instructions: Annotated[str, MACHINE] = Field("", description="widest SIMD level of the CPU, or architecture of the GPU")
    tf32: Annotated[bool | None, MACHINE] = Field(None, description="whether the GPU may multiply float32 in TF32; None on a CPU")
    threads: Annotated[Positive | None, MACHINE] = Field(None, description="CPU threads")
    seconds: Annotated[Amount | None, TIME] = Field(None, description="seconds in total")
    measured_seconds: Annotated[Amount | None, Elsewhere("speed")] = Field(None, description="seconds of the task's own work")
    tokens_per_second: Annotated[Amount | None, Elsewhere("speed")] = Field(
        None, description="tokens per second over measured_seconds"
    )
    calibration_ms: Annotated[Amount | None, Elsewhere("speed")] = Field(
        None, description="milliseconds of a fixed matrix product and copy, timed after the cell"
    )
    keep_map: Annotated[KeepMap | None, _DRAWN] = Field(None, description="the keep map, if one was asked for")
    versions: Annotated[dict[str, str], CODE] = Field(default_factory=dict, description="versions of packages")
    platform: Annotated[str, MACHINE] = Field("", description="operating system and processor")


class Failure(Document):
    """The error of a failed cell."""

    kind: str = Field(description="the error's type, or 'out of memory'")
    message: str = Field(description="first line of the error")
    where: str = Field("", description="file, line and function, in the user's code if it is on the stack")
    traceback: list[str] = Field(default_factory=list, description="last lines of the traceback")

    @property
    def reason(self) -> str:
        """The error in one line, with its place in the code."""
        text = ": ".join(part for part in (self.kind, self.message) if part)
        return f"{text} ({self.where})" if self.where else text


class RecordedTrace(Document):
    """The file beside a record with figures per token, question or step."""

    file: FileName = Field(description="name of the file")
    sha256: Sha256 = Field(description="hash of its content")
