"""What an installation puts where: everything under `kvbench`, so that another package may bring its own `policies/`."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
