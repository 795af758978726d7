"""The `--model_args` of the lm-eval model `kvbench`: model, policy, and method of reading prompts."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from transformers import PreTrainedTokenizerBase

from kvbench.harness.core import plugins
from kvbench.harness.core.contestants import Contestant
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.source_digests import source_digest
from kvbench.harness.engine.decoder import CacheConfig, refuse_too_large
from kvbench.harness.engine.fastcheck import fast_method
from kvbench.harness.engine.foreigncheck import own_loop
from kvbench.harness.engine.method import EAGER
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.rotary import LONGEST_STREAM
from kvbench.harness.lm_eval.reading import Prompt, RequestReader
from kvbench.harness.models.config import read_config
from kvbench.harness.models.hub import model_directory, weights_digest
from kvbench.harness.models.load import DTYPES, device_of, load_model, load_tokenizer, tokenizer_digest
from kvbench.harness.rules.rules import refuse_if_broken
from kvbench.harness.suite import Settings, policy_with, validated
from kvbench.policies import PositionMode

_OPTION = "--model_args"  # option that messages name
_BLOCK = 4096  # tokens per forward pass, all streams together
_DEFAULT_BATCH = 16


_Batch = Annotated[int, BeforeValidator(lambda x: _DEFAULT_BATCH if str(x).startswith("auto") else x), Field(ge=1)]


class Arguments(BaseModel):
    """Arguments of the model `kvbench`. Any other name is a parameter of the policy."""

    model_config = ConfigDict(extra="allow", frozen=True, coerce_numbers_to_str=True)

    pretrained: str = Field(description="a local directory or GGUF file, a hub id, builtin: and a name, or smollm2")
    policy: str = Field("dense", description="name of the policy, or file.py:Class")
    capacity: int | None = Field(None, ge=1, description="tokens per KV head kept between steps")
    positions: PositionMode = Field("cache", description="position that RoPE gives a cached token")
    limit: int | None = Field(None, ge=1, description="largest distance with positions=clamped; tokens")
    evict: Literal["step", "prompt"] | Annotated[int, Field(ge=1)] = Field(
        "step", description="moment of eviction: step, prompt (once after the prompt), or a number of tokens to evict at once"
    )
    prompt: Prompt = Field("stream", description="way of reading a prompt longer than the cache: stream, once or truncate")
    prompt_tokens: int | None = Field(None, ge=2, description="tokens that truncate keeps; the capacity if not given")
    seed: int = Field(0, description="seed of the policy's random numbers")
    sample_seed: int = Field(0, ge=0, description="seed of the answers, if lm-eval's gen_kwargs have do_sample=true")
    revision: str | None = Field(None, description="commit, branch or tag of a hub model")
    gguf_file: str | None = Field(None, description="the GGUF file to read of a directory or hub model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of the weights; the model's own if auto"
    )
    device: str = Field("auto", description="device: auto, cpu or cuda")
    batch_size: _Batch = Field(_DEFAULT_BATCH, description="requests run together; auto is 16")
    max_length: int | None = Field(
        None, ge=1, description="largest number of tokens of a request; a longer request keeps its last tokens"
    )
    rope_length: int | None = Field(
        None, ge=1, le=LONGEST_STREAM, description="longest position, for RoPE types that depend on it; tokens"
    )
    pickle: bool = Field(False, description="accept weights that are not safetensors")
    add_bos_token: bool | None = Field(None, description="same as in lm-eval's hf")
    prefix_token_id: int | None = Field(None, ge=0, description="same as in lm-eval's hf")
    chat_template_args: dict[str, Any] | None = Field(None, description="same as in lm-eval's hf")

    @classmethod
    def from_model_args(cls, arguments: dict[str, Any]) -> Self:
        """Validate arguments by name.

        Raises:
            UserError: an argument is invalid. The message names the first mistake.
        """
        return validated(cls, arguments, Settings(_OPTION), ())

    def loaded(self) -> tuple[RequestReader, PreTrainedTokenizerBase]:
        """Load the model. Return its request reader and its tokenizer.

        Raises:
            UserError: the model is not available, the policy is unknown, or it can't work with the capacity.
        """
        config = self._config()
        directory = model_directory(self.pretrained, self.revision, self.pickle, self.gguf_file)
        dtype = self.dtype
        if dtype == "auto":
            own = str(getattr(read_config(directory), "dtype", None) or "float32").removeprefix("torch.")
            dtype = own if own in DTYPES else "float32"  # type: ignore[assignment]
        tokenizer = load_tokenizer(directory)
        model = load_model(directory, dtype, device_of(self.device), self.rope_length, self.pickle)
        refuse_too_large(model, config)
        if self.prefix_token_id is not None and self.prefix_token_id >= len(tokenizer):
            raise UserError(f"{_OPTION}: prefix_token_id {self.prefix_token_id}: the tokenizer has {len(tokenizer):,} entries")
        try:
            return reader_of(model, config, self.prompt, self.prompt_tokens, self.batch_size), tokenizer
        except ValueError as error:
            raise UserError(str(error)) from None

    def signature(self) -> str:
        """Return a hash of everything that answers depend on: the arguments, the model's files and the policy's source."""
        directory = model_directory(self.pretrained, self.revision, self.pickle, self.gguf_file)
        files = [weights_digest(directory), tokenizer_digest(directory)]
        parts = [self.model_dump(exclude={"batch_size"}), *files, source_digest(self._config().policy)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _config(self) -> CacheConfig:
        """Return the cache configuration, after checking the policy."""
        policy_class, parameters = plugins.policy_class(self.policy), self.model_extra or {}
        names = [f.name for f in dataclasses.fields(policy_class)]
        for name in parameters:
            if name not in names:
                known = ", ".join(names) or "it has none"
                raise UserError(f"{name}: not an argument of kvbench, nor a parameter of {self.policy} ({known})")
        try:
            policy = policy_with(self.policy, policy_class, parameters, _OPTION)
            evict = 1 if self.evict == "step" else self.evict
            config = CacheConfig(policy, self.capacity, self.positions, self.limit, self.seed, evict)
            if self.capacity is not None:
                config.policy.bind(self.capacity)
        except (ValueError, TypeError) as error:
            raise UserError(str(error)) from None
        if not isinstance(policy, Contestant):
            refuse_if_broken(self.policy, config.policy, config.capacity, device_of(self.device))
        return config


def reader_of(model: Model, config: CacheConfig, prompt: Prompt, prompt_tokens: int | None, batch: int) -> RequestReader:
    """Return a reader with the fastest method that agrees with the plain walk.

    Raises:
        ValueError: the arguments contradict each other.
    """
    if isinstance(config.policy, Contestant):
        method = dataclasses.replace(EAGER, own_loop=own_loop(model, config).loop)
    else:
        method = fast_method(model, config, batch).method if config.policy.caches else EAGER
    return RequestReader(model, config, prompt, prompt_tokens, batch, _BLOCK, method)
