"""Where records and pages go: out of the tree, into one folder that every verb knows."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import bench_in as bench

from kvbench.harness.records import RecordStore

ROOT = Path(__file__).parents[1]
COLUMNS = 80
BAD = """from kvbench import Policy
class Bad(Policy):
    'Fails.'
    def importance(self, view):
        raise ZeroDivisionError('x')
"""
# OSC 8 links and what moves the cursor or colours.
CONTROL = re.compile(r"\x1b\]8;;[^\x1b]*\x1b\\|\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def asked(model_dir, text_dir):
    """A run of two cells, and one that fails if a `bad.py` is there."""
    options = ["--model", model_dir, "--data", text_dir, "--threads", 1, "--set", "tokens=100", "--set", "streams=1"]
    return ["run", "smoke", *options, "--policy", "dense", "--policy", "window"]


@pytest.fixture
def ran(tmp_path, asked):
    done = bench(*asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path


@pytest.mark.slow("measures suites")
def test_all_verbs_share_one_folder(ran, monkeypatch):
    assert bench("records", "verify", cwd=ran).returncode == 0
    assert bench("records", "export", "flat.csv", cwd=ran).returncode == 0
    assert bench("compare", "results", cwd=ran).returncode == 0
    assert bench("leaderboard", cwd=ran).returncode == 0
    pages = {"README.md", "index.html", "feed.json", "paper.md", "charts"}
    assert {p.name for p in (ran / "results").iterdir()} == {"smoke"} | pages
    assert {p.name for p in ran.iterdir()} == {"results", "flat.csv"}
    monkeypatch.setenv("BENCH_RESULTS", "elsewhere")
    assert bench("records", "verify", cwd=ran).returncode == 2
    (ran / "results").rename(ran / "elsewhere")
    for verb in (["records", "verify"], ["compare", "elsewhere"], ["leaderboard"], ["records", "export", "flat.csv"]):
        assert bench(*verb, cwd=ran).returncode == 0
    assert bench("leaderboard", "--results", "results", cwd=ran).returncode == 2, "the option has the last word"
    assert not (ran / "results").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["run", "smoke", "--results", ""], ["run", "smoke", "--model", ""], ["run", "smoke", "--data", " "],
        ["leaderboard", "--results", ""], ["leaderboard", "--out", ""], ["leaderboard", "--paper", ""],
        ["check", "--baseline", ""], ["check", "--baseline", "b", "--results", ""], ["check", "--baseline", "b", "--keep", ""],
        ["check", "--baseline", "b", "--model", ""], ["compare", "", "b"], ["compare", "a", ""], ["records", "verify", ""],
        ["records", "export", ""], ["records", "export", "a.csv", "--results", ""],
        ["baseline", "update", "", "--suite", "smoke"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_empty_argument_is_a_mistake(command, tmp_path):
    """Of an unset shell variable, say: it would mean the current folder, or silently the default."""
    done = bench(*command, cwd=tmp_path)
    assert done.returncode == 2
    assert "is empty" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow("measures suites")
def test_a_row_of_the_published_page_can_be_measured_again(ran, asked):
    """Its records are not the user's: the new record goes to the user's folder."""
    published = ran / "leaderboard" / "results"
    published.parent.mkdir()
    (ran / "results").rename(published)
    before = {p: p.read_bytes() for p in published.rglob("*.json")}
    cell = RecordStore(published).read_all()[0][0].cell_id[:8]
    done = bench("run", cell, *asked[2:8], cwd=ran)
    assert done.returncode == 0, done.stderr
    assert [r.cell_id[:8] for r in RecordStore(ran / "results").read_all()[0]] == [cell]
    assert {p: p.read_bytes() for p in published.rglob("*.json")} == before
    assert "no record in results has a cell id that begins" in bench("run", "0" * 8, cwd=ran).stderr


@pytest.mark.slow("measures suites")
def test_piped_output_is_a_row_a_cell_and_the_closing_is_on_stderr(tmp_path, asked):
    first = bench(*asked, cwd=tmp_path)
    head, *rows = (line.split("\t") for line in first.stdout.splitlines())
    assert head == ["policy", "capacity", "figure", "kv_bytes", "tokens/s", "status", "cell"]
    assert len(rows) == 2
    assert re.search(r"^\[1/2\] dense: perplexity", first.stderr, re.M)
    assert re.search(r"^window +\S+ +16.5 KiB  ok$", first.stderr, re.M)
    assert first.stderr.endswith(
        "Records: results\nPages: results/index.html and results/README.md, written by: bench leaderboard\n"
    )
    again = bench(*asked, cwd=tmp_path)
    assert again.stdout == first.stdout
    assert again.stderr.splitlines()[0] == "2 cells were finished before and skipped (--fresh measures them again)"
    elsewhere = bench(*asked, "--results", "my results", cwd=tmp_path).stderr
    assert elsewhere.endswith(", written by: bench leaderboard --results 'my results'\n")


def on_terminal(command, cwd: Path) -> tuple[int, str]:
    """The exit code of a command, and what it leaves on a terminal of `COLUMNS` columns; nobody types."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(COLUMNS), "TERM": "xterm"}
        os.execvpe(sys.executable, [sys.executable, "-m", "kvbench", *map(str, command)], env)
    written, deadline = b"", time.monotonic() + 240
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 1)[0]:
            try:
                part = os.read(terminal, 1 << 16)
            except OSError:  # closed at the other end
                break
            written += part
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), written.decode()


@pytest.mark.slow("processes of its own")
def test_on_a_terminal_a_run_ends_with_a_table_that_fits(tmp_path, asked):
    (tmp_path / "bad.py").write_text(BAD)
    code, written = on_terminal([*asked, "--policy", "bad.py:Bad"], tmp_path)
    assert code == 4, written
    lines = CONTROL.sub("", written).replace("\r", "\n").splitlines()
    end = [
        line.rstrip() for line in lines[max(i for i, line in enumerate(lines) if "smoke, tiny-llama" in line) :] if line.strip()
    ]
    assert end[1].split() == ["policy", "perplexity", "K/V", "status"]
    assert [line.split()[0] for line in end[2:5]] == ["dense", "window", "bad.py:Bad"]
    assert [line.split()[-1] for line in end[2:5]] == ["ok", "ok", "failed"]
    assert any(line.startswith("failed, perplexity of bad.py:Bad: ZeroDivisionError: x (bad.py:5") for line in end)
    assert all(len(line) <= COLUMNS for line in end)
    told = set(re.findall(r"\[\d/3\] (\S+)", CONTROL.sub("", written)))
    assert told == {"bad.py:Bad"}, "a line for what failed, and for no other cell"
    assert "tokens/s\t" not in written
    assert "\x1b]8;;file://" in written


def test_nothing_that_a_run_writes_is_tracked():
    """`git status` stays clean after `make bench`, in a clone of the project."""
    ignored = ["results/smoke/m/a.json", "results/README.md", "results/charts/a.svg", "leaderboard/index.html"]
    done = subprocess.run(["git", "check-ignore", "--no-index", *ignored], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 128:
        pytest.skip("this is no git checkout")
    assert done.stdout.split() == ignored
    tracked = subprocess.run(["git", "check-ignore", "leaderboard/results/x.json"], cwd=ROOT, capture_output=True, text=True)
    assert tracked.stdout == ""


def test_make_bench_measures_into_results_and_makes_the_page_though_cells_failed(tmp_path):
    """With a `bench` that only says how it was called."""
    calls = tmp_path / "calls"
    (tmp_path / "bench").write_text(f'#!/bin/sh\necho "$@" >> {calls}\ncase $1 in run) exit $CODE ;; esac\n')
    (tmp_path / "bench").chmod(0o755)
    make = ["make", "-s", "-o", ".venv/ready", f"BIN={tmp_path}", "bench"]
    env = {k: v for k, v in os.environ.items() if k != "BENCH_RESULTS" and not k.startswith("MAKE")}
    for code, page in ((0, True), (4, True), (2, False), (130, False)):
        calls.unlink(missing_ok=True)
        done = subprocess.run(make, cwd=ROOT, env=env | {"CODE": str(code)}, capture_output=True, text=True)
        assert (done.returncode == 0) == (code == 0)
        expected = ["run suites/quickstart.yaml --results results", *(["leaderboard --results results"] if page else [])]
        assert calls.read_text().splitlines() == expected
    calls.unlink()
    subprocess.run(make, cwd=ROOT, env=env | {"CODE": "0", "BENCH_RESULTS": "my results"}, check=True)
    assert calls.read_text().count("--results my results") == 2
