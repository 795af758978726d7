"""Runs: consecutive tokens without an eviction, read into one layer by one attention call.

Results agree with the walk. Ranks decide which tokens are visible: a token sees itself and all tokens of lower rank.

Axis letters: B streams, H KV heads, N = B * H rows, G query heads of a KV head, T tokens of the run, S slots, D key dim,
Dv value dim, P pairs of dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvbench.harness.engine.attention import Terms, logits_of, weights
from kvbench.harness.engine.rotary import LONGEST_STREAM, Rotation, rotate
from kvbench.harness.engine.slot_rows import Rows
from kvbench.policies import PositionMode, Seen, Statistic

_MAX_SCORES = 2**24  # held in memory at once


class Run(NamedTuple):
    """A run in the rows of one layer."""

    query: Tensor  # unrotated, unscaled, paired. [N, G, T, D]
    keys: Tensor  # unrotated, paired. [N, T, D]
    values: Tensor  # [N, T, Dv]
    steps: Tensor  # [N, T] int64
    ids: Tensor  # [N, T] int64


class RunReader:
    """Reads runs into one layer."""

    def __init__(self, rows: Rows, terms: Terms, mode: PositionMode, rotation: Rotation | None, updates: bool) -> None:
        """Prepare for the runs of a block.

        Args:
            mode: position mode; `clamped` only while no token is farther away than the limit.
            updates: statistics see the attention of each token.
        """
        self._rows, self._terms, self._mode, self._rotation = rows, terms, mode, rotation
        self._observed_names = rows.observed_names if updates else frozenset[Seen]()
        self._explicit = bool(self._observed_names - {"queries"}) or terms.softcap is not None or terms.sink_logits is not None

    def __call__(self, run: Run, now: Sequence[Tensor], due: bool) -> Tensor:
        """Read a run.

        Args:
            run: run that fits into the empty slots.
            now: step of each token, for a policy's view. [B, 1, 1] int64 each.
            due: tokens are evicted after the run.

        Returns:
            [N, G, T, Dv].
        """
        rows, (size, tokens) = self._rows, run.steps.shape
        ranks = rows.count()[:, None] + torch.arange(tokens, device=run.steps.device)
        free = rows.empty_slots(tokens)
        own = None
        if self._rotation is not None:
            own = self._rotation.factors(ranks if self._mode == "cache" else run.steps, run.keys.dtype, LONGEST_STREAM)
        kept = rotate(run.keys, own) if own is not None and rows.keys_rotated else run.keys
        keys, values = rows.enter(free, kept, run.values, ranks, run.steps)
        query, keys = self._rotated(run, keys, own)
        one_by_one = bool(self._observed_names) and not all(_takes_runs(s) for s in rows.states if s.sees)
        out = []
        at_once = max(1, _MAX_SCORES // (size * query.shape[1] * keys.shape[1]))
        sees = [rows.visible_to(r, s) for r, s in zip(ranks.split(at_once, 1), run.steps.split(at_once, 1), strict=True)]
        if one_by_one:
            rows.leave(free)
        else:
            rows.view.step = now[-1]
            rows.note_written(free, run.keys, run.values, run.steps, run.ids)
        for number, mask in enumerate(sees):
            part = slice(number * at_once, number * at_once + mask.shape[1])
            answer, observed = self._attend(query[:, :, part], keys, values, mask)
            out.append(answer)
            if self._observed_names:
                observed = rows.by_slot(observed)
                observed["queries"] = run.query[:, :, part]
                if one_by_one:
                    self._update_one_by_one(run, part, free, ranks, observed, now)
                else:
                    rows.view.step = now[part.stop - 1]
                    rows.update_together({name: observed[name] for name in self._observed_names})
        rows.end_run(free, due)
        return torch.cat(out, 2)

    def _rotated(self, run: Run, keys: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return rotated queries, scaled if all scores are computed, and rotated keys. [N, G, T, D], [N, S, D].

        keys: stored keys, the run's included. [N, S, D]; own: RoPE of the run's queries; None without RoPE. [N, T, P].
        """
        rows, rotation = self._rows, self._rotation
        scaling = self._terms.scaling if self._explicit else 1  # rounded once, together with the rotation
        if rotation is None or own is None:
            return run.query if scaling == 1 else run.query * scaling, keys
        query = rotate(run.query, own[:, None] * scaling)
        if rows.keys_rotated:
            return query, keys
        of_keys = rows.rank if self._mode == "cache" else rows.position.clamp(min=0)
        factors = rotation.factors(of_keys, run.keys.dtype, LONGEST_STREAM)
        stages = keys.shape[1] // factors.shape[1]
        return query, rotate(keys, factors if stages == 1 else factors.repeat(1, stages, 1))

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, sees: Tensor) -> tuple[Tensor, dict[Seen, Tensor]]:
        """Compute the attention of queries to visible keys. -> [N, G, T, Dv], and the parts of attention that statistics read.

        query: [N, G, T, D]; sees: [N, T, S] bool.
        """
        terms = self._terms
        if self._explicit:
            return _attend(query, keys, values, sees, terms, self._rows.heads, self._observed_names)
        one_head = keys[:, None], values[:, None], sees[:, None]
        return scaled_dot_product_attention(query, *one_head, scale=terms.scaling, enable_gqa=query.shape[1] > 1), {}

    def _update_one_by_one(
        self, run: Run, part: slice, free: Tensor, ranks: Tensor, observed: dict[Seen, Tensor], now: Sequence[Tensor]
    ) -> None:
        """Enter tokens one after another, and update statistics with the attention of each token."""
        rows = self._rows
        for t in range(part.start, part.stop):
            token = slice(t, t + 1)
            rows.free.copy_(free[:, t])
            rows.place(ranks[:, t], run.steps[:, t], now[t])
            rows.note_written(free[:, token], run.keys[:, token], run.values[:, token], run.steps[:, token], run.ids[:, token])
            rows.update({name: observed[name][:, :, t - part.start] for name in self._observed_names}, None)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, sees: Tensor, terms: Terms, heads: int, names: frozenset[Seen]
) -> tuple[Tensor, dict[Seen, Tensor]]:
    """Compute the attention of queries, with all scores in memory.

    Args:
        query: rotated and scaled. [N, G, T, D].
        keys: rotated. [N, S, D].
        values: [N, S, Dv].
        sees: [N, T, S] bool.
        heads: H.
        names: parts of attention that statistics read.

    Returns:
        Output [N, G, T, Dv], and observed weights [N, G, T, S], outputs, and, if `names` has them, logits [N, G, T, S].
    """
    group, tokens = query.shape[1:3]
    flat, mask = query.flatten(1, 2), sees.repeat(1, group, 1)  # [N, G * T, ...]
    scores = torch.bmm(flat, keys.mT)
    if terms.sink_logits is not None:  # one logit per row
        terms = terms._replace(sink_logits=terms.sink_logits.repeat_interleave(tokens))
    mass = weights(scores, terms, heads, mask)
    out = torch.bmm(mass.to(values.dtype), values).unflatten(1, (group, tokens))
    observed: dict[Seen, Tensor] = {"weights": mass.unflatten(1, (group, tokens)), "outputs": out}
    if "logits" in names:
        observed["logits"] = logits_of(scores, terms).masked_fill(~mask, -torch.inf).unflatten(1, (group, tokens))
    return out, observed


def _takes_runs(statistic: Statistic) -> bool:
    """Return whether a statistic can process several steps at once. A class that overrides only `update` can't."""

    def origin(name: str) -> int:
        return next(depth for depth, kind in enumerate(type(statistic).__mro__) if name in vars(kind))

    return type(statistic).update_run is not Statistic.update_run and origin("update_run") <= origin("update")
