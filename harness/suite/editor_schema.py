"""JSON schema of suite files, for editors."""

from __future__ import annotations

from typing import Any

from kvbench.harness.core import plugins
from kvbench.harness.core.parameters import policy_fields
from kvbench.harness.suite.entries import entry_schema, parameter_schema
from kvbench.harness.suite.file import ModelSpec, SuiteFile
from kvbench.policies import Policy

_OWN = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "pattern": ":"}}}
_INSIDE = "policy_inside"  # definition of a policy inside another policy


def schema() -> dict[str, Any]:
    """Return the JSON schema of suite files, with the available policies and tasks and their options."""
    policies = plugins.working_policies()
    tasks = [task.options.model_json_schema() for task in plugins.working_tasks().values()]
    models = [ModelSpec.model_json_schema()]
    nested: dict[str, Any] = {}  # options that are mappings themselves
    for options in (*tasks, *models):
        nested |= options.pop("$defs", {})
        options["properties"] = {k: _or_list(v) for k, v in options["properties"].items()}
    result = SuiteFile.model_json_schema()
    for options in tasks:
        about = "policies to run the task with; all of the suite's if not given"
        options["properties"]["policies"] = {"type": "array", "items": {"type": "string"}, "description": about}
        about = "when tokens are evicted in this task; all of the suite's if not given"
        options["properties"]["evict"] = {**result["properties"]["evict"], "description": about}
    names: dict[str, Any] = {"anyOf": [{"enum": list(policies)}, {"type": "string", "pattern": ":"}]}
    entries = [_entry(name, kind, entry_schema(name, kind).model_json_schema()) for name, kind in policies.items()]
    inside = [_entry(name, kind, parameter_schema(name, kind).model_json_schema()) for name, kind in policies.items()]
    result["properties"]["policies"]["items"] = {"anyOf": [names, *entries, _OWN]}
    result["$defs"] = result.get("$defs", {}) | nested | {_INSIDE: {"anyOf": [names, *inside, _OWN]}}
    for key, kinds in (("task", tasks), ("model", models)):
        one = {"anyOf": [*kinds, _OWN] if key == "task" else kinds}
        result["properties"][key] = {"anyOf": [one, {"type": "array", "items": one}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "KV Bench suite"} | result


def _entry(name: str, kind: type[Policy], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a policy's entry."""
    held = {k: {"$ref": f"#/$defs/{_INSIDE}"} for k in policy_fields(kind)}
    properties = {k: _or_list(v) for k, v in (fields.get("properties", {}) | held).items()}
    known = {"name": {"const": name}} | properties
    return {"type": "object", "required": ["name"], "additionalProperties": False, "properties": known}


def _or_list(one: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that accepts a value or a list of values."""
    return {"anyOf": [one, {"type": "array", "items": one}]}
