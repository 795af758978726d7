"""sigma-reparametrisation: weights W are gain * W / sigma(W), where sigma is the largest singular value and the gain is learned.

Source: Zhai et al. 2023, arXiv:2303.06296: one step of power iteration per forward pass in training; the gain begins at 1.
    Of all linear layers but the output head, which is tied to the embeddings.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils import parametrize
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


class _Sigma(nn.Module):
    """Computes a linear layer's weights. The singular vectors are buffers, so a checkpoint has them."""

    u: Tensor
    v: Tensor

    def __init__(self, weight: Tensor, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.register_buffer("u", normalize(torch.randn(rows, generator=generator), dim=0))
        self.register_buffer("v", normalize(torch.randn(columns, generator=generator), dim=0))
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, weight: Tensor) -> Tensor:
        u, v = self.u, self.v
        if self.training:
            with torch.no_grad():
                u = normalize(weight @ v, dim=0)
                v = normalize(weight.mT @ u, dim=0)
                self.u.copy_(u)
                self.v.copy_(v)
        return self.gain / (u @ weight @ v) * weight


def reparametrise(model: PreTrainedModel, seed: int) -> None:
    """Reparametrise the linear layers of a model's blocks, in place; the first vectors are drawn from the seed."""
    generator = torch.Generator().manual_seed(seed)
    for module in _linear(model):
        parametrize.register_parametrization(module, "weight", _Sigma(module.weight, generator), unsafe=True)


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the weights that the model computes with, in evaluation mode: a plain model of its class."""
    copy = deepcopy(model).eval()
    for module in _linear(copy):
        if parametrize.is_parametrized(module, "weight"):
            weight = module.weight.detach()
            # the parametrised class is also the original's, so nothing in it may be removed
            module.__class__ = nn.Linear if isinstance(module, nn.Linear) else Conv1D
            del module.parametrizations
            module.weight = nn.Parameter(weight)
    return copy


def _linear(model: PreTrainedModel) -> list[nn.Linear | Conv1D]:
    """A GPT-2's linear layers are `Conv1D`, whose weights are transposed and have the same singular values."""
    return [module for module in model.base_model.modules() if isinstance(module, (nn.Linear, Conv1D))]
