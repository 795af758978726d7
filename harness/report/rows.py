"""Rows of tables: one policy at one capacity, and the shortest names that distinguish rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvbench.harness.core.grouped import distinguishing_keys, grouped
from kvbench.harness.records import Record
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.records.metrics import Metrics, NllMetrics, QuestionMetrics, StepMetrics
from kvbench.harness.report.markdown import axes, cache_bytes, named
from kvbench.harness.report.pairing import scores_all, stride_of, task_version
from kvbench.harness.report.shares import Answers, Stream, answers, streams_of
from kvbench.harness.report.task_report import kv_title

CONTROL = "random"  # control policy; a policy that does no better gains nothing from its choice of tokens
_CONTROL_KEEPS = ("sinks", "window", "keep_prompt")  # always named, because they decide how hard it is to beat


def short_names(policies: Sequence[Row]) -> list[str]:
    """Name each row: policy, settings that tell the rows of its policy apart, and format if there are several.

    Rows of several capacities have one name, so settings that follow from the capacity are left out. The format is shown even if
    capacities differ, because it determines the size of a token.
    """
    names, formats = [], {row.cell.stored for row in policies}
    for row in policies:
        rivals, settings = [r for r in policies if r.cell.policy == row.cell.policy], _settings(row)
        distinguishing = distinguishing_keys([{"capacity": r.cell.capacity} | _settings(r) for r in rivals])
        always = _CONTROL_KEEPS if row.cell.policy == CONTROL else ()
        is_axis = row.cell.codec is not None or not row.cell.stored  # a third-party cache's format follows from its parameters
        keys = dict.fromkeys([*always, *distinguishing, *(["kv"] if len(formats) > 1 and is_axis else [])])
        shown = [key for key in keys if settings.get(key) is not None and not _follows_capacity(key, row, rivals)]
        names.append(named(without_folder(row.cell.policy), [f"{key} {settings[key]}" for key in shown]))
    return names


def short_titles(records: Sequence[Record]) -> list[str]:
    """Name each record as `short_names` names a row."""
    return short_names([Row([record]) for record in records])


def _follows_capacity(key: str, row: Row, rivals: Sequence[Row]) -> bool:
    """Whether a setting varies with the capacity, such as half the capacity, while its rivals share a constant such as 0.

    rivals: all rows of the policy.
    """
    by_capacity = grouped(rivals, lambda rival: rival.cell.capacity).values()
    values = [{repr(_settings(rival).get(key)) for rival in group} for group in by_capacity]
    shared = set.intersection(*values)
    alone = [group - shared for group in values]
    own = {repr(_settings(row).get(key))} - shared
    return bool(shared and own) and all(len(group) == 1 for group in alone) and len(set.union(*alone)) > 1


def without_folder(name: str) -> str:
    """Return the policy's name without the folder of its file."""
    path, colon, rest = name.partition(":")
    return f"{Path(path).name}{colon}{rest}"


def _settings(row: Row) -> dict[str, object]:
    """Return all settings in which two rows of one policy and capacity can differ. The control's window may be "half"."""
    cell = row.cell
    halved = cell.policy == CONTROL and cell.capacity is not None and cell.settings.get("window") == cell.capacity // 2
    return {**cell.settings, **({"window": "half"} if halved else {}), **axes(cell), "kv": cell.stored or None}


@dataclass(frozen=True)
class Row:
    """A policy at a capacity, with all its records of a suite and model on one machine."""

    records: Sequence[Record]

    @cached_property
    def perplexity(self) -> Record | None:
        """First record with NLLs."""
        return self._first(NllMetrics)

    @cached_property
    def latency(self) -> StepMetrics | None:
        """Step times of the first record of a task with step times; None if the cell failed or was not measured."""
        record = self._first(StepMetrics)
        return None if record is None else record.measured(StepMetrics)

    def _first(self, metrics: type[Metrics]) -> Record | None:
        return next((r for r in self.records if r.measures(metrics)), None)

    @property
    def id(self) -> str:
        """Identifier of the row within its question: the first cell's id, shortened."""
        return self.records[0].cell_id[:8]

    @property
    def cell(self) -> CellSpec:
        """Cell of the first record. The cells of all records agree, except for the task."""
        return self.records[0].cell

    @property
    def settings_key(self) -> str:
        """The policy with all settings but its seed, as a key. Rows that share it are draws of one policy."""
        cell = self.cell
        return repr([cell.policy, cell.parameters, cell.capacity, axes(cell) | {"seed": None}, cell.stored])

    @property
    def nll(self) -> float | None:
        """Nats per token over all scored tokens; None if the cell failed or was not measured."""
        metrics = None if self.perplexity is None else self.perplexity.measured(NllMetrics)
        return None if metrics is None else metrics.nll

    @property
    def stride(self) -> int:
        """Distance between scored tokens, which exceeds 1 only for a recomputed window."""
        record = self.perplexity
        return 1 if record is None or scores_all(record) else stride_of(record)

    @cached_property
    def answers(self) -> Answers | None:
        """Right answers over all tasks with questions."""
        return answers(self.records)

    @cached_property
    def answered(self) -> dict[str, tuple[str, list[Stream] | None]]:
        """Outcomes and the streams of the questions (`streams_of`), by task and text."""
        return {
            repr([r.cell.options, r.data.ids_sha256, *task_version(r)]): (metrics.outcomes, streams_of(r))
            for r in self.records
            if (metrics := r.measured(QuestionMetrics)) and metrics.outcomes
        }

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of K and V (`shown_kv_bytes`), preferably from the perplexity record."""
        return next((size for r in self._finished if (size := shown_kv_bytes(r)) is not None), None)

    @property
    def kv_read_bytes(self) -> int | None:
        """Bytes of the cache that a step reads, of a policy that selects; None for others, which read what they hold."""
        return next((size for r in self._finished if (size := r.metrics.kv_read_bytes) is not None), None)

    @property
    def _finished(self) -> list[Record]:
        """Finished records, the perplexity record first."""
        return sorted((r for r in self.records if r.status == "ok"), key=lambda r: r is not self.perplexity)

    @property
    def step_ms(self) -> float | None:
        """Milliseconds of a decode step."""
        return None if self.latency is None else self.latency.step_ms


def rows(records: Sequence[Record]) -> list[Row]:
    """Return a row per policy and capacity, in the order of the records. The records are of one suite, model and machine."""
    groups = grouped(records, lambda r: repr([r.cell.policy, r.cell.parameters, r.cell.capacity, axes(r.cell)]))
    return [Row(group) for group in groups.values()]


def without_seeds(records: Sequence[Record]) -> list[list[Record]]:
    """Group records that differ only in the seed."""
    return list(grouped(records, lambda record: (Row([record]).settings_key, record.facts.device)).values())


def kv_cells(record: Record, among: Iterable[Record]) -> dict[str, str]:
    """Return the bytes of a cell's K and V, and of those that a step reads, by heading. among: all records of the table."""
    return {kv_title(among): cache_bytes(shown_kv_bytes(record)), "read by a step": cache_bytes(record.metrics.kv_read_bytes)}


def shown_kv_bytes(record: Record) -> int | None:
    """Return the bytes of K and V that tables show, but that of the task memory; 0 if the policy keeps no cache; None if unknown.

    Of dense, and of a cut prompt that grows over a text, only the bytes of tokens count, not the room for more. After questions,
    caches whose answers differ in length hold different numbers of tokens, so their allocated bytes count.
    """
    grows = record.cell.capacity is None or (record.cell.evict == "prompt" and record.measured(NllMetrics) is not None)
    return (record.metrics.kv_held_bytes if grows else None) or record.metrics.kv_bytes
