"""Files of an installation, and the engine without the package of kernels."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers import bench_in

ROOT = Path(__file__).parents[1]
pytest.importorskip("hatchling", reason="hatchling builds the wheel")

pytestmark = pytest.mark.slow("builds a wheel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture
def site(wheel, tmp_path) -> Path:
    """The wheel unpacked, as pip would, beside a package that has a `policies/`, a `harness/` and a `lab/` of its own."""
    folder = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for name in ("policies", "harness", "lab"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"WHOSE = 'the {name} of another package'\n")
    return folder


def python(*arguments: str, path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True)


def test_the_wheel_holds_every_file_of_ours_and_nothing_beside_kvbench(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    folders = subprocess.run(
        ["git", "ls-files", "policies", "harness", "lab", "suites"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    assert {f"kvbench/{name}" for name in folders} <= inside
    assert {name.split("/")[0] for name in inside} == {"kvbench"}
    assert {"kvbench/__init__.py", "kvbench/__main__.py", "kvbench/py.typed"} <= inside


def test_it_works_beside_a_package_with_the_same_folders(site, tmp_path):
    code = (
        "import policies, harness, kvbench\n"
        "from kvbench import Policy\n"
        "print(policies.WHOSE, harness.WHOSE, kvbench.__file__, Policy.__module__, sep='\\n')"
    )
    done = python("-c", code, path=site, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "the policies of another package",
        "the harness of another package",
        str(site / "kvbench/__init__.py"),
        "kvbench.policies.policy",
    ], done.stderr


SUITE = """
suite: without
version: 1
model: {id: "builtin:sink_1"}
task: {name: perplexity, data: prose, tokens: 300}
policies:
  - dense
  - {name: sink_window, capacity: 32}
  - {name: h2o, capacity: 32}
"""
WITHOUT_KERNELS = "import sys; sys.modules['kvbench.harness.kernels'] = None"


@pytest.mark.slow("processes of its own")
def test_without_kernels_the_engine_reads_by_its_own_code(tmp_path):
    """The NLLs are the plain walk's, up to rounding in float32, and each record says why nothing faster was used."""
    (tmp_path / "s.yaml").write_text(SUITE)
    arguments = ["bench", "run", "s.yaml", "--json", "--device", "cpu", "--threads", "1", "--results"]
    code = f"{WITHOUT_KERNELS}\nsys.argv = {[*arguments, 'r']!r}\nfrom kvbench.harness.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    records, walked = json.loads(done.stdout), json.loads(bench_in(*arguments[1:], "w", "--walk", cwd=tmp_path).stdout)
    assert [record["facts"]["method"] for record in records] == ["closed form", "closed form", "walk"]
    for record, plain in zip(records, walked, strict=True):
        assert record["status"] == "ok"
        assert record["facts"]["step"] == "plain"
        assert record["facts"]["refused"].startswith("there are no kernels: ")
        assert record["metrics"]["nll"] == pytest.approx(plain["metrics"]["nll"], abs=1e-6)
