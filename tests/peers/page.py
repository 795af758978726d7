"""docs/peers.md from docs/data/peers.json: the same text for the same data.

PYTHONPATH=tests python -m peers.page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "docs/data/peers.json"
PAGE = Path(__file__).parents[2] / "docs/peers.md"

Facts = dict[str, Any]

TOP = """\
# Same name, different method

Two repositories can bear one name and keep different tokens. Here every policy that has published code is held to that code:
the same model, prompt and budget, and then the kept positions of every layer and KV head, and the NLLs of the next
{continuation} tokens. `make peers` runs it all again and rewrites this page. It fails if a row that is the same here no
longer is.

- **Eviction** is `evict: prompt`: the prompt is read under full attention, cut once, and the cache grows from there.
- **Models**: `stories260K`, a pretrained Llama with 4 KV heads of 2 query heads each, and `random-qwen2`, random weights, 2 KV
  heads of 3. Prompts have 128 to 320 tokens, of books and of random ids; every row is compared at two budgets where it has one.
- **Kept**: `same` means that not one kept position differs in any layer and head. *Ties* are positions whose scores are equal to
  within {tie} of their size, so that two orders of the same sums may rank them either way; they are counted apart. The same token
  twice in a prompt has the same key in the first layer, and scores can underflow to 0.
- **NLL** is ours minus theirs, in nats a token, the mean over prompts and budgets. Where no position differs and none ties, every
  token's NLL must agree to 0.001; bold: it does not, which is a fault.
"""

NOT_COMPARED = """\
## Not compared

| theirs | reason |
|---|---|
| kvpress `RandomPress` | another random number generator: `random` draws a hash of seed, layer, head and position |
| kvpress `LeverageScorePress`, `CompactorPress` | scores go through a Gaussian sketch drawn from torch's generator |
| kvpress `KVzipPress`, `FastKVzipPress`, `KVzapPress`, `DMSPress`, `QFilterPress` | need a second pass, or trained weights |
| kvpress `ThinKPress`, `CAMPress`, `MergingPress` | change keys or values; no policy of ours does yet |
| kvpress `BlockPress`, `DecodingPress` | other cadences than the prompt's end |
| D2O, beyond its scores | merges what it evicts |
"""


def render(data: Facts) -> str:
    """The page."""
    rows = data["rows"]
    theirs = [row for row in rows if "press" in row["theirs"]]
    rules = [row for row in rows if "rule" in row["theirs"]]
    parts = [
        TOP.format(continuation=data["continuation"], tie="0.001 %"),
        f"## kvpress\n\n`{theirs[0]['repository']}`, {theirs[0]['commit']}, its own code in an environment of its own.\n",
        table(theirs),
        unread(theirs),
        "## Rules that are published as scripts\n\nWritten again from the repository's code, in plain Python lists "
        "(`tests/peers/references.py`). Their NLL is that of dense attention that sees only what was kept.\n",
        table(rules),
        "## Why rows differ\n\n" + "\n".join(f"- **{name(row)}**: {row['why']}." for row in rows if row["why"]) + "\n",
        snapkvs(data["snapkvs"], rows),
        NOT_COMPARED,
    ]
    return "\n".join(part for part in parts if part)


def name(row: Facts) -> str:
    """The rule, and where it is from."""
    return row["key"].removeprefix("kvpress/")


def table(rows: list[Facts]) -> str:
    """One line a rule."""
    models = list(rows[0]["models"])
    head = ["rule", "what the name means there", "theirs", "ours", *(f"{m}: {x}" for m in models for x in ("kept", "NLL"))]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        found = [text for m in models for text in (kept(row, row["models"][m]), cost(row["models"][m]))]
        lines.append("| " + " | ".join([name(row), row["means"], called(row), f"`{ours(row['ours'])}`", *found]) + " |")
    return "\n".join(lines) + "\n"


def called(row: Facts) -> str:
    """Their class with its arguments, or repository and commit."""
    if "press" not in row["theirs"]:
        return f"{row['repository']} `{row['commit']}`"
    return f"`{press(row['theirs'])}`" if row["theirs"]["press"] else "no press"


def press(spec: Facts) -> str:
    """As Python."""
    inner = [press(spec["inner"])] if "inner" in spec else []
    return f"{spec['press']}({', '.join(inner + [f'{k}={v}' for k, v in spec.items() if k not in ('press', 'inner')])})"


def ours(spec: Facts) -> str:
    """As a suite has it."""
    return "{" + ", ".join(f"{k}: {value(v)}" for k, v in spec.items()) + "}"


def value(x: Any) -> str:
    """Of a parameter."""
    if isinstance(x, dict):
        return ours(x) if "name" in x else f"{x['times_group']:g} x G"
    return str(x).lower() if isinstance(x, bool) else str(x)


def kept(row: Facts, cells: list[Facts]) -> str:
    """Whether the same positions are kept."""
    if not cells:
        return f"not run: {row['missing']}" if row["missing"] else "budget too small"
    total, differ, ties = (sum(cell[x] for cell in cells) for x in ("kept", "differ", "ties"))
    text = f"**{differ:,}** of {total:,} differ" if differ else "same"
    return text + (f", {ties:,} ties" if ties else "")


def cost(cells: list[Facts]) -> str:
    """Mean difference of NLLs."""
    if not cells:
        return ""
    mean = sum(cell["ours_nll"] - cell["theirs_nll"] for cell in cells) / len(cells)
    text = "0" if abs(mean) < 0.0005 else f"{mean:+.3f}"
    return f"**{text}**" if any(cell["agrees"] is False for cell in cells) else text


def unread(rows: list[Facts]) -> str:
    """Cells that kvpress can compress but not read on from."""
    lost = [
        (name(row), m, sum(not c["by_them"] for c in cells), len(cells)) for row in rows for m, cells in row["models"].items()
    ]
    told = "; ".join(f"{rule} on {model}, {count} of {total}" for rule, model, count, total in lost if count)
    if not told:
        return ""
    return (
        "kvpress masks a head's evicted keys by a fake key whose product with every query of its group is negative, and raises "
        f"where it finds none: {told} cells. Their NLL is then that of dense attention that sees only what was kept.\n"
    )


def snapkvs(found: Facts, rows: list[Facts]) -> str:
    """How much of one budget two of the three keep in common."""
    means = {row["key"]: row["means"] for row in rows}
    titles = ["SnapKV's LongBench settings", "KVCache-Factory", "kvpress"]
    lines = [
        "## Three SnapKVs\n",
        "The share of the kept positions that two of them keep in common, both given the same budget, one selection a KV head. "
        f"Two random choices would share {found['chance']:.0%}. The 8 newest tokens, which all three keep, are counted.\n",
        "| | " + " | ".join(titles) + " |",
        "|" + "---|" * (len(titles) + 1),
    ]
    for title, shares in zip(titles, found["shares"], strict=True):
        lines.append(f"| {title} | " + " | ".join(f"{x:.0%}" for x in shares) + " |")
    return "\n".join(lines) + "\n\n" + "\n".join(f"- {t}: {means[k]}" for t, k in zip(titles, found["rows"], strict=True)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(json.loads(DATA.read_text(encoding="utf-8"))), encoding="utf-8")
