"""The leaderboard: a pure function of records, the same bytes for the same records."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from harness.records import Record, newest
from harness.report import chart, sections
from harness.report.intervals import FEWEST_BLOCKS
from harness.report.markdown import md

_INTRODUCTION = """# Leaderboard

Written by `bench leaderboard` from the records in `results/`; don't edit. [Figures from papers beside ours](paper.md).
How to read it:

- **capacity** is the number of tokens a KV head keeps between steps; a step attends to those and itself.
- **perplexity** is over all scored tokens of the stream; in brackets a 95 % interval *for this text* (circular
  block bootstrap, blocks of at least twice the capacity; "too short" below {blocks} blocks).
- **Δ NLL** is the paired mean difference in nats per token, on the tokens both scored after the larger of the two
  caches had filled; below 0 is better. The yardstick recompute is the one of the same capacity. "trend": beyond
  the model's training length dense gets worse and worse, so only the table by position compares with it.
- **tokens/s** in a table of quality is the speed of that evaluation, whole blocks at a time. It is not decode latency.
"""


def render(records: Iterable[Record]) -> chart.Page:
    """The page, in markdown, and its charts."""
    shown = newest(list(records))
    lines: list[str | chart.Chart] = [_INTRODUCTION.format(blocks=FEWEST_BLOCKS)]
    if not shown:
        lines.append("No records yet: `bench run suites/pg19.yaml`.\n")
    shown.sort(key=lambda r: (sections.shared(r), _order(r)))
    for _, group in itertools.groupby(shown, key=sections.shared):
        lines += _section(list(group))
    return chart.page(lines)


def _order(record: Record) -> tuple[Any, ...]:
    """Dense first, then by capacity, recompute before the policies."""
    cell = record.cell
    first = {"dense": 0, "recompute_window": 1, "recompute_sink_window": 1}.get(cell["policy"], 2)
    return (cell["capacity"] or 0, first, cell["policy"], repr(cell["parameters"]), cell["positions"], cell["seed"], record.key)


def _section(records: Sequence[Record]) -> list[str | chart.Chart]:
    """One model on one task of one suite."""
    cell = records[0].cell
    title = f"{md(cell['suite'])} v{md(cell['suite_version'])}: {md(cell['model']['id'])}, {md(cell['model']['dtype'])}"
    return [f"## {title}\n", *sections.body(records), *_provenance(records)]


def _provenance(records: Sequence[Record]) -> list[str]:
    """Where the numbers come from; what differs between the records is listed."""
    facts = [r.facts for r in records]
    data = [r.data for r in records]

    def all_of(values: Iterable[Any]) -> str:
        return md("; ".join(sorted({str(v) for v in values if v is not None})))

    dates = sorted(r.finished[:10] for r in records)
    texts = all_of("; ".join(d.get("texts", [])) or None for d in data)
    lines = [
        f"device: {all_of(f.get('device') for f in facts)}, threads {all_of(f.get('threads') for f in facts)}, "
        f"block {all_of(f.get('block') for f in facts)} tokens",
        "versions: " + all_of(", ".join(f"{k} {v}" for k, v in f.get("versions", {}).items()) for f in facts),
        "sha256: "
        + ", ".join(
            f"{name} {digests}"
            for name, digests in (
                ("weights", all_of(str(f.get("weights_sha256", ""))[:12] or None for f in facts)),
                ("text", all_of(str(d.get("text_sha256", ""))[:12] or None for d in data)),
                ("token ids", all_of(str(d.get("ids_sha256", ""))[:12] or None for d in data)),
            )
            if digests
        ),
        *([f"texts: {texts}"] if texts else []),
        f"measured: {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else ""),
    ]
    return ["<details><summary>Provenance</summary>\n", *(f"- {line}" for line in lines), "\n</details>\n"]
