"""Reads suites: checks their YAML, multiplies out its lists into cells, and reports mistakes with their line."""

from kvbench.harness.suite.cells import Cell, cell_from_spec, entry_schema, find, labels, load, schema, shipped_suites
from kvbench.harness.suite.file import ModelSpec, SuiteFile
from kvbench.harness.suite.overrides import Overrides

__all__ = [
    "Cell", "ModelSpec", "Overrides", "SuiteFile", "cell_from_spec", "entry_schema", "find", "labels", "load", "schema",
    "shipped_suites",
]  # fmt: skip
