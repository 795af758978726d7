"""What docs/comparison.md says of docs/data/peers.json, as Markdown; cog puts it into the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "docs/data/peers.json"

Facts = dict[str, Any]


def render(data: Facts) -> str:
    """Return which rules keep the same tokens, and a table of those that differ with the reason."""
    rows = data["rows"]
    same, other = (
        [row for row in rows if row["key"] != "kvpress/none" and bool(differing(row)) is differs] for differs in (False, True)
    )
    repositories = dict.fromkeys(f"{row['repository']} {row['commit'].split()[0]}" for row in same)
    lines = ["No kept position differs from:", ""]
    for repository in repositories:
        names = [name(row) for row in same if f"{row['repository']} {row['commit'].split()[0]}" == repository]
        lines.append(f"- `{repository}`: {'; '.join(names)}")
    lines += ["", "| rule | kept positions that differ | reason |", "|---|---|---|"]
    lines += [f"| {name(row)} | {differing(row)} | {row['why']} |" for row in other]
    return "\n".join(lines)


def name(row: Facts) -> str:
    """Return the rule's name without its repository."""
    return str(row["key"]).removeprefix("kvpress/")


def differing(row: Facts) -> str:
    """Return how many kept positions differ, over all models, in percent; empty if none does."""
    cells = [cell for of_model in row["models"].values() for cell in of_model]
    differ, kept = (sum(cell[x] for cell in cells) for x in ("differ", "kept"))
    return f"{100 * differ / kept:.1f} %" if differ else ""
