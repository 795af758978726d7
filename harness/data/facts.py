"""Cost in nats of the facts in generated prose, by distance from their last telling. It shows what a cache has forgotten.

A repeated fact costs nothing to a model that still has the last telling. To one that has lost it, it costs as much as a first
telling: the logarithm of the number of values it was drawn from, for a model that knows the prose well.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.data.prose import Prose

_MARGIN_CHARACTERS = 4096


def told(nll: NDArray[np.float32], byte_counts: NDArray[np.integer[Any]], seed: int) -> list[dict[str, Any]]:
    """Mean cost of a fact's words, by distance.

    Args:
        nll: nats per token of the prose of this seed, NaN where not scored. [N].
        byte_counts: UTF-8 bytes per token. [N].
        seed: of the prose.

    Returns:
        One row for first tellings and one per doubling of the distance: words_back [from, to) (None for first tellings),
        tellings, nats (summed over the tokens of the fact's words, mean over tellings), drawn_nats (mean log of the number of
        choices).
    """
    ends = np.cumsum(byte_counts)
    prose = Prose(seed)
    prose.text(int(ends[-1]) + _MARGIN_CHARACTERS)
    groups: dict[int | None, list[tuple[float, float]]] = defaultdict(list)
    for telling in prose.tellings:
        first = int(np.searchsorted(ends, telling.start, side="right"))  # token with the first byte of the fact's words
        last = int(np.searchsorted(ends, telling.end, side="left"))
        if last >= len(nll) or not np.isfinite(nll[first : last + 1]).all():
            continue
        doubling = None if telling.words_back is None else telling.words_back.bit_length()
        groups[doubling].append((float(nll[first : last + 1].sum(dtype=np.float64)), float(np.log(telling.choices))))
    rows = []
    for doubling in sorted(groups, key=lambda d: -1 if d is None else d):
        costs = np.array(groups[doubling])
        between = None if doubling is None else [2 ** (doubling - 1), 2**doubling]
        rows.append({
            "words_back": between, "tellings": len(costs), "nats": float(costs[:, 0].mean()),
            "drawn_nats": float(costs[:, 1].mean()),
        })  # fmt: skip
    return rows
