"""Figures that the lab adds to the attention task, from what was noted of each sample or image. Imports no torch.

Source, of outliers among patches: Darcet et al. 2023, arXiv:2309.16588, Section 2: large vision transformers turn a few patches
    of little content into registers, whose norm at the model's output is about ten times that of the others. Their criterion is
    a cutoff picked by hand for DINOv2-g, `NORM_CUTOFF`, which they say varies with the model.
Differs: `OUTLIER_TIMES_MEDIAN` is ours, for models of any scale.

Axis letters: N samples, L layers, Q query heads, H KV heads, D channels of a head, I the first tokens and all others, T tokens,
K buckets of positions, P patches, which are the last of the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.records.aggregates import buckets
from kvbench.harness.tasks.attention.attention_options import Arrays, ends
from kvbench.harness.tasks.attention.attention_options import figures as harness_figures

_LISTED = 20  # sinks, massive activations, and positions of outliers


def figures(noted: Arrays, epsilon: float, norm_cutoff: float | None = None) -> dict[str, Any]:
    """Return the figures of a record, but for the texts of tokens.

    Beside the arrays of the harness, `noted` may have `hidden_largest` and `hidden_median`, [N, L], `key_norm` and `value_norm`,
    [N, L, 2], `initial_norm` and `initial_cosine`, [N, L, I], and `lost`, [N, L, K], with the queries of each bucket in
    `queries`, [K]; of all samples together `key_energy` and `value_energy`, [L, H, D]; of images, what `patch_figures` needs.
    """
    result = harness_figures(noted, epsilon)
    result["layers"] = [layer | _layer(noted, index) for index, layer in enumerate(result["layers"])]
    if "hidden_largest" in noted:
        result["hidden_largest"] = float(noted["hidden_largest"].max())
    if "lost" in noted:
        queries = noted["queries"]
        of_samples = (noted["lost"].mean(1) * queries).sum(-1) / queries.sum()
        result |= {"lost": float(of_samples.mean()), "lost_interval": ends(of_samples)}
        means = noted["lost"].mean((0, 1))
        result["lost_at"] = [
            {"from": start, "to": stop, "lost": float(x)}
            for (start, stop), x in zip(buckets(result["tokens"]), means, strict=True)
        ]
    if "grid" in noted:
        result["patches"] = patch_figures(noted, norm_cutoff or NORM_CUTOFF)
    return {name: x for name, x in result.items() if x is not None}


def _layer(noted: Arrays, layer: int) -> dict[str, Any]:
    """Compute the lab's figures of a layer."""
    result: dict[str, Any] = {x: float(noted[x][:, layer].mean()) for x in ("hidden_largest", "hidden_median") if x in noted}
    means = ("key_norm", "value_norm", "initial_norm", "initial_cosine")
    result |= {name: noted[name][:, layer].mean(0).tolist() for name in means if name in noted}
    result |= {f"{x}_channels": top_channels(noted[f"{x}_energy"][layer]) for x in ("key", "value") if f"{x}_energy" in noted}
    if "lost" in noted:
        result["lost"] = float(np.average(noted["lost"][:, layer].mean(0), weights=noted["queries"]))
    return result


TOP_CHANNELS = 16  # a sixteenth of a head's channels, and at least one


def top_channels(energy: NDArray[Any]) -> float:
    """Share of the squares that is in a sixteenth of a head's channels, those with the most; mean over heads.

    `energy` has a row per head, with NaN where a layer has fewer heads or channels than another. [H, D].
    """
    heads = [row[np.isfinite(row)] for row in energy]
    tops = [np.sort(row)[-max(1, len(row) // TOP_CHANNELS) :].sum() / row.sum() for row in heads if len(row)]
    return float(np.mean(tops))


def sink_tokens(rows: Sequence[tuple[str, int, float]]) -> list[dict[str, Any]]:
    """Other sinks by text, the most frequent first. rows: text, position and share of heads of each occurrence."""
    times = Counter(text for text, _, _ in rows)
    return [
        {
            "text": text,
            "position": min(p for t, p, _ in rows if t == text),
            "times": count,
            "heads": sum(h for t, _, h in rows if t == text) / count,
        }
        for text, count in times.most_common(_LISTED)
    ]


def massive_activations(rows: Sequence[tuple[int, int, str, int, float]]) -> list[dict[str, Any]]:
    """Massive activations by layer, dim and text, the largest first. rows: layer, dim, text, position, magnitude of each."""
    groups: dict[tuple[int, int, str], list[tuple[int, float]]] = {}
    for layer, dim, text, position, magnitude in rows:
        groups.setdefault((layer, dim, text), []).append((position, magnitude))
    result: list[dict[str, Any]] = [
        {
            "layer": layer,
            "dim": dim,
            "text": text,
            "position": min(p for p, _ in group),
            "times": len(group),
            "magnitude": max(m for _, m in group),
        }
        for (layer, dim, text), group in groups.items()
    ]
    return sorted(result, key=lambda row: (-row["magnitude"], row["layer"]))[:_LISTED]


NORM_CUTOFF = 150.0  # Darcet et al.: of the hidden states after the last layer of DINOv2-g
OUTLIER_TIMES_MEDIAN = 4.0  # ours: of the norms of one image's patches after one layer


def patch_figures(noted: Arrays, norm_cutoff: float) -> dict[str, Any]:
    """Outliers among patches, the norms of patches and the attention they get, by layer.

    `noted` has `token_norm`, of the hidden states after each layer, and `token_received`, the attention that a token gets, mean
    over heads and queries, [N, L, T]; `grid`: rows and columns of patches, special tokens, and registers among these.
    """
    rows, columns, special, registers = (int(x) for x in noted["grid"])
    norms = noted["token_norm"][..., special:]
    far = norms > OUTLIER_TIMES_MEDIAN * np.median(norms, -1, keepdims=True)
    over, outlying = norms[:, -1] > norm_cutoff, far[:, -1]  # [N, P]
    result = {
        "rows": rows,
        "columns": columns,
        "special": special,
        "registers": registers,
        "norm_cutoff": norm_cutoff,
        "over_cutoff": float(over.mean()),
        "over_cutoff_interval": ends(over.mean(1)),
        "outliers": float(outlying.mean()),
        "outliers_interval": ends(outlying.mean(1)),
        "layers": [
            _patch_layer(norms[:, layer], far[:, layer], noted["token_received"][:, layer], outlying, registers)
            for layer in range(norms.shape[1])
        ],
        "positions": _positions(norms[:, -1], outlying, columns),
    }
    return {name: x for name, x in result.items() if x is not None}


def _patch_layer(
    norms: NDArray[Any], far: NDArray[Any], received: NDArray[Any], outlying: NDArray[Any], registers: int
) -> dict[str, float]:
    """Compute a layer's figures about patches. norms, far, outlying: [N, P]; received: [N, T]."""
    special = received.shape[1] - norms.shape[1]
    to_patches = received[:, special:]
    result = {
        "norm_median": float(np.median(norms)),
        "norm_largest": float(norms.max()),
        "outliers": float(far.mean()),
        "to_patch": float(to_patches[~outlying].mean()),
    }
    if outlying.any():
        result["to_outlier"] = float(to_patches[outlying].mean())
    if registers:
        result["to_register"] = float(received[:, special - registers : special].mean())
    return result


def _positions(norms: NDArray[Any], outlying: NDArray[Any], columns: int) -> list[dict[str, Any]]:
    """List the patches that are outliers, the most frequent first. norms, outlying: [N, P]."""
    times = outlying.sum(0)
    return [
        {
            "row": int(patch) // columns,
            "column": int(patch) % columns,
            "times": int(times[patch]),
            "norm": float(norms[outlying[:, patch], patch].max()),
        }
        for patch in np.argsort(-times, kind="stable")[:_LISTED]
        if times[patch]
    ]
