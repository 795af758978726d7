"""The Python interface: `docs/python.md` is run as it stands, and what a notebook's policies need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from math import inf
from pathlib import Path

import pytest

import kvbench
from kvbench import CacheView, Policy, Records, load_records, run
from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError
from kvbench.policies.h2o import H2O

ROOT = Path(__file__).parents[1]
SMALL = {"tasks": "perplexity", "tokens": 4096, "threads": 1, "device": "cpu"}


@dataclass(frozen=True)
class Newest(Policy):
    """Defined where it is used."""

    def importance(self, view: CacheView):
        return view.position.float().masked_fill(view.age < 1, inf)


def main_module(code: str, cwd: Path) -> str:
    """What a program without a file prints: its classes are those of a notebook."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow("processes of its own")
def test_the_page_runs_as_it_stands(tmp_path):
    page, _, _ = (ROOT / "docs/python.md").read_text(encoding="utf-8").partition("## Tables and figures")  # test_losses.py
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 4
    printed = main_module("\n".join(blocks), tmp_path)
    assert "__main__:SmallKeys" in printed
    assert "metrics.perplexity" in printed
    frame = load_records(tmp_path / "results").to_frame()
    assert len(frame) == 3 + 1 + 2, "tova at capacity 64 was there already, twice"
    assert set(frame["status"]) == {"ok"}


@pytest.mark.slow("measures suites")
def test_run_gives_the_records_that_bench_run_would_keep(tmp_path, capsys):
    records = run("quickstart", policies=[Newest, "window", H2O(window=8), {"name": "h2o", "window": [16, 32]}],
                  results=tmp_path, progress=False, **SMALL)  # fmt: skip
    assert capsys.readouterr() == ("", "")
    of_h2o = [("ok", "h2o", 8), ("ok", "h2o", 16), ("ok", "h2o", 32)]
    assert [(r.status, r.cell.policy, r.cell.parameters.get("window")) for r in records] == [
        ("ok", f"{__name__}:Newest", None), ("ok", "window", None), *of_h2o, *of_h2o,
    ], "h2o reads the long stream, too"  # fmt: skip
    assert records[0].metrics.nll == pytest.approx(records[1].metrics.nll, abs=1e-6)
    kept = load_records(tmp_path)
    assert isinstance(kept, Records)
    assert sorted(r.key for r in kept) == sorted(r.key for r in records)
    frame = kept.to_frame()
    assert {"policy", "capacity", "model.id", "task.tokens", "parameters.window", "metrics.nll", "facts.method"} <= set(frame)
    assert sorted(frame["key"]) == sorted(r.key for r in records)
    assert "perplexity" in kept._repr_html_()


def test_mistakes_are_told_in_one_line(tmp_path):
    class Inner(Policy):
        def importance(self, view):
            return view.position.float()

    with pytest.raises(kvbench.UserError, match=r"did you mean 'perplexity'\?"):
        run("quickstart", tasks="perplexty", results=tmp_path)
    with pytest.raises(UserError, match="define the policy at the top"):
        run("quickstart", policies=Inner, results=tmp_path)
    with pytest.raises(UserError, match="unknown key 'tokns', did you mean 'tokens'"):
        run("quickstart", tokns=1, results=tmp_path)


def test_files_that_are_no_records_are_listed(tmp_path):
    (tmp_path / "notes.json").write_text("[]")
    records = load_records(tmp_path)
    assert list(records) == []
    assert [p.path.name for p in records.problems] == ["notes.json"]
    assert records.to_frame().empty


def test_load_records_needs_no_torch(tmp_path):
    code = "import sys, kvbench; kvbench.load_records('.'); print({'torch', 'pandas', 'scipy'} & set(sys.modules))"
    assert main_module(code, tmp_path) == "set()\n"


CLASS = """
from kvbench import Policy
from kvbench.harness.core.sources import source_digest

class Mine(Policy):
    def importance(self, view):
        return {0}
print(source_digest(Mine()))
"""


@pytest.mark.slow("processes of its own")
def test_a_class_without_a_file_has_a_digest_of_its_own_text(tmp_path):
    """Or its cells would not be measured again after a change."""
    texts = ("view.age.float()", "view.age.float()", "-view.age.float()")
    first, again, other = (main_module(CLASS.format(text), tmp_path) for text in texts)
    assert first == again != other


def test_every_name_is_found_again():
    for policy in (H2O, Newest):
        assert plugins.policy_class(plugins.name_of(policy)) is policy


@pytest.mark.slow("processes of its own")
def test_a_class_of_the_program_itself_fails_where_another_process_measures(tmp_path):
    code = """
from kvbench import Policy, run

class Mine(Policy):
    def importance(self, view):
        return view.position.float()
(record,) = run("memory-cpu", policies=Mine, capacity=64, tokens=256, device="cpu", threads=1, progress=False)
print(record.status, record.error.message)
"""
    printed = main_module(code, tmp_path)
    assert printed.startswith("failed this task runs in another process, which can't import Mine: ")


def test_everything_in_all_is_there():
    assert {name for name in kvbench.__all__ if getattr(kvbench, name) is None} == set()
    assert set(kvbench.__all__) <= set(dir(kvbench))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvbench.nothing  # noqa: B018
