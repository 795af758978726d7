"""TriAttention: score keys by their dot products with a head's mean query, averaged over later positions.

Source: Mao et al. 2026, arXiv:2604.04921. Read in WeianMao/triattention c3744ee, `triattention/methods/triattention.py` and
`pruning_utils.py`. Their trigonometric series of a distance is the dot product of the rotated mean query and the rotated key.
Differs: the mean query is that of the stream's own prompt; the authors use a calibration text, whose statistics `file` takes.
Every layer and head chooses for itself (their `per_layer_perhead_pruning`); in their experiments a head keeps the same tokens in
all layers. The authors evict every 128 steps (`evict: {every: 128}`) and cut no prompt; here a prompt longer than `keep_prompt`
is scored like other tokens. They add noise of 1e-6 to break ties.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.statistic import Attention, HeadSizes, Seen, Statistic
from kvbench.policies.tables import content_of, sha256_of
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class PromptQueries(Statistic):
    """Sums over the prompt's unrotated queries, for each pair of dims that RoPE rotates together: both parts, length, number.

    [B, H, G, P, 4] float64. In a stream without a prompt, every query counts.
    """

    sees: ClassVar[tuple[Seen, ...]] = ("queries",)
    per: ClassVar[Literal["slot", "head"]] = "head"

    def shape(self, sizes: HeadSizes) -> tuple[int, ...]:
        """Four numbers a pair."""
        return sizes.group, sizes.key_dim // 2, 4

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Add this step's queries."""
        pairs = attention.queries.double().unflatten(-1, (-1, 2))
        length = pairs.norm(dim=-1, keepdim=True)
        counts = (view.prompt == 0) | (view.step < view.prompt)
        return state + torch.cat([pairs, length, torch.ones_like(length)], -1) * counts[..., None, None]

    def update_run(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Add these steps' queries."""
        pairs = attention.queries.double().unflatten(-1, (-1, 2))  # [B, H, G, T, P, 2]
        length = pairs.norm(dim=-1, keepdim=True)
        steps = view.step[..., None] - torch.arange(pairs.shape[3] - 1, -1, -1, device=pairs.device)  # [B, 1, 1, T]
        counts = (view.prompt == 0)[..., None] | (steps < view.prompt[..., None])
        return state + (torch.cat([pairs, length, torch.ones_like(length)], -1) * counts[..., None, None]).sum(3)


@dataclass(frozen=True)
class TriAttention(Policy):
    """Keep prompts of up to `keep_prompt` tokens, and the keys with the highest mean score for queries at later positions."""

    scope = "head"

    keep_prompt: int | None = None  # tokens of the longest prompt that is never evicted; capacity - 1 when None
    horizon: int = 65536  # steps ahead; the offsets are 1, 2, 4, ... up to it
    group: Literal["max", "mean"] = "max"  # over the query heads of a KV head
    normalise: bool = True  # each query head's scores to mean 0 and deviation 1, before the group
    file: str | None = None  # of the queries' statistics, see `read_statistics`; those of the prompt's queries when None
    sha256: str | None = None  # of the file; `bind` fills it in, so that a record says which statistics they were

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """`PromptQueries`, unless `file` is given."""
        return () if self.file else (PromptQueries(),)

    def bind(self, capacity: int) -> Self:
        """Resolve the longest prompt that is kept, which leaves room for at least one other token."""
        keep_prompt = capacity - 1 if self.keep_prompt is None else self.keep_prompt
        if not 0 <= keep_prompt < capacity:
            raise ValueError(f"capacity {capacity} can't hold keep_prompt {self.keep_prompt} + at least 1 other token")
        if self.horizon < 1:
            raise ValueError(f"horizon {self.horizon} is below 1")
        sha256 = sha256_of(self.file, self.sha256) if self.file else None
        if self.file and sha256:
            read_statistics(self.file, sha256, "cpu")
        return replace(self, keep_prompt=keep_prompt, sha256=sha256)

    def importance(self, view: CacheView) -> Tensor:
        """The group's score; the prompt is never evicted if it is kept. [B, H, S] float32."""
        assert self.keep_prompt is not None, "bind first"
        prompt = (view.position < view.prompt) & (view.prompt <= self.keep_prompt)
        scores = self._scores(view)
        if self.normalise:
            scores = _standardised(scores, (view.valid & ~prompt)[:, :, None])
        worth = scores.amax(2) if self.group == "max" else scores.mean(2)
        return worth.masked_fill(~view.valid, -inf).masked_fill(prompt, inf)

    def _scores(self, view: CacheView) -> Tensor:
        """Score per query head: dot product with the mean query, and key length times (mean length - length of the mean).

        [B, H, G, S] float32.
        """
        centres = self._centres(view)
        query, lacking = centres[..., :2], centres[..., 2] - centres[..., :2].norm(dim=-1)
        offsets = 2 ** torch.arange(self.horizon.bit_length(), device=view.step.device)
        copies = query.flatten(-2)[..., None, :].expand(*centres.shape[:3], len(offsets), -1).contiguous()
        ahead = view.rotate(copies, offsets.expand(copies.shape[:-1])).mean(-2)  # [B, H, G, D]
        to_come = view.rotate(ahead, (view.step + 1).expand(ahead.shape[:-1]))
        keys = view.rotated_keys.float()
        return to_come @ keys.mT + lacking @ keys.unflatten(-1, (-1, 2)).norm(dim=-1).mT

    def _centres(self, view: CacheView) -> Tensor:
        """The mean of both parts and of the length of each pair of dims. [B, H, G, P, 3] float32."""
        if self.file and self.sha256:
            table = read_statistics(self.file, self.sha256, str(view.rank.device))
            layers, heads, _, pairs, _ = table.shape
            if (layers, 2 * pairs) != (view.num_layers, view.keys.shape[-1]) or heads < view.rank.shape[1]:
                ours = f"{view.num_layers} layers of {view.rank.shape[1]} KV heads of {view.keys.shape[-1]} dims"
                raise ValueError(
                    f"{self.file} is of {layers} layers of {heads} KV heads of {2 * pairs} dims; the model has {ours}"
                )
            table = table[view.layer[..., 0], view.head[..., 0]]
            return table.expand(*view.rank.shape[:2], -1, -1, -1)
        sums = view.state(PromptQueries())
        return (sums[..., :3] / sums[..., 3:].clamp(min=1)).float()


def _standardised(scores: Tensor, among: Tensor) -> Tensor:
    """To mean 0 and deviation 1 along the last axis, both of the slots in `among`."""
    number = among.sum(-1, keepdim=True).clamp(min=1)
    scores = scores.masked_fill(~among, 0)
    centred = (scores - scores.sum(-1, keepdim=True) / number).masked_fill(~among, 0)
    return centred / (centred.square().sum(-1, keepdim=True) / number).sqrt().clamp(min=1e-6)


@lru_cache
def read_statistics(file: str, sha256: str, device: str) -> Tensor:
    """Statistics of unrotated queries: for every pair of dims the mean of its first part, of its second and of its length.

    A pair is two dims that RoPE rotates together. The file is a tensor [L, H, G, P, 3], written by `torch.save`. The authors'
    files have the same numbers for every layer and query head: `q_mean_real`, `q_mean_imag` and `q_abs_mean`.

    Args:
        file: its path.
        sha256: of the file.
        device: to put the tensor on.

    Raises:
        ValueError: there is no such file, it has another sha256, or it holds no such tensor.
    """
    sha256_of(file, sha256)
    try:
        table = torch.load(io.BytesIO(content_of(file)), map_location=device, weights_only=True)
    except Exception as error:  # what it raises depends on what is wrong with the file
        raise ValueError(f"{file}: can't be read: {error}") from error
    if not isinstance(table, Tensor) or table.dim() != 5 or table.shape[-1] != 3:
        raise ValueError(f"{file}: expected a tensor [layers, KV heads, query heads of each, pairs of dims, 3]")
    return table.float()
