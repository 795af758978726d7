"""Markdown of the pages: tables, numbers and names. Text from records is escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kvbench.harness.core.grouped import grouped
from kvbench.harness.core.shown import visible
from kvbench.harness.records import Record
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.records.metrics import Metrics

M = TypeVar("M", bound=Metrics)
Row = tuple[Record, Mapping[Any, str]]  # a record and its cells, by column
_TEXT_COLUMNS = ("policy", "task", "status", "training", "model", "options", "cell", "metric", "verdict", "why")  # aligned left
_DEFAULT_AXES = {"evict": "step", "kv": "", "positions": "cache", "limit": None, "seed": 0}


def model_name(record: Record) -> str:
    """Return the model's id, with the quantisation from which its weights were converted, if any."""
    quantised = record.facts.dequantised_from
    return visible(record.cell.model.id + (f" (weights dequantised from {quantised})" if quantised else ""))


def task_name(record: Record) -> str:
    """Return the task's name with the options that it shows."""
    cell = record.cell
    names = cell.options if cell.task.shown is None else cell.task.shown
    return " ".join([cell.task.name, *(f"{k} {cell.options[k]}" for k in names if k in cell.options and k != "name")])


def title(record: Record) -> str:
    """Return the policy with its parameters, and with evict, kv, positions, limit and seed unless default."""
    cell = record.cell
    extra = [f"{name} {value}" for name, value in cell.settings.items() if value is not None]
    extra += [str(v) if name == "kv" else f"{name} {v}" for name, v in axes(cell).items() if v != _DEFAULT_AXES[name]]
    return named(cell.policy, extra)


def axes(cell: CellSpec) -> dict[str, object]:
    """Return the settings, except parameters, in which cells of one policy and capacity can differ, by their names in a suite."""
    return {"evict": cell.evicts, "kv": cell.stored, "positions": cell.positions, "limit": cell.limit, "seed": cell.seed}


def named(policy: str, settings: Sequence[str]) -> str:
    """Return the name of a policy with settings in parentheses."""
    return visible(f"{policy} ({', '.join(settings)})" if settings else policy)


def on_device(record: Record, among: Iterable[Record]) -> str:
    """Return " on <device>" if the records were measured on several devices, else an empty text."""
    return f" on {record.facts.device or 'an unknown device'}" if len({r.facts.device for r in among}) > 1 else ""


def row_label(record: Record, among: Iterable[Record]) -> str:
    """Return the escaped title of the policy, with the device if the records have several."""
    return md(title(record) + on_device(record, among))


def by_row(records: Sequence[Record]) -> list[list[Record]]:
    """Return the records of each row of a table that has a column for each value of a task's axis."""
    return list(grouped(records, lambda r: (row_label(r, records), r.cell.capacity)).values())


def status(record: Record) -> str:
    """Return the state of a record: ok, the kind of failure, or the flags."""
    if record.failure:
        return f"**failed**: {md(record.failure)}"
    flags = record.metrics.flags
    return f"**flagged**: {md('; '.join(flags))}" if flags else "ok"


def task_line(record: Record) -> str:
    """Describe the task, its options and its data in a sentence."""
    options = ", ".join(f"{md(k)} {md(v)}" for k, v in record.cell.options.items() if k != "name")
    source = f" on {md(record.data.source)}" if record.data.source else ""
    return f"{md(record.cell.task.name)}{source}{f' ({options})' if options else ''}.\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], alignment: str) -> list[str]:
    """Return the lines of a table. alignment: one letter per column: l, c or r."""
    rule = [{"r": "---:", "c": ":---:"}.get(a, "---") for a in alignment]
    return [*(f"| {' | '.join(row)} |" for row in (head, rule, *rows)), ""]


def policy_table(
    rows: Sequence[Row], among: Sequence[Record], heads: Mapping[Any, str] | Callable[[Any], str] | None = None
) -> list[str]:
    """Return the lines of a table with a row per record: policy, capacity, and its cells. Empty columns are left out.

    Args:
        rows: each record with its cells, by column; "policy" replaces the label of the record.
        among: all records of the page, which decide whether labels name a device.
        heads: heading of each column, in order; or a function that returns the heading of a column, for columns in ascending
            order. None: the columns are the headings, in the order of the longest row.
    """
    if callable(heads):
        heads = {column: heads(column) for column in sorted({column for _, cells in rows for column in cells})}
    lines = [{"policy": row_label(r, among), "capacity": number(r.cell.capacity), **cells} for r, cells in rows]
    return rows_table(lines, None if heads is None else {"policy": "policy", "capacity": "capacity", **heads})


def measured_table(records: Sequence[Record], metrics: type[M], cells: Callable[[Record, M], Mapping[str, str]]) -> list[str]:
    """Return the lines of a table with a row per record: its cells, by heading, if it was measured, and its status."""
    rows = [(r, dict(cells(r, m)) if (m := r.measured(metrics)) else {}) for r in records]
    return policy_table([(r, row | {"status": status(r)}) for r, row in rows], records)


def rows_table(rows: Sequence[Mapping[Any, str]], heads: Mapping[Any, str] | None = None) -> list[str]:
    """Return the lines of a table, given the cells of each row by column. Empty columns are left out.

    Args:
        heads: heading of each column, in order. None: the columns are the headings, in the order of the longest row.
    """
    columns = heads or {name: name for row in sorted(rows, key=len, reverse=True) for name in row}
    shown = [name for name in columns if any(row.get(name) for row in rows)]
    alignment = "".join("l" if name in _TEXT_COLUMNS else "r" for name in shown)
    return table([columns[name] for name in shown], [[row.get(name, "") for name in shown] for row in rows], alignment)


def number(value: Any) -> str:
    """Format a float with four digits, an integer with thousands separators; empty for anything else."""
    if isinstance(value, int):
        return f"{value:,}"
    return digits(value) if isinstance(value, float) else ""


def digits(value: float | None, count: int = 4) -> str:
    """Format a number with `count` significant digits, or all before the point, or an exponent below 0.0001; empty for None."""
    if value is None:
        return ""
    text = f"{value:.{count}g}"
    return f"{value:,.0f}" if "e+" in text else text


def rounded(value: float | None) -> str:
    """Format a number without decimals; empty for None."""
    return "" if value is None else f"{value:,.0f}"


def with_ends(figure: float, ends: Sequence[float] | None, form: Callable[..., str], missing: str = " (too short)") -> str:
    """Format a figure with the ends of its interval, each by `form`; without an interval, with the text `missing`."""
    return form(figure) + (f" [{form(ends[0])}, {form(ends[1])}]" if ends else missing)


def percent(share: float | None, ends: Sequence[float] | None = None, unit: str = " %") -> str:
    """Format a share in percent, with the ends of its interval if given; empty for None."""
    if share is None:
        return ""
    interval = "" if not ends else f" [{100 * max(0.0, ends[0]):.1f}, {100 * min(1.0, ends[1]):.1f}]"
    return f"{100 * share:.1f}{unit}{interval}"


def in_bytes(value: Any) -> str:
    """Format bytes in binary units, with three digits; empty unless an integer."""
    if not isinstance(value, int):
        return ""
    size, units = float(value), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"


def cache_bytes(value: Any) -> str:
    """Format the bytes of a cache; a dash for a policy that keeps no cache."""
    return "–" if value == 0 else in_bytes(value)


def md(text: object) -> str:
    """Escape text of a record, so that it can't become markup, end a table cell or be invisible."""
    flat = " ".join(visible(text).split())
    return re.sub(r"([\\`*_{}\[\]<>|#&~!])", lambda m: f"&#{ord(m[1])};" if m[1] in "<>|&`[]" else f"\\{m[1]}", flat)
