"""Reads the files that policies name: a table of how important each head of a model is, and the digest of any file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor


def content_of(file: str) -> bytes:
    """The bytes of a file.

    Raises:
        ValueError: it can't be read.
    """
    try:
        return Path(file).expanduser().read_bytes()
    except (OSError, RuntimeError) as error:  # RuntimeError: the home directory of `~name` is not known
        raise ValueError(f"{file} can't be read ({getattr(error, 'strerror', None) or error})") from None


def sha256_of(file: str, known: str | None) -> str:
    """The sha256 of a file, so that a record says what was in it.

    Raises:
        ValueError: the file can't be read, or its sha256 is not `known`.
    """
    sha256 = hashlib.sha256(content_of(file)).hexdigest()
    if known not in (None, sha256):
        raise ValueError(f"{file} has changed: its sha256 is {sha256[:8]}..., not {known[:8]}...")
    return sha256


def read_importance(file: str, layers: int, heads: int) -> Tensor:
    """Importance of every KV head. [L, H] float64.

    The file is JSON, `{"importance": [[...], ...]}`: a list for every layer, with a number for every KV head, or for every
    query head; the numbers of a KV head's query heads are averaged.

    Args:
        file: its path.
        layers: L.
        heads: H.

    Raises:
        ValueError: the file can't be read, or holds no such table of finite, non-negative numbers.
    """
    expected = f"expected {{'importance': {layers} lists of {heads} numbers, or of a multiple of it}}"
    content = content_of(file)
    try:
        table = json.loads(content)["importance"]
        sizes = sorted({len(row) for row in table})
        importance = torch.tensor(table, dtype=torch.float64, device="cpu") if len(sizes) == 1 else None
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError):  # PyTorch raises some of them
        raise ValueError(f"{file}: not a table of heads; {expected}") from None
    if importance is None or importance.dim() != 2 or len(table) != layers or sizes[0] % heads or not sizes[0]:
        raise ValueError(f"{file}: found {len(table)} lists of {' or '.join(map(str, sizes)) or 'no'} numbers; {expected}")
    if not (importance.isfinite() & (importance >= 0)).all():
        raise ValueError(f"{file}: importance must be finite and not negative; {expected}")
    return importance.unflatten(1, (heads, -1)).mean(-1)
