"""NLLs of a continuation that sees, of the prompt, only what was kept: dense attention with a mask, in no cache.

It is the definition that the engine's caches are held to, and it prices the rules that no package runs.

Axis letters: B streams, H KV heads, G query heads of a KV head, T tokens of prompt and continuation, N of the prompt, D key dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from prompt_views import rotation_of
from torch import Tensor

from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.model import Model


@dataclass
class Masked:
    """Answers a model's attention: the prompt is read densely, later queries see what was kept of it.

    Attributes:
        kept: of each layer. [L, H or H * G, N] bool.
        turned: whether the kept keys stand at positions 0, 1, 2, ... for later queries, and these after them.
    """

    model: Model
    kept: Tensor
    turned: bool = False

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """[1, H * G, T, D], [1, H, T, D], [1, H, T, Dv] -> [1, H * G, T, Dv]."""
        pair = self.model.layers[layer].rotation
        query, keys = (x if pair is None else pair.pair(x) for x in (query, keys))
        group = query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        kept = self.kept[layer].repeat_interleave(query.shape[1] // self.kept.shape[1], 0)
        heads, length = kept.shape
        at = torch.arange(query.shape[2])
        stream = at.expand(heads, -1)
        seen = (at <= at[:, None]).expand(heads, -1, -1).clone()
        seen[:, length:, :length] &= kept[:, None]
        logits = self._logits(layer, query, keys, stream)
        if self.turned:
            ranks = torch.cat([kept.cumsum(1) - 1, kept.sum(1, keepdim=True) + at[: len(at) - length]], 1).clamp(min=0)
            logits[:, :, length:] = self._logits(layer, query, keys, ranks)[:, :, length:]
        weights = (logits.float() * terms.scaling).masked_fill(~seen, -torch.inf).softmax(-1)
        return weights.to(values.dtype) @ values

    def _logits(self, layer: int, query: Tensor, keys: Tensor, position: Tensor) -> Tensor:
        turn = rotation_of(self.model, layer)
        return turn(query, position.expand(query.shape[:-1])) @ turn(keys, position.expand(keys.shape[:-1])).mT


def nlls(model: Model, tokens: Tensor, kept: Tensor, turned: bool = False) -> Tensor:
    """NLLs of the tokens after the prompt. tokens: [1, T]; kept: [L, H or H * G, N] bool. -> [T - N] float64."""
    length = kept.shape[-1]
    with torch.inference_mode():
        logits = model(tokens, Masked(model, kept, turned))[0, length - 1 : -1]
    return -logits.double().log_softmax(-1).gather(1, tokens[0, length:, None])[:, 0]
