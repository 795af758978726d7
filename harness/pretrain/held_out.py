"""What a model makes of samples that it is not trained on: for the log while it trains, and as an exam in the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.harness.pretrain.config import PretrainConfig
from kvbench.harness.pretrain.probe import attention_to_first, right_answers
from kvbench.harness.pretrain.samples import NAMES, Samples

_TOGETHER = 8  # samples read at once


class HeldOut:
    """Whole samples of every kind that the model's recipe has."""

    def __init__(self, config: PretrainConfig, ids: NDArray[np.uint16], tokenizer: Any, seed: int) -> None:
        """Keep what samples are drawn from.

        Args:
            config: of the model.
            ids: running text that is not trained on; there are as many samples of a kind as it has text for. [N].
            tokenizer: without sinks.
            seed: of what is drawn, another than that of training.
        """
        self._count, shares = len(ids) // config.training.sample, config.kinds.model_dump() | {"repeats": config.repeats.share}
        self._asking = [kind for kind in ("repeats", *NAMES) if kind != "text" and shares[kind]]
        self._samples = {
            kind: Samples(config, [kind] * self._count, ids, tokenizer, seed, staged=False) for kind in ("text", *self._asking)
        }

    def attention_to_first(self, model: Any) -> Tensor:
        """Mean softmax weight that each query head gives to the first token of a text. [L, Q]."""
        shares = [attention_to_first(model, part["input_ids"].to(model.device)) for part in self._parts("text")]
        return torch.stack(shares).mean(0)

    def answers(self, model: Any) -> dict[str, list[tuple[int, int]]]:
        """(right answers, questions) of each sample, of every kind that asks; of repeats, stretches."""
        found = {}
        for kind in self._asking:
            parts = [{name: x.to(model.device) for name, x in part.items()} for part in self._parts(kind)]
            counts = [torch.stack(right_answers(model, part["input_ids"], part["answers"]), 1) for part in parts]
            found[kind] = [(right, count) for right, count in torch.cat(counts).tolist() if count] if counts else []
        return {kind: samples for kind, samples in found.items() if samples}

    def _parts(self, kind: str) -> Iterator[dict[str, Tensor]]:
        samples = self._samples[kind]
        for at in range(0, self._count, _TOGETHER):
            every = [samples[place] for place in range(at, min(at + _TOGETHER, self._count))]
            yield {name: torch.cat([x[name] for x in every]) for name in ("input_ids", "answers")}
