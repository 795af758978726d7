"""Figures of patch tokens, from what was noted of each image. Imports no torch.

Source: Darcet et al. 2023, arXiv:2309.16588, Section 2: large vision transformers turn a few patches of little content into
    registers, whose norm at the model's output is about ten times that of the others. Their criterion is a cutoff picked by
    hand for DINOv2-g, `NORM_CUTOFF`, which they say varies with the model.
Differs: `OUTLIER_TIMES_MEDIAN` is ours, for models of any scale.

Axis letters: N images, L layers, T tokens, P patches, which are the last of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.tasks.attention.intervals import ends

Arrays = Mapping[str, NDArray[Any]]
NORM_CUTOFF = 150.0  # Darcet et al.: of the hidden states after the last layer of DINOv2-g
OUTLIER_TIMES_MEDIAN = 4.0  # ours: of the norms of one image's patches after one layer
_LISTED = 20  # positions


def patch_figures(noted: Arrays, norm_cutoff: float) -> dict[str, Any]:
    """Outliers among patches, the norms of patches and the attention they get, by layer.

    Args:
        noted: `token_norm`, of the hidden states after each layer, and `token_received`, the attention that a token gets, mean
            over heads and queries, [N, L, T]; `grid`: rows and columns of patches, special tokens, and registers among these.
        norm_cutoff: norm after the last layer above which a patch counts for `over_cutoff`.
    """
    rows, columns, special, registers = (int(x) for x in noted["grid"])
    norms = noted["token_norm"][..., special:]
    far = norms > OUTLIER_TIMES_MEDIAN * np.median(norms, -1, keepdims=True)
    over, outlying = norms[:, -1] > norm_cutoff, far[:, -1]  # [N, P]
    found = {
        "rows": rows, "columns": columns, "special": special, "registers": registers, "norm_cutoff": norm_cutoff,
        "over_cutoff": float(over.mean()), "over_cutoff_interval": ends(over.mean(1)),
        "outliers": float(outlying.mean()), "outliers_interval": ends(outlying.mean(1)),
        "layers": [
            _layer(norms[:, layer], far[:, layer], noted["token_received"][:, layer], outlying, registers)
            for layer in range(norms.shape[1])
        ],
        "positions": _positions(norms[:, -1], outlying, columns),
    }  # fmt: skip
    return {name: x for name, x in found.items() if x is not None}


def _layer(
    norms: NDArray[Any], far: NDArray[Any], received: NDArray[Any], outlying: NDArray[Any], registers: int
) -> dict[str, float]:  # fmt: skip
    """One layer's figures. norms, far, outlying: [N, P]; received: [N, T]."""
    special = received.shape[1] - norms.shape[1]
    to_patches = received[:, special:]
    found = {
        "norm_median": float(np.median(norms)), "norm_largest": float(norms.max()), "outliers": float(far.mean()),
        "to_patch": float(to_patches[~outlying].mean()),
    }  # fmt: skip
    if outlying.any():
        found["to_outlier"] = float(to_patches[outlying].mean())
    if registers:
        found["to_register"] = float(received[:, special - registers : special].mean())
    return found


def _positions(norms: NDArray[Any], outlying: NDArray[Any], columns: int) -> list[dict[str, Any]]:
    """Where outliers are, the most frequent patch first. norms, outlying: [N, P]."""
    times = outlying.sum(0)
    return [
        {
            "row": int(patch) // columns, "column": int(patch) % columns, "times": int(times[patch]),
            "norm": float(norms[outlying[:, patch], patch].max()),
        }
        for patch in np.argsort(-times, kind="stable")[:_LISTED]
        if times[patch]
    ]  # fmt: skip
