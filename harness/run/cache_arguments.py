"""Check the arguments of `kvbench.Cache`, and of model calls with such a cache."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from operator import index
from typing import Any

from torch import Tensor

from kvbench.harness.core import plugins, user_files
from kvbench.harness.core.errors import UserError
from kvbench.harness.suite import policy_with
from kvbench.policies import Policy

_OPTION = "kvbench.Cache"  # name in messages
_UNDERSTOOD = {
    "input_ids",
    "attention_mask",
    "past_key_values",
    "logits_to_keep",
    "return_dict",
    "position_ids",
    "cache_position",
    "use_cache",  # the decoder always uses its cache
    "tokenizer",  # needed for `stop_strings`; generate passes it on to the model
}


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Refuse a call that requests more than logits, has no tokens, or turns the cache off.

    Raises:
        UserError: an argument is missing, not supported, or of another type.
    """
    others = [k for k, v in given.items() if k not in _UNDERSTOOD and v is not None and v is not False]
    tokens, keep = given.get("input_ids"), given.get("logits_to_keep", 0)
    if others or tokens is None:
        raise UserError(f"a kvbench.Cache reads input_ids and gives logits: leave out {', '.join(others) or 'all but input_ids'}")
    for name in ("input_ids", "attention_mask", "position_ids"):
        if not isinstance(value := given.get(name), Tensor | None):
            raise UserError(f"{name}: expected a tensor, not a {type(value).__name__}: pass return_tensors='pt' to the tokenizer")
    if not isinstance(keep, int) or keep < 0:
        raise UserError("logits_to_keep: expected a number of tokens, 0 or more")
    if given.get("use_cache") is False:
        raise UserError("use_cache is False, so generate would pass the whole text at every step: pass use_cache=True")


def policy_of(policy: str | Policy | type[Policy], parameters: Mapping[str, Any]) -> Policy:
    """Return the requested policy.

    Raises:
        UserError: there is no policy of this name, or a parameter has a mistake.
    """
    if isinstance(policy, Policy) and not parameters:
        policy_with(type(policy).__name__, type(policy), {f.name: getattr(policy, f.name) for f in fields(policy)}, _OPTION)
        return policy
    user_files.forget_changed()
    kind = plugins.policy_class(policy) if isinstance(policy, str) else policy
    if not (inspect.isclass(kind) and issubclass(kind, Policy)):
        raise UserError(f"policy: expected a name, file.py:Class, a class or an instance with its parameters, not {policy!r}")
    return policy_with(policy if isinstance(policy, str) else kind.__name__, kind, parameters, _OPTION)


def whole_number(name: str, value: Any, least: int, most: int) -> int:
    """Return a whole number, which may come from NumPy or PyTorch, as an int.

    Raises:
        UserError: the value is not a whole number, or out of range.
    """
    try:
        number = index(value)
    except TypeError:
        number = None
    if isinstance(value, bool) or number is None or not least <= number <= most:
        raise UserError(f"{name}: expected a whole number from {least:,} to {most:,}, not {value!r}")
    return number
