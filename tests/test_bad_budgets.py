"""Messages for policies that a cell can't use: one line that names the suite's file and line, before anything is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import bench

MINE = """
from dataclasses import dataclass

from kvbench import Composed, Policy
from kvbench.policies.window import Window


@dataclass(frozen=True)
class Wrong(Composed):
    score: Policy = Window()
    more: int = 0
    layers: int = 0

    def budgets(self, capacity, layers, heads, prompt):
        return [[capacity + self.more] * heads] * (self.layers or layers)


@dataclass(frozen=True)
class Floor(Composed):
    score: Policy = Window()

    def pool_floor(self, capacity):
        return capacity + 1
"""
SUITE = """suite: mine
version: 1
description: budgets
model: {id: "builtin:sink_2"}
task: {name: perplexity, data: prose, tokens: 64}
policies:
  - {name: window, capacity: 16}
  - ENTRY
"""


@pytest.mark.slow("measures suites")
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('{name: "FILE:Wrong", more: 1, capacity: 16}', ("add up to", "make")),
        ('{name: "FILE:Wrong", layers: 1, capacity: 16}', ("table of budgets is for layers with",)),
        ("{name: headkv, file: TABLE, capacity: 32}", ("expected {'importance': 4 lists of 2",)),
        ('{name: "FILE:Floor", capacity: 16}', ("at least 17", "16 on average")),
        ("{name: window, capacity: 16, evict: prompt}", ("prompt",)),
        ("{name: d2o, capacity: 16}", ("D2O merges keys", "positions must be stream")),
    ],
)
def test_one_line_names_file_and_line_and_nothing_is_measured(entry, words, tmp_path: Path, capsys):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "heads.json").write_text(json.dumps({"importance": [[1.0, 2.0, 3.0]]}))
    suite = tmp_path / "mine.yaml"
    suite.write_text(
        SUITE.replace("ENTRY", entry.replace("FILE", str(tmp_path / "mine.py")).replace("TABLE", str(tmp_path / "heads.json")))
    )
    code, out, err = bench(capsys, "run", str(suite), "--results", str(tmp_path / "results"))
    lines = [line for line in err.splitlines() if line]
    assert code == 2, err
    assert len(lines) == 1, err
    assert f"{suite}:8: " in lines[0]
    assert all(word in lines[0] for word in words), lines[0]
    assert not list((tmp_path / "results").glob("**/*.json"))
    assert out == ""
