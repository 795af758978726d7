"""Tiny vision transformers, as folders a user could name. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
    "initializer_range": 0.2,
}
OUTLIER, OUTLIER_ROW, OUTLIER_COLUMN = 6, 1, 2  # a patch of the grid of 4 x 4


def vision_model(family: str, **config: Any) -> PreTrainedModel:
    """A random vision transformer with 4 x 4 patches."""
    torch.manual_seed(0)
    return AutoModel.from_config(CONFIG_MAPPING[family](**{**SIZES, **config})).float().eval()


def with_outlier(layer: int, size: float = 900.0) -> PreTrainedModel:
    """A DINOv2 with 4 registers in which one patch, the same of every image, becomes an outlier in one layer.

    Its position embedding alone has a large number in dim 0. One unit of that layer's MLP looks for it and writes a large number
    into dim 9.
    """
    hf: Any = vision_model("dinov2_with_registers", num_register_tokens=4)
    with torch.no_grad():
        embeddings = hf.embeddings
        embeddings.patch_embeddings.projection.weight[0], embeddings.patch_embeddings.projection.bias[0] = 0, 0
        embeddings.position_embeddings[..., 0] = 0
        embeddings.position_embeddings[0, 1 + OUTLIER, 0] = 30
        embeddings.cls_token[..., 0] = 0
        mlp = hf.encoder.layer[layer].mlp
        mlp.fc1.weight[0], mlp.fc1.bias[0] = 0, -10
        mlp.fc1.weight[0, 0] = 5
        mlp.fc2.weight[:, 0] = 0
        mlp.fc2.weight[9, 0] = size
    return hf


def vision_folder(folder: Path, hf: PreTrainedModel) -> Path:
    """A model saved to a folder, without an image processor."""
    hf.save_pretrained(folder)
    return folder
