"""A run in one table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.records import Record


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row a record, for people and pipes."""
    return [
        {
            "policy": r.cell["policy"],
            "capacity": r.cell["capacity"],
            "perplexity": f"{r.metrics['perplexity']:.4f}" if "perplexity" in r.metrics else None,
            "kv_bytes": r.metrics.get("kv_bytes"),
            "tokens/s": round(r.facts.get("tokens_per_second", 0)),
            "status": r.status if r.error is None else f"{r.status}: {r.error['kind']}",
            "cell": r.cell_id[:8],
        }
        for r in records
    ]
