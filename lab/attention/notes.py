"""Notes that the lab takes of samples beside those of the harness: of keys, values and hidden states, and of evicted tokens.

Axis letters: B samples side by side, L layers, Q query heads, H KV heads, T tokens, t queries of a chunk, K buckets of positions,
D key dim, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvbench.harness.engine.watch import Chunk, Watcher
from kvbench.harness.records.aggregates import buckets
from kvbench.harness.tasks.attention import watch_samples
from kvbench.harness.tasks.attention.watch_samples import by_sample

MASSIVE, MASSIVE_TIMES_MEDIAN = 100.0, 1000.0  # Sun et al. 2024, arXiv:2402.17762, Section 2
INITIAL = 4  # first tokens that are looked at one by one
_LATER_QUERIES = 4  # one over the share of a sample that must follow a token, for its attention to say something


class Notes(watch_samples.Notes):
    """Notes of samples that are read side by side."""

    def __init__(self, tokens: int, map_tokens: int) -> None:
        """tokens: T; map_tokens: M, at most T."""
        super().__init__(tokens, map_tokens)
        self._norms: list[tuple[Tensor, Tensor]] = []  # of keys and values: the first token's, and the others' mean. [B, 2]
        self._energies: list[list[Tensor]] = []  # squares of a layer's keys and values, but the first token's, summed. [H, D]
        self._likeness: list[Tensor] = []  # of the first tokens and of the others, after a layer. [B, INITIAL + 1]
        self._token_norms: list[Tensor] = []  # of the hidden states after a layer. [B, T]
        self._hidden: list[tuple[Tensor, Tensor]] = []  # largest and median. [B]
        self.massive: list[tuple[int, int, int, int, float]] = []  # layer, sample, position, dim, magnitude

    def see_vectors(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Note norms of keys, [B, H, T, D], and values, [B, H, T, Dv]."""
        norms = [x.float().norm(dim=-1).mean(1) for x in (keys, values)]  # [B, T]
        self._energies.append([x[:, :, 1:].double().square().sum((0, 2)).cpu() for x in (keys, values)])
        self._norms.append(tuple(torch.stack([x[:, 0], x[:, 1:].mean(1)], -1) for x in norms))  # type: ignore[arg-type]

    def see_hidden(self, layer: int, hidden: Tensor) -> None:
        """Note magnitudes of the hidden states after a layer, [B, T, E]."""
        size = hidden.float().abs()
        median, largest = size.flatten(1).median(1).values, size.flatten(1).amax(1)
        self._hidden.append((largest, median))
        norms = hidden.float().norm(dim=-1)
        self._token_norms.append(norms)
        if self._tokens > INITIAL + 1:
            self._likeness.append(likeness(nn.functional.normalize(hidden.float(), dim=-1)))
        bound = torch.clamp(MASSIVE_TIMES_MEDIAN * median, min=MASSIVE)
        if bool((largest > bound).any()):
            for sample, position, dim in (size > bound[:, None, None]).nonzero().tolist():
                self.massive.append((layer, sample, position, dim, float(size[sample, position, dim])))

    def other_sinks(self, epsilon: float) -> list[tuple[int, int, float]]:
        """Sample, position and share of heads of every token but the first that is the sink of a head."""
        of_heads = (self.mean_received() > epsilon).double().mean((0, 2))  # [B, T]
        of_heads[:, 0] = 0
        if self._causal[0]:
            of_heads[:, self._tokens - self._tokens // _LATER_QUERIES :] = 0
        return [(s, p, float(of_heads[s, p])) for s, p in of_heads.nonzero().tolist()]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Notes by sample, as `figures` takes them."""
        arrays = dict[str, Tensor]()
        if self._norms:
            arrays |= {
                name: torch.stack([x[index] for x in self._norms]) for index, name in enumerate(("key_norm", "value_norm"))
            }
        if self._hidden:
            names = ("hidden_largest", "hidden_median")
            arrays |= {name: torch.stack([x[index] for x in self._hidden]) for index, name in enumerate(names)}
        if self._likeness:
            norms = torch.stack(self._token_norms)
            arrays["initial_norm"] = torch.cat([norms[..., :INITIAL], norms[..., INITIAL:].mean(-1, keepdim=True)], -1)
            arrays["initial_cosine"] = torch.stack(self._likeness)
        return super().arrays() | by_sample(arrays)

    def by_token(self) -> dict[str, NDArray[Any]]:
        """Norms of the hidden states after each layer, and the attention that a token gets, mean over heads. [B, L, T] each."""
        return by_sample({"token_norm": torch.stack(self._token_norms), "token_received": self.mean_received().mean(2)})

    def energies(self) -> dict[str, NDArray[np.float64]]:
        """Squares of keys and of values by channel, summed over samples and all tokens but the first. [L, H, D] each.

        Layers with fewer heads or channels than others have NaN in their place. Empty if no keys were shown.
        """
        energies = {}
        for name, layers in zip(("key_energy", "value_energy"), zip(*self._energies, strict=True), strict=False):
            heads, channels = (max(x.shape[dim] for x in layers) for dim in (0, 1))
            energies[name] = np.full((len(layers), heads, channels), np.nan)
            for layer, x in enumerate(layers):
                energies[name][layer, : x.shape[0], : x.shape[1]] = x.numpy()
        return energies


def likeness(directions: Tensor) -> Tensor:
    """Mean cosine of each of the first tokens to those after them, and of these to each other. [B, T, E] -> [B, INITIAL + 1].

    Directions have length 1.
    """
    first, others = directions[:, :INITIAL], directions[:, INITIAL:]
    count, total = others.shape[1], others.sum(1)
    among = (total.square().sum(-1) - count) / (count * (count - 1))
    return torch.cat([(first @ total[..., None])[..., 0] / count, among[:, None]], -1)


class Lost(Watcher):
    """The attention that queries give to tokens that a policy evicted before them."""

    def __init__(self, tokens: int, last_seen: Sequence[Tensor]) -> None:
        """Look up what was evicted. `last_seen`: by layer, the last query that saw a token under the policy. [B, H, T] each."""
        self._last_seen = last_seen
        edges = buckets(tokens)
        self._bucket = torch.zeros(tokens, dtype=torch.int64, device=last_seen[0].device)
        for bucket, (start, stop) in enumerate(edges):
            self._bucket[start:stop] = bucket
        self.queries = np.array([stop - start for start, stop in edges])
        self._sums: list[Tensor] = []  # [B, Q, K]

    def see_chunk(self, chunk: Chunk) -> None:
        """Add up the weights of evicted tokens, by bucket."""
        weights, keys = chunk.weights, chunk.weights.shape[-1]
        if chunk.layer == len(self._sums):
            self._sums.append(torch.zeros(*weights.shape[:2], len(self.queries), dtype=torch.float64, device=weights.device))
        now = chunk.first + torch.arange(weights.shape[2], device=weights.device)
        last = self._last_seen[chunk.layer][..., :keys]
        gone = last[:, :, None] < now[:, None]  # [B, H, t, L]
        gone = gone.repeat_interleave(weights.shape[1] // last.shape[1], 1)
        lost = (weights * gone).sum(-1).double()
        index = self._bucket[now].expand(*weights.shape[:2], -1)
        self._sums[chunk.layer].scatter_add_(2, index, lost)

    def of_samples(self) -> NDArray[np.float32]:
        """Means over heads and the queries of each bucket. [B, L, K]."""
        sums = torch.stack(self._sums).mean(2).transpose(0, 1).cpu().numpy()
        return np.asarray(sums / self.queries, np.float32)
