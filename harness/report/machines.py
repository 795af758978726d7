"""The machines that measured records. Figures of two machines never share a row."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import StepMetrics
from kvbench.harness.report.markdown import md, title


def device(record: Record) -> str:
    """The device that measured the record; empty if unknown."""
    return record.facts.device


def on_device(record: Record, among: Sequence[Record]) -> str:
    """Text " on <device>" if these records were measured on several devices, else empty."""
    return f" on {device(record) or 'an unknown device'}" if len({device(r) for r in among}) > 1 else ""


def row_label(record: Record, among: Sequence[Record]) -> str:
    """Escaped title of the policy, with the device if these records have several."""
    return md(title(record) + on_device(record, among))


def by_machine(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """(name, records) of every machine, sorted by name; the name is empty if there is only one.

    A machine is a device. If steps were timed on a device with several set-ups (instructions, threads), each set-up is a
    machine; all of them share the figures of quality, which don't depend on the set-up.
    """
    machines = []
    for name in sorted({device(r) for r in records}):
        here = [r for r in records if device(r) == name]
        setups = sorted({_setup(r) for r in here if r.measures(StepMetrics)})
        for setup in setups or [""]:
            label = f"{name or 'an unknown device'}{f', {setup}' if len(setups) > 1 else ''}"
            machines.append((label, [r for r in here if not r.measures(StepMetrics) or _setup(r) == setup]))
    return machines if len(machines) > 1 else [("", list(records))]


def _setup(record: Record) -> str:
    """What else the time of a step depends on."""
    threads, instructions = record.facts.threads, record.facts.instructions
    return ", ".join([*([f"threads {threads}"] if threads else []), *([instructions] if instructions else [])])
