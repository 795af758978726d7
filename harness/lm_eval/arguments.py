"""What `--model_args` may say of the model `kvbench`: which model under which policy, and how prompts are read."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import AutoConfig, PreTrainedTokenizerBase

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.fastcheck import fast_method
from kvbench.harness.engine.method import EAGER
from kvbench.harness.engine.model import Model
from kvbench.harness.lm_eval.reading import Prompt, Reader
from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.load import DTYPES, device_of, load_model, load_tokenizer
from kvbench.harness.rules.rules import refuse_if_broken
from kvbench.policies import PositionMode

_BLOCK = 4096  # tokens that pass a layer at once, all streams together
_BATCH = 16  # requests side by side, where none is said


class Arguments(BaseModel):
    """Arguments by name; what is none of these is a parameter of the policy."""

    model_config = ConfigDict(extra="allow", frozen=True, coerce_numbers_to_str=True)

    pretrained: str = Field(description="a local directory, a hub id, or builtin: and a name")
    policy: str = Field("dense", description="its name, or file.py:Class")
    capacity: int | None = Field(None, ge=1, description="tokens per KV head kept between steps")
    positions: PositionMode = Field("cache", description="where RoPE puts a cached token")
    limit: int | None = Field(None, ge=1, description="largest distance of positions clamped; tokens")
    prompt: Prompt = Field("stream", description="how a prompt longer than the cache is read: stream, once or truncate")
    prompt_tokens: int | None = Field(None, ge=2, description="tokens that truncate leaves; the capacity if not given")
    seed: int = Field(0, description="of the policy's randomness")
    revision: str | None = Field(None, description="of a hub model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="the model's own if auto")
    device: str = Field("auto", description="auto, cpu, cuda")
    batch_size: int | str = Field(_BATCH, description="requests side by side; auto is 16")
    max_length: int | None = Field(None, ge=1, description="tokens of a request, of which the last are taken")
    rope_length: int | None = Field(None, ge=1, description="longest position, for RoPE types that depend on it; tokens")
    pickle: bool = Field(False, description="accept weights that are not safetensors")
    add_bos_token: bool | None = Field(None, description="as in lm-eval's hf")
    prefix_token_id: int | None = Field(None, description="as in lm-eval's hf")
    chat_template_args: dict[str, Any] | None = Field(None, description="as in lm-eval's hf")

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """Checked.

        Raises:
            UserError: the first mistake.
        """
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"--model_args: {'.'.join(str(p) for p in first['loc'])}: {first['msg']}") from None

    def loaded(self) -> tuple[Reader, PreTrainedTokenizerBase]:
        """A reader of the model, and the model's tokenizer.

        Raises:
            UserError: the model can't be had, there is no such policy, or it can't serve the capacity.
        """
        config = self._config()
        directory = model_directory(self.pretrained, self.revision, self.pickle)
        dtype = self.dtype
        if dtype == "auto":
            own = str(getattr(AutoConfig.from_pretrained(directory), "dtype", None) or "float32").removeprefix("torch.")
            dtype = own if own in DTYPES else "float32"  # type: ignore[assignment]
        batch = _BATCH if str(self.batch_size).startswith("auto") else int(self.batch_size)
        tokenizer = load_tokenizer(directory)
        model = load_model(directory, dtype, device_of(self.device), self.rope_length, self.pickle)
        try:
            return reader_of(model, config, self.prompt, self.prompt_tokens, batch), tokenizer
        except ValueError as error:
            raise UserError(str(error)) from None

    def _config(self) -> CacheConfig:
        """What the cache is asked to keep."""
        kind, parameters = plugins.policy_class(self.policy), self.model_extra or {}
        names = [f.name for f in dataclasses.fields(kind)]
        for name in parameters:
            if name not in names:
                its = ", ".join(names) or "it has none"
                raise UserError(f"{name}: no argument of kvbench, nor a parameter of {self.policy} ({its})")
        try:
            config = CacheConfig(kind(**parameters), self.capacity, self.positions, self.limit, self.seed)
            if self.capacity is not None:
                config.policy.bind(self.capacity)
        except ValueError as error:
            raise UserError(str(error)) from None
        refuse_if_broken(self.policy, config.policy, config.capacity, device_of(self.device))
        return config


def reader_of(model: Model, config: CacheConfig, prompt: Prompt, prompt_tokens: int | None, batch: int) -> Reader:
    """A reader that is as fast as was found to agree with the plain walk.

    Raises:
        ValueError: what is asked does not go together.
    """
    method = fast_method(model, config).method if config.policy.caches else EAGER
    return Reader(model, config, prompt, prompt_tokens, batch, _BLOCK, method)
