"""Choose the next token: the likeliest token, or a random draw with a separate seed for each stream.

The tokens drawn from a seed do not depend on the other streams of a batch, up to rounding of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


class Sampler:
    """Draws a token for each stream, step by step."""

    def __init__(self, seeds: Sequence[int], temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0) -> None:
        """Prepare a draw for each stream.

        Args:
            seeds: seed of each stream.
            temperature: softmax temperature; 0 chooses the likeliest token and draws nothing.
            top_p: draw only from the likeliest tokens that together have this probability; 1 for all tokens.
            top_k: draw only from this number of likeliest tokens; 0 for all tokens.
        """
        self._draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._greedy = temperature == 0.0
        self._warp = LogitsProcessorList()
        if not self._greedy and temperature != 1.0:
            self._warp.append(TemperatureLogitsWarper(temperature))
        if top_k:
            self._warp.append(TopKLogitsWarper(top_k))
        if top_p < 1.0:
            self._warp.append(TopPLogitsWarper(top_p))

    def __call__(self, logits: Tensor, streams: Sequence[int] | None = None) -> Tensor:
        """Return a token for each stream. [B, V] -> [B] int64, on the logits' device.

        streams: indices of the streams that the logits belong to; all streams in order when None. Other streams draw nothing.
        """
        if self._greedy:
            return logits.argmax(-1)
        warped = self._warp(torch.empty(len(logits), 0, dtype=torch.int64), logits.float())  # type: ignore[arg-type]
        up_to = warped.double().softmax(-1).cumsum(-1)  # [B, V]
        draws = self._draws if streams is None else [self._draws[stream] for stream in streams]
        drawn = torch.stack([torch.rand((), generator=draw, dtype=torch.float64) for draw in draws])
        point = drawn[:, None].to(logits.device) * up_to[:, -1:]
        return torch.searchsorted(up_to, point, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
