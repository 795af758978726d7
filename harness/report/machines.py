"""Where records were measured: what two machines measured never stands in one row."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import StepMetrics
from kvbench.harness.report.markdown import md, title


def device(record: Record) -> str:
    """What it was measured on; empty if the record doesn't say."""
    return record.facts.device


def on_device(record: Record, among: Sequence[Record]) -> str:
    """To tell rows apart: " on X" with the device's name where these records were measured on several, else nothing."""
    return f" on {device(record) or 'an unknown device'}" if len({device(r) for r in among}) > 1 else ""


def row_label(record: Record, among: Sequence[Record]) -> str:
    """The policy as text of a page, with its device where that tells rows apart."""
    return md(title(record) + on_device(record, among))


def by_machine(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Every machine's name with the records it measured, sorted by name.

    A machine is a device; where steps were timed on one device in several ways (instructions, threads), each way is a
    machine, and shares the figures of quality, which these don't decide. Of one machine the name is empty.
    """
    found = []
    for name in sorted({device(r) for r in records}):
        here = [r for r in records if device(r) == name]
        setups = sorted({_setup(r) for r in here if _timed(r)})
        for setup in setups or [""]:
            what = f"{name or 'an unknown device'}{f', {setup}' if len(setups) > 1 else ''}"
            found.append((what, [r for r in here if not _timed(r) or _setup(r) == setup]))
    return found if len(found) > 1 else [("", list(records))]


def _timed(record: Record) -> bool:
    return record.measures(StepMetrics)


def _setup(record: Record) -> str:
    """What else decides the time of a step."""
    threads, instructions = record.facts.threads, record.facts.instructions
    return ", ".join([*([f"threads {threads}"] if threads else []), *([instructions] if instructions else [])])
