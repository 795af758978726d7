"""The commands `bench list` and `bench schema`: available policies, suites, tasks and models."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from kvbench.harness.cli.output import print_rows
from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError, described
from kvbench.harness.core.packaged import PACKAGED, packaged_path

if TYPE_CHECKING:
    from kvbench.policies import Policy

_CAPACITIES = (64, 1024, 16384)  # tokens; the first capacity that a policy can serve is shown


@click.command("list")
@click.argument("what", type=click.Choice(["policies", "suites", "tasks", "models"]))
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def list_(what: str, as_json: bool) -> None:
    """List policies, suites, tasks or model families. For each family, a tiny random model goes through the self-check.

    \b
    bench list policies
    bench list models
    """
    rows = {"policies": policies, "suites": suites, "tasks": tasks, "models": models}
    print_rows(rows[what](), as_json)


@click.command()
def schema() -> None:
    """Print the JSON schema of suite files, for editors.

    \b
    bench schema > suite.schema.json
    """
    from kvbench.harness import suite

    click.echo(json.dumps(suite.schema(), indent=1))


def policies() -> list[dict[str, Any]]:
    """Return a row per policy: kept tokens, parameters, scope, statistics, and the method that reads blocks.

    The row of a plug-in that can't be used has the reason.
    """
    unusable = {"parameters": "", "scope": "", "statistics": "", "blocks": ""}
    rows = []
    for name in plugins.policy_names():
        try:
            rows.append(_policy(name, plugins.policy_class(name)))
        except UserError as error:
            rows.append({"policy": name, "keeps": str(error), **unusable})
        except Exception as error:  # a user's class may raise anything
            rows.append({"policy": name, "keeps": f"can't be shown: {described(error)}", **unusable})
    return rows + [{"policy": name, "keeps": reason, **unusable} for name, reason in plugins.ignored_plugins().items()]


def _policy(name: str, policy: type[Policy]) -> dict[str, Any]:
    usual = _with_defaults(policy)
    return {
        "policy": name,
        "keeps": next(iter((policy.__doc__ or "").strip().splitlines()), ""),
        "parameters": ", ".join(map(_parameter, dataclasses.fields(policy))),
        "scope": usual.scope if usual else "",
        "statistics": ", ".join(type(s).__name__ for s in usual.statistics) if usual else "",
        "blocks": _blocks(policy),
    }


def _parameter(field: dataclasses.Field[Any]) -> str:
    """Return a parameter's name with its default."""
    from kvbench.policies import Policy

    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if default is dataclasses.MISSING:
        return f"{field.name} (needed)"
    return f"{field.name}={plugins.name_of(type(default)) if isinstance(default, Policy) else default}"


def _with_defaults(policy: type[Policy]) -> Policy | None:
    """Return the policy with every parameter at its default; None if a parameter has no default."""
    try:
        return policy()
    except TypeError:
        return None


def _blocks(policy_class: type[Policy]) -> str:
    """Return the method that reads blocks of tokens under a policy with its defaults, on a CPU."""
    from kvbench.harness.engine.kernel_interface import why_not_compiled
    from kvbench.policies import Selecting
    from kvbench.policies.reset import Reset

    if not policy_class.caches:
        return "full attention between resets" if issubclass(policy_class, Reset) else "windows run afresh"
    if not policy_class.evicts:
        return "masks" if issubclass(policy_class, Selecting) else "closed form"
    usual = _with_defaults(policy_class)
    if usual is None:
        return "depends on its parameters"
    if usual.outcome:
        return "full attention, cut after the prompt"
    for capacity in _CAPACITIES:
        try:
            policy = usual.bind(capacity)
        except ValueError:
            continue
        if policy.band(capacity) is not None:
            return "closed form"
        reason = why_not_compiled(policy)
        return f"compiled steps ({reason})" if reason else "compiled walk"
    return "depends on its parameters"


def tasks() -> list[dict[str, Any]]:
    """Return a row per task: measured quantity and options."""
    rows = []
    for name in plugins.task_names():
        try:
            task = plugins.task_class(name)
        except UserError as error:
            rows.append({"task": name, "measures": str(error), "options": ""})
            continue
        fields = {k: f for k, f in task.options.model_fields.items() if k != "name"}
        options = ", ".join(f"{k} (needed)" if f.is_required() else f"{k}={f.default}" for k, f in fields.items())
        rows.append({"task": name, "measures": (task.__doc__ or "").strip().splitlines()[0], "options": options})
    return rows


def suites() -> list[dict[str, Any]]:
    """Return a row per suite that comes with the project."""
    from kvbench.harness import suite as suite_files

    rows = []
    for path in suite_files.shipped_suites():
        suite, cells = suite_files.load(path)
        models = ", ".join(dict.fromkeys(c.model.id for c in cells))
        rows.append({"suite": path.stem, "cells": len(cells), "model": models, "about": suite.description})
    return rows


def _packaged(name: str) -> dict[str, Any]:
    """Return the row of a packaged model."""
    try:
        packaged_path(name)
    except UserError as error:
        return {"family": name, "state": "not installed", "check": str(error).removeprefix(f"{name}: ")}
    return {"family": name, "state": "installed", "check": PACKAGED[name].about}


def models() -> list[dict[str, Any]]:
    """Return a row per packaged model, and a row per model family: whether a tiny random model passes the self-check."""
    from transformers.utils import logging

    from kvbench.harness.engine.model import UnsupportedModelError, adopt
    from kvbench.harness.models.families import FAMILIES, tiny_model
    from kvbench.harness.models.selfcheck import check

    logging.set_verbosity_error()
    rows = [_packaged(name) for name in PACKAGED]
    for family in FAMILIES:
        try:
            difference = check(adopt(tiny_model(family)))
            state, detail = "works", f"differs from its own forward pass by {difference:.2f} of the rounding error"
        except UnsupportedModelError as error:
            state, detail = "refused", str(error)
        except KeyError:
            state, detail = "unknown", "the installed transformers does not have it"
        rows.append({"family": family, "state": state, "check": detail})
    return rows
