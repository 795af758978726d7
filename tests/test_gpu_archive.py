"""What `make gpu` brings home: an archive that another machine goes on from, and a page; and what it can do without."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest


def filled(folder, sizes):
    """A folder of results with files of these sizes."""
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    return folder


def test_what_is_packed_is_unpacked_elsewhere(gpu, tmp_path):
    """Files that are not finished, or that are made from the others, stay behind."""
    packed = {"gpu.md": 10, "gpu-run.state": 20, "latency/m/a.json": 500, "latency/m/a.steps.npy": 90, "gpu-logs/a.log": 0}
    folder = filled(tmp_path / "r", packed | {"latency/.running": 1, "x.npy.partial": 5, "index.html": 9, "old.tar.gz": 9})
    (folder / "link").symlink_to("gpu.md")
    chosen, left_out = gpu.archive.choose(folder, ("gpu.md",))
    assert left_out == []
    gpu.archive.pack(folder, chosen, tmp_path / "out" / "a.tar.gz")
    gpu.archive.unpack(tmp_path / "out" / "a.tar.gz", tmp_path / "other")
    found = {x.relative_to(tmp_path / "other").as_posix(): x.read_bytes() for x in (tmp_path / "other").rglob("*") if x.is_file()}
    assert found == {name: (folder / name).read_bytes() for name in packed}
    assert [x.name for x in (tmp_path / "out").iterdir()] == ["a.tar.gz"]


def test_the_largest_traces_are_left_out_of_a_full_archive(gpu, tmp_path):
    """Random bytes, which no compression makes smaller."""
    limit = 2**20
    folder = filled(tmp_path / "r", {"gpu.md": 300_000, "a.npy": 290_000, "b.npy": 200_000, "c.npy": 250_000, "d.json": 5})
    filled(folder, {f"many/{'long-name' * 12}{x}.json": 1 for x in range(30)})
    chosen, left_out = gpu.archive.choose(folder, ("gpu.md",), limit)
    assert [x.name for x in left_out] == ["a.npy"]
    gpu.archive.pack(folder, chosen, tmp_path / "a.tar.gz")
    assert 700_000 < (tmp_path / "a.tar.gz").stat().st_size <= limit


@pytest.mark.parametrize("name", ["../outside", "/outside", "link", "", "nothing"])
def test_a_strange_archive_is_refused_as_a_whole(gpu, tmp_path, name):
    path = tmp_path / "a.tar.gz"
    if name:
        with tarfile.open(path, "w:gz") as tar:
            tar.addfile(tarfile.TarInfo("good"), io.BytesIO())
            member = tarfile.TarInfo(name)
            member.type, member.linkname = (tarfile.SYMTYPE, "good") if name == "link" else (tarfile.REGTYPE, "")
            tar.addfile(member, io.BytesIO())
    if name == "nothing":
        path.write_bytes(b"no archive")
    if name == "/outside":
        gpu.archive.unpack(path, tmp_path / "r")
        assert {x.name for x in (tmp_path / "r").iterdir()} == {"good", "outside"}, "it is written below the folder"
        return
    with pytest.raises(SystemExit, match=r"--from .*a\.tar\.gz"):
        gpu.archive.unpack(path, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def step_record(status="ok", **metrics):
    """A record of a decode step."""
    task, model = {"name": "latency"}, {"id": "random:llama-2-7b"}
    cell = {"task": task, "model": model, "policy": "h2o", "capacity": 4096}
    facts = {"method": "compiled walk", "step": "fused", "device": "a GPU", "differs_from_walk": 0.123}
    figures = {"step_ms": 6.6, "error": 0.012, "roofline": {"ms": 5.13}, "over_roofline": 1.287, "flags": []} | metrics
    return {"cell": cell, "status": status, "metrics": figures, "facts": facts, "error": None}


def test_the_page_says_what_the_records_and_logs_say(gpu, tmp_path):
    row = {
        "row": "perplexity, H2O", "shape": "llama-3-8b", "streams": 8, "method": "compiled walk", "differs_from_walk": 0.5,
        "refused": "", "device": "a GPU", "tokens_per_second": 1000.0, "times_bound": 1.9, "share_of_multiply_rate": 0.25,
        "multiply_rate": 7.98e14,
    }  # fmt: skip
    proven = {"check": "rotate", "dtype": "bfloat16", "error": 0.5, "allowed": 0.1, "good": False, "why": ""}
    checks = gpu.stages.Stage("checks", 60, ["-m", "pytest", "tests/test_a.py"])
    stages = [checks, gpu.stages.Stage("good", 60, ["x"]), gpu.stages.Stage("later", 60, ["y"])]
    state = gpu.stages.State(None, {})
    state.keep(checks, gpu.stages.Outcome("checks", "exit code 1", 12, 60))
    state.keep(stages[1], gpu.stages.Outcome("good", "ok", 1, 60))
    filled(tmp_path, {"latency/m/half.json": 10, "gpu-logs/good.log": 0})
    (tmp_path / "latency" / "m" / "a.json").write_text(json.dumps(step_record()))
    (tmp_path / "speed.jsonl").write_text("".join(json.dumps(row | {"tokens_per_second": x}) + "\n" for x in (500.0, 1000.0)))
    (tmp_path / "proof.jsonl").write_text(json.dumps(proven))
    log = [
        "no more than this",
        *["."] * 30,
        "FAILED tests/test_a.py::test_b - assert 1 == 2",
        "1 failed, 7 passed, 2 skipped in 3s",
    ]
    (tmp_path / "gpu-logs" / "checks.log").write_text("\n".join(log))
    key = {"device": "a GPU", "torch": "2.11.0", "sources": "0123456789abcdef"}
    page = gpu.page.text(stages, state, key, tmp_path, [tmp_path / "latency" / "big.npy"])
    for line in (
        "1 of 3 stages ok, 1 failed or cut off, 1 not begun",
        "| latency, random:llama-2-7b, h2o, 4,096 tokens kept | 6.6 ms a step ± 1.2% | 5.13 ms (roofline) | 1.29 |",
        "| 1,000 tokens/s | 1,900 tokens/s; 25% of the rate of matrix products (798 TFLOP/s) | 1.9 | compiled walk |",
        "compiled walk; steps fused | 0.123 |",
        "| rotate | bfloat16 | 0.5 | 0.1 | WRONG",
        "| tests/test_a.py | 1 failed, 7 passed, 2 skipped; FAILED tests/test_a.py::test_b - assert 1 == 2 |",
        "### checks: exit code 1 after 12 s of 60 s",
        "No room in the archive: latency/big.npy",
    ):
        assert line in page
    assert "500 tokens/s" not in page, "a row that was measured again"
    assert "no more than this" not in page, "only a log's last lines"
    assert page.rindex("2 skipped in 3s") > page.index("### checks")


@pytest.mark.parametrize("name", ["datasets", "ray", "lm_eval"])
def test_a_rehearsal_does_without_what_the_image_lacks(gpu, tmp_path, monkeypatch, name):
    """As if it were not installed; a bundled package is hidden, too, but found where its wheel was installed."""
    monkeypatch.setattr(gpu.run, "ROOT", tmp_path)
    variables = gpu.run.environment(str(tmp_path), 60, True, tmp_path)
    ask = f"import importlib.util, json; print(importlib.util.find_spec('{name}')); import {name}"
    asked = subprocess.run([sys.executable, "-c", ask], env=variables, capture_output=True, text=True)
    assert asked.stdout == "None\n"
    assert f"ModuleNotFoundError: No module named '{name}'" in asked.stderr
    (tmp_path / f"{name}.py").write_text("")
    assert subprocess.run([sys.executable, "-c", ask], env=variables, capture_output=True).returncode == 0


def test_the_tree_that_travels_is_small():
    """Without the published records, of which no stage may need any; CI rehearses there."""
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "-l", "--full-tree", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("no git checkout")
    files = [line.split("\t") for line in listed.stdout.splitlines()]
    sizes = [int(about.split()[3]) for about, path in files if not path.startswith("leaderboard/results/")]
    assert 2**20 < sum(sizes) < 48 * 2**20
