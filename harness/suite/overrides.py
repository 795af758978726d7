"""Changes that the command line makes to a suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError, did_you_mean
from kvbench.harness.suite.file import ModelSpec, SuiteFile
from kvbench.harness.suite.text import Source, items, yaml_value


def override(source: Source, model: str | None, dtype: str | None, policies: Sequence[str], settings: Sequence[str]) -> None:
    """Change a suite's data by the values of --model, --dtype, --policy and --set, "key=value" each."""
    if model is not None:
        source.put(("model",), _models(model), "--model")
    if dtype is not None:
        for i, _ in items(source.data.get("model")):
            source.put(("model", *i, "dtype"), dtype, "--dtype")
    if policies:
        chosen = [entry for option in policies for entry in _entries(source, yaml_value(option, "--policy"))]
        source.put(("policies",), chosen, "--policy")
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise UserError(f"--set {setting}: expected KEY=VALUE")
        value = yaml_value(text, f"--set {setting}")
        _refuse_choice_of_tasks(source, key, value, f"--set {setting}")
        _set(source, key, value, f"--set {setting}")


def _entries(source: Source, option: Any) -> list[Any]:
    """Return the suite's entries of the policy that --policy names, parameters included, or the option itself without any."""
    listed = source.data.get("policies")
    entries = listed if isinstance(listed, list) else []
    return [entry for entry in entries if option == (entry.get("name") if isinstance(entry, dict) else entry)] or [option]


def _refuse_choice_of_tasks(source: Source, key: str, value: Any, place: str) -> None:
    """Refuse `task` or `tasks` as a choice among the suite's tasks. `tasks` is an option of the task `lm_eval`."""
    tasks = {task.get("name") for _, task in items(source.data.get("task")) if isinstance(task, dict)}
    names = [name for _, name in items(value) if isinstance(name, str) and name in {*tasks, *plugins.task_names()}]
    if key not in ("task", "tasks") or not names:
        return
    for name in set(names) - tasks:
        raise UserError(f"{place}: this suite has no task '{name}', only {', '.join(sorted(map(str, tasks)))}")
    raise UserError(f"{place}: give {' '.join(f'--only {n}' for n in names)} to measure only some of the suite's tasks")


def _models(model: str) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the model that --model names, or all models in a folder of models, such as the results of `bench pretrain`."""
    folder = Path(model).expanduser()
    inside = [] if (folder / "config.json").exists() else sorted(folder.glob("*/config.json"))
    return [{"id": str(file.parent)} for file in inside] or {"id": model}


def _set(source: Source, key: str, value: Any, place: str) -> None:
    """Set every field with this name in the suite, its tasks, models and policies."""
    data, is_known = source.data, False
    if key in SuiteFile.model_fields and key not in ("model", "task", "policies"):
        source.put((key,), value, place)
        is_known = True
    for group in ("task", "model"):
        for i, holder in items(data.get(group)):
            name = key.removeprefix(f"{group}.")
            if isinstance(holder, dict) and name in _options(group, holder):
                source.put((group, *i, name), value, place)
                is_known = True
    for index, entry in enumerate(data.get("policies") or []):
        if (isinstance(entry, dict) and key in entry) or key in _parameters(entry):
            if isinstance(entry, str):
                data["policies"][index] = {"name": entry}
            if key in SuiteFile.model_fields:
                data["policies"][index].pop(key, None)  # the suite's value replaces it
            else:
                source.put(("policies", index, key), value, place)
            is_known = True
    if not is_known:
        known = {"capacity", "evict", "kv", "positions", "limit", "seed", *ModelSpec.model_fields}
        for _, holder in items(data.get("task")):
            known |= _options("task", holder) if isinstance(holder, dict) else set()
        for entry in data.get("policies") or []:
            known |= _parameters(entry)
        raise UserError(f"{place}: unknown key '{key}'{did_you_mean(key, known)}")


def _options(group: str, holder: dict[str, Any]) -> set[str]:
    """Return the keys that are allowed in a task's or a model's mapping."""
    if group == "model":
        return set(ModelSpec.model_fields)
    try:
        return set(plugins.task_class(str(holder.get("name"))).options.model_fields) - {"name"}
    except UserError:
        return set()


def _parameters(entry: Any) -> set[str]:
    """Return the names of a policy's parameters; empty for an unknown policy, which is reported later, with its line."""
    name = entry.get("name") if isinstance(entry, dict) else entry
    try:
        return {f.name for f in dataclasses.fields(plugins.policy_class(str(name)))}
    except UserError:
        return set()
