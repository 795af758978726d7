"""The Python interface: `docs/python.md` is run as it stands, and what a notebook's policies need."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from math import inf
from pathlib import Path

import pytest

from kvbench import CacheView, Policy, Records, load_records, run
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


@pytest.mark.slow("measures suites")
def test_run_gives_the_records_that_bench_run_would_keep(tmp_path, capsys):
    records = run(
        "quickstart",
        policies=[Newest, "window", H2O(window=8), {"name": "h2o", "window": [16, 32]}],
        results=tmp_path,
        progress=False,
        **SMALL,
    )
    assert capsys.readouterr() == ("", "")
    of_h2o = [("ok", "h2o", 8), ("ok", "h2o", 16), ("ok", "h2o", 32)]
    assert [(r.status, r.cell.policy, r.cell.parameters.get("window")) for r in records] == [
        ("ok", f"{__name__}:Newest", None),
        ("ok", "window", None),
        *of_h2o,
        *of_h2o,
    ], "h2o reads the long stream, too"
    assert records[0].metrics.nll == pytest.approx(records[1].metrics.nll, abs=1e-6)
    kept = load_records(tmp_path)
    assert isinstance(kept, Records)
    assert sorted(r.key for r in kept) == sorted(r.key for r in records)
    frame = kept.to_frame()
    assert {"policy", "capacity", "model.id", "task.tokens", "parameters.window", "metrics.nll", "facts.method"} <= set(frame)
    assert sorted(frame["key"]) == sorted(r.key for r in records)
    assert "perplexity" in kept._repr_html_()


def test_load_records_needs_no_torch(tmp_path):
    code = "import sys, kvbench; kvbench.load_records('.'); print({'torch', 'pandas', 'scipy'} & set(sys.modules))"
    assert main_module(code, tmp_path) == "set()\n"


CLASS = """
from kvbench import Policy
from kvbench.harness.core.source_digests import source_digest

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
    assert printed.startswith("failed it is measured in another process, which can't import Mine: ")
