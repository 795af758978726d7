"""Perplexity: the whole stream, paired differences, and by position."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.records import Record
from harness.report.chart import Chart
from harness.report.charts.stream import over_the_stream
from harness.report.intervals import Interval
from harness.report.markdown import count, in_bytes, label, md, status, table
from harness.report.pairing import paired, past_training, perplexity

AXES: tuple[str, ...] = ()


def headline(record: Record) -> str:
    """Of the whole stream."""
    return f"perplexity {record.metrics['perplexity']:.4g}"


def body(records: Sequence[Record]) -> list[str | Chart]:
    """What was asked, the table, the stream as a picture, and by position."""
    data, task = records[0].data, records[0].cell["task"]
    prefix, stride, kind = len(data.get("prefix", [])), task.get("stride", 1), " newlines" if task.get("newlines") else ""
    streams = task.get("streams")
    about = (
        f"{md(task.get('name', ''))} on {md(data.get('source', '?'))}, {count(data.get('tokens'))} tokens"
        f"{f' after a prefix of {prefix}{kind}' if prefix else ''}"
        f"{f', cut in {streams} streams' if streams else ''}"
        f"{f'; recompute_window scores one token in {stride}' if stride > 1 else ''}."
    )
    return [about + "\n", *_table(records), *over_the_stream(records), *_buckets(records), *_facts(records)]


def _table(records: Sequence[Record]) -> list[str]:
    dense = next((r for r in records if r.cell["policy"] == "dense"), None)
    recompute = {r.cell["capacity"]: r for r in records if r.cell["policy"] == "recompute_window"}
    rows = []
    for record in records:
        metrics, ok = record.metrics, record.status == "ok"
        rows.append([
            label(record), count(record.cell["capacity"]), _perplexity(record) if ok else "",
            f"{metrics['bits_per_byte']:.3f}" if ok and "bits_per_byte" in metrics else "",
            _difference(record, dense), _difference(record, recompute.get(record.cell["capacity"])),
            in_bytes(metrics.get("kv_bytes")) if ok else "", count(round(record.facts.get("tokens_per_second", 0))),
            status(record),
        ])  # fmt: skip
    head = ["policy", "capacity", "perplexity", "bits/byte", "Δ NLL to dense", "Δ NLL to recompute", "K/V", "tokens/s", "status"]
    return table(head, rows, "lrrrrrrrl")


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
        rows.append([label(record), count(record.cell["capacity"]), *(f"{means[e]:.4g}" if e in means else "" for e in edges)])
    length = having[0].facts.get("training_length")
    about = "Perplexity by position in the stream" + (f" (training length {count(length)})" if length else "") + ":\n"
    head = ["policy", "capacity", *(f"{count(low)} to {count(high)}" for low, high in edges)]
    return [about, *table(head, rows, "lr" + "r" * len(edges))]


def _facts(records: Sequence[Record]) -> list[str]:
    """What the facts of generated prose cost, by how far back they were told before."""
    having = [r for r in records if r.status == "ok" and r.metrics.get("facts")]
    if not having:
        return []
    spans = sorted({tuple(f["words_back"] or (0, 0)) for r in having for f in r.metrics["facts"]})
    rows = []
    for record in having:
        costs = {tuple(f["words_back"] or (0, 0)): f["nats"] for f in record.metrics["facts"]}
        rows.append([label(record), count(record.cell["capacity"]), *(f"{costs[s]:.2f}" if s in costs else "" for s in spans)])
    heads = ["told first" if high == 0 else f"{low:,} to {high:,}" for low, high in spans]
    drawn = having[0].metrics["facts"][0]["drawn_nats"]
    return [
        f"Nats for the words of a fact, by words since it was told before (told for the first time, it is drawn from "
        f"{round(math.exp(drawn))}: {drawn:.2f} nats; who remembers it pays nothing):\n",
        *table(["policy", "capacity", *heads], rows, "lr" + "r" * len(heads)),
    ]  # fmt: skip
