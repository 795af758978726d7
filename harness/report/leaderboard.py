"""The leaderboard: a pure function of records, the same bytes for the same records."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from kvbench.harness.core.intervals import MIN_BLOCK_TOKENS, MIN_BLOCKS
from kvbench.harness.records import Record, newest
from kvbench.harness.report import chart, sections
from kvbench.harness.report.charts.bytes import against_bytes
from kvbench.harness.report.machines import by_machine
from kvbench.harness.report.markdown import md
from kvbench.harness.report.overview import overview

_INTRODUCTION = """# Leaderboard

Written by `bench leaderboard` from records; don't edit. It also writes `index.html`, the same on one page to sort and filter,
and [figures from papers beside ours](paper.md).
How to read it:

- **capacity** is the number of tokens a KV head keeps between steps; a step attends to those and itself.
- **cell**: one policy at one capacity with one task; a record is a measured cell.
- **perplexity** is over the same tokens in every row of a table: all of the stream, or, where a policy that recomputes its
  window for every token scored only one in so many, those; then **on all tokens** and bits/byte are over all, and empty
  for that policy. In brackets a 95 % interval *for this text*
  (Student's t over {blocks} blocks; "too short" if a block would have fewer than {shortest} tokens or than twice the capacity).
- **Δ NLL** is the paired mean difference in nats per token, on the tokens both scored after the larger of the two
  caches had filled; below 0 is better. The yardstick recompute is the one of the same capacity. "trend": beyond
  the model's training length dense gets worse and worse, so only the table by position compares with it.
- **surely** better: the paired Δ NLL is significant after Holm's correction for the number of pairs, so that equal policies
  are told apart in at most 5 % of tables; or it follows from two such. Δ NLL is over more tokens than a column of perplexities
  with recompute in it, and may tell apart what that column shows as equal, or in another order.
- **rank**: the best to the worst place that a policy can have among those of the same capacity, from those surely better
  and surely worse than it. Rivals it can't be compared with ("too short", "trend") may be either. "–": comparable with none.
- **front**: ★ for a cache that earns its bytes and its time. It has none where another with no more bytes is neither surely
  worse in NLL nor surely slower (steps timed in turn; sign test over rounds, Holm's correction), and has fewer bytes, or is
  surely better, or surely faster. "–": the NLL can't be compared with that of any cache of no more bytes.
- **K/V** "–": a recompute policy keeps no cache, and is not on the front of caches.
- **cliff**: from that token on, more than twice the perplexity of the best bounded cache.
- **repeat**: `bench run` with that id measures the row's (first) cell again, as in `bench run 128d93c6 --fresh`; with `--data`
  where it reads books, and `--model` where its model is a local directory.
- **tokens/s** in a table of quality is the speed of that evaluation, whole blocks at a time. It is not decode latency.
"""


def render(records: Iterable[Record]) -> chart.Page:
    """The page, in markdown, and its charts."""
    found = groups(records)
    lines: list[str | chart.Chart] = [_INTRODUCTION.format(blocks=MIN_BLOCKS, shortest=MIN_BLOCK_TOKENS), *_contents(found)]
    if not found:
        lines.append("No records yet: `bench run suites/pg19.yaml`.\n")
    for group in found:
        lines += _group(group)
    return chart.page(lines)


def groups(records: Iterable[Record]) -> list[list[Record]]:
    """The newest record of every cell, those of one suite and model together."""
    shown = sorted(newest(list(records)), key=lambda r: (_suite(r), _order(r)))
    return [list(group) for _, group in itertools.groupby(shown, key=_suite)]


def _group(group: Sequence[Record]) -> list[str | chart.Chart]:
    """One suite on one model."""
    lines: list[str | chart.Chart] = [f"## {_heading(group[0])}\n"]
    for machine, part in by_machine(group):
        shown: list[str | chart.Chart] = [*overview(part), *against_bytes(part, machine)]
        lines += [f"On {md(machine)}:\n", *shown] if machine and shown else shown
    ordered = sorted(group, key=lambda r: (sections.section_key(r), _order(r)))
    for _, section in itertools.groupby(ordered, key=sections.section_key):
        lines += _section(list(section))
    return lines


def _suite(record: Record) -> str:
    """What the records of one part of the page have in common: suite and model."""
    cell = record.cell.as_json()
    return repr([cell["suite"], cell["suite_version"], cell["model"]])


def _heading(record: Record) -> str:
    cell = record.cell
    return f"{md(cell.suite)} v{md(cell.suite_version)}: {md(cell.model.id)}, {md(cell.model.dtype)}"


def _contents(groups: Sequence[Sequence[Record]]) -> list[str]:
    """Links to the parts of the page, as GitHub makes them of headings."""
    names = [_heading(group[0]) for group in groups]
    anchors = ["".join(c for c in html.unescape(n).lower() if c.isalnum() or c in " -_").replace(" ", "-") for n in names]
    return [*(f"- [{n}](#{a}): {len(g)} cells" for n, a, g in zip(names, anchors, groups, strict=True)), ""] if groups else []


def _order(record: Record) -> tuple[Any, ...]:
    """Dense first, then by capacity, recompute before the policies."""
    cell = record.cell
    first = {"dense": 0, "recompute_window": 1, "recompute_sink_window": 1}.get(cell.policy, 2)
    return (cell.capacity or 0, first, cell.policy, repr(cell.parameters), cell.positions, cell.seed, record.key)


def _section(records: Sequence[Record]) -> list[str | chart.Chart]:
    """One task of one suite on one model."""
    return [f"### {md(sections.heading(records[0]))}\n", *sections.body(records), *_provenance(records)]


def _provenance(records: Sequence[Record]) -> list[str]:
    """Where the numbers come from; what differs between the records is listed."""
    facts = [r.facts for r in records]
    data = [r.data for r in records]

    def all_of(values: Iterable[Any]) -> str:
        return md("; ".join(sorted({str(v) for v in values if v is not None})))

    dates = sorted(r.finished[:10] for r in records)
    texts = all_of("; ".join(d.texts) or None for d in data)
    lines = [
        f"device: {all_of(f.device or None for f in facts)}, threads {all_of(f.threads for f in facts)}, "
        f"block {all_of(f.block for f in facts)} tokens",
        "versions: " + all_of(", ".join(f"{k} {v}" for k, v in f.versions.items()) for f in facts),
        "sha256: "
        + ", ".join(
            f"{name} {digests}"
            for name, digests in (
                ("weights", all_of(f.weights_sha256[:12] or None for f in facts)),
                ("text", all_of(d.text_sha256[:12] or None for d in data)),
                ("token ids", all_of(d.ids_sha256[:12] or None for d in data)),
            )
            if digests
        ),
        *([f"texts: {texts}"] if texts else []),
        f"measured: {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else ""),
    ]
    return ["<details><summary>Provenance</summary>\n", *(f"- {line}" for line in lines), "\n</details>\n"]
