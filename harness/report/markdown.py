"""Markdown: tables, numbers and names as the pages write them. Whatever comes from a record is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record


def title(record: Record) -> str:
    """The policy with what distinguishes it: parameters, positions and seed where they are not the plain ones."""
    cell = record.cell
    extra = [f"{k} {v}" for k, v in cell["parameters"].items() if v is not None]
    extra += [f"positions {cell['positions']}"] if cell["positions"] != "cache" else []
    extra += [f"limit {cell['limit']}"] if cell.get("limit") is not None else []
    extra += [f"seed {cell['seed']}"] if cell["seed"] else []
    return visible(f"{cell['policy']} ({', '.join(extra)})" if extra else cell["policy"])


def told_apart(records: Sequence[Record]) -> list[str]:
    """Short titles: of each policy only what differs from its others of the same capacity."""
    titles = []
    for record in records:
        cell = record.cell
        rivals = [r for r in records if (r.cell["policy"], r.cell["capacity"]) == (cell["policy"], cell["capacity"])]

        def varies(of: str | None, name: str, rivals: list[Record] = rivals) -> bool:
            return len({repr((r.cell[of] if of else r.cell).get(name)) for r in rivals}) > 1

        extra = [f"{k} {v}" for k, v in cell["parameters"].items() if varies("parameters", k)]
        extra += [f"{k} {cell[k]}" for k in ("positions", "limit", "seed") if varies(None, k) and cell.get(k) is not None]
        titles.append(visible(f"{cell['policy']} ({', '.join(extra)})" if extra else cell["policy"]))
    return titles


def label(record: Record) -> str:
    """The title as text of a page."""
    return md(title(record))


def status(record: Record) -> str:
    """Whether it went well; what it died of, or what is doubtful about it."""
    if record.status != "ok":
        return f"**failed**: {md((record.error or {}).get('kind', '?'))}"
    flags = record.metrics.get("flags") or []
    return f"**flagged**: {md('; '.join(map(str, flags)))}" if flags else "ok"


def asked(record: Record) -> str:
    """The task with its options, and what it read."""
    task = record.cell["task"]
    options = ", ".join(f"{md(k)} {md(v)}" for k, v in task.items() if k != "name")
    source = f" on {md(record.data['source'])}" if record.data.get("source") else ""
    return f"{md(task.get('name', ''))}{source}{f' ({options})' if options else ''}.\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], alignment: str) -> list[str]:
    """A table; alignment: one letter a column, l, c or r."""
    rule = [{"r": "---:", "c": ":---:"}.get(a, "---") for a in alignment]
    return [*(f"| {' | '.join(row)} |" for row in (head, rule, *rows)), ""]


def number(value: Any) -> str:
    """A number in four digits, large integers in full."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else ""


def count(value: Any) -> str:
    """An integer with its thousands apart."""
    return f"{value:,}" if isinstance(value, int) else "" if value is None else md(str(value))


def in_bytes(value: Any) -> str:
    """Bytes in binary units, three digits."""
    if not isinstance(value, int):
        return ""
    size, units = float(value), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def cache_bytes(value: Any) -> str:
    """Bytes of a cache; a dash for what keeps none, which is not a small cache."""
    return "–" if value == 0 else in_bytes(value)


def md(text: object) -> str:
    """Text of a record as text of a page: nothing in it can be markup, end a table cell or hide."""
    flat = " ".join(visible(text).split())
    return re.sub(r"([\\`*_{}\[\]<>|#&~!])", lambda m: f"&#{ord(m[1])};" if m[1] in "<>|&`[]" else f"\\{m[1]}", flat)
