"""The arguments of `kvbench.Cache`, and those of the calls that carry one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from operator import index
from typing import Any

from kvbench.harness.core.device import free_bytes
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.parameters import policy_from
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.model import Model
from kvbench.harness.suite import refuse_wrong_types
from kvbench.policies import Policy

_UNDERSTOOD = {
    "input_ids", "attention_mask", "past_key_values", "logits_to_keep", "return_dict",
    "position_ids", "cache_position", "use_cache",  # which the decoder knows without being told
    "tokenizer",  # of `stop_strings`: generate passes it on to the model, too
}  # fmt: skip


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Refuse a call that wants more than logits, or has no tokens.

    Raises:
        UserError: names the arguments.
    """
    others = [k for k, v in given.items() if k not in _UNDERSTOOD and v is not None and v is not False]
    tokens, keep = given.get("input_ids"), given.get("logits_to_keep", 0)
    if others or tokens is None:
        raise UserError(f"a kvbench.Cache reads input_ids and gives logits: leave out {', '.join(others) or 'all but input_ids'}")
    if not isinstance(keep, int) or keep < 0:
        raise UserError("logits_to_keep: expected a number of tokens, 0 or more")
    if given.get("use_cache") is False:
        raise UserError("use_cache is False, so generate would pass the whole text at every step: pass use_cache=True")


def policy_of(policy: str | Policy | type[Policy], parameters: Mapping[str, Any]) -> Policy:
    """The policy that was asked for.

    Raises:
        UserError: there is none of this name.
        ValueError, TypeError: it has no such parameters, or refuses their values.
    """
    if isinstance(policy, Policy) and not parameters:
        return policy
    if isinstance(policy, str):
        built = policy_from(policy, parameters)
    elif inspect.isclass(policy) and issubclass(policy, Policy):
        built = policy(**parameters)
    else:
        raise UserError(f"policy: expected a name, file.py:Class, a class or an instance with its parameters, not {policy!r}")
    if parameters:
        refuse_wrong_types(built, parameters)
    return built


def whole_number(name: str, value: Any, least: int, most: int) -> int:
    """A whole number, also one of NumPy or PyTorch.

    Raises:
        UserError: it is none, or out of range.
    """
    try:
        number = index(value)
    except TypeError:
        number = None
    if isinstance(value, bool) or number is None or not least <= number <= most:
        raise UserError(f"{name}: expected a whole number from {least:,} to {most:,}, not {value!r}")
    return number


def refuse_too_large(model: Model, config: CacheConfig, capacity: int) -> None:
    """Refuse a capacity whose slots don't fit into memory.

    Raises:
        UserError: names both sizes.
    """
    needed, free = model.kv_bytes(capacity + config.every - 1, codec=config.kv), free_bytes(model.device)
    if needed > free:
        raise UserError(f"capacity {capacity:,}: its slots take {needed / 2**30:,.1f} GiB, but only {free / 2**30:,.1f} are free")
