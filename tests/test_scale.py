"""The pages on several machines: their table, and the commands in them, as far as that can be seen without a cluster."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kvbench.harness.cli import measure

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)


def options(command: str):
    """What `bench run` takes from a command line."""
    bench, verb, *arguments = shlex.split(command)
    assert (bench, verb) == ("bench", "run")
    return measure.run.make_context("run", arguments).params


@pytest.mark.slow("takes seconds")
def test_the_table_is_what_the_script_prints(capsys):
    spec = importlib.util.spec_from_file_location("scale", DOCS / "scale.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main()
    assert capsys.readouterr().out in (DOCS / "scale.md").read_text(encoding="utf-8"), "run: python docs/scale.py"


def test_the_commands_are_ones_that_bench_takes():
    (page,) = [block for block in blocks("scale.md", "") if "bench run" in block]
    lines = [line.split("#")[0].strip() for line in page.splitlines()]
    taken = [options(line) for line in lines if line.startswith("bench run")]
    assert [(t["ray"], t["workers"], t["threads"]) for t in taken] == [
        ("local", None, None), ("local", 4, 2), ("10.0.0.1:6379", 8, None), ("auto", None, None),
    ]  # fmt: skip


def test_the_job_for_kubernetes_runs_bench_on_its_head():
    (text,) = blocks("ray-kubernetes.md", "yaml")
    job = yaml.safe_load(text)
    given = options(job["spec"]["entrypoint"])
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (given["ray"], given["workers"]) == ("auto", sum(group["replicas"] for group in groups))
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == pinned_ray()
    for pod in (job["spec"]["rayClusterSpec"]["headGroupSpec"], *groups):
        volumes = {volume["name"] for volume in pod["template"]["spec"]["volumes"]}
        (container,) = pod["template"]["spec"]["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def pinned_ray() -> str:
    pins = (DOCS.parent / "constraints.txt").read_text()
    return re.search(r"^ray==(.*)$", pins, re.M)[1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_job_for_slurm_is_a_script_and_runs_bench_on_its_head():
    (script,) = blocks("ray-slurm.md", "bash")
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    command = script.replace("\\\n", " ").split(" -- ")[1]
    assert options(command.strip())["ray"] == "auto"
