"""Suites: YAML files, checked and multiplied out into cells; mistakes are reported with their line."""

from kvbench.harness.suite.cells import Cell, again, entry_schema, find, labels, load, schema, shipped_suites
from kvbench.harness.suite.file import ModelSpec, SuiteFile
from kvbench.harness.suite.overrides import Overrides

__all__ = [
    "Cell", "ModelSpec", "Overrides", "SuiteFile", "again", "entry_schema", "find", "labels", "load", "schema",
    "shipped_suites",
]  # fmt: skip
