"""Records in the order of pages, and tables of records by task (`report/task_report.py`) and over a pretraining.

Figures of two machines never share a row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from kvbench.harness.core.grouped import grouped
from kvbench.harness.records import Record, newest
from kvbench.harness.records.metrics import NllMetrics, PeakMetrics, StepMetrics
from kvbench.harness.report.chart import Chart, Page, channel, curves, file_name, make_visible, page
from kvbench.harness.report.markdown import md, model_name, number, rows_table
from kvbench.harness.report.pairing import past_training, question, strided, task_version
from kvbench.harness.report.rows import short_titles
from kvbench.harness.report.task_report import plain, task_of, titles_of

KEPT = re.compile(r"(.+)-step-(\d+)")  # name of an intermediate model that `bench pretrain` keeps
_FIGURES = {"sink_heads": "sink heads", "hidden_largest": "largest activation"}  # titles of a task's metrics
_PERPLEXITY = "perplexity"


def groups(records: Iterable[Record]) -> list[list[Record]]:
    """Return the newest record of every cell, grouped by suite and model."""
    ordered = sorted(newest(list(records)), key=order)
    parts = grouped(ordered, lambda r: repr([r.cell.suite, r.cell.suite_version, r.cell.as_json()["model"]]))
    return [parts[name] for name in sorted(parts)]


def order(record: Record) -> tuple[Any, ...]:
    """Return the sort key of a record: dense first, then by capacity, recompute before other policies."""
    cell = record.cell
    unusual = cell.positions != usual_positions(cell.evicts)
    first = {"dense": 0, "recompute_window": 1, "recompute_sink_window": 1}.get(cell.policy, 2)
    return (
        cell.capacity or 0,
        first,
        cell.policy,
        repr(cell.parameters),
        cell.evicts,
        cell.stored,
        unusual,
        cell.positions,
        cell.seed,
        record.key,
    )


def usual_positions(evicts: str) -> str:
    """Return the usual mode of positions: `stream` after a cut prompt, as in public code, and `cache` in an endless stream."""
    return "stream" if evicts == "prompt" else "cache"


def by_machine(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Return (name, records) of every machine, sorted by name. The name is empty if there is only one machine.

    A machine is a device. If steps were timed on a device with several set-ups (instructions, threads), each set-up is a
    machine. All machines share the figures of quality, which don't depend on the set-up. Without times and peaks, all records
    belong to one machine.
    """
    if not any(r.measures(StepMetrics) or r.measures(PeakMetrics) for r in records):
        return [("", list(records))]
    machines = []
    for name in sorted({r.facts.device for r in records}):
        here = [r for r in records if r.facts.device == name]
        setups = sorted({_setup(r) for r in here if r.measures(StepMetrics)})
        for setup in setups or [""]:
            label = f"{name or 'an unknown device'}{f', {setup}' if len(setups) > 1 else ''}"
            machines.append((label, [r for r in here if not r.measures(StepMetrics) or _setup(r) == setup]))
    return machines if len(machines) > 1 else [("", list(records))]


def _setup(record: Record) -> str:
    """Describe the threads and instructions, on which the time of a step depends."""
    threads, instructions = record.facts.threads, record.facts.instructions
    return ", ".join([*([f"threads {threads}"] if threads else []), *([instructions] if instructions else [])])


def headline(record: Record) -> str:
    """Return the main figure of a finished cell as a phrase; empty if the cell failed."""
    if record.status != "ok":
        return ""
    words, figures = record.metrics.headline(), plain(record)
    first = next((name for name in titles_of(record) or figures if name in figures), None)
    if first is not None and not words:
        return f"{first} {number(figures[first])}"
    trend = " (past the training length)" if record.measured(NllMetrics) and past_training(record) else ""
    return words + strided(record) + trend


def section_key(record: Record) -> str:
    """Return the key of a record's section: everything that defines its question, except the task's axes."""
    axes = record.cell.task.axes
    if not axes:
        return question(record)
    cell = record.cell.as_json()
    task = {k: v for k, v in cell["task"].items() if k not in axes}
    return repr([cell["suite"], cell["suite_version"], cell["model"], task, "", *task_version(record)])


def section(record: Record, records: Iterable[Record]) -> Page:
    """Return the table of a record's task, with a row for each record of the same suite, model and task.

    If the model is an intermediate model of a pretraining, curves over the steps of the training come first.
    """
    suite = [r for r in newest([*records, record]) if _suite(r) == _suite(record)]
    curves = over_steps(record.cell.suite, suite) if KEPT.fullmatch(record.cell.model.id) else []
    return page([*curves, *_table([r for r in suite if section_key(r) == section_key(record)])])


def unasked(records: Iterable[Record], answered: Collection[tuple[str, int]]) -> list[str | Chart]:
    """Return the tables of suites that answer no question, because they only measure times, memory or attention."""
    others = (record for record in newest(list(records)) if _suite(record) not in answered)
    return [line for group in grouped(others, section_key).values() for line in _table(group)]


def _table(records: Iterable[Record]) -> list[str | Chart]:
    """Return the table of records of one section, with its heading."""
    rows = sorted(records, key=order)
    cell = rows[0].cell
    of_what = f"{md(cell.suite)} v{md(cell.suite_version)}: {md(model_name(rows[0]))}, {md(cell.model.dtype)}.\n"
    return [f"## {md(cell.task.heading)}\n", of_what, *task_of(rows[0]).body(rows)]


def _suite(record: Record) -> tuple[str, int]:
    return record.cell.suite, record.cell.suite_version


def over_steps(suite: str, records: Sequence[Record]) -> list[str | Chart]:
    """Return a table and a chart of sink heads, activations and perplexity over the steps of a pretraining.

    records: all records of the suite, of any models. The result is empty unless a training has two kept models with figures.
    """
    values = [value for record in records if record.status == "ok" for value in _step_figures(record)]
    of_several = {v["training"] for v in values if len({w["step"] for w in values if w["training"] == v["training"]}) > 1}
    values = [v for v in values if v["training"] in of_several]
    if not values:
        return []
    values.sort(key=lambda v: (v["training"], v["step"], v["line"]))
    panels = [_step_panel([v for v in values if v["figure"] == f], f) for f in dict.fromkeys(v["figure"] for v in values)]
    spec = {"hconcat": panels, "resolve": {"scale": {"color": "independent"}}}
    alt = f"{', '.join(dict.fromkeys(v['figure'] for v in values))} over training steps of {', '.join(sorted(of_several))}."
    chart = Chart(file_name(f"{suite} over steps", suite), alt, make_visible(spec))
    return [f"## {md(suite)}: over training steps\n", *_step_table(values), chart]


def _step_figures(record: Record) -> list[dict[str, Any]]:
    """Return the figures of a kept model's record, each a point of a curve."""
    kept = KEPT.fullmatch(record.cell.model.id)
    if kept is None:
        return []
    training, figures = kept[1], record.metrics.as_json()
    named = {figure: figures.get(name) for name, figure in _FIGURES.items()} if record.cell.is_dense else {}
    values = [(figure, training, value) for figure, value in named.items() if isinstance(value, (int, float))]
    if (nll := record.measured(NllMetrics)) is not None:
        values.append((_PERPLEXITY, f"{training}, {short_titles([record])[0]}", nll.perplexity))
    point = {"training": training, "step": int(kept[2])}
    return [point | {"figure": figure, "line": line, "value": value} for figure, line, value in values]


def _step_panel(values: list[dict[str, Any]], figure: str) -> dict[str, Any]:
    """Return the panel of a figure over steps, with a line per training, or per training and policy."""
    scale = {"type": "log"} if figure == _PERPLEXITY else {} if any(v["value"] for v in values) else {"domain": [0, 1]}
    alone = {"legend": None} if len({v["line"] for v in values}) == 1 else {}
    y, colour = channel("value", figure, scale=scale), channel("line", None, "nominal", **alone)
    return {"width": 300, "height": 240} | curves(values, channel("step", "step"), y, colour)


def _step_table(values: list[dict[str, Any]]) -> list[str]:
    """Return a table with a row per training and step, and a column per figure and policy."""
    rows: dict[tuple[str, int], dict[str, str]] = {}
    for v in values:
        row = rows.setdefault((v["training"], v["step"]), {"training": md(v["training"]), "step": f"{v['step']:,}"})
        row[md(v["figure"] + v["line"].removeprefix(v["training"]))] = number(v["value"])
    return rows_table(list(rows.values()))
