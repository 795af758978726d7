"""Reads a table of heads from a file: how important each head of a model is."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor


def read_importance(file: str, layers: int, heads: int) -> Tensor:
    """Importance of every KV head. [L, H] float64.

    The file is JSON, `{"importance": [[...], ...]}`: a list for every layer, with a number for every KV head, or for every
    query head; the numbers of a KV head's query heads are averaged.

    Args:
        file: its path.
        layers: L.
        heads: H.

    Raises:
        ValueError: the file can't be read, or holds no such table of finite numbers from 0.
    """
    expected = f"expected {{'importance': {layers} lists of {heads} numbers, or of a multiple of it}}"
    try:
        table = json.loads(Path(file).read_text(encoding="utf-8"))["importance"]
        sizes = sorted({len(row) for row in table})
        importance = torch.tensor(table, dtype=torch.float64, device="cpu") if len(sizes) == 1 else None
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; {expected}") from None
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{file}: not a table of heads; {expected}") from None
    if importance is None or importance.dim() != 2 or len(table) != layers or sizes[0] % heads or not sizes[0]:
        raise ValueError(f"{file}: found {len(table)} lists of {' or '.join(map(str, sizes)) or 'no'} numbers; {expected}")
    if not (importance.isfinite() & (importance >= 0)).all():
        raise ValueError(f"{file}: importance must be finite and not negative; {expected}")
    return importance.unflatten(1, (heads, -1)).mean(-1)
