"""Scripts in tests/benchmarks that no target of the Makefile runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = {  # script and options, and how its rows begin
    "generate_speed.py --tokens 500 --capacity 16": ["     250 | ", "     500 | "],
    "zoo_speed.py h2o tova --model builtin:sink_2 --tokens 1024 --capacity 64 --threads 1": ["h2o ", "tova "],
}


@pytest.mark.slow("two processes import transformers")
@pytest.mark.parametrize("command", SCRIPTS)
def test_a_script_prints_its_rows(command: str) -> None:
    script, *options = command.split()
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "benchmarks" / script, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(f"\n{row}" in done.stdout for row in SCRIPTS[command]), done.stdout
