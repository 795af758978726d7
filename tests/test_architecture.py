"""Imports run one way, and quick commands start quickly."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast


ROOT = Path(__file__).parents[1]
# What each package may import besides itself, including lazy imports and imports for types. Layers are in order: a package may
# import only what is above it. `kvbench` is the top package itself, for its version.
MAY_IMPORT = {
    "policies": "",
    "core": "policies",
    "records": "core",
    "rules": "core policies",
    "engine": "core policies",
    "kernels": "core engine policies",
    "models": "core engine policies",
    "data": "core models",
    "suite": "core models policies records",
    "report": "core records",
    "lm_eval": "core data engine models policies rules suite",
    "tasks": "core data engine lm_eval models policies records report",
    "run": "core data engine kvbench models policies records report rules suite tasks",
    "audit": "core data engine models policies report run",
    "cli": "audit core data engine kvbench lm_eval models policies records report run suite",
}


INTERFACE = ROOT / "harness/engine/kernel_interface.py"  # the only importer of the kernels, which stand below the engine


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    """All modules and names that a file imports, at any place in it."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def package_of(module: str) -> str:
    """The package of ours that a module belongs to; empty if it is not ours."""
    top, *inside = module.split(".")
    if top != "kvbench" or inside == ["harness"]:
        return ""
    if inside[:1] == ["harness"]:
        return inside[1]
    return inside[0] if inside[:1] in (["policies"], ["lab"]) else "kvbench"


def packages_imported(path: Path) -> set[str]:
    """All imports of our own modules."""
    return {package_of(module) for module in imports(path)} - {""}


def test_policies_import_torch_and_nothing_of_the_harness():
    for path in sorted((ROOT / "policies").rglob("*.py")):
        assert not {m.split(".")[0] for m in imports(path)} - {"torch", "kvbench", *sys.stdlib_module_names}, path
        assert packages_imported(path) <= {"policies"}, path


def test_every_file_imports_what_its_package_may():
    for path in sorted((ROOT / "harness").rglob("*.py")):
        package, *inside = path.relative_to(ROOT / "harness").with_suffix("").parts
        if package == "__init__":
            assert not imports(path), path
            continue
        assert inside, f"{path.name} belongs in a package"
        allowed = {package, *MAY_IMPORT[package].split()}
        assert packages_imported(path) <= (allowed | {"kernels"} if path == INTERFACE else allowed), path
        assert not {m for m in imports(path) if m.split(".")[0] in ("harness", "policies", "tests")}, path


def test_the_lab_stands_on_the_harness_and_nothing_on_the_lab():
    for path in sorted((ROOT / "lab").rglob("*.py")):
        assert not {m for m in imports(path) if m.split(".")[0] in ("harness", "policies", "lab", "tests")}, path
    for path in sorted((ROOT / "kvbench").glob("*.py")):
        assert "lab" not in packages_imported(path), path


def test_the_engine_calls_at_most_six_functions_of_the_kernels():
    """A single module of the engine imports the package of kernels, and no module of the package."""
    assert {m for m in imports(INTERFACE) if package_of(m) == "kernels"} == {"kvbench.harness.kernels"}
    tree = parsed(ROOT / "harness/kernels/__init__.py")
    public = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert len(public) <= 6
    attributes = (node for node in ast.walk(parsed(INTERFACE)) if isinstance(node, ast.Attribute))
    assert {x.attr for x in attributes if isinstance(x.value, ast.Name) and x.value.id == "package"} == public


def test_the_table_of_imports_has_every_package_and_points_upward():
    folders = {path.relative_to(ROOT / "harness").parts[0] for path in (ROOT / "harness").rglob("*.py")} - {"__init__.py"}
    assert set(MAY_IMPORT) == folders | {"policies"}
    above = {"kvbench"}
    for package, allowed in MAY_IMPORT.items():
        assert set(allowed.split()) <= above, f"{package} may import only what stands above it"
        above.add(package)


def test_no_modules_import_each_other_in_a_circle():
    files = {
        ".".join(("kvbench", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
        for folder in ("harness", "policies")
        for path in (ROOT / folder).rglob("*.py")
    }
    below = {}
    for name, path in files.items():  # imports for types alone are indented
        nodes = [node for node in parsed(path).body if isinstance(node, ast.ImportFrom)]
        pairs = [(node.module, f"{node.module}.{alias.name}") for node in nodes for alias in node.names]
        below[name] = {member if member in files else module for module, member in pairs} & files.keys()
    TopologicalSorter(below).prepare()  # raises CycleError, which names the circle


def test_records_and_reports_need_no_torch():
    for package in ("records", "report"):
        for path in sorted((ROOT / "harness" / package).rglob("*.py")):
            assert not {m.split(".")[0] for m in imports(path)} & {"torch", "transformers", "datasets", "lm_eval"}, path


def attributes_set(function: ast.FunctionDef) -> set[str]:
    """Names that a method sets on its first argument."""
    own = function.args.args[0].arg if function.args.args else ""
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == own
    }


def test_no_attribute_is_born_outside_init():
    """All state of an object is defined in its constructor. State that changes from block to block is passed on as a value."""
    for path in sorted([*(ROOT / "harness").rglob("*.py"), *(ROOT / "lab").rglob("*.py")]):
        for kind in (node for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)):
            methods = {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)}
            born = {node.target.id for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
            born |= attributes_set(methods["__init__"]) if "__init__" in methods else set()
            for method in methods.values():
                assert attributes_set(method) <= born, f"{path}: {kind.name}.{method.name}"


BASELINE, WITHOUT_ATTENTION = (str(ROOT / "leaderboard/baselines" / name) for name in ("quickstart", "formats"))
HEAVY = {"torch", "transformers", "datasets", "lm_eval", "pandas", "kvbench.lab.pretrain"}
LAB = "kvbench.lab"  # which knows more figures of the task attention than the harness
FEWEST = {"numpy", "scipy", "pydantic", LAB}
COMMANDS = """
import sys
from kvbench.harness.cli import main

for command, modules in {commands!r}:
    sys.argv = ["bench", *command]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (command, end.code)
    assert not modules & set(sys.modules), (command, modules & set(sys.modules))
"""


@pytest.mark.slow("processes of their own")
@pytest.mark.parametrize(
    "commands",
    [
        [
            (["--help"], FEWEST),
            (["run", "--help"], FEWEST),
            (["leaderboard", "--results", WITHOUT_ATTENTION, "--out", "-"], {LAB}),
            (["check", "--baseline", WITHOUT_ATTENTION, "--results", WITHOUT_ATTENTION], {LAB}),
        ],
        [
            (["compare", BASELINE, BASELINE], {"scipy"}),
            (["leaderboard", "--results", BASELINE, "--out", "-"], set()),
            (["check", "--baseline", BASELINE, "--results", BASELINE], set()),  # intervals of attention are computed again
            (["records", "verify", BASELINE], set()),
        ],
    ],
    ids=["without attention", "with attention"],
)
def test_a_reader_of_records_starts_without_what_measures(commands, tmp_path):
    """A process runs several commands: those that may import least come first."""
    code = COMMANDS.format(commands=[(command, HEAVY | modules) for command, modules in commands])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr


def test_files_and_functions_stay_short():
    for path in [path for folder in ("policies", "harness", "lab") for path in (ROOT / folder).rglob("*.py")]:
        assert path.read_text().count("\n") <= 400, path
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}:{node.name}"
