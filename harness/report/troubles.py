"""Troubles of a run: failed cells, flags and slow methods, each in a line for all policies that share the reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbench.harness.core.grouped import grouped
from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record
from kvbench.harness.records.run_facts import Failure
from kvbench.harness.report.rows import without_folder
from kvbench.harness.report.task_report import OF_MACHINE, task_of

_MAX_NAMES = 3  # names in a line, before "and 4 more"
_WALKED = ("walk", "compiled steps")  # methods that read token by token inside a layer


def troubles(records: Sequence[Record]) -> list[str]:
    """Return a line for each failure and flag, with the reason, and a line for each way of reading without a faster method."""
    return [*_failures(records), *_flags(records), *_slow(records)]


def _failures(records: Sequence[Record]) -> list[str]:
    """Describe failed cells in a line per policy and reason."""
    failures = grouped((r for r in records if r.status != "ok"), lambda r: (without_folder(r.cell.policy), _reason(r)))
    return [
        visible(f"{policy} failed ({f'{len(failed)} cells' if len(failed) > 1 else failed[0].cell.task.name}): {reason}")
        for (policy, reason), failed in failures.items()
    ]


def _reason(record: Record) -> str:
    """Return the reason of a failure, with the place in the code."""
    error = record.error or Failure(kind="", message="")
    reason = ": ".join(part for part in (error.kind, error.message) if part) or "no reason given"
    return f"{reason} ({error.where})" if error.where else reason


def _flags(records: Sequence[Record]) -> list[str]:
    """Describe flags in a line per task and kind. Flags of one kind agree up to the first colon or digit."""
    flags = (
        (record.cell.task.name, flag, without_folder(record.cell.policy)) for record in records for flag in record.metrics.flags
    )
    lines = []
    for (task, _), flagged in grouped(flags, lambda named: (named[0], named[1].split(":")[0].rstrip("0123456789,. "))).items():
        lines.append(visible(f"{_names(policy for _, _, policy in flagged)} flagged ({task}): {flagged[0][1]}"))
    return lines


def _slow(records: Sequence[Record]) -> list[str]:
    """Describe, in at most a line per way of reading, the cells without a faster method, with the policies of each reason."""
    by_way = grouped((r for r in records if r.status == "ok" and _way(r)), _way)
    lines = []
    for way, cells in by_way.items():
        reasons = grouped(cells, lambda r: r.facts.refused or r.facts.plain_because)
        named = "; ".join(f"{_names(without_folder(r.cell.policy) for r in slow)} ({why})" for why, slow in reasons.items())
        lines.append(visible(f"{len(cells)} cell{'s were' if len(cells) > 1 else ' was'} {way}: {named}"))
    return lines


def _way(record: Record) -> str:
    """Return how a cell was read, if a faster method was refused or does not exist; else an empty text.

    A task that measures time or memory reads single tokens, for which only a refused method matters.
    """
    facts = record.facts
    by_token = facts.method in _WALKED or (facts.method or "").endswith("token by token")
    if by_token and (facts.refused or facts.plain_because) and task_of(record).measures not in OF_MACHINE:
        return "read token by token"
    return "measured without a faster method" if facts.refused else ""


def _names(policies: Iterable[str]) -> str:
    """Join the different names of policies. Of many, only the first are named."""
    names = list(dict.fromkeys(policies))
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more}"
