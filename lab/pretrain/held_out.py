"""Evaluate a model on samples that it is not trained on: for the log while it trains, and as an exam in the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from kvbench.harness.engine.own_attention import attention_by
from kvbench.harness.engine.watch import weighing_of
from kvbench.lab.pretrain.config import PretrainConfig
from kvbench.lab.pretrain.samples import NAMES, WORDED, TrainingSamples
from kvbench.lab.variants.base import attention_weights, weighed

_NAME = "kv_bench_probe"
_FIRST_QUERY = 64  # earlier queries have too few keys to choose from
_layer_shares: dict[int, Tensor] = {}  # filled by `_attention`: the last of each layer in the current forward pass, [Q]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention that records the weight of the first token. [B, Q, T, D], [B, H, T, D] -> [B, T, Q, D]."""
    if getattr(module.config, "zero_sink", False):
        s_aux = query.new_zeros(query.shape[1])
    lags = int(getattr(module, "lags", False))  # no token sees itself, and the first one nothing
    weights = attention_weights(module, query[:, :, lags:], key[:, :, : key.shape[2] - lags], scaling, s_aux)
    weights = pad(weights, (0, lags, lags, 0))
    weighing = weighing_of(module, query, scaling or query.shape[-1] ** -0.5)
    shares = weights.to(value.dtype) if weighing is None else weighing.shares(weights.to(value.dtype))
    layer: Any = module.layer_idx
    _layer_shares[layer] = shares[:, :, _FIRST_QUERY:, 0].float().mean((0, 2))
    return weighed(weights, value), None


AttentionInterface.register(_NAME, _attention)


@torch.inference_mode()
def attention_to_first(model: PreTrainedModel, samples: Tensor) -> Tensor:
    """Mean softmax weight that each query head gives to the first token, over queries from the 64th on. [L, Q] float32.

    Samples are [B, T] int64, T > 64. The model's mode and attention implementation are restored afterwards.
    """
    training = model.training
    model.eval()
    _layer_shares.clear()
    with attention_by(model, _NAME):
        model(input_ids=samples, use_cache=False)
        shares = torch.stack([_layer_shares[layer] for layer in sorted(_layer_shares)])
    model.train(training)
    return shares


@torch.inference_mode()
def right_answers(model: PreTrainedModel, samples: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Count, per sample, the answers of which the model predicts every token, given the text before; and all answers. [B], [B].

    Samples are [B, T] int64; `answers` says whether a token belongs to an answer, [B, T] bool. The model keeps its mode.
    """
    training = model.training
    model.eval()
    right = model(input_ids=samples, use_cache=False).logits[:, :-1].argmax(-1) == samples[:, 1:]
    model.train(training)
    asked = answers[:, 1:]
    starts = asked & ~answers[:, :-1]
    number = starts.flatten().cumsum(0)[asked.flatten()] - 1  # of the answer that a token belongs to
    wrong = (~right).flatten()[asked.flatten()].float()
    is_right = wrong.new_zeros(int(starts.sum())).index_add_(0, number, wrong) == 0
    sample = starts.nonzero()[:, 0]  # of each answer
    return torch.bincount(sample[is_right], minlength=len(samples)), starts.sum(1)


_TOGETHER = 9_216  # tokens read at once: attention weights of a longer sample are large
_TRACED = (50, 100, 200, 400, 800, 1600, 2400, 3200, 4000)  # tokens of a trace


class HeldOut:
    """Samples of every kind in the recipe, in full length."""

    def __init__(self, config: PretrainConfig, ids: NDArray[np.uint16], count: int, tokenizer: Any, seed: int) -> None:
        """Keep what `count` samples of each kind are drawn from.

        `ids` is running text that is not trained on, [N], for as many samples; the tokenizer has no sinks; the
        seed is another than that of training.
        """
        self._length = config.training.sample
        self._count, shares = count, config.kinds.model_dump() | {"repeats": config.repeats.share}
        self._asking = [kind for kind in ("repeats", *NAMES) if kind != "text" and shares[kind]]
        self._read = next(kind for kind in WORDED if shares[kind]) if config.words else "text"
        self._samples = {
            kind: TrainingSamples(config, [kind] * self._count, ids, tokenizer, seed, staged=False)
            for kind in dict.fromkeys((self._read, *self._asking))
        }

    def attention_to_first(self, model: Any) -> Tensor:
        """Mean softmax weight that each query head gives to the first token of a text. [L, Q]."""
        shares = [attention_to_first(model, part["input_ids"].to(model.device)) for part in self._parts(self._read)]
        return torch.stack(shares).mean(0)

    def answers(self, model: Any) -> dict[str, list[tuple[int, int]]]:
        """(right answers, questions) of each sample, by kind; of repeats, repeated stretches."""
        answers = {}
        for kind in self._asking:
            parts = [{name: x.to(model.device) for name, x in part.items()} for part in self._parts(kind)]
            counts = [torch.stack(right_answers(model, part["input_ids"], part["answers"]), 1) for part in parts]
            answers[kind] = [(right, count) for right, count in torch.cat(counts).tolist() if count] if counts else []
        return {kind: samples for kind, samples in answers.items() if samples}

    @torch.inference_mode()
    def unbroken(self, model: Any) -> dict[int, tuple[int, int]]:
        """(traces right up to there, traces as long) by tokens of a trace, greedy. Empty if the recipe has no programs."""
        if "programs" not in self._samples:
            return {}
        rights, lengths = [], []
        model.eval()
        for part in self._parts("programs"):
            ids, counted = part["input_ids"].to(model.device), part["weights"][:, 1:].to(model.device) == 1
            wrong = (model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1) != ids[:, 1:]) & counted
            traced = counted.cumsum(1)
            rights += torch.where(wrong, traced - 1, traced[:, -1:]).amin(1).tolist()
            lengths += traced[:, -1].tolist()
        return {
            at: (sum(right >= at for right in rights), sum(length >= at for length in lengths))
            for at in _TRACED
            if max(lengths) >= at
        }

    def _parts(self, kind: str) -> Iterator[dict[str, Tensor]]:
        samples = self._samples[kind]
        together = max(1, _TOGETHER // self._length)
        for at in range(0, self._count, together):
            every = [samples[place] for place in range(at, min(at + together, self._count))]
            yield {name: torch.cat([x[name] for x in every]) for name in ("input_ids", "answers", "weights")}
