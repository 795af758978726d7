"""Looks at a policy's budgets once the model is known: whether they are possible, and whether heads differ."""

from __future__ import annotations

from kvbench.harness.core.errors import UserError, described
from kvbench.harness.engine.budgets import floor_of, static_table
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.model import Model
from kvbench.harness.suite import Cell
from kvbench.policies import Composed, Policy


def refuse_wrong_budgets(cell: Cell, prompt: int | None, model: Model) -> None:
    """Refuse a policy whose table of budgets does not fit the model, before anything is measured.

    Args:
        cell: to be measured.
        prompt: length of its prompts, if they have one.
        model: of the cell.

    Raises:
        UserError: the table has another shape, its budgets don't add up, or heads keep more at least than on average.
    """
    if cell.capacity is None:
        return
    config = CacheConfig(cell.policy, cell.capacity, evict=cell.evict)
    try:
        static_table(model, config, prompt if cell.evict == "prompt" else None)
        floor_of(cell.policy.bind(cell.capacity), cell.capacity)
    except Exception as error:  # a user's policy may raise anything
        why = str(error) if isinstance(error, ValueError) else described(error)
        raise UserError(f"{cell.place}{': ' if cell.place else ''}{cell.label}: {why}") from error


def kind_of_budgets(model: Model, config: CacheConfig) -> str | None:
    """Why heads hold different numbers of tokens: "table", "pool" or "prompt"; None if they don't."""
    policy = config.policy if config.capacity is None else config.policy.bind(config.capacity)
    if config.capacity is not None and policy.caches and static_table(model, config, None) is not None:
        return "table"
    if config.capacity is not None and policy.pool_floor(config.capacity) is not None:
        return "pool"
    return "prompt" if _asks_the_prompt(policy) else None


def _asks_the_prompt(policy: Policy) -> bool:
    """Whether the policy, or one that answers for it, computes budgets from a prompt."""
    answers = type(policy).prompt_budgets
    if isinstance(policy, Composed) and answers is Composed.prompt_budgets:
        return _asks_the_prompt(policy.score)
    return answers is not Policy.prompt_budgets
