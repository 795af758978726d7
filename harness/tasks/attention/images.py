"""The samples of a vision transformer: images, read by the model's own image processor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from kvbench.harness.core.errors import UserError
from kvbench.harness.data.images import Images, in_directory, on_hub, shapes
from kvbench.harness.models.vision import ImageReader, TokenLayout
from kvbench.harness.tasks.attention.schema import AttentionOptions


@dataclass(frozen=True)
class ImageSamples:
    """Images, each of which is a sample."""

    images: Images
    reader: ImageReader  # turns them into pixels
    count: int  # of the samples
    layout: TokenLayout  # of the tokens that the model makes of an image

    @cached_property
    def ids_sha256(self) -> str:
        """Fingerprint of what the model reads: the pixels, as its image processor makes them."""
        digest = hashlib.sha256()
        for number in range(self.count):
            digest.update(self.inputs(number, number + 1)["pixel_values"].numpy().astype("<f4").tobytes())
        return digest.hexdigest()

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.layout.tokens

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return self.count * self.length

    def facts(self) -> dict[str, Any]:
        """Facts about the data, for the record."""
        return {"source": self.images.source, "ids_sha256": self.ids_sha256, "tokens": self.tokens}

    def inputs(self, start: int, stop: int) -> dict[str, Tensor]:
        """What the model reads: `pixel_values` of the samples from `start` to `stop` - 1. [B, 3, H, W] float32."""
        return {"pixel_values": self.reader.pixels([self.images.load(number) for number in range(start, stop)])}

    def checked(self) -> dict[str, Tensor]:
        """The sample that the model's attention is checked with."""
        return self.inputs(0, 1)

    def text(self, sample: int, position: int) -> str:
        """What a token is: "[CLS]", "[register 1]" or "patch"."""
        return self.layout.name(position)


def image_samples(options: AttentionOptions, reader: Callable[[], ImageReader], directory: Path | None) -> ImageSamples:
    """The first images of the data.

    Raises:
        UserError: the model reads no images, or there are too few.
    """
    loaded, images = reader(), _images(options, directory)
    if images.count is not None and images.count < options.samples:
        raise UserError(f"{images.source}: has {images.count:,} images, not the {options.samples:,} asked for; set samples lower")
    return ImageSamples(images, loaded, options.samples, loaded.layout(loaded.pixels([images.load(0)])))


def _images(options: AttentionOptions, directory: Path | None) -> Images:
    if options.data == "shapes":
        return shapes(options.data_seed or 0)
    if directory is not None:
        return in_directory(directory)
    if options.dataset is None:
        raise UserError(
            "data images: give a directory of .png or .jpg files (--data DIR), or a hub dataset (dataset: owner/name)"
        )
    return on_hub(options.dataset, options.split, options.samples)
