"""What KV Bench's policies keep of a prompt, by the definition of a view in `tests/prompt_views.py`, and the engine's NLLs.

Axis letters: L layers, H KV heads, G query heads of a KV head, N tokens of the prompt, T of the continuation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peers.cases import streaming_heads
from peers.rows import TABLE, Spec
from prompt_views import prompt_views
from torch import Tensor

from kvbench.harness.core import plugins
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.model import Model
from kvbench.policies import CacheView, Policy


def build(spec: Spec, model: Model, folder: Path) -> Policy:
    """A policy as a suite names it; one inside another is a mapping with a name, too.

    Args:
        spec: `{"times_group": x}` stands for x times the query heads of a KV head, and `TABLE` for a file.
        model: that it will serve.
        folder: for the file.

    Raises:
        LookupError: there is no policy of this name.
    """
    if spec["name"] not in plugins.policy_names():
        raise LookupError(f"no policy {spec['name']!r}")
    arguments = {k: _argument(v, model, folder) for k, v in spec.items() if k != "name"}
    policy: Policy = plugins.policy_class(spec["name"])(**arguments)
    return policy


def _argument(value: Any, model: Model, folder: Path) -> Any:
    if isinstance(value, dict):
        return build(value, model, folder) if "name" in value else value["times_group"] * model.layers[0].group
    if value != TABLE:
        return value
    path = folder / "heads.json"
    streaming = streaming_heads(len(model.layers), model.layers[0].heads)
    path.write_text(json.dumps({"importance": [[1 - streams for streams in row] for row in streaming]}))
    return str(path)


@dataclass
class Prompted:
    """A model after one prompt. Views are shared by policies that name the same statistics."""

    model: Model
    tokens: Tensor  # [1, N]
    _views: dict[tuple[Any, ...], list[CacheView]] = field(default_factory=dict)

    def views(self, policy: Policy) -> list[CacheView]:
        """Of every layer, for a bound policy."""
        key = tuple(policy.statistics)
        if key not in self._views:
            self._views[key] = prompt_views(self.model, self.tokens, policy)
        return self._views[key]


def kept(prompted: Prompted, policy: Policy, capacity: int) -> Tensor:
    """Which tokens of the prompt each head keeps. [L, H, N] bool."""
    if not policy.evicts:
        shape = [(s.heads, prompted.tokens.shape[1]) for s in prompted.model.layers]
        return torch.ones(len(shape), *shape[0], dtype=torch.bool)
    bound = policy if policy.outcome else policy.bind(capacity)
    views = prompted.views(bound)
    table = _budgets(bound, views, capacity)
    if table is None:
        floor = bound.pool_floor(capacity)
        if floor is not None:
            return torch.stack([_pooled(bound.importance(view)[0], capacity, floor) for view in views])
        table = [[capacity] * views[0].rank.shape[1]] * len(views)
    return torch.stack([_of_layer(policy, view, budgets) for view, budgets in zip(views, table, strict=True)])


def _budgets(bound: Policy, views: list[CacheView], capacity: int) -> list[list[int]] | None:
    """Tokens of each layer and KV head, if they are not the same everywhere. L lists of H."""
    heads, length = views[0].rank.shape[1:]
    asked = bound.prompt_budgets(views, None if bound.outcome else capacity)
    if asked is not None:
        return asked[0].tolist()
    table = bound.budgets(capacity, len(views), heads, length)
    return None if table is None else [list(row) for row in table]


def _of_layer(policy: Policy, view: CacheView, budgets: list[int]) -> Tensor:
    """Each head keeps its budget of highest (importance, rank), the policy bound to that budget. [H, N] bool."""
    mask = torch.ones(view.rank.shape[1:], dtype=torch.bool)
    for head, budget in enumerate(budgets):
        if budget < mask.shape[1]:
            worth = policy.bind(budget).importance(view)[0, head].tolist()
            for position in sorted(range(len(worth)), key=lambda i: (worth[i], i))[: len(worth) - budget]:
                mask[head, position] = False
    return mask


def _pooled(importance: Tensor, capacity: int, floor: int) -> Tensor:
    """Every head keeps its `floor` highest; the layer's rest is its highest of all others. [H, N] -> [H, N] bool."""
    mask = torch.zeros_like(importance, dtype=torch.bool)
    for head, worth in enumerate(importance.tolist()):
        mask[head, sorted(range(len(worth)), key=lambda i: (worth[i], i))[-floor:] if floor else []] = True
    rest = [(w, i, h) for h, worth in enumerate(importance.tolist()) for i, w in enumerate(worth) if not mask[h, i]]
    for _, position, head in sorted(rest, reverse=True)[: importance.shape[0] * capacity - int(mask.sum())]:
        mask[head, position] = True
    return mask


def engine_nlls(prompted: Prompted, policy: Policy, capacity: int, positions: str, after: Tensor) -> Tensor | None:
    """NLLs of a continuation from the engine's cache, evicted once at the prompt's end; None if the engine can't yet.

    after: [T] int64. -> [T] float64.
    """
    if not hasattr(CachedDecoder, "read_prompt"):
        return None
    held = None if policy.outcome or not policy.evicts else capacity
    how: Any = {"positions": positions, "evict": "prompt" if policy.evicts else 1}
    with torch.inference_mode():
        read: Any = CachedDecoder(prompted.model, CacheConfig(policy, held, **how))
        first = read.read_prompt(prompted.tokens, 64)[:, None]
        logits = torch.cat([first, read(after[None, :-1])], 1)[0]
    return -logits.double().log_softmax(-1).gather(1, after[:, None])[:, 0]
