"""Turns a capacity that a suite gives as a share of the prompt, or in bytes, into tokens."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import torch

from kvbench.harness.models.shape import ModelShape, readable_shape
from kvbench.harness.suite.axes import Evict
from kvbench.harness.suite.file import ModelSpec


def capacity_of(budget: dict[str, Any], model: ModelSpec, prompt: int | None, evict: Evict) -> int:
    """Tokens per KV head kept between steps.

    Args:
        budget: {"share": of the prompt}, or {"bytes": of the K/V slots of one stream}.
        model: whose slots these are.
        prompt: tokens of the task's prompts; None if they have no one length.
        evict: when tokens are evicted: `b` at once need `capacity + b` slots.

    Raises:
        ValueError: it can't be known, or is less than one token.
    """
    return _of_prompt(budget["share"], prompt) if "share" in budget else _of_bytes(budget["bytes"], model, evict)


def _of_prompt(share: float, prompt: int | None) -> int:
    if prompt is None:
        raise ValueError("a share of the prompt, but this task has no prompts of one known length; give tokens")
    tokens = int(Fraction(str(share)) * prompt)
    if tokens < 1:
        raise ValueError(f"{share} of a prompt of {prompt:,} tokens is less than one token")
    return tokens


def _of_bytes(size: int, model: ModelSpec, evict: Evict) -> int:
    shape = _shape(model.id, model.revision)
    if shape is None:
        raise ValueError(f"the config of {model.id} can't be read, so the bytes of a token are unknown; give tokens")
    itemsize, spare = getattr(torch, model.dtype).itemsize, 1 if evict == "prompt" else evict
    tokens = shape.capacity_within(size, itemsize, spare)
    if tokens < 1:
        raise ValueError(f"{size:,} bytes, but the smallest cache of {model.id} takes {shape.kv_bytes(spare, 1, itemsize):,}")
    return tokens


@cache
def _shape(model: str, revision: str | None) -> ModelShape | None:
    return readable_shape(model, revision)
