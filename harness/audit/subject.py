"""Cache under test, and a reader that passes it to the unmodified model, as its users do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin

from kvbench.harness.core import plugins
from kvbench.harness.core.contestants import Contestant, cache_from
from kvbench.harness.core.errors import UserError, did_you_mean
from kvbench.harness.core.presses import Press
from kvbench.harness.engine.foreign import Hooks
from kvbench.harness.engine.stored import copied
from kvbench.harness.run.generate import Cache as PolicyCache
from kvbench.harness.run.policy_check import parsed_settings, policy_from_settings
from kvbench.policies import Policy

_DEFAULT_BUDGET = 64  # tokens, for a policy of ours


@dataclass(frozen=True)
class Subject:
    """Cache under test.

    Attributes:
        name: name for messages.
        new_cache: returns an empty cache for a model.
        budget: tokens that a KV head should keep between steps; None if unknown.
        sinks: number of first tokens that should always be held.
        press: press whose hooks evict from the cache; None for a cache that evicts by itself.
        attention: attention function that the cache needs, `sdpa` or `eager`; None for the usual one.
    """

    name: str
    new_cache: Callable[[PreTrainedModel], Cache]
    budget: int | None = None
    sinks: int = 0
    press: Press | None = None
    attention: str | None = None


def subject_of(target: str, settings: Sequence[str], budget: int | None, sinks: int) -> Subject:
    """Return the subject that a command names: `file.py:Class`, `kvpress:Press`, a cache of transformers, or a policy.

    Args:
        settings: parameters of the constructor, "key=value" each.

    Raises:
        UserError: nothing has this name, or it refuses its parameters.
    """
    if target.startswith("kvpress:") and find_spec("kvpress") is None:
        raise UserError(f"{target}: kvpress is not installed here: `make peers` makes an environment with it")
    if ":" in target and not target.startswith("hf:"):
        named: Any = plugins.named_object(target)
        if inspect.isclass(named) and issubclass(named, Cache | CacheLayerMixin):
            given = _arguments(target, named, parsed_settings(settings), budget)
            return replace(subject_of_factory(partial(named, **given), budget, sinks), name=target)
    name = f"hf:{target}" if ":" not in target and hasattr(cache_utils, target) else target
    return subject_of_policy(target, policy_from_settings(name, settings), budget, sinks)


def _arguments(target: str, named: type[Any], given: dict[str, Any], budget: int | None) -> dict[str, Any]:
    """Return the arguments of a constructor. A parameter `budget` or `capacity` gets the budget, unless it is given."""
    parameters = inspect.signature(named).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in given:
        if key not in parameters and not takes_any:
            hint = did_you_mean(key, parameters) if parameters else ""
            raise UserError(f"--set {key}: {target} has no such parameter{hint}")
    sizes = {name: budget for name in ("budget", "capacity") if name in parameters and budget is not None}
    return sizes | given


def subject_of_policy(name: str, policy: Policy, budget: int | None, sinks: int = 0) -> Subject:
    """Return the subject for a policy of ours, or for a contestant: a cache or a press.

    Raises:
        UserError: the policy keeps no cache, or a budget is given for a policy that never evicts.
    """
    if isinstance(policy, Contestant):
        press = policy if isinstance(policy, Press) else None
        return Subject(name, lambda hf: policy.new_cache(hf.config), budget or policy.holds, sinks, press, policy.attention)
    if not policy.caches:
        raise UserError(f"{name} keeps no cache: it reads its window again for every token")
    if not policy.evicts and budget is not None:
        raise UserError(f"{name} never evicts: leave out --budget")
    capacity = None if not policy.evicts else budget or _DEFAULT_BUDGET
    return Subject(name, lambda hf: PolicyCache(hf, policy, capacity, positions="stream"), capacity, sinks)


def subject_of_factory(factory: Callable[..., Any], budget: int | None, sinks: int) -> Subject:
    """Return the subject for a class of a cache or of one layer's cache, or for a function that returns an empty cache."""
    name = getattr(factory, "__name__", type(factory).__name__)
    return Subject(name, lambda hf: cache_from(factory, hf.config), budget, sinks)


class Reader:
    """Reads texts with one cache, by the model's own forward pass.

    Attributes:
        cache: cache that the model writes to.
        tokens: number of tokens read of each text.
    """

    def __init__(self, subject: Subject, hf: PreTrainedModel, explicit: bool | None = None) -> None:
        """Create the cache.

        Args:
            explicit: pass positions to the model, as `generate` does. Otherwise the model asks the cache for its length. When
                None, positions are passed for presses only, as kvpress' pipeline does.
        """
        self._subject, self._hf = subject, hf
        self._explicit = subject.press is not None if explicit is None else explicit
        self.cache = subject.new_cache(hf)
        self.tokens = 0
        self._hooks = None if subject.press is None else Hooks(subject.press)

    def __call__(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Read the next tokens. [B, T] int64 -> logits [B, T, V] float32. mask: 0 for padding, of all tokens so far. [B, N]."""
        count, given = ids.shape[1], dict[str, Any]()
        if mask is not None:
            given["attention_mask"] = mask
        if mask is not None or self._explicit:
            read = torch.ones(len(ids), self.tokens + count, dtype=torch.int64) if mask is None else mask
            given["position_ids"] = (read.cumsum(1) - 1).clamp(min=0)[:, -count:].to(ids.device)
        with nullcontext() if self._hooks is None else self._hooks.on(self._hf):
            logits = self._hf(input_ids=ids, past_key_values=self.cache, use_cache=True, **given).logits.float()
        self.tokens += count
        return logits

    def fork(self) -> Self:
        """Return a reader with a deep copy of the cache."""
        other = copy(self)
        copies_itself = hasattr(self.cache, "__deepcopy__")
        other.cache, other._hooks = deepcopy(self.cache) if copies_itself else copied(self.cache), deepcopy(self._hooks)
        return other

    def reset(self) -> None:
        """Empty the cache by its own `reset`."""
        self.cache.reset()
        self.tokens, self._hooks = 0, None if self._subject.press is None else Hooks(self._subject.press)

    def crop(self, count: int) -> None:
        """Remove the newest tokens by the cache's own `crop`."""
        self.cache.crop(-count)
        self.tokens -= count
