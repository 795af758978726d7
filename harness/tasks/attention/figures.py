"""Figures of the attention task, from what was noted of each sample. Imports no torch.

Axis letters: N samples, L layers, Q query heads, T tokens, M tokens of a map, K buckets of positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.tasks.attention.intervals import ends
from kvbench.harness.tasks.attention.patches import NORM_CUTOFF, patch_figures
from kvbench.harness.tasks.common.samples import buckets

Arrays = Mapping[str, NDArray[Any]]
_LISTED = 20  # sinks and massive activations


def figures(noted: Arrays, epsilon: float, norm_cutoff: float | None = None) -> dict[str, Any]:
    """The figures of a record, but for the texts of tokens.

    Args:
        noted: `first`, `late`, `entropy`, `largest_logit` and perhaps `rest`, [N, L, Q]; perhaps `hidden_largest` and
            `hidden_median`, [N, L], `key_norm` and `value_norm`, [N, L, 2], and `lost`, [N, L, K], with the queries of each
            bucket in `queries`, [K]; `tokens`, the length of a sample; of images, what `patch_figures` needs.
        epsilon: attention that makes a token a head's sink.
        norm_cutoff: norm above which a patch counts as an outlier of Darcet et al.; theirs when None.
    """
    first, tokens = noted["first"], int(noted["tokens"])
    shares = (first > epsilon).mean((1, 2))
    found: dict[str, Any] = {
        "samples": len(first), "tokens": tokens, "heads": first[0].size,
        "sink_heads": float(shares.mean()), "sink_heads_interval": ends(shares),
        "first": float(first.mean()), "first_interval": ends(first.mean((1, 2))),
        "first_by_head": first.mean(0).tolist(), "entropy": float(noted["entropy"].mean()),
        "entropy_by_head": noted["entropy"].mean(0).tolist(), "largest_logit": float(noted["largest_logit"].max()),
        "layers": [_layer(noted, layer) for layer in range(first.shape[1])],
    }  # fmt: skip
    if "rest" in noted:
        found["rest"] = float(noted["rest"].mean())
    if "hidden_largest" in noted:
        found["hidden_largest"] = float(noted["hidden_largest"].max())
    if "lost" in noted:
        queries = noted["queries"]
        of_samples = (noted["lost"].mean(1) * queries).sum(-1) / queries.sum()
        found |= {"lost": float(of_samples.mean()), "lost_interval": ends(of_samples)}
        means = noted["lost"].mean((0, 1))
        found["lost_at"] = [
            {"from": start, "to": stop, "lost": float(x)} for (start, stop), x in zip(buckets(tokens), means, strict=True)
        ]
    if "grid" in noted:
        found["patches"] = patch_figures(noted, norm_cutoff or NORM_CUTOFF)
    return {name: x for name, x in found.items() if x is not None}


def _layer(noted: Arrays, layer: int) -> dict[str, Any]:
    """One layer's figures."""
    late = noted["late"][:, layer]
    found: dict[str, Any] = {name: float(noted[name][:, layer].mean()) for name in ("first", "late", "entropy", "largest_logit")}
    found["late_deviation"] = float(late.std())
    found |= {x: float(noted[x][:, layer].mean()) for x in ("rest", "hidden_largest", "hidden_median") if x in noted}
    found |= {name: noted[name][:, layer].mean(0).tolist() for name in ("key_norm", "value_norm") if name in noted}
    if "lost" in noted:
        found["lost"] = float(np.average(noted["lost"][:, layer].mean(0), weights=noted["queries"]))
    return found


def sink_tokens(rows: Sequence[tuple[str, int, float]]) -> list[dict[str, Any]]:
    """Other sinks by text, the most frequent first. rows: text, position and share of heads of each occurrence."""
    times = Counter(text for text, _, _ in rows)
    return [
        {
            "text": text, "position": min(p for t, p, _ in rows if t == text), "times": count,
            "heads": sum(h for t, _, h in rows if t == text) / count,
        }
        for text, count in times.most_common(_LISTED)
    ]  # fmt: skip


def massive_activations(rows: Sequence[tuple[int, int, str, int, float]]) -> list[dict[str, Any]]:
    """Massive activations by layer, dim and text, the largest first. rows: layer, dim, text, position, magnitude of each."""
    groups: dict[tuple[int, int, str], list[tuple[int, float]]] = {}
    for layer, dim, text, position, magnitude in rows:
        groups.setdefault((layer, dim, text), []).append((position, magnitude))
    found: list[dict[str, Any]] = [
        {
            "layer": layer, "dim": dim, "text": text, "position": min(p for p, _ in group), "times": len(group),
            "magnitude": max(m for _, m in group),
        }
        for (layer, dim, text), group in groups.items()
    ]  # fmt: skip
    return sorted(found, key=lambda row: (-row["magnitude"], row["layer"]))[:_LISTED]
