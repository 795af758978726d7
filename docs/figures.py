"""Tables of the built-in models in docs, from the published records. cog puts them into the pages: `make picture`."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import scipy.stats

sys.path.insert(0, str(Path(__file__).parent / "images"))

import backcopy as first_tokens
import zoo

from kvbench.harness.data.backcopy import best_nll, text
from kvbench.harness.records import RecordStore
from kvbench.harness.records.metrics import NllMetrics
from kvbench.harness.report.markdown import table
from kvbench.harness.tasks.trace.schema import TraceMetrics, TraceOptions
from kvbench.lab.attention.schema import AttentionMetrics

_LEADS = (("snapkv", "random", 192), ("snapkv", "h2o", 192), ("h2o", "random", 192), ("h2o", "random", 96))


def vectors() -> str:
    """Return ranges over layers of what channels and first tokens are like, a column per model."""
    columns = dict(_vectors())
    rows = [[title, *(column[title] for column in columns.values())] for title in next(iter(columns.values()))]
    return "\n".join(table(["range over layers", *(f"`{name}`" for name in columns)], rows, "l" + "r" * len(columns)))


def _vectors() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each model's name and figures."""
    folders = (zoo.RESULTS / "attention_builtin.jsonl", zoo.RESULTS / "smollm2_attention.jsonl")
    for record in (record for folder in folders for record in RecordStore(folder).read_all()[0]):
        metrics = record.measured(AttentionMetrics)
        if metrics is None or not record.cell.is_dense:
            continue
        shares = [[100 * (getattr(layer, f"{x}_channels") or 0) for layer in metrics.layers] for x in ("key", "value")]
        norms = [layer.initial_norm[0] / layer.initial_norm[-1] for layer in metrics.layers if layer.initial_norm]
        yield (
            record.cell.model.id.removeprefix("builtin:"),
            {
                "energy of keys in a sixteenth of the channels": _range(shares[0], " %", 0),
                "energy of values": _range(shares[1], " %", 0),
                "norm of the first token's hidden state, relative to other tokens": _range(norms, "", 2),
            },
        )


def _range(values: list[float], unit: str, digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}{unit}"


def backcopy() -> str:
    """Return what the first token is to the models that were trained on Bigram-Backcopy, and what losing it costs."""
    measured = first_tokens.measured()
    last = {training: max(step for name, step, _ in measured if name == training) for training in first_tokens.TRAININGS}
    losses = {
        (r["training"], r["capacity"]): r["loss"] for r in first_tokens.losses(measured) if r["step"] == last[r["training"]]
    }
    columns = {}
    for training in first_tokens.TRAININGS:
        records = [record for name, step, record in measured if name == training and step == last[training]]
        (token,) = (found for record in records if (found := first_tokens.first_token(record)))
        (dense,) = (m for r in records if r.cell.is_dense and (m := r.measured(NllMetrics)))
        columns[training] = {
            "attention to the first token": f"{token['attention']:.3f}",
            "norm of its value, relative to other tokens": f"{token['value']:.3f}",
            "perplexity, dense": f"{math.exp(dense.nll):.2f}",
        } | {f"lost without it, {c} tokens cached": f"{abs(losses[training, c]):.0f} %" for c in (64, 32, 8)}
    rows = [[title, *(column[title] for column in columns.values())] for title in next(iter(columns.values()))]
    best = math.exp(best_nll(text(0, 32_768).split()))
    rows[2][0] += f" (lowest possible: {best:.2f})"
    return "\n".join(table(["after the last step", *(f"`{name}`" for name in columns)], rows, "l" + "r" * len(columns)))


def solved() -> str:
    """Return the percentage of programs solved, a row per policy, a column per capacity and moment of eviction."""
    programs = _programs()
    columns = [(capacity, moment) for capacity in (96, 192) for moment in ("step", "every 128")]
    rows = [
        [f"`{policy}`", *(f"{100 * statistics.mean(programs[policy, *column]):.0f} %" for column in columns)]
        for policy in ("snapkv", "random", "h2o", "tova", "window")
    ]
    return "\n".join(table(["policy", *(f"{c} tokens, {moment}" for c, moment in columns)], rows, "lrrrr"))


def leads() -> str:
    """Return differences in points with Student's 95 % interval over programs, evicting at every step."""
    programs = _programs()
    rows = []
    for ahead, behind, capacity in _LEADS:
        pairs = zip(programs[ahead, capacity, "step"], programs[behind, capacity, "step"], strict=True)
        lead = [100 * (x - y) for x, y in pairs]
        wide = scipy.stats.t.ppf(0.975, len(lead) - 1) * statistics.stdev(lead) / math.sqrt(len(lead))
        mean = statistics.mean(lead)
        shown = f"{mean:.0f} points [{mean - wide:.0f}, {mean + wide:.0f}]".replace("-", "−")
        rows.append([f"`{ahead}` over `{behind}`", str(capacity), shown])
    return "\n".join(table(["lead", "tokens", "95 % interval"], rows, "lrr"))


def _programs() -> dict[tuple[str, int, str], list[float]]:
    """Return the share of seeds that solve each program in `stream` positions, by policy, capacity and moment."""
    cells: dict[tuple[str, int, str], list[list[int]]] = {}
    for record in RecordStore(zoo.RESULTS / "long_answers.jsonl").read_all()[0]:
        metrics, cell = record.measured(TraceMetrics), record.cell
        options = cell.task_options(TraceOptions)
        if metrics is None or options.samples > 1 or options.teacher or cell.positions != "stream" or cell.capacity is None:
            continue
        moment = "step" if cell.evict in (None, "step") else "every 128"
        cells.setdefault((cell.policy, cell.capacity, moment), []).append([int(digit) for digit in metrics.outcomes])
    return {name: [statistics.mean(program) for program in zip(*seeds, strict=True)] for name, seeds in cells.items()}
