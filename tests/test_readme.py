"""What the README says is so."""

from __future__ import annotations

import itertools
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml

from kvbench.harness.cli import cli
from kvbench.harness.core import plugins
from kvbench.harness.models.families import FAMILIES
from kvbench.harness.run import policy_check

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_every_verb_policy_and_task_is_named():
    names = [*cli.commands, *plugins.policy_names(), *plugins.task_names()]
    assert [n for n in names if f"`{n}`" not in README and f"bench {n}" not in README] == []


def test_the_table_is_that_of_the_leaderboard(board):
    after = README[README.index("<!-- table -->") :].splitlines()[1:]
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), after))
    page = (board / "README.md").read_text().splitlines()
    assert len(rows) >= 8
    assert [row for row in rows if row not in page] == []


def test_its_policy_works_from_a_file_of_its_own(tmp_path):
    code = next(c for c in re.findall(r"```python\n(.*?)```", README, re.S) if "class SmallKeys" in c)
    assert len(code.strip().splitlines()) <= 22
    file = tmp_path / "small_keys.py"
    file.write_text(code)
    assert [f for f in policy_check.run_checks(f"{file}:SmallKeys") if not f.ok] == []


def test_its_suite_is_one(tmp_path):
    from kvbench.harness import suite

    text = next(c for c in re.findall(r"```yaml\n(.*?)```", README, re.S))
    (tmp_path / "s.yaml").write_text(text)
    assert len(suite.load(tmp_path / "s.yaml")[1]) == 1 + 3 * 4
    shipped = yaml.safe_load((ROOT / "suites/pg19.yaml").read_text())
    assert {k: v for k, v in yaml.safe_load(text).items() if k != "policies"}.items() <= shipped.items()


def test_the_number_of_families_is_that_of_the_list():
    from test_models import REFUSED

    assert f"{len(FAMILIES) - len(REFUSED)} families passing" in README
    assert f"{len(REFUSED)} refused" in README


def test_a_policy_of_an_installed_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch):
    entry = EntryPoint("theirs", "kvbench.policies.window:Window", "bench.policies")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == "bench.policies" else [])
    assert "theirs" in plugins.policy_names()
    assert plugins.policy_class("theirs").__name__ == "Window"
