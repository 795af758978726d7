"""docs/seeds.md: every table and figure of the two papers has a row, and what a row names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvbench.harness.pretrain.config import find
from kvbench.harness.records import RecordStore
from kvbench.harness.suite import shipped_suites

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/seeds.md"
NUMBERED = {"StreamingLLM": (15, 10), "When attention sink emerges": (30, 15)}  # figures and tables of each paper


def rows(section: str) -> list[tuple[str, str]]:
    """(item, where it is) of each row."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert all(len(row) == 3 for row in cells)
    return [(item, here) for item, _, here in cells[1:]]


@pytest.mark.parametrize("section", NUMBERED)
def test_no_table_or_figure_is_missing_and_none_is_there_twice(section):
    items = [item for item, _ in rows(section)]
    assert len(items) == len(set(items))
    for name, last in zip(("Figure", "Table"), NUMBERED[section], strict=True):
        assert [item for item in items if item.startswith(name)] == [f"{name} {n}" for n in range(1, last + 1)]
    assert all(re.match(r"(Figure|Table) \d+$|(system|models?|data): \w", item) for item in items)


@pytest.mark.parametrize("section", NUMBERED)
def test_each_row_was_run_or_has_a_suite_or_says_why_not(section):
    suites = {path.stem for path in shipped_suites()}
    for item, here in rows(section):
        state = re.match(r"\*\*(run|suite|no)\*\*(.*)", here)
        assert state, item
        commands, folders = re.findall(r"`bench run ([\w-]+)", here), re.findall(r"`leaderboard/results/(\w+)`", here)
        recipes, pages = re.findall(r"`bench pretrain (\w+)", here), re.findall(r"\]\(([\w./-]+?)(#[\w-]+)?\)", here)
        assert set(commands) <= suites, item
        assert all(find(name).exists() for name in recipes), item
        for folder in folders:
            records, problems = RecordStore(ROOT / "leaderboard/results" / folder).read_all()
            assert records, (item, folder)
            assert not problems
        for page, anchor in pages:
            text = (ROOT / "docs" / page).read_text(encoding="utf-8")
            assert not anchor or anchor[1:] in {
                heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)", text, re.M)
            }
        needed = {"run": folders or pages, "suite": commands, "no": state[2].startswith(": ") and len(state[2]) > 9}[state[1]]
        assert needed, item
