"""The latency page: a step at the end of the stream, compared with dense, recompute and the roofline."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records import Record
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.charts.latency import over_capacity
from kvbench.harness.report.machines import by_machine
from kvbench.harness.report.markdown import cache_bytes, count, in_bytes, label, md, status, table
from kvbench.harness.report.speed import speed_up
from kvbench.harness.tasks.latency.schema import LatencyMetrics, LatencyOptions


def body(records: Sequence[Record]) -> list[str | Chart]:
    """For each machine: the steady state, a chart of it over the capacity, and the curve over the stream."""
    task = records[0].cell.task_options(LatencyOptions)
    about = (
        f"One decode step, {task.batch} stream{'s' if task.batch > 1 else ''}, after {count(task.tokens)} tokens. "
        "ms/token is the median with half its 95 % interval. Speed-ups are medians over the rounds that timed both cells, "
        "with their interval: over dense, which caches the whole stream, and over recomputing a window of the same capacity. "
        "Bookkeeping is the share of a step spent on statistics, scoring and eviction. The roofline is the shortest time that "
        "the bytes or operations of a step can take at this device's rates, measured at the start. Slots: in use / attended.\n"
    )
    head = ["policy", "capacity", "ms/token", "p90", "p99", "tokens/s", "first token ms", "speed-up over dense", "over recompute",
            "bookkeeping", "× roofline", "slots", "K/V", "state", "status"]  # fmt: skip
    lines: list[str | Chart] = [about]
    for machine, part in by_machine(records):
        lines += [f"On {md(machine)}:\n"] if machine else []
        lines += table(head, [_row(r, part) for r in part], "lrrrrrrrrrrrrrl")
        lines += [*over_capacity(part, machine), *_curve(part), *_rates(part)]
    return lines


def _row(record: Record, records: Sequence[Record]) -> list[str]:
    name, m = [label(record), count(record.cell.capacity)], record.measured(LatencyMetrics)
    if m is None:
        return [*name, *[""] * 12, status(record)]
    dense = [r for r in records if r.cell.policy == "dense"]
    recompute = [r for r in records if r.cell.policy == "recompute_window" and r.cell.capacity == record.cell.capacity]
    last, tails = m.curve[-1], m.percentiles_ms
    return [
        *name, f"{m.step_ms:.3g} ± {m.error:.0%}", *(f"{tails[q]:.3g}" if q in tails else "" for q in ("p90", "p99")),
        f"{m.tokens_per_second:,.0f}", f"{m.first_token_ms:.3g} ± {m.first_token_error:.0%}",
        speed_up(record, dense), speed_up(record, recompute), f"{m.bookkeeping_share:.0%}" if m.kv_bytes else "",
        f"{m.over_roofline:.1f}", f"{last.used_slots:,.0f} / {last.attended_slots:,.0f}",
        cache_bytes(m.kv_bytes), in_bytes(m.state_bytes), status(record),
    ]  # fmt: skip


def _curve(records: Sequence[Record]) -> list[str]:
    """Milliseconds per token over the stream."""
    curves = [(r, m.curve) for r in records if (m := r.measured(LatencyMetrics))]
    points = sorted({point.position for _, curve in curves for point in curve})
    rows = []
    for record, curve in curves:
        steps = {point.position: point for point in curve}
        cells = (f"{steps[p].step_ms:.3g} ± {steps[p].error:.0%}" if p in steps else "" for p in points)
        rows.append([label(record), count(record.cell.capacity), *cells])
    head = ["policy", "capacity", *(f"after {p:,}" for p in points)]
    return (
        ["ms/token over the stream, while caches fill and afterwards:\n", *table(head, rows, "lr" + "r" * len(points))]
        if rows
        else []
    )


def _rates(records: Sequence[Record]) -> list[str]:
    """Rates measured on the device."""
    rates = [m.device for r in records if (m := r.measured(LatencyMetrics))]
    texts = dict.fromkeys(f"{x.bandwidth / 1e9:,.1f} GB/s, {x.multiply_rate / 1e12:,.2f} TFLOP/s" for x in rates)
    return [f"Device rates, measured at the start: {md('; '.join(texts))}.\n"] if texts else []
