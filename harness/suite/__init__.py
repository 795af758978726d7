"""Reading of suites: check the YAML, expand its lists into cells, and report mistakes with their line."""

from kvbench.harness.suite.cells import Cell, cell_from_spec, find, labels, load, shipped_suites, with_references
from kvbench.harness.suite.editor_schema import schema
from kvbench.harness.suite.entries import entry_schema, parameter_schema, policy_with
from kvbench.harness.suite.file import ModelSpec, Resources, SuiteFile
from kvbench.harness.suite.text import Settings, validated, yaml_value

__all__ = [
    "Cell",
    "ModelSpec",
    "Resources",
    "Settings",
    "SuiteFile",
    "cell_from_spec",
    "entry_schema",
    "find",
    "labels",
    "load",
    "parameter_schema",
    "policy_with",
    "schema",
    "shipped_suites",
    "validated",
    "with_references",
    "yaml_value",
]
