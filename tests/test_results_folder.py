"""Where records and pages go: out of the tree, into one folder that every verb knows."""

from __future__ import annotations

import re

import pytest
from conftest import bench_in as bench


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
        ["run", "smoke", "--results", ""],
        ["run", "smoke", "--model", ""],
        ["run", "smoke", "--data", " "],
        ["leaderboard", "--results", ""],
        ["leaderboard", "--out", ""],
        ["leaderboard", "--paper", ""],
        ["check", "--baseline", ""],
        ["check", "--baseline", "b", "--results", ""],
        ["check", "--baseline", "b", "--keep", ""],
        ["check", "--baseline", "b", "--model", ""],
        ["compare", "", "b"],
        ["compare", "a", ""],
        ["records", "verify", ""],
        ["records", "export", ""],
        ["records", "export", "a.csv", "--results", ""],
        ["baseline", "update", "", "--suite", "smoke"],
    ],
    ids=" ".join,
)
def test_an_empty_argument_is_a_mistake(command, tmp_path):
    """Of an unset shell variable, say: it would mean the current folder, or silently the default."""
    done = bench(*command, cwd=tmp_path)
    assert done.returncode == 2
    assert "is empty" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


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
