"""Options and figures that the lab adds to the attention task."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from kvbench.harness.data.texts import Source
from kvbench.harness.records.figure_rules import EXACT, PART_NATS, SUM, near
from kvbench.harness.records.types import Amount, Count, Ends, Number, Part, Positive, Share
from kvbench.harness.tasks.attention import attention_options as harness_options
from kvbench.harness.tasks.attention.attention_options import SHARE
from kvbench.harness.tasks.common.samples import SampleOptions

MOST_SHOWN = 100  # characters of a token
_IMAGES = ("images", "shapes")


class AttentionOptions(harness_options.AttentionOptions):
    """Options of the attention task, those of images included."""

    data: Literal[Source, "images", "shapes"] = Field(  # type: ignore[assignment]  # of the harness: texts alone
        "pg19",
        description="books (pg19), Wikipedia articles (wikitext), generated prose, or Bigram-Backcopy's words; or images of a "
        "directory or a dataset, or shapes drawn from data_seed",
    )
    tokens: int | None = Field(  # type: ignore[assignment]  # likewise
        128, ge=2, le=2**20, description="length of a sample, the tokens that open it included; of an image, the model decides"
    )
    dataset: str | None = Field(
        None, description="dataset of images on the hub: owner/name or owner/name@revision; read where --data gives no directory"
    )
    norm_cutoff: float | None = Field(
        None,
        gt=0,
        description="norm after the last layer above which a patch counts as an outlier of Darcet et al.; 150 if not given",
    )

    @property
    def reads_images(self) -> bool:
        """Whether the samples are images."""
        return self.data in _IMAGES

    def of_text(self) -> SampleOptions:
        """The options of samples that are pieces of a text."""
        return SampleOptions.model_validate({name: getattr(self, name) for name in SampleOptions.model_fields})

    @model_validator(mode="before")
    @classmethod
    def _images_have_no_length(cls, given: Any) -> Any:
        return {"tokens": None, **given} if isinstance(given, dict) and given.get("data") in _IMAGES else given

    @model_validator(mode="after")
    def _fits(self) -> Self:
        wrong = ("tokens", "prompt") if self.reads_images else ("dataset", "norm_cutoff")
        for name in wrong:
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is for {'texts' if self.reads_images else 'images'}: data {self.data} has none")
        if self.tokens is None and not self.reads_images:
            raise ValueError("tokens: a text needs the length of its samples")
        if self.prompt is not None and self.tokens is not None and self.prompt >= self.tokens:
            raise ValueError(f"prompt {self.prompt:,} leaves nothing of a sample of {self.tokens:,} tokens")
        return self


class LayerAttention(harness_options.LayerAttention):
    """Figures of a layer, those of hidden states, keys, values and evicted tokens included."""

    hidden_largest: Annotated[Amount | None, near(PART_NATS, SUM)] = Field(
        None, description="largest magnitude in the hidden states after the layer, mean over samples"
    )
    hidden_median: Annotated[Amount | None, near(PART_NATS, SUM)] = Field(
        None, description="median magnitude in the hidden states after the layer, mean over samples"
    )
    key_norm: Annotated[list[Amount] | None, near(PART_NATS, SUM)] = Field(
        None, min_length=2, max_length=2, description="norm of the first token's key, and the mean over the others"
    )
    value_norm: Annotated[list[Amount] | None, near(PART_NATS, SUM)] = Field(
        None, min_length=2, max_length=2, description="norm of the first token's value, and the mean over the others"
    )
    key_channels: Annotated[Share | None, SHARE] = Field(
        None,
        description="share of the squares of keys, as attention takes them, in the largest sixteenth of a head's channels",
    )
    value_channels: Annotated[Share | None, SHARE] = Field(
        None, description="share of the squares of values in the largest sixteenth of a head's channels"
    )
    initial_norm: Annotated[list[Amount] | None, near(PART_NATS, SUM)] = Field(
        None,
        min_length=5,
        max_length=5,
        description="norm of the hidden state of each of the first four tokens, and the mean over the others",
    )
    initial_cosine: Annotated[list[Number] | None, SHARE] = Field(
        None,
        min_length=5,
        max_length=5,
        description="mean cosine of the hidden state of each of the first four tokens to the others', and of these to each other",
    )
    lost: Annotated[Share | None, SHARE] = Field(
        None, description="attention that a query would give under full attention to tokens that were evicted before it"
    )


class SinkToken(Part):
    """A token other than the first that some head attends to more than epsilon."""

    text: Annotated[str, EXACT] = Field(max_length=MOST_SHOWN, description="text of the token")
    position: Annotated[Count, EXACT] = Field(description="first position at which it is a sink, in a sample")
    times: Annotated[Positive, EXACT] = Field(
        description="number of times that it is a sink of at least one head, in all samples"
    )
    heads: Annotated[Share, SHARE] = Field(description="share of heads whose sink it is, where it is one; mean")


class Massive(Part):
    """A massive activation: a magnitude over 100 and over 1,000 times the median of its layer."""

    layer: Annotated[Count, EXACT] = Field(description="layer after which it occurs, counted from 0")
    dim: Annotated[Count, EXACT] = Field(description="dimension of the hidden state")
    text: Annotated[str, EXACT] = Field(max_length=MOST_SHOWN, description="text of the token")
    position: Annotated[Count, EXACT] = Field(description="position of its first occurrence in a sample")
    times: Annotated[Positive, EXACT] = Field(description="number of occurrences in all samples")
    magnitude: Annotated[Amount, near(PART_NATS, SUM)] = Field(description="largest of them")


class LostAt(Part):
    """Attention lost by queries between two positions of a sample."""

    from_: Annotated[Count, EXACT] = Field(alias="from", description="first position")
    to: Annotated[Count, EXACT] = Field(description="first position after the bucket")
    lost: Annotated[Share, SHARE] = Field(description="mean over queries, layers, heads and samples")


class LayerPatches(Part):
    """The patches of all images in one layer."""

    norm_median: Annotated[Amount, near(PART_NATS, SUM)] = Field(
        description="median norm of the patches' hidden states after the layer"
    )
    norm_largest: Annotated[Amount, near(PART_NATS, SUM)] = Field(
        description="largest norm of the patches' hidden states after the layer"
    )
    outliers: Annotated[Share, SHARE] = Field(description="share of patches whose norm is an outlier after this layer")
    to_patch: Annotated[Share, SHARE] = Field(
        description="attention that a patch gets that is no outlier after the last layer, mean over queries and heads"
    )
    to_outlier: Annotated[Share | None, SHARE] = Field(
        None, description="attention that a patch gets that is an outlier after the last layer"
    )
    to_register: Annotated[Share | None, SHARE] = Field(None, description="attention that a register token gets")


class OutlierPosition(Part):
    """A place in the grid of patches where outliers are."""

    row: Annotated[Count, EXACT] = Field(description="counted from 0, at the top")
    column: Annotated[Count, EXACT] = Field(description="counted from 0, on the left")
    times: Annotated[Positive, EXACT] = Field(description="images that have an outlier here")
    norm: Annotated[Amount, near(PART_NATS, SUM)] = Field(description="largest of them, after the last layer")


class Patches(Part):
    """Patch tokens, and those among them whose norm is an outlier: the registers of Darcet et al. 2023, arXiv:2309.16588."""

    rows: Annotated[Positive, EXACT] = Field(description="rows of patches in an image")
    columns: Annotated[Positive, EXACT] = Field(description="columns of patches in an image")
    special: Annotated[Count, EXACT] = Field(description="tokens before the patches: [CLS], register tokens")
    registers: Annotated[Count, EXACT] = Field(description="register tokens among them")
    norm_cutoff: Annotated[Amount, EXACT] = Field(description="norm after the last layer that `over_cutoff` counts from")
    over_cutoff: Annotated[Share, SHARE] = Field(description="share of patches above it: the criterion of Darcet et al.")
    over_cutoff_interval: Annotated[Ends | None, SHARE] = Field(None, description="95 % interval over images")
    outliers: Annotated[Share, SHARE] = Field(
        description="share of patches whose norm after the last layer is over 4 times the median of their image's: our criterion"
    )
    outliers_interval: Annotated[Ends | None, SHARE] = Field(None, description="95 % interval over images")
    layers: Annotated[list[LayerPatches], EXACT] = Field(description="layers of the model, in order")
    positions: Annotated[list[OutlierPosition], EXACT] = Field(
        default_factory=list, description="positions of outliers by our criterion, the most frequent first"
    )


class AttentionMetrics(harness_options.AttentionMetrics):
    """Figures about the attention of heads, and about what comes with sinks."""

    hidden_largest: Annotated[Amount | None, near(PART_NATS, SUM)] = Field(
        None, title="largest activation", description="largest magnitude in the hidden states of all layers and samples"
    )
    lost: Annotated[Share | None, SHARE] = Field(
        None, title="attention lost", description="attention that queries would give under full attention to what was evicted"
    )
    lost_interval: Annotated[Ends | None, SHARE] = Field(None, description="95 % interval over samples")
    lost_at: Annotated[list[LostAt], EXACT] = Field(default_factory=list, description="attention lost by position in the sample")
    layers: Annotated[list[LayerAttention], EXACT] = Field(  # type: ignore[assignment]  # a list of a subclass
        description="layers of the model, in order"
    )
    sinks: Annotated[list[SinkToken], EXACT] = Field(default_factory=list, description="other sinks, the most frequent first")
    massive: Annotated[list[Massive], EXACT] = Field(default_factory=list, description="massive activations, the largest first")
    patches: Annotated[Patches | None, EXACT] = Field(None, description="figures of images")

    def headline(self) -> str:
        """The sink metric, the attention lost, and the share of outliers."""
        lost = "" if self.lost is None else f", {100 * self.lost:.1f} % of attention lost"
        outliers = "" if self.patches is None else f", {100 * self.patches.outliers:.1f} % of patches outliers"
        return f"{super().headline()}{lost}{outliers}"
