"""Fields of a suite file, as pydantic models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from kvbench.harness.suite.axes import Capacities, Evicts, KVs, size_in_bytes
from kvbench.policies import PositionMode


class ModelSpec(BaseModel):
    """Model to load, and options for loading it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(description="a hub id, a local directory or GGUF file, or the name of a packaged model")
    revision: str | None = Field(None, description="commit of a hub model")
    gguf_file: str | None = Field(None, description="the GGUF file to read of a hub model or local directory")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    rope_length: int | None = Field(None, ge=1, description="longest position, for RoPE types that depend on it; tokens")
    pickle: bool = Field(False, description="accept weights that are not safetensors")
    devices: int = Field(1, ge=1, description="number of devices that the model is spread over")
    parallel: Literal["layers"] | None = Field(None, description="way of spreading the model: whole layers on each device")

    @field_validator("parallel", mode="before")
    @classmethod
    def _spreads_layers(cls, value: Any) -> Any:
        if value == "tensor":
            raise ValueError("tensor was taken out: use parallel: layers, which lets any family span several devices")
        return value

    @model_validator(mode="after")
    def _says_how_to_spread(self) -> Self:
        if self.devices > 1 and self.parallel is None:
            raise ValueError(f"devices: {self.devices} needs parallel: layers")
        return self

    def as_json(self) -> dict[str, Any]:
        """Return the fields for a record, with the bare name of a local directory or file."""
        local = Path(self.id).expanduser()
        name = local.resolve().name if local.exists() else self.id
        file = {} if self.gguf_file is None else {"gguf_file": self.gguf_file}
        spread = {"devices": self.devices, "parallel": self.parallel} if self.devices > 1 else {}
        return {"id": name, "revision": self.revision, "dtype": self.dtype, "rope_length": self.rope_length} | file | spread


class Resources(BaseModel):
    """Resources that each worker of a run needs. Resources change no figure and are not part of cell ids."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: float | None = Field(
        None, ge=0, le=64, description="GPUs of a worker: 0, 1, or a share such as 0.5; 1 if not given and the machine has any"
    )
    cpus: int | None = Field(None, ge=1, description="cores of a worker; as many as its threads if not given")
    memory: Annotated[
        int | None,
        BeforeValidator(lambda v: None if v is None else size_in_bytes(v)),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
    ] = Field(None, description="memory of a worker: bytes, or a size such as 20GiB")

    @model_validator(mode="after")
    def _has_whole_gpus(self) -> Self:
        if self.gpus is not None and self.gpus > 1 and self.gpus % 1:
            raise ValueError("gpus is a whole number, or less than 1")
        return self


class SuiteFile(BaseModel):
    """The fields of a suite file."""

    model_config = ConfigDict(extra="forbid")

    suite: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="name of the suite")
    version: int = Field(ge=1, description="version of the suite, raised when a change makes old records incomparable")
    description: str = ""
    model: dict[str, Any] | list[dict[str, Any]]
    task: dict[str, Any] | list[dict[str, Any]]
    capacity: Capacities = Field(
        None, description="tokens per KV head kept between steps, for every policy; or {share: of the prompt}, or {bytes: SIZE}"
    )
    evict: Evicts = Field(
        "step", description="moment of eviction: after every step, {every: TOKENS} at once, or once after the prompt"
    )
    kv: KVs = Field("dtype", description="format of K and V: the model's dtype, or a codec such as int4")
    positions: PositionMode | list[PositionMode] = Field("cache", description="position that RoPE gives a cached token")
    limit: int | None = Field(None, ge=1, description="largest distance of positions 'clamped'; tokens")
    seed: int | list[int] = 0
    resources: Annotated[dict[str, Any] | None, WithJsonSchema(Resources.model_json_schema())] = Field(
        None, description="resources of each worker of `bench run --ray`"
    )
    policies: list[str | dict[str, Any]] = Field(min_length=1)
