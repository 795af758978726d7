"""Vision transformers: which configs are theirs, how they are loaded, and how images become samples of their tokens.

The decode loop can't drive them. They can be looked at, as any model whose attention goes through transformers'
AttentionInterface. Of a model with two towers, such as CLIP, the vision tower is what is looked at.

Axis letters: B images, T tokens, E hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvbench.harness.core.errors import UserError
from kvbench.harness.models.config import first_cause, read_config
from kvbench.harness.models.weights import read_weights
from kvbench.lab.attention.images import Images, in_directory, on_hub, require_pillow, shapes
from kvbench.lab.attention.schema import AttentionOptions

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class TokenLayout:
    """Token order of an image: special tokens ([CLS], then registers), then patches row by row."""

    rows: int  # of patches
    columns: int  # of patches
    special: int  # tokens before the patches
    registers: int  # the last of those that are register tokens

    @property
    def tokens(self) -> int:
        """T of an image."""
        return self.special + self.rows * self.columns

    def name(self, position: int) -> str:
        """Name of the token at a position: "[CLS]", "[register 1]", "[special 1]" or "patch"."""
        if position >= self.special:
            return "patch"
        register = position - (self.special - self.registers)
        if register >= 0:
            return f"[register {register + 1}]"
        return "[CLS]" if position == 0 else f"[special {position}]"


@dataclass(frozen=True)
class ImageReader:
    """Turns images into a vision transformer's input, with the model's own image processor.

    Without one, the shorter side is resized to the config's `image_size`, the middle is cut out, and colours are scaled to
    between -1 and 1.
    """

    config: PreTrainedConfig  # of the model, or of its vision tower
    processor: Any
    name: str  # of the model, for errors

    def pixels(self, images: Sequence[NDArray[np.uint8]]) -> Tensor:
        """The model's input. [height, width, 3] each -> [B, 3, H, W] float32.

        Raises:
            UserError: the image processor can't read them, or does not make pixels of one size of them.
        """
        if self.processor is None:
            return torch.cat([_fitted(image, _pair(self.config.image_size)) for image in images])
        try:
            inputs = self.processor(images=list(images), input_data_format="channels_last", return_tensors="pt")
            pixels: Tensor = inputs["pixel_values"].float()
        except Exception as error:  # image processors raise many kinds
            raise UserError(f"{self.name}: its image processor fails ({type(error).__name__}: {first_cause(error)})") from error
        if pixels.ndim != 4:
            raise UserError(f"{self.name}: its image processor gives {pixels.ndim} axes instead of [images, channels, H, W]")
        return pixels

    def layout(self, pixels: Tensor) -> TokenLayout:
        """The tokens that the model makes of each image; no weights are loaded for that. pixels: [B, 3, H, W].

        Raises:
            UserError: the model's hidden states are not [CLS], registers and a grid of patches.
        """
        try:
            with torch.device("meta"), torch.inference_mode():
                model = AutoModel.from_config(self.config, attn_implementation="eager").eval()
                hidden: Tensor = model(pixel_values=torch.empty(1, *pixels.shape[1:]))[0]
            rows, columns = (size // patch for size, patch in zip(pixels.shape[2:], _pair(self.config.patch_size), strict=True))
        except Exception as error:  # transformers raises many kinds
            raise UserError(
                f"{self.name}: its tokens can't be told from its config ({type(error).__name__}: {first_cause(error)})"
            ) from error
        registers = getattr(self.config, "num_register_tokens", None) or 0
        special = hidden.shape[1] - rows * columns
        if hidden.ndim != 3 or special < registers:
            raise UserError(f"{self.name}: its hidden states {list(hidden.shape)} are no {rows} x {columns} patches")
        return TokenLayout(rows, columns, special, registers)


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
        """Model inputs: `pixel_values` of the samples from `start` to `stop` - 1. [B, 3, H, W] float32."""
        return {"pixel_values": self.reader.pixels([self.images.load(number) for number in range(start, stop)])}

    def checked(self) -> dict[str, Tensor]:
        """The sample that the model's attention is checked with."""
        return self.inputs(0, 1)

    def text(self, sample: int, position: int) -> str:
        """Name of the token at a position, such as "[CLS]", "[register 1]" or "patch"."""
        return self.layout.name(position)


def image_samples(options: AttentionOptions, reader: ImageReader, directory: Path | None) -> ImageSamples:
    """The first images of the data.

    Raises:
        UserError: the model reads no images, or there are too few.
    """
    images = _images(options, directory)
    if images.count is not None and images.count < options.samples:
        raise UserError(f"{images.source}: has {images.count:,} images, not the {options.samples:,} asked for; set samples lower")
    return ImageSamples(images, reader, options.samples, reader.layout(reader.pixels([images.load(0)])))


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


def vision_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """The config of the part of a model that reads images, if the model is a vision transformer or has two towers; else None."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    tower: PreTrainedConfig = getattr(config, "vision_config", config)
    return tower if getattr(_headless(tower), "main_input_name", "") == "pixel_values" else None


def load_image_reader(directory: Path) -> ImageReader:
    """Load the image reader of a model from the directory of its files or, for random weights, from its config file.

    Raises:
        UserError: the model is no vision transformer, or its image processor can't be loaded.
    """
    name, config = directory.stem if directory.is_file() else directory.name, read_config(directory)
    tower = vision_config(config)
    if tower is None:
        raise UserError(f"{name}: model family '{config.model_type}' reads no images, which this task's data are")
    if not any((directory / file).is_file() for file in _PROCESSOR_FILES):
        return ImageReader(tower, None, name)
    require_pillow(f"{name}: its image processor")
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        raise UserError(f"{name}: its image processor can't be read ({first_cause(error)})") from error
    return ImageReader(tower, processor, name)


def read_vision_weights(directory: Path, config: PreTrainedConfig, dtype: torch.dtype, allow_pickle: bool) -> PreTrainedModel:
    """A vision transformer without its head, or the vision tower of a model with two, with all its weights.

    Raises:
        UserError: a file is damaged, or its tensors don't match the config; or the model has no tower of its own.
        MemoryError: the weights don't fit.
    """
    model = read_weights(directory, config, dtype, allow_pickle, saved_class(config), head=False)
    kind = _headless(vision_config(config))
    inside = next((m for m in model.modules() if type(m) is kind), getattr(model, "vision_model", None))
    if not isinstance(inside, PreTrainedModel):
        raise UserError(f"{directory.name}: model family '{config.model_type}' has no vision transformer that stands alone")
    return inside


def saved_class(config: PreTrainedConfig) -> Any:
    """The class that a model was saved from, so that its head matches its files.

    If transformers has no such class for this config: that of causal language models, or else the one without a head.
    """
    names = config.architectures or []
    saved = getattr(transformers, names[0], None) if names else None
    if isinstance(saved, type) and issubclass(saved, PreTrainedModel) and saved.config_class is type(config):
        return saved
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel


def _headless(config: PreTrainedConfig | None) -> Any:
    """The class without a head of a model with this config; None if transformers has none."""
    families: Any = MODEL_MAPPING
    classes = families.get(type(config), None)
    return classes[0] if isinstance(classes, tuple) else classes


def _pair(size: Any) -> tuple[int, int]:
    """Height and width, from one number or two."""
    return (int(size[0]), int(size[1])) if isinstance(size, Sequence) else (int(size), int(size))


def _fitted(image: NDArray[np.uint8], size: tuple[int, int]) -> Tensor:
    """An image resized and cut to a size, its colours in [-1, 1]. [height, width, 3] -> [1, 3, *size] float32."""
    pixels = torch.from_numpy(image.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    scale = max(wanted / given for wanted, given in zip(size, pixels.shape[2:], strict=True))
    resized = [max(wanted, round(scale * given)) for wanted, given in zip(size, pixels.shape[2:], strict=True)]
    pixels = nn.functional.interpolate(pixels, resized, mode="bilinear", antialias=True)
    top, left = ((have - wanted) // 2 for have, wanted in zip(resized, size, strict=True))
    return pixels[:, :, top : top + size[0], left : left + size[1]]
