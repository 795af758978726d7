"""What a fact of generated prose costs, by how far back it was told before: what a cache has forgotten shows here.

A reader who remembers pays nothing for a fact told again, one who has forgotten pays what its first telling cost: the logarithm
of the number of values it was drawn from, if the reader knows the prose well.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.data.prose import Prose

_MARGIN = 4096  # characters


def told(nll: NDArray[np.float32], byte_counts: NDArray[np.integer[Any]], seed: int) -> list[dict[str, Any]]:
    """Mean cost of a fact's words, by distance.

    Args:
        nll: nats per token of prose of this seed, NaN where not scored. [N].
        byte_counts: UTF-8 bytes of each. [N].
        seed: of the prose.

    Returns:
        For first tellings, and for every doubling of the distance: words_back [from, to) (None for the first), tellings, nats
        (mean over tellings, summed over the tokens of the fact's words), drawn_nats (mean logarithm of the choices).
    """
    ends = np.cumsum(byte_counts)
    prose = Prose(seed)
    prose.text(int(ends[-1]) + _MARGIN)
    groups: dict[int | None, list[tuple[float, float]]] = defaultdict(list)
    for telling in prose.tellings:
        first = int(np.searchsorted(ends, telling.start, side="right"))  # the token that holds its first byte
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
