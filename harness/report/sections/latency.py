"""Latency: a step at the end of the stream, beside dense, beside recompute and beside what the memory allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbench.harness.core.intervals import median_interval
from kvbench.harness.records import Record
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.charts.latency import over_capacity
from kvbench.harness.report.machines import by_machine
from kvbench.harness.report.markdown import cache_bytes, count, in_bytes, label, md, status, table

AXES: tuple[str, ...] = ()


def headline(record: Record) -> str:
    """Milliseconds a token."""
    return f"{record.metrics['step_ms']:.3g} ms/token ± {record.metrics['error']:.0%}"


def body(records: Sequence[Record]) -> list[str | Chart]:
    """Machine by machine the steady state, a picture of it over the capacity, then the curve over the stream."""
    task = records[0].cell["task"]
    about = (
        f"One decode step, {task['batch']} stream{'s' if task['batch'] > 1 else ''}, after {count(task['tokens'])} tokens. "
        "ms/token is the median with half its 95 % interval. Speed-ups are medians over rounds in which both were measured "
        "in turn, with their interval: against dense with the whole stream in its cache, and against recomputing the same "
        "capacity. Bookkeeping is what statistics, scoring and evicting take of a step. The roofline is the shortest time "
        "the bytes (or operations) of a step can take on this device, both measured at the start. Slots: in use / attended.\n"
    )
    head = ["policy", "capacity", "ms/token", "p90", "p99", "tokens/s", "first token ms", "speed-up on dense", "on recompute",
            "bookkeeping", "× roofline", "slots", "K/V", "state", "status"]  # fmt: skip
    lines: list[str | Chart] = [about]
    for machine, part in by_machine(records):
        lines += [f"On {md(machine)}:\n"] if machine else []
        lines += table(head, [_row(r, part) for r in part], "lrrrrrrrrrrrrrl")
        lines += [*over_capacity(part, machine), *_curve(part), *_rates(part)]
    return lines


def _row(record: Record, records: Sequence[Record]) -> list[str]:
    name, m = [label(record), count(record.cell["capacity"])], record.metrics
    if record.status != "ok":
        return [*name, *[""] * 12, status(record)]
    dense = [r for r in records if r.cell["policy"] == "dense"]
    recompute = [r for r in records if r.cell["policy"] == "recompute_window" and r.cell["capacity"] == record.cell["capacity"]]
    last, tails = m["curve"][-1], m["percentiles_ms"]
    return [
        *name, f"{m['step_ms']:.3g} ± {m['error']:.0%}", *(f"{tails[q]:.3g}" if q in tails else "" for q in ("p90", "p99")),
        f"{m['tokens_per_second']:,.0f}", f"{m['first_token_ms']:.3g} ± {m['first_token_error']:.0%}",
        speed_up(record, dense), speed_up(record, recompute), f"{m['bookkeeping_share']:.0%}" if m["kv_bytes"] else "",
        f"{m['over_roofline']:.1f}", f"{last['used_slots']:,.0f} / {last['attended_slots']:,.0f}",
        cache_bytes(m["kv_bytes"]), in_bytes(m["state_bytes"]), status(record),
    ]  # fmt: skip


def speed_up(record: Record, bases: Sequence[Record]) -> str:
    """How many times as fast as the yardstick that was measured side by side with it; empty if none was."""
    ratios = next((found for base in bases if (found := round_ratios(base, record)) is not None), None)
    if ratios is None:
        return ""
    low, high = median_interval(ratios)
    return f"{np.median(ratios):.3g}× [{low:.3g}, {high:.3g}]"


def round_ratios(a: Record, b: Record) -> list[float] | None:
    """A's time of a step over b's, round by round; None if the two were not timed in turn."""
    if a is b or a.status != "ok" or b.status != "ok" or a.metrics["together"] != b.metrics["together"]:
        return None
    ratios: list[float] = (np.array(a.metrics["rounds_ms"]) / np.array(b.metrics["rounds_ms"])).tolist()
    return ratios


def _curve(records: Sequence[Record]) -> list[str]:
    """Milliseconds a token over the stream."""
    having = [r for r in records if r.status == "ok"]
    points = sorted({c["position"] for r in having for c in r.metrics["curve"]})
    rows = []
    for record in having:
        steps = {c["position"]: c for c in record.metrics["curve"]}
        cells = (f"{steps[p]['step_ms']:.3g} ± {steps[p]['error']:.0%}" if p in steps else "" for p in points)
        rows.append([label(record), count(record.cell["capacity"]), *cells])
    head = ["policy", "capacity", *(f"after {p:,}" for p in points)]
    return (
        ["ms/token over the stream, while caches fill and after:\n", *table(head, rows, "lr" + "r" * len(points))] if rows else []
    )


def _rates(records: Sequence[Record]) -> list[str]:
    """What the device was found to do."""
    seen = dict.fromkeys(
        f"{r.metrics['device']['bandwidth'] / 1e9:,.1f} GB/s, {r.metrics['device']['multiply_rate'] / 1e12:,.2f} TFLOP/s"
        for r in records if r.status == "ok"
    )  # fmt: skip
    return [f"Measured at the start: {md('; '.join(seen))}.\n"] if seen else []
