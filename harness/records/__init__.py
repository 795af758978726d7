"""Records of measured cells, and the folders that hold them. Imports no torch."""

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
from kvbench.harness.records.store import LOCK, RecordStore, publish

__all__ = [
    "LOCK",
    "MIGRATIONS",
    "NUMERICS_VERSION",
    "RECORD_VERSION",
    "Problem",
    "Record",
    "RecordStore",
    "digest",
    "from_the_future",
    "newest",
    "publish",
    "read",
]
