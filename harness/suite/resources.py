"""What a worker gets of its machine: the key `resources` of a suite. Used by `bench run --ray` only."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from kvbench.harness.suite.axes import size_in_bytes


class Resources(BaseModel):
    """What every worker of a run needs. It changes no number, so it is in no cell id."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: float | None = Field(
        None, ge=0, le=64, description="of a worker: 0, 1, or a share such as 0.5; 1 if not given and the machine has some"
    )
    cpus: int | None = Field(None, ge=1, description="cores of a worker; as many as its threads if not given")
    memory: Annotated[
        int | None, BeforeValidator(lambda v: None if v is None else size_in_bytes(v)),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
    ] = Field(None, description="of a worker: bytes, or a size such as 20GiB")  # fmt: skip

    @model_validator(mode="after")
    def _refuse_parts(self) -> Resources:
        """Refuse 1.5 GPUs.

        Raises:
            ValueError: that is asked for.
        """
        if self.gpus is not None and self.gpus > 1 and self.gpus % 1:
            raise ValueError("gpus is a whole number, or less than 1")
        return self
