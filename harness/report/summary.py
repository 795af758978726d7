"""A run in one table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.records import Record
from harness.report.sections import headline


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row a record, for people and pipes; options of models and tasks that differ between records are shown."""
    models = {str(r.cell["model"]["id"]) for r in records}
    names = dict.fromkeys(name for r in records for name in r.cell["task"])
    varying = [n for n in names if len({repr(r.cell["task"].get(n)) for r in records}) > 1]
    return [
        {
            **({"model": r.cell["model"]["id"]} if len(models) > 1 else {}),
            "policy": r.cell["policy"],
            "capacity": r.cell["capacity"],
            **{name: r.cell["task"].get(name) for name in varying},
            "figure": headline(r),
            "kv_bytes": r.metrics.get("kv_bytes"),
            "tokens/s": round(r.facts["tokens_per_second"]) if "tokens_per_second" in r.facts else None,
            "status": _status(r),
            "cell": r.cell_id[:8],
        }
        for r in records
    ]


def _status(record: Record) -> str:
    flags = record.metrics.get("flags") or []
    return f"{record.status}: {record.error['kind']}" if record.error else "flagged" if flags else record.status
