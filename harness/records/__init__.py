"""Records: one JSON file per cell, and the folder that holds them. Imports no torch."""

from kvbench.harness.records.record import (
    MIGRATIONS,
    NUMERICS_VERSION,
    RECORD_VERSION,
    Problem,
    Record,
    digest,
    from_the_future,
    newest,
    read,
)
from kvbench.harness.records.store import LOCK, RecordStore, pack

__all__ = [
    "LOCK", "MIGRATIONS", "NUMERICS_VERSION", "RECORD_VERSION", "Problem", "Record", "RecordStore", "digest", "from_the_future",
    "newest", "pack", "read",
]  # fmt: skip
