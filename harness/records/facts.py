"""What a record tells besides its figures: what was read, how and where it was measured, why it failed. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from kvbench.harness.records.rules import CODE, EXACT, MACHINE, TIME, Elsewhere, NotHeld, Rule
from kvbench.harness.records.types import Amount, Count, Document, FileName, Number, Part, Positive, Sha256, Whole


class Data(Document):
    """What was read."""

    other_fields: ClassVar[Rule] = EXACT  # whatever else a task says of its data

    source: Annotated[str, EXACT] = Field("", description="where the text came from, in words")
    text_sha256: Annotated[str, EXACT] = Field("", description="of the text")
    ids_sha256: Annotated[str, Elsewhere("data")] = Field("", description="of the token ids")
    tokens: Annotated[Count, EXACT] = Field(0, description="that were read, the prefix not counted")
    prefix: Annotated[list[Whole], EXACT] = Field(default_factory=list, description="token ids that open a stream")
    texts: Annotated[list[str], EXACT] = Field(default_factory=list, description="titles")


class KVShape(Part):
    """Layers of a model that keep K and V of one shape."""

    layers: Annotated[Count, EXACT] = Field(description="how many")
    heads: Annotated[Count, EXACT] = Field(description="KV heads of each")
    key_dim: Annotated[Count, EXACT] = Field(description="of a key")
    value_dim: Annotated[Count, EXACT] = Field(description="of a value")
    sliding_window: Annotated[Positive | None, EXACT] = Field(None, description="tokens; None: unbounded")


class Facts(Document):
    """What may differ without changing the numbers. Older records lack some of them."""

    weights_sha256: Annotated[str, Elsewhere("data")] = Field("", description="of the model's weights")
    policy_sha256: Annotated[str, CODE] = Field("", description="of the source of the policy and its statistics")
    task_sha256: Annotated[str, CODE] = Field("", description="of the source of a task that is not ours")
    block: Annotated[Positive | None, NotHeld("what fits into memory; it changes rounding only")] = Field(
        None, description="tokens that pass a layer at once"
    )
    method: Annotated[str | None, Elsewhere("method")] = Field(None, description="how blocks were read")
    step: Annotated[str | None, Elsewhere("method")] = Field(None, description="how steps of one token were made")
    refused: Annotated[str | None, Elsewhere("method")] = Field(
        None, description="why a faster way was not used though it applies"
    )
    plain_because: Annotated[str | None, Elsewhere("method")] = Field(None, description="why no faster way applies")
    differs_from_walk: Annotated[
        Amount | None, NotHeld("the check at load has its own bound, and a method beyond it is refused")
    ] = Field(None, description="largest difference of the method to the plain walk, as a share of what is rounding")
    self_check: Annotated[Number | None, NotHeld("the check at load has its own bound, and a model beyond it is refused")] = (
        Field(None, description="difference to the model's own forward pass, as a share of what is rounding")
    )
    model_type: Annotated[str | None, EXACT] = Field(None, description="the model's family")
    training_length: Annotated[Positive | None, EXACT] = Field(None, description="longest stream it was trained on; tokens")
    kv_shapes: Annotated[list[KVShape] | None, EXACT] = Field(None, description="of the model's layers")
    device: Annotated[str, MACHINE] = Field("", description="its name")
    instructions: Annotated[str, MACHINE] = Field("", description="the widest of the CPU, or the GPU's architecture")
    threads: Annotated[Positive | None, MACHINE] = Field(None, description="of the CPU")
    seconds: Annotated[Amount | None, TIME] = Field(None, description="from beginning to end")
    measured_seconds: Annotated[Amount | None, Elsewhere("speed")] = Field(None, description="of the task's work alone")
    tokens_per_second: Annotated[Amount | None, Elsewhere("speed")] = Field(None, description="over measured_seconds")
    calibration_ms: Annotated[Amount | None, Elsewhere("speed")] = Field(
        None, description="a product and a copy of fixed sizes, timed after the cell"
    )
    versions: Annotated[dict[str, str], CODE] = Field(default_factory=dict, description="of packages")
    platform: Annotated[str, MACHINE] = Field("", description="system and processor")


class Failure(Document):
    """What a cell failed with."""

    kind: str = Field(description="the error's type, or 'out of memory'")
    message: str = Field(description="its first line")
    where: str = Field("", description="file, line and function: the user's own where there are any")
    traceback: list[str] = Field(default_factory=list, description="its last lines")


class Trace(Document):
    """The file beside a record, with its per-token, per-question or per-step figures."""

    file: FileName = Field(description="its name")
    sha256: Sha256 = Field(description="of its content")
