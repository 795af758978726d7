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
from kvbench.harness.records.submitted import Standing, Submitted, add_submitted, fingerprint, read_submitted, standing

__all__ = [
    "LOCK", "MIGRATIONS", "NUMERICS_VERSION", "RECORD_VERSION", "Problem", "Record", "RecordStore", "Standing", "Submitted",
    "add_submitted", "digest", "fingerprint", "from_the_future", "newest", "pack", "read", "read_submitted", "standing",
]  # fmt: skip
