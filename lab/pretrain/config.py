"""The recipe of a reference model (shape, text, training), read from a YAML file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvbench.harness.core.errors import UserError, did_you_mean
from kvbench.harness.data import backcopy, register_machine
from kvbench.harness.suite import yaml_value
from kvbench.lab.shared_kv.sources import why_unserved

MOST_SINKS, LEAST_VOCABULARY = 4, 1300
_RECIPES = Path(__file__).with_name("recipes.yaml")
_BOTH = ("softmax", "sigmoid", "clipped", "qk_norm")
_ATTENTION = {  # by family of the shape
    "llama": (*_BOTH, "sink_logits", "gated", "lckv"),
    "gpt2": (*_BOTH, "relu", "sigmoid_shares", "elu", "elu_shares", "pseudo", "key_bias", "protected"),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Shape(_Strict):
    """A model with tied embeddings."""

    family: Literal["llama", "gpt2"] = Field(
        "llama",
        description="llama: RoPE, RMSNorm, gated MLP, grouped queries; gpt2: learned positions, LayerNorm, biases, MLP of ReLU",
    )

    hidden: int = Field(192, ge=8, description="width")
    layers: int = Field(6, ge=1)
    heads: int = Field(6, ge=1, description="query heads")
    kv_heads: int = Field(2, ge=1)
    intermediate: int = Field(512, ge=8, description="width of the MLP")
    vocabulary: int = Field(4096, ge=8, description="tokens, special ones included")
    rope_theta: float = Field(10_000.0, gt=1, description="base of RoPE; a larger one leaves more dimensions to content")


class Condensed(_Strict):
    """Layers whose K and V the layers of an LCKV read, and the passes of its training steps."""

    kv_layers: tuple[int, ...] = Field(..., description="for every layer, the one whose K and V it reads; it may come later")
    blind: int = Field(7, ge=0, description="passes of a step without a gradient, in which K and V settle; m in the paper")
    graded: int = Field(2, ge=1, description="passes with a gradient after them; b in the paper")


class Mix(_Strict):
    """Share of each source in the running text, in characters."""

    pg19: float = Field(0.8, ge=0, description="books of the train split")
    prose: float = Field(0.2, ge=0, description="generated prose")


class Repeats(_Strict):
    """Random tokens in which stretches come again at random distances. They bring about heads that look things up."""

    share: float = Field(0.0, ge=0, le=1, description="share of the samples, in the beginning")
    later: float = Field(0.0, ge=0, le=1, description="share of the samples, after `until`")
    until: float = Field(0.4, ge=0, le=1, description="share of the steps")
    vocabulary: int = Field(
        300, ge=2, description="number of tokens that they are drawn from at first: the first after the sinks"
    )
    widest: int | None = Field(None, ge=2, description="number of tokens in the end; none: as many as at first")
    widen: tuple[float, float] = Field((0.0, 0.0), description="shares of the steps between which their number grows evenly")
    shortest: int = Field(4, ge=2, description="tokens of a stretch")
    longest: int = Field(12, ge=2, description="tokens of a stretch")

    @model_validator(mode="after")
    def _widens_later(self) -> Self:
        if self.widen[0] > self.widen[1]:
            raise ValueError("widen must end after it begins")
        return self

    def tokens(self, progress: float) -> int:
        """Return the number of tokens from which samples are drawn, given the completed share of the steps."""
        (start, end), last = self.widen, self.vocabulary if self.widest is None else self.widest
        grown = 1.0 if progress >= end else max(0.0, progress - start) / (end - start)
        return self.vocabulary + round((last - self.vocabulary) * grown)


class Kinds(_Strict):
    """Relative shares of the other samples: running text, and texts that tell something and ask for it."""

    text: float = Field(1.0, ge=0, description="books and prose")
    needles: float = Field(0.0, ge=0, description="running text with a sentence in it that is asked for at the end")
    registers: float = Field(0.0, ge=0, description="StreamEval's numbered lines and questions about any of them")
    keys: float = Field(0.0, ge=0, description="keys with one to four values")
    chains: float = Field(0.0, ge=0, description="keys that name keys that hold a value")
    programs: float = Field(0.0, ge=0, description="programs of a register machine and their traces")
    turns: float = Field(0.0, ge=0, description="labels that are given values, given others, and asked for")
    backcopy: float = Field(0.0, ge=0, description="Bigram-Backcopy's words; no other kind beside it")
    far_programs: float = Field(0.0, ge=0, description="programs that read some values long after they were said")
    far_turns: float = Field(0.0, ge=0, description="turns in which some labels are asked for a hundred times as often as others")
    text_from: float = Field(0.0, ge=0, le=1, description="share of the steps after which text and needles begin")
    rest: float = Field(0.05, ge=0, description="weight in the loss of what is no answer, but for running text")

    @model_validator(mode="after")
    def _something_before_text(self) -> Self:
        if self.text_from and not (self.registers or self.keys or self.chains):
            raise ValueError("text_from needs another kind of samples to begin with")
        return self


class Short(_Strict):
    """Shorter samples in the beginning, where heads that look things up come about much sooner."""

    until: float = Field(..., gt=0, le=1, description="share of the steps")
    sample: int = Field(..., ge=8, description="tokens; a divisor of the whole sample's")


class Again(_Strict):
    """Steps whose samples are shorter than their stage's: what is learnt of short texts stays, and texts end at any place."""

    share: float = Field(..., ge=0, le=1, description="share of the steps")
    samples: tuple[int, ...] = Field(..., min_length=1, description="tokens, of which those below the stage's are drawn")


class Training(_Strict):
    """Length and hyperparameters of a training run."""

    tokens: int = Field(..., ge=1, description="tokens of text, sinks not counted")
    sample: int = Field(254, ge=8, description="tokens of text per sample, sinks not counted")
    short: tuple[Short, ...] = Field((), description="stages of shorter samples, and more of them a step; in order")
    again: Again | None = Field(None, description="shorter samples in between, later on")
    batch: int = Field(32, ge=1, description="samples per step")
    learning_rate: float = Field(4e-3, gt=0)
    beta2: float = Field(0.95, gt=0, lt=1, description="beta2 of AdamW; beta1 is 0.9")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant",
        description="course of the learning rate: constant before its decay; cosine, to a twentieth; linear, to nothing",
    )
    optimizer: Literal["adamw", "ortho_adam", "sgd"] = Field("adamw", description="sgd has a momentum of 0.9")
    weight_decay: float = Field(0.1, ge=0)
    warmup: float = Field(0.02, ge=0, lt=1, description="share of the steps in which the learning rate rises")
    decay: float = Field(0.2, ge=0, lt=1, description="share of the steps, at the end, in which it falls to a tenth")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of autocast; the weights are float32")
    initial: float = Field(0.02, gt=0, description="standard deviation of the untrained weights")
    compile: bool = Field(True, description="use torch.compile")
    probe_every: int = Field(250, ge=1, description="steps between measurements of attention to the first token")
    checkpoint_every: int = Field(500, ge=1, description="steps between checkpoints")
    keep: tuple[int, ...] = Field((), description="steps after which the model is kept, for measurements; 0: untrained")
    keep_every: int | None = Field(None, ge=1, description="also keep it after every `keep_every` steps")

    @field_validator("short")
    @classmethod
    def _in_order(cls, stages: tuple[Short, ...]) -> tuple[Short, ...]:
        if any(later.until <= earlier.until for earlier, later in pairwise(stages)):
            raise ValueError("each stage must end after the one before it")
        return stages

    @model_validator(mode="after")
    def _whole_pieces(self) -> Self:
        for size in (*(stage.sample for stage in self.short), *(self.again.samples if self.again else ())):
            if size < 1 or self.sample % size:
                raise ValueError(f"short samples of {size} tokens don't make a sample of {self.sample}")
        return self


class PretrainConfig(_Strict):
    """Recipe of a reference model."""

    name: str
    seed: int = Field(0, ge=0, lt=2**63)
    start: str | None = Field(None, description="a model to go on from: a directory, or builtin:NAME; weights alone")
    sinks: int = Field(0, ge=0, le=MOST_SINKS, description="learnable sink tokens before every sample")
    zero_sink: bool = Field(False, description="softmax off by one: a sink logit fixed at 0, in training and evaluation")
    attention: Literal[
        "softmax",
        "sink_logits",
        "sigmoid",
        "gated",
        "clipped",
        "qk_norm",
        "relu",
        "sigmoid_shares",
        "elu",
        "elu_shares",
        "pseudo",
        "key_bias",
        "protected",
        "lckv",
    ] = Field("softmax", description="kind of attention")
    sigma_reparam: bool = Field(False, description="sigma-reparametrised linear layers while training")
    lckv: Condensed | None = Field(None, description="settings of attention lckv, which needs them")
    shape: Shape = Shape()
    text: Mix = Mix()
    kinds: Kinds = Kinds()
    repeats: Repeats = Repeats()
    training: Training

    @model_validator(mode="after")
    def _one_attention(self) -> Self:
        if self.zero_sink and self.attention != "softmax":
            raise ValueError(f"zero_sink is a softmax, so attention can't be {self.attention}")
        family, of_family = self.shape.family, _ATTENTION[self.shape.family]
        if self.attention not in of_family:
            raise ValueError(f"of shape.family {family}, attention is one of {', '.join(of_family)}, not {self.attention}")
        if self.shape.family == "gpt2" and self.shape.kv_heads != self.shape.heads:
            raise ValueError("shape.family gpt2 has as many kv_heads as heads")
        return self

    @model_validator(mode="after")
    def _one_order_of_layers(self) -> Self:
        if (self.attention == "lckv") != (self.lckv is not None):
            raise ValueError("attention lckv and what lckv says go together: give both or neither")
        why = "" if self.lckv is None else why_unserved(self.lckv.kv_layers, self.shape.layers)
        if why:
            raise ValueError(f"lckv: {why}")
        return self

    @model_validator(mode="after")
    def _one_tokenizer(self) -> Self:
        kinds = self.kinds
        written = bool(kinds.text or kinds.needles or kinds.registers or kinds.keys or kinds.chains)
        vocabularies = written + self._runs_programs + bool(kinds.backcopy)
        if vocabularies > 1:
            raise ValueError("programs and turns have words of their own, and so has backcopy: other kinds can't be beside them")
        if not vocabularies:
            raise ValueError("kinds: all shares are 0")
        tokens = len(self.words) + MOST_SINKS
        if self.words and self.shape.vocabulary != tokens:
            raise ValueError(f"shape.vocabulary: samples of these kinds have {tokens} tokens")
        if not self.words and self.shape.vocabulary < LEAST_VOCABULARY:
            raise ValueError(f"shape.vocabulary: at least {LEAST_VOCABULARY:,} tokens, for bytes and numbers")
        return self

    @property
    def words(self) -> tuple[str, ...]:
        """The words of its samples, each of which is a token; none if it reads running text."""
        kinds = self.kinds
        return register_machine.WORDS if self._runs_programs else backcopy.WORDS if kinds.backcopy else ()

    @property
    def _runs_programs(self) -> bool:
        kinds = self.kinds
        return bool(kinds.programs or kinds.turns or kinds.far_programs or kinds.far_turns)

    @property
    def steps(self) -> int:
        """Number of optimiser steps; tokens that don't fill a whole batch are dropped."""
        return self.training.tokens // (self.training.sample * self.training.batch)

    def shortened(self, tokens: int) -> PretrainConfig:
        """Return a shorter recipe: warm-up and the stages before running text keep their steps, later stages have fewer.

        Raises:
            UserError: they aren't fewer, or the stages alone need more.
        """
        ratio = self.training.tokens / tokens
        repeated = self.repeats.until if self.repeats.share else 0.0
        stages = max(self.kinds.text_from, repeated, *(stage.until for stage in self.training.short))
        if ratio < 1 or ratio * stages > 1:
            least = round(stages * self.training.tokens)
            raise UserError(f"{self.name}: --tokens must lie between {least:,} and the recipe's {self.training.tokens:,}")
        repeats = {"until": min(1.0, ratio * self.repeats.until), "widen": tuple(ratio * share for share in self.repeats.widen)}
        short = tuple(x.model_copy(update={"until": ratio * x.until}) for x in self.training.short)
        training = {"tokens": tokens, "short": short, "warmup": ratio * self.training.warmup}
        return self.model_copy(
            update={
                "kinds": self.kinds.model_copy(update={"text_from": ratio * self.kinds.text_from}),
                "repeats": self.repeats.model_copy(update=repeats),
                "training": self.training.model_copy(update=training),
            }
        )

    def is_kept(self, step: int) -> bool:
        """Whether the model is kept after `step` steps."""
        every = self.training.keep_every
        return step in self.training.keep or (every is not None and step % every == 0)

    def pieces(self, step: int) -> int:
        """Number of shorter samples that a sample is cut into at a step, counted from 0."""
        whole, again = self.training.sample, self.training.again
        size = next((stage.sample for stage in self.training.short if step < stage.until * self.steps), whole)
        draw, shorter = random.Random(f"{self.seed}/{step}"), [x for x in (again.samples if again else ()) if x < size]
        if again and shorter and draw.random() < again.share:
            size = draw.choice(shorter)
        return whole // size


def load(name: str, changes: Sequence[str] = ()) -> PretrainConfig:
    """Load a recipe, given the path of its file or the name of a packaged recipe.

    With `like: OTHER`, missing values come from another recipe: a file in the same folder, or a packaged recipe. A change is
    KEY=VALUE, such as "seed=1" or "shape.hidden=256", and replaces the recipe's value.

    Raises:
        UserError: there is no such recipe, or it or a change is invalid.
    """
    config = _values(name, Path())
    for change in changes:
        key, equals, value = change.partition("=")
        *outer, last = key.split(".")
        holder = config
        for part in outer:
            holder = holder.setdefault(part, {})
            if not isinstance(holder, dict):
                raise UserError(f"--set {change}: {part} has no parts")
        if not equals:
            raise UserError(f"--set {change}: expected KEY=VALUE, such as shape.hidden=256")
        holder[last] = yaml_value(value, f"--set {change}")
    try:
        return PretrainConfig.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}") from None


def _values(name: str, folder: Path, readers: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the values of a recipe, a file in `folder` or packaged. readers: files that are like it, directly or not."""
    path = folder / name
    if not path.exists():
        return _packaged_values(name)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: can't be read ({str(error).splitlines()[0]})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a mapping")
    base = values.pop("like", None)
    if base is None:
        return values
    if path.resolve() in readers:
        raise UserError(f"{path}: is like itself, by way of `like: {base}`")
    return _merged(_values(str(base), path.parent, (*readers, path.resolve())), values)


def _packaged_values(name: str) -> dict[str, Any]:
    """Return the values of a packaged recipe.

    Raises:
        UserError: there is no such recipe.
    """
    recipes = yaml.safe_load(_RECIPES.read_text(encoding="utf-8"))
    if name not in recipes:
        raise UserError(f"{name}: no such file or reference model{did_you_mean(name, recipes)}")
    values = {"name": name} | recipes[name]
    base = values.pop("like", None)
    return values if base is None else _merged(_packaged_values(base), values)


def _merged(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe, with missing values from `base`."""
    merged = dict(base)
    for key, value in values.items():
        both_mappings = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = base[key] | value if both_mappings else value
    return merged
