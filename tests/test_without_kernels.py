"""The engine without the package of kernels: the same figures, and the reason in the record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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


def measured(folder: Path, name: str, begin: str, *options: str) -> list[dict]:
    """The records of the suite, measured in a new process. begin: code that runs first there."""
    arguments = ["bench", "run", "s.yaml", "--json", "--device", "cpu", "--threads", "1", "--results", name, *options]
    code = f"{begin}\nsys.argv = {arguments!r}\nfrom kvbench.harness.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow("processes of its own")
def test_without_kernels_the_engine_reads_by_its_own_code(tmp_path):
    """The NLLs are the plain walk's, up to rounding in float32, and each record says why nothing faster was used."""
    (tmp_path / "s.yaml").write_text(SUITE)
    records, walked = measured(tmp_path, "r", WITHOUT_KERNELS), measured(tmp_path, "w", "import sys", "--walk")
    assert [record["facts"]["method"] for record in records] == ["closed form", "closed form", "walk"]
    for record, plain in zip(records, walked, strict=True):
        assert record["status"] == "ok"
        assert record["facts"]["step"] == "plain"
        assert record["facts"]["refused"].startswith("there are no kernels: ")
        assert record["metrics"]["nll"] == pytest.approx(plain["metrics"]["nll"], abs=1e-6)
