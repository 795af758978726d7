"""Tables of the built-in models in docs, from the published records. cog puts them into the pages: `make picture`."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import scipy.stats

sys.path.insert(0, str(Path(__file__).parent / "images"))

import backcopy as first_tokens
import zoo

from kvbench.harness.data.backcopy import best_nll, text
from kvbench.harness.records import RecordStore
from kvbench.harness.records.metrics import NllMetrics
from kvbench.harness.report.markdown import table
from kvbench.harness.tasks.trace.trace_options import TraceMetrics, TraceOptions
from kvbench.lab.attention.schema import AttentionMetrics

_WITH_SINK = ("sink_2", "smollm2")


def vectors() -> str:
    """Return ranges over layers of what channels and first tokens are like, a column per model."""
    columns = dict(_vectors())
    rows = [[title, *(column[title] for column in columns.values())] for title in next(iter(columns.values()))]
    return "\n".join(table(["range over layers", *(f"`{name}`" for name in columns)], rows, "l" + "r" * len(columns)))


def _vectors() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the names and figures of the model with sink tokens and of SmolLM2."""
    folders = (zoo.RESULTS / "attention_builtin.jsonl", zoo.RESULTS / "smollm2_attention.jsonl")
    for record in (record for folder in folders for record in RecordStore(folder).read_all()[0]):
        metrics = record.measured(AttentionMetrics)
        model = record.cell.model.id.removeprefix("builtin:")
        if metrics is None or not record.cell.is_dense or model not in _WITH_SINK:
            continue
        shares = [[100 * (getattr(layer, f"{x}_channels") or 0) for layer in metrics.layers] for x in ("key", "value")]
        norms = [layer.initial_norm[0] / layer.initial_norm[-1] for layer in metrics.layers if layer.initial_norm]
        yield (
            model,
            {
                "energy of keys in a sixteenth of the channels": _range(shares[0], " %", 0),
                "energy of values": _range(shares[1], " %", 0),
                "norm of the first token's hidden state, relative to other tokens": _range(norms, "", 2),
            },
        )


def _range(values: Sequence[float], unit: str, digits: int) -> str:
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
            "perplexity, dense": f"{dense.perplexity:.2f}",
        } | {f"lost without it, {c} tokens cached": f"{abs(losses[training, c]):.0f} %" for c in (64, 32, 8)}
    rows = [[title, *(column[title] for column in columns.values())] for title in next(iter(columns.values()))]
    best = math.exp(best_nll(text(0, 32_768).split()))
    rows[2][0] += f" (lowest possible: {best:.2f})"
    return "\n".join(table(["after the last step", *(f"`{name}`" for name in columns)], rows, "l" + "r" * len(columns)))


def solved() -> str:
    """Return the percentage of programs solved, a row per policy, a column per capacity and moment of eviction.

    The last column is the lead over the random choice at 192 tokens and every step, with Student's 95 % interval.
    """
    programs = _programs()
    columns = [(capacity, moment) for capacity in (96, 192) for moment in ("step", "every 128")]
    rows = []
    for policy in ("snapkv", "random", "h2o", "tova", "window"):
        shares = [f"{100 * statistics.mean(programs[policy, *column]):.0f}" for column in columns]
        rows.append([f"`{policy}`", *shares, _lead(programs, policy)])
    head = ["policy", *(f"{c} tokens, {moment}, %" for c, moment in columns), "192 tokens, step: points over `random`"]
    return "\n".join(table(head, rows, "lrrrrr"))


def _lead(programs: dict[tuple[str, int, str], list[float]], policy: str) -> str:
    if policy == "random":
        return ""
    pairs = zip(programs[policy, 192, "step"], programs["random", 192, "step"], strict=True)
    lead = [100 * (ours - theirs) for ours, theirs in pairs]
    margin = scipy.stats.t.ppf(0.975, len(lead) - 1) * statistics.stdev(lead) / math.sqrt(len(lead))
    mean = statistics.mean(lead)
    return f"{mean:+.0f} [{mean - margin:+.0f}, {mean + margin:+.0f}]".replace("-", "−")


def _programs() -> dict[tuple[str, int, str], list[float]]:
    """Return the share of seeds that solve each program in `stream` positions, by policy, capacity and moment."""
    cells: dict[tuple[str, int, str], list[list[int]]] = {}
    for record in RecordStore(zoo.RESULTS / "long_answers.jsonl").read_all()[0]:
        metrics, cell = record.measured(TraceMetrics), record.cell
        options = cell.task_options(TraceOptions)
        if metrics is None or options.samples > 1 or options.teacher or cell.positions != "stream" or cell.capacity is None:
            continue
        assert metrics.outcomes is not None
        moment = "step" if cell.evict in (None, "step") else "every 128"
        cells.setdefault((cell.policy, cell.capacity, moment), []).append([int(digit) for digit in metrics.outcomes])
    return {name: [statistics.mean(program) for program in zip(*seeds, strict=True)] for name, seeds in cells.items()}
