"""Imports run one way, and what is quick starts quickly."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("harness.", "policies")
# Modules that lie in `harness` itself, by the package they belong to; whatever else lies there is a package of its own.
PACKAGES = {
    "core": "errors failure files intervals user_cache visible",
    "records": "records record_types record_metrics record_schema",
    "device": "device calibration",
    "models": "hub shape",
    "suite": "suite suite_file suite_text overrides",
    "policy_check": "policy_check policy_rules policy_views",
    "run": "runner prepare apart estimate progress",
    "about": "listing doctor",
}
PACKAGE_OF = {module: package for package, modules in PACKAGES.items() for module in modules.split()}
# What each package may import besides itself and the core; None: everything. Arrows that point up, to be turned round when
# folders move: device -> engine, registry -> tasks (types), models -> registry,
# tasks -> lm_eval.
MAY_IMPORT: dict[str, str | None] = {
    "core": "",
    "records": "",
    "engine": "policies",
    "device": "engine",
    "registry": "policies tasks",
    "models": "registry",
    "data": "models",
    "aggregates": "",
    "report": "aggregates records",
    "tasks": "aggregates data device engine lm_eval policies",
    "suite": "policies records registry",
    "policy_check": "engine policies registry suite",
    "lm_eval": "data engine models policies policy_check registry tasks",
    "pretrain": "data device engine registry suite tasks",
    "about": "__version__ data device engine models policies registry suite",
    "run": "__version__ device engine models policy_check records registry report suite tasks",
    "cli": None,
    "__main__": "cli",
    "__init__": "",
}


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
    assert {PACKAGE_OF.get(name, name) for name in (m.split(".")[1] for m in ours)} <= {"core", "records", "report", "aggregates"}
    assert not {m.split(".")[0] for m in imports(path)} & {"torch", "transformers", "datasets"}


@pytest.mark.parametrize("path", sorted((ROOT / "harness").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_imports_what_its_package_may(path):
    top, *inside = path.relative_to(ROOT / "harness").with_suffix("").parts
    package = PACKAGE_OF.get(top, top)
    assert package in MAY_IMPORT, f"say in MAY_IMPORT what {package} may import, or in PACKAGES where it belongs"
    allowed = MAY_IMPORT[package]
    ours = {m.split(".")[1] if m.startswith("harness.") else "policies" for m in imports(path) if m.startswith(OURS)}
    if allowed is not None:
        assert {PACKAGE_OF.get(name, name) for name in ours} <= {package, "core", *allowed.split()}
    if inside and inside[0] == "kernels":  # which the walk calls, and little else of the engine
        of_engine = {m.split(".")[2] for m in imports(path) if m.startswith("harness.engine.")}
        assert of_engine <= {"kernels", "slots", "rows", "rotary"}


def test_the_tables_of_imports_name_what_is_there():
    there = {path.relative_to(ROOT / "harness").with_suffix("").parts[0] for path in (ROOT / "harness").rglob("*.py")}
    assert set(PACKAGE_OF) <= there
    assert set(MAY_IMPORT) == {PACKAGE_OF.get(name, name) for name in there}


def attributes_set(function: ast.FunctionDef) -> set[str]:
    """Names that a method sets on its first argument."""
    own = function.args.args[0].arg if function.args.args else ""
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name) and node.value.id == own
    }  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "harness/engine").rglob("*.py")), ids=lambda p: p.stem)
def test_no_attribute_is_born_outside_init(path):
    """What changes from block to block is a value that is passed on, so a reader finds all state of an object in one place."""
    for kind in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
        methods = {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)}
        born = {node.target.id for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
        born |= attributes_set(methods["__init__"]) if "__init__" in methods else set()
        for method in methods.values():
            assert attributes_set(method) <= born, f"{kind.name}.{method.name}"


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
