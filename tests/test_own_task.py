"""A task is one file: that of CONTRIBUTING.md, outside the package, is run, verified, shown, compared and held by the gate."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import bench_in

from kvbench.harness.core import plugins
from kvbench.harness.records import Record, RecordStore, digest, read
from kvbench.harness.records.cell import AnyOptions
from kvbench.harness.report import gate
from kvbench.harness.report.compare import differences

ROOT = Path(__file__).parents[1]
CODE = next(
    c for c in re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S) if "class Hits(Task)" in c
)
SUITE = """
suite: own
version: 1
model: {id: "builtin:sink_1"}
task: {name: "hits.py:Hits", tokens: 200}
policies: [dense, {name: window, capacity: [16, 32]}]
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """A folder with the task's file, a suite, and the records of a run."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "hits.py").write_text(CODE)
    (folder / "own.yaml").write_text(SUITE)
    done = bench_in("run", "own.yaml", "--threads", 1, "--results", "results", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def bench(folder: Path, *args: object):
    return bench_in("--task", "hits.py:Hits", *args, cwd=folder)


def records_of(folder: Path) -> list[Record]:
    records, problems = RecordStore(folder).read_all()
    assert not problems
    return records


def rewritten(record: Record, **figures) -> Record:
    """The record with other figures, as its file would have them."""
    return Record.from_json(json.loads(json.dumps(record.as_json() | {"metrics": record.metrics.as_json() | figures})))


@pytest.mark.slow("measures suites")
def test_they_are_verified_shown_and_compared(ran):
    done = bench(ran, "records", "verify", "results")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 records are correct" in done.stderr
    page = bench(ran, "leaderboard", "--results", "results", "--out", "-").stdout
    assert "| policy | capacity | hit rate | tokens | status |" in page
    assert len([line for line in page.splitlines() if re.match(r"\| (dense|window) ", line)]) >= 3
    for record in records_of(ran / "results"):
        assert (record.cell.task.name, record.cell.task.tokens) == ("hits.py:Hits", 200), "no folder is named"
        assert type(record.metrics).__name__ == "HitsMetrics"
        assert record.metrics.hits == round(record.metrics.hit_rate * record.metrics.tokens)
        assert record.facts.task_sha256
    less = rewritten(record, hit_rate=record.metrics.hit_rate / 2)
    assert {d.metric: d.verdict for d in differences(record, less)}["hit_rate"] == "worse"
    assert {d.metric: d.verdict for d in differences(less, record)}["hit_rate"] == "better"
    assert {d.verdict for d in differences(record, record)} == {"same"}


@pytest.mark.slow("measures suites")
def test_the_gate_catches_a_change_of_a_figure_and_lets_times_be(ran):
    folder = ran / "results"
    records = records_of(folder)
    slower = [rewritten(r, seconds=100 * r.metrics.seconds) for r in records]
    for now in (records, slower):
        assert [f for f in gate.check((records, folder), (now, folder), {}) if f.state not in ("ok", "not compared")] == []
    fewer = [rewritten(r, hits=r.metrics.hits - 1) for r in records]
    found = {f.check: f.says for f in gate.check((records, folder), (fewer, folder), {}) if f.state == "regression"}
    assert found["figures"].startswith("hits ")
    assert "trace" in found


@pytest.mark.slow("measures suites")
def test_no_file_is_imported_because_a_record_names_it(ran, monkeypatch):
    monkeypatch.chdir(ran)
    monkeypatch.setattr(plugins, "_tasks_of_files", {})
    (ran / "evil.py").write_text("raise SystemExit('imported')\n")
    path = next(iter((ran / "results").rglob("*.json")))
    value = json.loads(path.read_text())
    value["cell"]["task"]["name"] = "evil.py:Evil"
    odd = ran / "odd.json"
    odd.write_text(json.dumps(value))
    assert "cell was edited" in read(odd).reason
    odd.write_text(json.dumps(value | {"cell_id": digest(value["cell"])}))
    assert isinstance(read(odd).cell.task, AnyOptions)
    assert plugins.known_task("evil.py:Evil") is None


def test_tasks_and_what_reads_records_import_no_torch():
    code = (
        "import sys\nfrom kvbench.harness.core import plugins\n"
        "assert len(plugins.working_tasks()) >= 6\n"
        "heavy = {'torch', 'transformers', 'datasets', 'lm_eval', 'pyarrow'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
