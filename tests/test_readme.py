"""What the README and the documentation say is so."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from conftest import bench

from kvbench.harness.core import plugins

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = {re.search(r"class (\w+)\(Policy\)", code)[1]: code for code in re.findall(r"```python\n(.*?)```", README, re.S)}


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.slow("measures suites")
def test_its_command_measures_its_policy(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("small_keys.py").write_text(CODE["SmallKeys"])
    command = re.search(r"^bench (run smoke (?:.*\\\n)*.*)$", README, re.M)[1].replace("\\\n", "").split()
    code, out, _ = bench(capsys, *command, "--results", "results")
    assert code == 0
    assert all(name in out for name in ("SmallKeys", "sink_window"))


@pytest.fixture
def written(tmp_path, monkeypatch) -> dict[str, list[str]]:
    """The settings in the commands of the guides, by policy. The current directory has the files of their examples."""
    monkeypatch.chdir(tmp_path)
    text = page("write-a-policy.md") + page("write-a-statistic.md")
    classes = {re.search(r"class (\w+)\((?:Policy|Composed)\)", c)[1]: c for c in re.findall(r"```python\n(.*?)```", text, re.S)}
    found = {}
    for file, name, settings in re.findall(r"^bench policy check (\w+\.py):(\w+)(.*)$", text, re.M):
        Path(file).write_text(classes.pop(name))
        found[f"{file}:{name}"] = re.findall(r"--set (\S+)", settings)
    assert classes == {}, "each example has a command that checks it"
    return found


@pytest.mark.slow("measures suites")
def test_the_examples_of_every_kind_are_measured(written, capsys):
    """By the suite beside them, at every moment of eviction."""
    suite = re.search(r"```yaml\n(.*?)```", page("write-a-policy.md"), re.S)[1]
    Path("mine.yaml").write_text(suite)
    shorter = ("--set", "tokens=128", "--set", "prompt=72")
    code, out, _ = bench(capsys, "run", "mine.yaml", *shorter, "--results", "results", "--json")
    assert code == 0
    records = json.loads(out)
    assert all(r["status"] == "ok" for r in records)
    assert {r["cell"]["policy"] for r in records} == {"random", *written}
    assert len(records) == 3 * (1 + 1 + 2)


def test_a_policy_of_an_installed_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch):
    entry = EntryPoint("theirs", "kvbench.policies.window:Window", "bench.policies")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == "bench.policies" else [])
    assert "theirs" in plugins.policy_names()
    assert plugins.policy_class("theirs").__name__ == "Window"
