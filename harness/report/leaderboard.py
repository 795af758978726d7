"""The leaderboard page: a pure function of records."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvbench.harness.core.intervals import MIN_BLOCK_TOKENS, MIN_BLOCKS
from kvbench.harness.records import Record, Submitted, standing
from kvbench.harness.report import chart, sections
from kvbench.harness.report.answer import answer
from kvbench.harness.report.charts import over_steps
from kvbench.harness.report.charts.bytes import against_bytes
from kvbench.harness.report.feed import feed
from kvbench.harness.report.groups import groups, order
from kvbench.harness.report.machines import by_machine
from kvbench.harness.report.markdown import label, md
from kvbench.harness.report.overview import overview

_HEAD = """# Leaderboard

Written by `bench leaderboard` from records; don't edit it. The command also writes `index.html`, the same to choose, compare and
sort, [`feed.json`](feed.json), and [published figures beside ours](paper.md).
"""
_INTRODUCTION = """## All tables

How to read them:

- **capacity**: the tokens that a KV head keeps between steps. A step attends to those and to itself.
- **positions**: where RoPE puts a kept token: at its rank in the cache, unless a name says `positions stream` (where it stood
  in the text, as public code leaves the keys of a prompt that it cuts) or `positions clamped` (LM-Infinite).
- **cell**: one policy at one capacity with one task. A record is a measured cell.
- **perplexity**: over the same tokens in every row of a table. These are all tokens, unless a policy that recomputes its
  window scored only every n-th; then **on all tokens** and bits/byte are over all tokens, and empty for that policy. In
  brackets: a 95 % interval *for this text* (Student's t over {blocks} blocks). "too short": a block would have fewer than
  {shortest} tokens, or fewer than twice the capacity.
- **Δ NLL**: the paired mean difference in nats per token, on the tokens that both scored after the larger of the two
  caches had filled. Below 0 is better. The recompute policy it refers to has the same capacity. "trend": dense gets ever
  worse beyond the model's training length, so only the table by position compares with it.
- **surely** better: the paired Δ NLL is significant after Holm's correction for the number of pairs, or follows from two
  such differences. Equal policies are called different in about 5 % of tables. Δ NLL is over more tokens than a column
  of perplexities that includes recompute, so it may separate or reorder policies that look equal there.
- **rank**: the best to the worst place that a policy can have among those of its capacity, given which are surely better
  and surely worse. Rivals that it can't be compared with ("too short", "trend") may be either. "–": comparable with none.
- **front**: ★ if no other cache beats it. A cache beats another if it has no more bytes, is neither surely worse in NLL nor
  surely slower, and has fewer bytes or is surely better or surely faster. (Steps are timed in the same rounds; sign test
  over rounds, Holm's correction.) "–": its NLL is comparable with that of no cache of at most its bytes.
- **K/V** "–": a recompute policy keeps no cache, so it has no rank and is not on the front.
- **cliff**: from that token on, the perplexity is more than twice that of the best bounded cache.
- **repeat**: `bench run` with that id measures the row's first cell again, for example `bench run 128d93c6 --fresh`. Add
  `--data` if it reads books, and `--model` if its model is a local directory.
- **tokens/s** in a table of quality: the speed of that evaluation, a block of tokens at a time. It is not decode latency.
"""


def render(records: Iterable[Record], submitted: Mapping[str, Submitted] | None = None) -> chart.Page:
    """The page in Markdown, with its charts.

    Args:
        records: of all suites and models.
        submitted: those that were submitted, from `read_submitted`; all are ours when None.
    """
    records = list(records)
    parts = groups(records)
    introduction = _INTRODUCTION.format(blocks=MIN_BLOCKS, shortest=MIN_BLOCK_TOKENS)
    lines: list[str | chart.Chart] = [_HEAD, *answer(feed(records, submitted)), introduction, *_contents(parts)]
    if not parts:
        lines.append("No records yet: `bench run suites/pg19.yaml`.\n")
    for suite, of_suite in itertools.groupby(parts, key=lambda group: (group[0].cell.suite, group[0].cell.suite_version)):
        several = list(of_suite)
        lines += over_steps.body(suite[0], [record for group in several for record in group])
        lines += [line for group in several for line in _group(group, submitted or {})]
    return chart.page(lines)


def _group(group: Sequence[Record], submitted: Mapping[str, Submitted]) -> list[str | chart.Chart]:
    """The part of one suite and model."""
    lines: list[str | chart.Chart] = [f"## {_heading(group[0])}\n"]
    for machine, part in by_machine(group):
        summary: list[str | chart.Chart] = [*overview(part), *against_bytes(part, machine)]
        lines += [f"On {md(machine)}:\n", *summary] if machine and summary else summary
    ordered = sorted(group, key=lambda r: (sections.section_key(r), order(r)))
    for _, section in itertools.groupby(ordered, key=sections.section_key):
        lines += _section(list(section), submitted)
    return lines


def _heading(record: Record) -> str:
    cell = record.cell
    return f"{md(cell.suite)} v{md(cell.suite_version)}: {md(cell.model.id)}, {md(cell.model.dtype)}"


def _contents(groups: Sequence[Sequence[Record]]) -> list[str]:
    """Links to the parts, with the anchors that GitHub gives to headings."""
    names = [_heading(group[0]) for group in groups]
    anchors = ["".join(c for c in html.unescape(n).lower() if c.isalnum() or c in " -_").replace(" ", "-") for n in names]
    return [*(f"- [{n}](#{a}): {len(g)} cells" for n, a, g in zip(names, anchors, groups, strict=True)), ""] if groups else []


def _section(records: Sequence[Record], submitted: Mapping[str, Submitted]) -> list[str | chart.Chart]:
    return [f"### {md(sections.heading(records[0]))}\n", *sections.body(records), *_provenance(records, submitted)]


def _provenance(records: Sequence[Record], submitted: Mapping[str, Submitted]) -> list[str]:
    """Machine, versions, hashes and dates of the records; where they differ, all values."""
    facts = [r.facts for r in records]
    data = [r.data for r in records]

    def distinct(values: Iterable[Any]) -> str:
        return md("; ".join(sorted({str(v) for v in values if v is not None})))

    dates = sorted(r.finished[:10] for r in records)
    texts = distinct("; ".join(d.texts) or None for d in data)
    lines = [
        f"device: {distinct(f.device or None for f in facts)}, threads {distinct(f.threads for f in facts)}, "
        f"block {distinct(f.block for f in facts)} tokens",
        "versions: " + distinct(", ".join(f"{k} {v}" for k, v in f.versions.items()) for f in facts),
        "sha256: "
        + ", ".join(
            f"{name} {digests}"
            for name, digests in (
                ("weights", distinct(f.weights_sha256[:12] or None for f in facts)),
                ("text", distinct(d.text_sha256[:12] or None for d in data)),
                ("token ids", distinct(d.ids_sha256[:12] or None for d in data)),
            )
            if digests
        ),
        *([f"texts: {texts}"] if texts else []),
        *_standings(records, submitted),
        f"measured: {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else ""),
    ]
    return ["<details><summary>Provenance</summary>\n", *(f"- {line}" for line in lines), "\n</details>\n"]


def _standings(records: Sequence[Record], submitted: Mapping[str, Submitted]) -> list[str]:
    """The rows that are not ours, in one line."""
    rows = [
        f"{label(r)}{'' if r.cell.capacity is None else f' at {r.cell.capacity}'} {standing(r, submitted)}"
        for r in records
        if standing(r, submitted) != "ours"
    ]
    return [f"standing: {'; '.join(rows)}"] if rows else []
