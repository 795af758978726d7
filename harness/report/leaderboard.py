"""The leaderboard: a pure function of records, the same bytes for the same records."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from harness.records import Record, newest
from harness.report.intervals import FEWEST_BLOCKS, Interval
from harness.report.pairing import paired, past_training, perplexity, question

_INTRODUCTION = """# Leaderboard

Written by `bench leaderboard` from the records in `results/`; don't edit. How to read it:

- **capacity** is the number of tokens a KV head keeps between steps; a step attends to those and itself.
- **perplexity** is over all scored tokens of the stream; in brackets a 95 % interval *for this text* (circular
  block bootstrap, blocks of at least twice the capacity; "too short" below {blocks} blocks).
- **Δ NLL** is the paired mean difference in nats per token, on the tokens both scored after the larger of the two
  caches had filled; below 0 is better. The yardstick recompute is the one of the same capacity. "trend": beyond
  the model's training length dense gets worse and worse, so only the table by position compares with it.
- **tokens/s** is the speed of this evaluation, whole blocks at a time. It is not decode latency.
"""


def render(records: Iterable[Record]) -> str:
    """The page, in markdown."""
    shown = newest(list(records))
    lines = [_INTRODUCTION.format(blocks=FEWEST_BLOCKS)]
    if not shown:
        lines.append("No records yet: `bench run suites/pg19.yaml`.\n")
    for _, group in itertools.groupby(sorted(shown, key=lambda r: (question(r), _order(r))), key=question):
        lines += _section(list(group))
    return "\n".join(lines)


def _order(record: Record) -> tuple[Any, ...]:
    """Dense first, then by capacity, recompute before the policies."""
    cell = record.cell
    first = {"dense": 0, "recompute_window": 1}.get(cell["policy"], 2)
    return (cell["capacity"] or 0, first, cell["policy"], repr(cell["parameters"]), cell["positions"], cell["seed"], record.key)


def _section(records: Sequence[Record]) -> list[str]:
    """One model on one task of one suite."""
    cell, data = records[0].cell, records[0].data
    model, task = cell["model"], cell["task"]
    title = f"{md(cell['suite'])} v{md(cell['suite_version'])}: {md(model['id'])}, {md(model['dtype'])}"
    prefix, stride = len(data.get("prefix", [])), task.get("stride", 1)
    about = (
        f"{md(task.get('name', ''))} on {md(data.get('source', '?'))}, {_count(data.get('tokens'))} tokens"
        f"{f' after a prefix of {prefix}' if prefix else ''}"
        f"{f'; recompute_window scores one token in {stride}' if stride > 1 else ''}."
    )
    return [f"## {title}\n", about + "\n", *_table(records), *_buckets(records), *_provenance(records)]


def _table(records: Sequence[Record]) -> list[str]:
    dense = next((r for r in records if r.cell["policy"] == "dense"), None)
    recompute = {r.cell["capacity"]: r for r in records if r.cell["policy"] == "recompute_window"}
    rows = []
    for record in records:
        metrics, ok = record.metrics, record.status == "ok"
        rows.append([
            label(record), _count(record.cell["capacity"]), _perplexity(record) if ok else "",
            f"{metrics['bits_per_byte']:.3f}" if ok and "bits_per_byte" in metrics else "",
            _difference(record, dense), _difference(record, recompute.get(record.cell["capacity"])),
            _bytes(metrics.get("kv_bytes")) if ok else "", _count(round(record.facts.get("tokens_per_second", 0))),
            "ok" if ok else f"**failed**: {md((record.error or {}).get('kind', '?'))}",
        ])  # fmt: skip
    head = ["policy", "capacity", "perplexity", "bits/byte", "Δ NLL to dense", "Δ NLL to recompute", "K/V", "tokens/s", "status"]
    return _markdown_table(head, rows, "lrrrrrrrl")


def label(record: Record) -> str:
    """The policy with what distinguishes it: parameters, positions and seed where they are not the plain ones."""
    cell = record.cell
    parameters = ", ".join(f"{k} {v}" for k, v in cell["parameters"].items() if v is not None)
    extra = [f"positions {cell['positions']}"] if cell["positions"] != "cache" else []
    extra += [f"limit {cell['limit']}"] if cell.get("limit") is not None else []
    extra += [f"seed {cell['seed']}"] if cell["seed"] else []
    stride = 1 if cell["policy"] != "recompute_window" else cell["task"].get("stride", 1)
    extra += [f"one token in {stride}"] if stride > 1 else []
    inside = ", ".join([*([parameters] if parameters else []), *extra])
    return md(str(cell["policy"])) + (f" ({md(inside)})" if inside else "")


def _perplexity(record: Record) -> str:
    mean = perplexity(record)
    if mean is None:
        return ""
    value = f"{math.exp(min(mean.mean, 700)):.4g}"
    if past_training(record):
        return f"{value} (trend)"
    if mean.low is None or mean.high is None:
        return f"{value} (too short)"
    return f"{value} [{math.exp(mean.low):.4g}, {math.exp(mean.high):.4g}]"


def _difference(record: Record, base: Record | None) -> str:
    if base is None or base is record:
        return "" if base is None else "0"
    if past_training(base) or past_training(record):
        return "trend"
    return _signed(paired(record, base))


def _signed(difference: Interval | None) -> str:
    if difference is None:
        return ""
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+.4f} (too short)"
    return f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"


def _buckets(records: Sequence[Record]) -> list[str]:
    """Perplexity by position in the stream."""
    having = [r for r in records if r.status == "ok" and r.metrics.get("buckets")]
    if not having:
        return []
    edges = sorted({(b["from"], b["to"]) for r in having for b in r.metrics["buckets"]})
    rows = []
    for record in having:
        means = {(b["from"], b["to"]): math.exp(min(b["nll"], 700)) for b in record.metrics["buckets"]}
        rows.append([label(record), _count(record.cell["capacity"]), *(f"{means[e]:.4g}" if e in means else "" for e in edges)])
    length = having[0].facts.get("training_length")
    about = "Perplexity by position in the stream" + (f" (training length {_count(length)})" if length else "") + ":\n"
    head = ["policy", "capacity", *(f"{_count(low)} to {_count(high)}" for low, high in edges)]
    return [about, *_markdown_table(head, rows, "lr" + "r" * len(edges))]


def _provenance(records: Sequence[Record]) -> list[str]:
    """Where the numbers come from; what differs between the records is listed."""
    facts = [r.facts for r in records]
    data = records[0].data

    def all_of(values: Iterable[Any]) -> str:
        return md("; ".join(sorted({str(v) for v in values if v is not None})))

    dates = sorted(r.finished[:10] for r in records)
    lines = [
        f"device: {all_of(f.get('device') for f in facts)}, threads {all_of(f.get('threads') for f in facts)}, "
        f"block {all_of(f.get('block') for f in facts)} tokens",
        "versions: " + all_of(", ".join(f"{k} {v}" for k, v in f.get("versions", {}).items()) for f in facts),
        f"weights sha256 {all_of(str(f.get('weights_sha256', ''))[:12] for f in facts)}; text sha256 "
        f"{md(str(data.get('text_sha256', ''))[:12])}; token ids sha256 {md(str(data.get('ids_sha256', ''))[:12])}",
        f"texts: {md('; '.join(data.get('texts', [])))}",
        f"measured: {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else ""),
    ]
    return ["<details><summary>Provenance</summary>\n", *(f"- {line}" for line in lines), "\n</details>\n"]


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], alignment: str) -> list[str]:
    rule = ["---:" if a == "r" else "---" for a in alignment]
    return [*(f"| {' | '.join(row)} |" for row in (head, rule, *rows)), ""]


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "" if value is None else md(str(value))


def _bytes(value: Any) -> str:
    """Bytes in binary units, three digits."""
    if not isinstance(value, int):
        return ""
    size, units = float(value), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def md(text: object) -> str:
    """Text of a record as text of a page: nothing in it can be markup or end a table cell."""
    flat = " ".join(str(text).split())
    return re.sub(r"([\\`*_{}\[\]<>|#&~!])", lambda m: f"&#{ord(m[1])};" if m[1] in "<>|&`[]" else f"\\{m[1]}", flat)
