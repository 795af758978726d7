"""The GitHub action installs from its own path, and its exit code is that of the check, even if the summary fails."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ACTION = ROOT / ".github" / "actions" / "gate" / "action.yml"
STEPS = {step["name"]: step for step in yaml.safe_load(ACTION.read_text())["runs"]["steps"] if "run" in step}
BENCH = """#!/bin/sh
echo "$@" >> "$CALLS"
case $1 in audit) echo "audited $2"; exit "$(case $2 in wrong*) echo 1 ;; none*) echo 2 ;; *) echo 0 ;; esac)" ;; esac
case $1 in check) exit $CHECK ;; compare) echo "a table"; exit $COMPARE ;; esac
"""


def run(name: str, folder: Path, stub: str, **environment: str) -> tuple[int, list[str]]:
    """Run a step in the runner's shell, with `bench` and `python` replaced. -> its exit code, and their arguments."""
    tools = folder / "tools"
    tools.mkdir()
    for tool in ("bench", "python"):
        (tools / tool).write_text(stub)
        (tools / tool).chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if k in ("HOME", "TMPDIR")}
    where = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "RUNNER_TEMP": str(folder),
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
        "GITHUB_PATH": str(folder / "path"),
        "CALLS": str(folder / "calls"),
    }
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[name]["run"]],
        env=kept | where | environment,
        check=False,
    )
    return done.returncode, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("check", [0, 1, 2, 3])
@pytest.mark.parametrize("compare", [0, 2])
def test_the_exit_code_is_the_checks(check, compare, tmp_path):
    """Even if the summary fails, which would hide a regression."""
    code, calls = run("Check", tmp_path, BENCH, BASELINE="a base", MODEL="", CHECK=f"{check}", COMPARE=f"{compare}")
    assert code == check
    assert calls == [
        f"check --baseline a base --keep {tmp_path}/records",
        f"compare a base {tmp_path}/records --markdown",
    ]
    summary = (tmp_path / "summary").read_text()
    assert summary.startswith("a table")
    assert (f"exit code {check}" in summary) == (compare != 0)


@pytest.mark.parametrize(("partial", "expected"), [("pass", 0), ("fail", 5)])
def test_another_cpu_is_a_warning(partial, expected, tmp_path, capfd):
    code, _ = run("Check", tmp_path, BENCH, BASELINE="b", MODEL="", CHECK="5", COMPARE="0", PARTIAL=partial)
    assert code == expected
    assert ("::warning::" in capfd.readouterr().out) == (partial == "pass")


def test_a_local_model_is_passed_on(tmp_path):
    _, calls = run("Check", tmp_path, BENCH, BASELINE="b", MODEL="my models/m", CHECK="0", COMPARE="0")
    assert calls[0] == f"check --baseline b --model my models/m --keep {tmp_path}/records"


@pytest.mark.parametrize(("second", "expected"), [("right.py:Other", 0), ("wrong.py:Cache", 1), ("none.py:Cache", 2)])
def test_every_cache_is_audited_and_the_exit_code_is_that_of_the_worst(second, expected, tmp_path):
    code, calls = run("Audit", tmp_path, BENCH, AUDIT=f"right.py:Cache --budget 64\n\n{second}\nh2o --capacity 32\n")
    assert code == expected
    assert calls == ["audit right.py:Cache --budget 64", f"audit {second}", "audit h2o --capacity 32"]
    summary = (tmp_path / "summary").read_text()
    assert f"bench audit {second}\n\n```\naudited {second}\n```" in summary
