"""Measure how much each KV head retrieves, and write the table that `headkv` and `duo_attention` read.

A sequence of random tokens is read twice in a row. In the second copy, a head that retrieves attends to the token that followed
the same token in the first copy. The score of a head is the share of attention to that following token.

Source: the repeated-random-tokens test of induction heads, Olsson et al. 2022, arXiv:2209.11895. HeadKV and DuoAttention find
their tables by other probes: needles with reasoning (arXiv:2410.19258), and training (arXiv:2410.10819).

Axis letters: B streams, L layers, H KV heads, G query heads of a KV head, N tokens of a copy, T = 2 N, D key dim.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from kvbench.harness.core.files import atomic_write
from kvbench.harness.engine.attention import Terms, weights
from kvbench.harness.engine.model import Model, random_tokens
from kvbench.harness.engine.rotary import rotate


class _Retrieval:
    """Attention backend with full attention that records the share of attention to the token after the earlier copy."""

    def __init__(self, model: Model, copy: int) -> None:
        self._model, self._copy = model, copy
        self.scores: dict[int, Tensor] = {}  # by layer, [H]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Compute the attention of one layer. [B, H * G, T, D], [B, H, T, D], [B, H, T, Dv] -> [B, H * G, T, Dv]."""
        shape, tokens = self._model.layers[layer], keys.shape[2]
        positions = torch.arange(tokens, device=keys.device)
        if shape.rotation is not None:
            factors = shape.rotation.factors(positions, keys.dtype, tokens)
            query, keys = (rotate(shape.rotation.pair(x), factors) for x in (query, keys))
        keys, values = (x.repeat_interleave(shape.group, 1) for x in (keys, values))
        age = positions[:, None] - positions
        sees = (age >= 0) if shape.sliding_window is None else (age >= 0) & (age < shape.sliding_window)
        scores = torch.matmul(query * terms.scaling, keys.mT)
        heads = scores.shape[1]
        if terms.sink_logits is not None:  # one logit per row
            terms = terms._replace(sink_logits=terms.sink_logits.repeat_interleave(tokens))
        mass = weights(scores.flatten(0, 1), terms, heads, sees).view(scores.shape)
        second = torch.arange(self._copy, tokens - 1, device=keys.device)
        induction = mass[:, :, second, second - self._copy + 1].float().mean((0, 2))
        self.scores[layer] = induction.view(shape.heads, shape.group).amax(1)
        return torch.matmul(mass.to(values.dtype), values)


@torch.inference_mode()
def retrieval_scores(model: Model, tokens: int = 64, streams: int = 16, seed: int = 0) -> list[list[float]]:
    """Return the retrieval score of each KV head: the score of its best query head. [L][H].

    Scores are means over `streams` sequences of `tokens` random tokens, each read twice.
    """
    first = random_tokens(model.hf, streams, tokens, seed)
    probe = _Retrieval(model, tokens)
    model(torch.cat([first, first], 1), probe, 1)
    return [[round(float(x), 6) for x in probe.scores[layer]] for layer in range(len(model.layers))]


def write_head_table(model: Model, path: Path) -> list[list[float]]:
    """Probe a model, and write the table.

    Returns:
        The scores. [L][H].

    Raises:
        OSError: the file can't be written.
    """
    scores = retrieval_scores(model)
    with atomic_write(path) as file:
        file.write(json.dumps({"importance": scores}, indent=1) + "\n")
    return scores
