"""Imports run one way, and what is quick starts quickly."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("harness.", "policies")
_BASE = {"errors", "files", "intervals", "visible"}  # for everybody
_RUN = {"device", "engine", "hub", "registry", "suite", "suite_file"}
# What each package or module of the harness may import besides itself and the base; None: everything.
# Upwards, and to be mended when folders move: device -> engine, hub and suite_text -> registry, tasks and lm_eval both ways,
# progress -> report.
MAY_IMPORT: dict[str, set[str] | None] = {
    "errors": set(), "files": set(), "intervals": set(), "visible": set(),
    "aggregates": set(), "failure": set(), "shape": set(), "user_cache": set(),
    "engine": {"policies", "user_cache"},
    "device": {"engine"},
    "registry": {"policies", "tasks"},
    "hub": {"registry", "user_cache"},
    "data": {"hub"},
    "record_types": set(), "record_metrics": {"record_types"}, "record_schema": {"record_metrics", "record_types"},
    "records": {"record_schema"},
    "report": {"aggregates", "records"},
    "tasks": {"aggregates", "data", "device", "engine", "lm_eval", "policies"},
    "lm_eval": {"data", "engine", "hub", "policies", "policy_rules", "registry", "tasks"},
    "suite_file": {"policies"}, "suite_text": {"registry"},
    "overrides": {"registry", "suite_file", "suite_text"},
    "suite": {"overrides", "policies", "records", "registry", "suite_file", "suite_text"},
    "listing": {"engine", "policies", "registry", "suite"},
    "doctor": {"__version__", "data", "device", "engine", "hub", "listing", "policies"},
    "policy_views": {"policies"},
    "policy_rules": {"policies", "policy_views", "registry", "suite"},
    "policy_check": {"engine", "policies", "policy_rules", "registry", "suite"},
    "pretrain": {"data", "device", "engine", "registry", "suite", "tasks"},
    "progress": {"records", "report"},
    "apart": {"engine", "failure", "registry", "tasks"},
    "estimate": {*_RUN, "shape"},
    "prepare": {*_RUN, "estimate", "policy_rules", "records", "shape", "tasks"},
    "runner": {*_RUN, "__version__", "apart", "failure", "prepare", "records", "tasks"},
    "cli": None, "__main__": {"cli"}, "__init__": set(),
}  # fmt: skip


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "policies").rglob("*.py")), ids=lambda p: p.stem)
def test_policies_import_torch_and_nothing_of_the_harness(path):
    outside = {m.split(".")[0] for m in imports(path)} - {"torch", "policies", *sys.stdlib_module_names}
    assert not outside


@pytest.mark.parametrize(
    "path",
    [
        *(
            ROOT / f"harness/{name}.py"
            for name in ("records", "record_metrics", "record_schema", "record_types", "aggregates", "intervals", "visible")
        ),
        *sorted((ROOT / "harness/report").rglob("*.py")),
    ],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_reports_import_records_only(path):
    """And what computes figures of traces: nothing that has torch behind it."""
    ours = {m for m in imports(path) if m.startswith(("harness", "policies"))}
    allowed = {*_BASE, "record_metrics", "record_schema", "record_types", "records", "report", "aggregates"}
    assert {m.split(".")[1] for m in ours} <= allowed
    assert not {m.split(".")[0] for m in imports(path)} & {"torch", "transformers", "datasets"}


@pytest.mark.parametrize("path", sorted((ROOT / "harness").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_imports_what_its_package_may(path):
    package, *inside = path.relative_to(ROOT / "harness").with_suffix("").parts
    assert package in MAY_IMPORT, f"say in MAY_IMPORT what {package} may import"
    allowed = MAY_IMPORT[package]
    ours = {m.split(".")[1] if m.startswith("harness.") else "policies" for m in imports(path) if m.startswith(OURS)}
    if allowed is not None:
        assert ours <= {package, *_BASE, *allowed}
    if inside and inside[0] == "kernels":  # which the walk calls, and nothing else of the engine
        of_engine = {m for m in imports(path) if m.startswith("harness.engine.")}
        assert all(m.split(".")[2] in ("kernels", "slots", "rotary") for m in of_engine)


def test_the_table_of_imports_names_what_is_there():
    there = {path.relative_to(ROOT / "harness").with_suffix("").parts[0] for path in (ROOT / "harness").rglob("*.py")}
    assert set(MAY_IMPORT) == there


@pytest.mark.parametrize("command", [["--help"], ["leaderboard", "--out", "-"], ["run", "--help"]])
def test_help_and_the_leaderboard_start_without_torch(command, tmp_path):
    code = (
        f"import sys; sys.argv = ['bench', *{command!r}]\nfrom harness.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr


def test_files_and_functions_stay_short():
    for path in [*(ROOT / "policies").rglob("*.py"), *(ROOT / "harness").rglob("*.py")]:
        text = path.read_text()
        assert text.count("\n") <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}:{node.name}"


def test_the_page_in_the_repository_is_the_page_of_its_records(board):
    from harness.records import RecordStore
    from harness.report import paper
    from harness.report.leaderboard import render

    records, problems = RecordStore(board / "results").read_all()
    assert not problems
    charts = []
    for page, file in ((render(records), "README.md"), (paper.render(records), "paper.md")):
        assert page.text == (board / file).read_text(encoding="utf-8")
        charts += [f"{c.name}{theme}.svg" for c in page.charts for theme in ("", "-dark")]
    assert sorted(charts) == sorted(p.name for p in (board / "charts").iterdir())
