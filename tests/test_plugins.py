"""Policies of packages and files that can't be used are named with the reason, in one line, and the others work.

A task of a file, that of CONTRIBUTING.md, is run, verified, shown, compared and held by the gate.
"""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from helpers import bench, bench_in

from kvbench.harness.core import plugins, user_files
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.source_digests import source_digest
from kvbench.harness.models.config import read_config
from kvbench.harness.records import Record, RecordStore, digest, read
from kvbench.harness.records.cell import AnyOptions
from kvbench.harness.report import gate
from kvbench.harness.report.compare import differences
from kvbench.harness.run.cache_arguments import policy_of
from kvbench.harness.run.python import run

ENTRIES = """[bench.policies]
fails = theirs_fails:Fails
exits = theirs_exits:Exits
gone = theirs:Gone
number = theirs:NUMBER
bare = theirs:Bare
crashes = theirs:Crashes
h2o = theirs:Bare

[bench.tasks]
perplexity = theirs:Bare

[bench.models]
theirs = theirs_model:TheirConfig
theirs_gone = theirs:Gone
llama = theirs_fails:Fails

[bench.commands]
greet = theirs_commands:greet
crash = theirs_commands:crash
gone_too = theirs_commands:gone
number = theirs:NUMBER
doctor = theirs_commands:greet
"""
THEIR_COMMANDS = """
import click

from kvbench import UserError

@click.command()
@click.option("--name", default="you")
def greet(name):
    if name == "nobody":
        raise UserError("greet: nobody is there")
    click.echo(f"hello {name}")

@click.command()
def crash():
    return 1 / 0
"""
THEIR_MODEL = """
from transformers import AutoConfig, LlamaConfig

class TheirConfig(LlamaConfig):
    model_type = "theirs"

AutoConfig.register("theirs", TheirConfig, exist_ok=True)
"""
THEIRS = """
from kvbench.policies.window import Window

NUMBER = 7

class Bare(Window):
    pass

class Crashes(Window):
    def bind(self, capacity):
        return 1 / 0
"""


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """An installed package with six policies. One can be used, and one has the name of one of ours."""
    files = {
        "theirs_fails.py": "import torch\ntorch.no_such_thing\n",
        "theirs_exits.py": "raise SystemExit(3)\n",
        "theirs.py": THEIRS,
        "theirs_commands.py": THEIR_COMMANDS,
        "theirs_model.py": THEIR_MODEL,
        "theirs-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n",
        "theirs-1.0.dist-info/entry_points.txt": ENTRIES,
    }
    (tmp_path / "theirs-1.0.dist-info").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_list_names_what_is_broken_and_lists_the_others(package, capsys):
    code, out, err = bench(capsys, "list", "policies", "--json")
    assert (code, err) == (0, "")
    keeps = {row["policy"]: row["keeps"] for row in json.loads(out)}
    assert keeps["fails"].startswith(
        "the plug-in 'fails' (theirs_fails:Fails) can't be loaded: AttributeError: module 'torch' has"
    )
    assert "SystemExit: 3 (theirs_exits.py:1, in <module>)" in keeps["exits"]
    assert "AttributeError: module 'theirs' has no attribute 'Gone'" in keeps["gone"]
    assert keeps["number"] == "number is not a kvbench.Policy"
    assert keeps["crashes"] == "can't be shown: ZeroDivisionError: division by zero (theirs.py:11, in bind)"
    assert keeps["bare"] == ""
    assert keeps["theirs:Bare"] == "ignored: 'h2o' is a built-in policy; its package must choose another name"
    assert keeps["h2o"].startswith("Keep the `window` newest tokens")
    assert keeps["window"]
    assert len(keeps) == len(plugins.policy_names()) + 1


def test_the_help_names_commands_of_packages_without_importing_them(package, capsys):
    code, out, _ = bench(capsys, "--help")
    assert code == 0
    assert len(re.findall(r"^  (?:greet|crash|gone_too|number) +Command of the package theirs\.$", out, re.M)) == 4
    assert "Show the facts that a bug report needs" in out  # a built-in name means our command
    assert "theirs_commands" not in sys.modules


def test_a_command_of_a_package_is_run_like_ours(package, capsys):
    assert bench(capsys, "greet", "--name", "her", "--debug") == (0, "hello her\n", "")
    assert "greet [OPTIONS]\n\nOptions:\n  --name TEXT" in bench(capsys, "greet", "--help")[1]
    assert bench(capsys, "greet", "--nam") == (2, "", "bench: No such option '--nam'. Did you mean '--name'?\n")
    assert bench(capsys, "greet", "--name", "nobody") == (2, "", "bench: greet: nobody is there\n")
    assert "Show the facts that a bug report needs" in bench(capsys, "doctor", "--help")[1], "a built-in name means our command"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("crash", "the plug-in 'crash' failed: ZeroDivisionError: division by zero (theirs_commands.py:15, in crash)"),
        ("gone_too", "the plug-in 'gone_too' (theirs_commands:gone) can't be loaded: AttributeError"),
        ("number", "the plug-in 'number' (theirs:NUMBER) is not a click.Command"),
    ],
)
def test_a_broken_command_of_a_package_is_one_line(package, capsys, command, says):
    code, out, err = bench(capsys, command)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"bench: {says}")
    assert "Traceback" in bench(capsys, command, "--debug")[2]


def test_a_name_that_two_packages_use_means_the_first(package):
    other = package / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[bench.policies]\nbare = theirs:Crashes\n")
    (ignored,) = plugins.ignored_plugins("bare")
    assert {ignored, f"theirs:{plugins.policy_class('bare').__name__}"} == {"theirs:Bare", "theirs:Crashes"}


def test_a_task_of_a_package_does_not_replace_ours(package):
    assert plugins.task_class("perplexity").__module__ == "kvbench.harness.tasks.perplexity"


def test_a_model_type_of_a_package_is_imported_when_its_config_is_read(package, tmp_path):
    """A model type that transformers knows is not looked up."""
    config = tmp_path / "config.json"
    for name, says in (
        ("llama", None),
        ("theirs_gone", "the plug-in 'theirs_gone' \\(theirs:Gone\\) can't be loaded"),
        ("theirs", None),
    ):
        config.write_text(json.dumps({"model_type": name, "num_hidden_layers": 3}))
        with pytest.raises(UserError, match=says) if says else nullcontext():
            assert (read_config(tmp_path).model_type, read_config(tmp_path).num_hidden_layers) == (name, 3)


def test_check_says_why_a_plug_in_can_not_be_used_and_which_is_ignored(package, capsys):
    code, _, err = bench(capsys, "policy", "check", "fails")
    assert code == 2
    assert err.startswith("bench: the plug-in 'fails' (theirs_fails:Fails) can't be loaded: AttributeError")
    assert err.count("\n") == 1
    code, _, err = bench(capsys, "policy", "check", "h2o", "--capacity", 8)
    assert code == 0
    assert err.startswith("bench: the plug-in theirs:Bare is ignored: 'h2o' is a built-in policy")


A = "from kvbench.policies.window import Window\nclass A(Window): ...\n"
SAYS_BAD = "bad.py: can't be imported: ZeroDivisionError: division by zero (bad.py:2, in <module>)"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("two.py", A + "class B(Window): ...\n", "name the class, e.g. two.py:A, two.py:B"),
        ("two.py:C", A, "two.py has no 'C'; name the class, e.g. two.py:A"),
        ("none.py", "x = 1\n", "none.py: it defines no class that inherits from kvbench.Policy"),
        ("typo.py:A", "x = = 1\n", "typo.py: can't be imported: SyntaxError: invalid syntax (typo.py:1)"),
        ("bad.py:A", "x = 1\ny = x / 0\n", SAYS_BAD),
        ("no_such_package.policies:A", "", "no_such_package.policies: no such module in the current directory or installed"),
    ],
)
def test_what_is_wrong_with_a_users_file_is_said_in_one_line(tmp_path, monkeypatch, capsys, name, text, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name.split(":")[0]).write_text(text)
    code, _, err = bench(capsys, "policy", "check", name)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.fast
def test_other_processes_get_only_files_that_could_be_executed(tmp_path):
    """A file with a mistake is not sent to later children, which would all fail on it."""
    for name, text in (("typo.py", "x = ("), ("right.py", "x = 1")):
        (tmp_path / name).write_text(text)
    with pytest.raises(SyntaxError):
        user_files.user_module(str(tmp_path / "typo.py"))
    user_files.user_module(str(tmp_path / "right.py"))
    names = {file.name for file in user_files.loaded_files()}
    assert str(tmp_path / "right.py") in names
    assert str(tmp_path / "typo.py") not in names
    user_files.receive([user_files.UserFile("broken.py", "kv_bench_broken", "broken.py", b"1 / 0")])  # no cell here needs it


EDITED = """
from dataclasses import dataclass

from kvbench.policies import Policy


@dataclass(frozen=True)
class Own(Policy):
    number: int = %d

    def importance(self, view):
        return view.position
"""


@pytest.mark.fast
@pytest.mark.parametrize("call", ["Cache", "run"])
def test_a_file_that_is_edited_runs_as_edited_from_the_next_call_on(call, tmp_path):
    """Until then, as in a run that goes on, its digest is that of the code that runs."""
    file = tmp_path / "own.py"
    name = f"{file}:Own"
    file.write_text(EDITED % 1)
    digest = source_digest(plugins.policy_class(name)())
    file.write_text(EDITED % 2)
    assert plugins.policy_class(name)().number == 1
    assert source_digest(plugins.policy_class(name)()) == digest
    if call == "Cache":
        assert policy_of(name, {}).number == 2
    else:
        with pytest.raises(UserError):
            run("no such suite", policies=name)
    assert plugins.policy_class(name)().number == 2
    assert source_digest(plugins.policy_class(name)()) != digest


ROOT = Path(__file__).parents[1]
TASK_CODE = next(
    c for c in re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S) if "class Hits(Task)" in c
)
TASK_SUITE = """
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
    (folder / "hits.py").write_text(TASK_CODE)
    (folder / "own.yaml").write_text(TASK_SUITE)
    done = bench_in("run", "own.yaml", "--threads", 1, "--results", "results", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def bench_with_task(folder: Path, *args: object):
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
    done = bench_with_task(ran, "records", "verify", "results")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 records are correct" in done.stderr
    page = bench_with_task(ran, "leaderboard", "--results", "results", "--out", "-").stdout
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
