"""Published tables compared with our records of the same cells.

Each document in `published_tables.yaml` is a table with its source, and the options of our record for each row and column.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvbench.harness.records import Record, newest
from kvbench.harness.report import chart
from kvbench.harness.report.markdown import digits, md, rows_table, table

_BUILTIN = Path(__file__).parents[1] / "models/builtin"


def _training_curves() -> list[chart.Chart]:
    """Return loss and attention to the first token over training tokens, a line per built-in model with a training log.

    The model of Bigram-Backcopy is left out, because its loss is not comparable with the loss on text.
    """
    logs = {path.parent.name: path.read_text(encoding="utf-8") for path in sorted(_BUILTIN.glob("*/training.jsonl"))}
    steps = {name: [json.loads(line) for line in text.splitlines()] for name, text in logs.items() if name != "backcopy"}
    if not steps:
        return []
    loss = [
        {"model": name, "tokens": row["tokens"] / 1e6, "loss": round(row["loss"], 4)}
        for name, rows in steps.items()
        for row in rows[len(rows) // 50 :]  # leave out the steep initial drop, which would flatten the curves
    ]
    attention = [
        {"model": name, "tokens": row["tokens"] / 1e6, "attention": round(row["attention_to_first"]["largest"], 4)}
        for name, rows in steps.items()
        for row in rows
        if "attention_to_first" in row
    ]
    panels = [
        _panel(loss, list(steps), "loss", "loss, nats per token", {"zero": False, "nice": False}),
        _panel(attention, list(steps), "attention", "attention to the first token", {"zero": True}),
    ]
    alt = f"Training loss, and attention to the first token, over tokens seen, of {', '.join(steps)}."
    return [chart.Chart("pretraining", alt, {"hconcat": panels})]


def _panel(values: list[dict[str, Any]], names: list[str], field: str, title: str, zero: dict[str, Any]) -> dict[str, Any]:
    y = chart.channel(field, title, scale={"type": "linear"} | zero)
    colour = chart.channel("model", None, "nominal", sort=names)
    x = chart.channel("tokens", "million tokens")
    return {"width": 340, "height": 260} | chart.curves(values, x, y, colour, point=False, strokeWidth=1.5)


_TABLES = Path(__file__).with_name("published_tables.yaml")
_INTRODUCTION = """# Papers beside ours

Written by `bench leaderboard` from records and published figures; don't edit this page. Each cell is
*published* → **ours** (difference in percent of the published figure, if both are of the same model). The authors measured
published figures on their own set-up; the text below each table says how ours differs. A published figure that stands alone has
not been measured here; the command below its table does that.
"""


def render(records: Iterable[Record]) -> chart.Page:
    """Return the page in Markdown, with its charts."""
    current = [(record, _flat(record)) for record in newest(list(records))]
    lines: list[str | chart.Chart] = [_INTRODUCTION]
    for published in yaml.safe_load_all(_TABLES.read_text(encoding="utf-8")):
        lines += _section(published, current)
    return chart.page(lines)


def _section(published: dict[str, Any], records: Sequence[tuple[Record, dict[str, Any]]]) -> list[str | chart.Chart]:
    columns, rows = published["columns"], published["rows"]
    fixed = published["where"] | ({"model": published["model"]} if "model" in published else {})
    matches = [[_find(records, fixed | row["match"] | column.get("match", {})) for column in columns] for row in rows]
    values = [[_value(record, published) for record in line] for line in matches]
    same_model = not published.get("models_of_ours", False)
    base = [c["label"] for c in columns].index(published["relative_to"]) if "relative_to" in published else None
    lines = []
    for row, ours, cells in zip(rows, values, matches, strict=True):
        yardsticks = None if base is None else (row["paper"][base], ours[base])
        line = (_cell(p, v, r, same_model, yardsticks) for p, v, r in zip(row["paper"], ours, cells, strict=True))
        lines.append([row["label"], *line])
    for ratio in published.get("ratios", []):
        a, b = ratio["of"]
        published_ratios = map(_ratio, rows[a]["paper"], rows[b]["paper"])
        line = (_cell(p, v, None, same_model) for p, v in zip(published_ratios, map(_ratio, values[a], values[b]), strict=True))
        lines.append([f"*{ratio['label']}*", *line])
    figures = [figure for row in rows for figure in row["paper"]]
    wanted = [record for figure, record in zip(figures, itertools.chain(*matches), strict=True) if figure is not None]
    missing = wanted.count(None)
    suites = published.get("suites") or [published["where"]["suite"]]  # suites that measure the cells of the table
    commands = "; ".join(f"`bench run {suite}`" for suite in suites)
    devices = sorted({r.facts.device for line in matches for r in line if r is not None})
    head = ["", *(column["label"] for column in columns)]
    about = f"{published['what']}. Source: {published['source']}. Suite: {', '.join(f'`{suite}`' for suite in suites)}.\n"
    return [
        f"## {published['title']}\n",
        about,
        *table(head, lines, "l" + "r" * len(columns)),
        f"What differs: {published['differs']}\n",
        *([f"Not measured: {missing} of {len(wanted)} cells. {commands}\n"] if missing else []),
        *([f"Ours: {md('; '.join(devices))}.\n"] if devices else []),
        *(_training_curves() if published.get("chart") == "training" else []),
        *_others(published, [record for record, _ in records if record.cell.suite in suites]),
    ]


def _flat(record: Record) -> dict[str, Any]:
    """Return the options of a record's cell, by the names that a suite uses."""
    cell = record.cell
    evict = ({} if cell.evicts == "step" else {"evict": cell.evicts}) | ({"kv": cell.stored} if cell.stored else {})
    return {
        **cell.options,
        **cell.settings,
        "suite": cell.suite,
        "model": cell.model.id,
        "policy": cell.policy,
        "capacity": cell.capacity,
        "positions": cell.positions,
        "seed": cell.seed,
    } | evict


def _find(records: Sequence[tuple[Record, dict[str, Any]]], wanted: dict[str, Any]) -> Record | None:
    """Return the first record with these options (`_flat`); evict defaults to every step, positions to "cache", the seed to 0."""
    wanted = {"evict": None, "kv": None, "positions": "cache", "seed": 0} | wanted
    telling = list(reversed(wanted.items()))  # the policy and its capacity differ most often
    return next((record for record, options in records if all(options.get(k) == v for k, v in telling)), None)


def _value(record: Record | None, published: dict[str, Any]) -> float | None:
    """Return our figure on the paper's scale."""
    if record is None or record.status != "ok":
        return None
    value = record.metrics.as_json().get(published["metric"])
    return float(value) * published.get("scale", 1) if isinstance(value, (int, float)) else None


def _ratio(a: Any, b: Any) -> float | None:
    return a / b if isinstance(a, (int, float)) and isinstance(b, (int, float)) and b else None


def _cell(
    paper: Any, ours: float | None, record: Record | None, same_model: bool, base: tuple[Any, float | None] | None = None
) -> str:
    """Return "published → ours" with the difference, or with both as multiples of the row's base if given."""
    quoted = f"{paper:,.2f}" if isinstance(paper, float) else f"{paper:,}" if isinstance(paper, int) else str(paper)
    theirs = "" if paper is None else f"*{quoted}{_multiple(paper, base and base[0])}*"
    if ours is None:
        if record is not None:
            return f"{theirs} → **failed**: {md(record.failure or '?')}"
        return theirs
    if base is not None:
        return f"{theirs} → **{digits(ours)}**{_multiple(ours, base[1])}"
    difference = f" ({100 * (ours - paper) / paper:+.1f} %)" if same_model and isinstance(paper, (int, float)) and paper else ""
    return f"{theirs} → **{digits(ours)}**{difference}"


def _multiple(value: Any, base: Any) -> str:
    ratio = _ratio(value, base)
    return "" if ratio is None else f" ({ratio:,.3f}x)" if ratio < 10 else f" ({ratio:,.0f}x)"


def _others(published: dict[str, Any], records: Sequence[Record]) -> list[str]:
    """Return a table of our records on models without published figures. records: records of the table's suites."""
    known = {published.get("model"), published["where"].get("model"), *(r["match"].get("model") for r in published["rows"])}
    known |= {c.get("match", {}).get("model") for c in published["columns"]}
    rows = []
    for record in records:
        value = _value(record, published)
        if record.cell.model.id not in known and (record.status != "ok" or value is not None):
            shown = {k: v for k, v in _flat(record).items() if k not in ("suite", "model", "name", "policy", "seed")}
            options = ", ".join(f"{k} {v}" for k, v in shown.items() if v not in (None, "cache"))
            figure = "failed" if value is None else digits(value)
            cells = {"model": md(record.cell.model.id), "policy": md(record.cell.policy), "options": md(options)}
            rows.append(cells | {md(published["metric"]): figure})
    if not rows:
        return []
    about = "The same suite on models without a published figure:\n"
    return ["<details><summary>Ours on other models</summary>\n", about, *rows_table(rows), "</details>\n"]
