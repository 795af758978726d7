"""The Python interface, frames for papers, and the commands of README and documentation."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from math import inf
from pathlib import Path

import pandas as pd
import pytest
from factories import RECORDS
from helpers import H2O, bench
from test_progress import measured

from kvbench import CacheView, Policy, Records, compare, load_records, losses, run
from kvbench.harness.core.errors import UserError
from kvbench.harness.report import feed
from kvbench.harness.report.doubts import with_doubts

ROOT = Path(__file__).parents[1]
SMALL = {"tasks": "perplexity", "tokens": 4096, "threads": 1, "device": "cpu"}


@dataclass(frozen=True)
class Newest(Policy):
    """Defined where it is used."""

    def importance(self, view: CacheView):
        return view.position.float().masked_fill(view.age < 1, inf)


def main_module(code: str, cwd: Path) -> str:
    """Return the output of a program without a file, whose classes are like those of a notebook."""
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


@pytest.mark.parametrize("name", ["a\0b", __file__], ids=["null byte", "file"])
def test_results_are_a_folder(name):
    with pytest.raises(UserError, match=r"no name of a folder|not a folder"):
        run("quickstart", results=name, progress=False)


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
    named = [name.rpartition(":")[2] for option, name in itertools.pairwise(command) if option == "--policy"]
    assert all(name in out for name in ["SmallKeys", *named])


@pytest.fixture
def written(tmp_path, monkeypatch) -> dict[str, list[str]]:
    """The settings in the commands of the guides, by policy. The current directory has the files of their examples."""
    monkeypatch.chdir(tmp_path)
    text = page("write-a-policy.md") + page("write-a-statistic.md")
    kinds, blocks = r"class (\w+)\((?:Policy|Composed|Merging|Selecting)\)", re.findall(r"```python\n(.*?)```", text, re.S)
    classes = {re.search(kinds, block)[1]: block for block in blocks}
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
    shorter = ("--set", "streams=2", "--set", "tokens=256", "--set", "prompt=72")
    code, out, _ = bench(capsys, "run", "mine.yaml", *shorter, "--results", "results", "--json")
    assert code == 0
    records = json.loads(out)
    assert all(r["status"] == "ok" for r in records)
    evicting = {policy for policy in written if "EveryOther" not in policy}  # which selects
    assert {r["cell"]["policy"] for r in records} == {"dense", "random", *evicting}
    assert len(records) == 1 + 3 * (1 + 1 + 2 + 1)


LOST = {"value": "loss", "low": "low", "high": "high", "to_name": "reference"}


@pytest.fixture(scope="module")
def records():
    return load_records(RECORDS / "budget.jsonl")


def test_the_frame_has_every_row_of_the_feed_with_its_figures(records):
    questions = feed.feed(records)["questions"]
    rows = [row for q in questions for row in [*(row for budget in q["budgets"] for row in budget["rows"]), *q["references"]]]
    for (_, made), row in zip(losses(records).iterrows(), rows, strict=True):
        assert [made.policy, made.kind, made.status] == [row["name"], row["kind"], row["status"]]
        for name in ("perplexity", "kv_bytes", "kv_share", "ms"):
            assert same(made[name], row[name]), name
        assert same(made.capacity, row["capacity"])
        assert all(map(same, (made.best_rank, made.worst_rank), row["rank"] or (None, None)))
        assert all(same(made[column], (row["loss"] or {}).get(key)) for key, column in LOST.items())
        right = row["answers"][0]["share"] if row["answers"] and made.unit == "points" else None
        assert same(made.right, None if right is None else 100 * right)


def same(value, other) -> bool:
    return pd.isna(value) if other is None else value == other


def test_a_comparison_has_the_intervals_of_the_page(records):
    """The intervals are corrected for all pairs of the budget."""
    at_64 = [r for r in records if r.cell.capacity == 64 and r.cell.task.name == "perplexity"]
    compared = 0
    for question in feed.feed(with_doubts(at_64))["questions"]:
        for budget in question["budgets"]:
            names = [row["name"] for row in budget["rows"]]
            for (first, second), ends in zip(itertools.combinations(names, 2), budget["pairs"], strict=True):
                if second == "h2o":
                    made = compare(at_64, "h2o", first)
                    (made,) = made[made.subject == question["subject"]][["loss", "low", "high"]].to_numpy()
                    assert list(made) == pytest.approx([100 * math.expm1(x) for x in ends], rel=1e-3, abs=1e-2)
                    compared += 1
    assert compared > 1


def test_a_name_is_that_of_a_row_or_of_a_policy():
    seeds = [measured("random", 2.0 + seed / 10, parameters={"sinks": seed}) for seed in (1, 2)]
    both = [measured("dense", 1.9, None), *seeds, measured("h2o", 2.05)]
    every = compare(both, "random", "h2o")
    assert [*every.policy] == ["random (sinks 1)", "random (sinks 2)"]
    one = compare(both, "random (sinks 2)", "h2o")
    assert [*one.policy] == ["random (sinks 2)"]
    assert [*one.verdict] == ["worse"]
    back = compare(both, "h2o", "random (sinks 2)")
    assert [*back.verdict] == ["better"]
    assert back.interval[0].startswith("-")
    assert back.interval[0].isascii(), "pdfLaTeX has no minus sign"
    assert (1 + one.loss[0] / 100) * (1 + back.loss[0] / 100) == pytest.approx(1)
    other = measured("h2o", 2.1, parameters={"window": 4})
    assert {*compare([*both, other], "h2o", "dense").policy} == {"h2o"}, "where a row has exactly that name"
    assert [*compare(both, "dense", "h2o").capacity] == [8], "of the cache, for a reference has none"
