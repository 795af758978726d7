"""Puts figures of records into prose: `make picture`. CI does it again, so that no figure outlives its record.

In the pages of docs, `<!--=name-->81 %<!---->` marks a figure; what stands between is written by this script.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import scipy.stats

sys.path.insert(0, str(Path(__file__).parent / "images"))

import backcopy
import draw
import zoo

from kvbench.harness.data.backcopy import best_nll, text
from kvbench.harness.records import RecordStore
from kvbench.harness.records.metrics import AnswerMetrics, NllMetrics, QuestionMetrics
from kvbench.harness.tasks.attention.schema import AttentionMetrics
from kvbench.harness.tasks.trace import first_wrong
from kvbench.harness.tasks.trace.schema import TraceMetrics, TraceOptions

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
_MARKED = re.compile(r"(<!--=(.+?)-->)(.*?)(<!---->)", re.S)


def figures() -> dict[str, str]:
    """Every figure by name, as it is printed."""
    return dict(
        [
            *_zoo(),
            *_budget(),
            *_staircase(),
            *_long(),
            *_vectors(),
            *_backcopy(),
        ]
    )


def _zoo() -> Iterator[tuple[str, str]]:
    """zoo/MOMENT/POLICY/closed: share of the control's gap to dense that a policy closes."""
    records = zoo.measured()
    for moment in zoo.MOMENTS:
        for row in zoo.losses(records, moment):
            yield from ((f"zoo/{moment}/{name}/closed", f"{100 * row.closed:.0f} %") for name in row.policy.split(" = "))


def _budget() -> Iterator[tuple[str, str]]:
    """budget/NAME/TOKENS, perplexity lost in %."""
    shown = [row for budget in draw.question("budget")["budgets"] for row in budget["rows"] if row["loss"]]
    yield from ((f"budget/{row['name']}/{row['capacity']}", f"{row['loss']['value']:,.0f} %") for row in shown)


def _staircase() -> Iterator[tuple[str, str]]:
    """streameval/MODEL/inside and /beyond: right answers of sinks and a window about lines that it holds whole, or not."""
    shares: dict[tuple[str, str], list[QuestionMetrics]] = {}
    for record in RecordStore(zoo.RESULTS / "streameval_cpu").read_all()[0]:
        metrics = record.measured(AnswerMetrics)
        if record.cell.policy == "sink_window" and record.cell.positions == "cache" and metrics is not None:
            (where,) = metrics.in_cache
            model = record.cell.model.id.removeprefix("builtin:")
            shares.setdefault((model, "inside" if where == "whole" else "beyond"), []).append(metrics)
    for (model, where), cells in shares.items():
        right = [100 * (m.accuracy or 0) for m in cells]
        asked = sum(m.questions for m in cells)
        said = f"{min(right):.1f} to {max(right):.1f} %" if where == "inside" else f"{max(right):.1f} % of {asked:,}"
        yield f"streameval/{model}/{where}", said


def _long() -> Iterator[tuple[str, str]]:
    """long/POLICY/TOKENS/MOMENT/POSITIONS, of greedy answers solved, the mean over seeds; dense, and what recomputes, by name.

    With /first at its end: the word before or at which half of the answers have gone wrong; /told: steps that obey; /held.
    `long read STEPS of REGISTERS` instead of `long`: of right traces of at least STEPS, read; /through: right for as many.
    Two policies, as in long/h2o-random: points by which the first is ahead, with Student's interval over programs.
    """
    cells: dict[str, list[TraceMetrics]] = {}
    through: dict[str, list[bool]] = {}
    for record in RecordStore(zoo.RESULTS / "long_answers").read_all()[0]:
        metrics, cell = record.measured(TraceMetrics), record.cell
        options = cell.task_options(TraceOptions)
        if metrics is None or options.samples > 1:
            continue
        start = f"long read {options.steps} of {options.registers}" if options.teacher else "long"
        moment = "step" if cell.evict in (None, "step") else "128"
        where = f"/{cell.capacity}/{moment}/{cell.positions}" if cell.policy != "dense" else ""
        name = f"{start}/{cell.policy}{where}"
        cells.setdefault(name, []).append(metrics)
        if options.teacher:
            through.setdefault(name, []).extend(words >= options.steps * options.step for words in metrics.words_right)
    solved = {name: [statistics.mean(program) for program in zip(*(map(int, m.outcomes) for m in found), strict=True)]
              for name, found in cells.items() if name.startswith("long/")}  # fmt: skip
    for (ahead, ours), (behind, theirs) in itertools.permutations(solved.items(), 2):
        (policy, *where), (other, *place) = ahead.split("/")[1:], behind.split("/")[1:]
        same = where == place or (policy == other and where[:2] == place[:2])  # in the other mode of positions
        if where and place and same:
            lead = [100 * (x - y) for x, y in zip(ours, theirs, strict=True)]
            wide = scipy.stats.t.ppf(0.975, len(lead) - 1) * statistics.stdev(lead) / math.sqrt(len(lead))
            middle, ends = statistics.mean(lead), [f"{statistics.mean(lead) + side * wide:.0f}" for side in (-1, 1)]
            name = f"{policy}-{other}" if policy != other else policy
            yield f"long/{name}/{'/'.join(where)}/lead", f"{middle:.0f} points [{', '.join(ends)}]".replace("-", "−")
    for name, right in through.items():
        yield f"{name}/through", f"{100 * statistics.mean(right):.0f} %"
    for name, found in cells.items():
        yield name, f"{100 * statistics.mean(m.accuracy or 0 for m in found):.0f} %"
        yield f"{name}/first", f"{statistics.mean(first_wrong(m) or math.inf for m in found):.0f}"
        told = [bucket for m in found for bucket in m.told]
        if told:
            yield f"{name}/told", f"{100 * sum(b.right for b in told) / sum(b.count for b in told):.1f} %"
        if all(m.held is not None for m in found):
            yield f"{name}/held", f"{100 * statistics.mean(m.held or 0 for m in found):.0f} %"


def _vectors() -> Iterator[tuple[str, str]]:
    """attention/MODEL/FIGURE: ranges over layers of what channels and first tokens are like."""
    folders = (zoo.RESULTS / "attention_builtin", zoo.RESULTS / "smollm2_attention")
    for record in (record for folder in folders for record in RecordStore(folder).read_all()[0]):
        metrics = record.measured(AttentionMetrics)
        if metrics is None or not record.cell.is_dense:
            continue
        name = f"attention/{record.cell.model.id.removeprefix('builtin:')}"
        for title in ("key", "value"):
            shares = [100 * (getattr(layer, f"{title}_channels") or 0) for layer in metrics.layers]
            yield f"{name}/{title}s", f"{min(shares):.0f} to {max(shares):.0f} %"
        norms, cosines = ([getattr(layer, f"initial_{x}") for layer in metrics.layers] for x in ("norm", "cosine"))
        for title, values in (
            ("norm", [x[0] / x[-1] for x in norms]),
            ("cosine", [x[0] for x in cosines]),
            ("others", [x[-1] for x in cosines]),
        ):
            yield f"{name}/{title}", f"{min(values):.2f} to {max(values):.2f}"


def _backcopy() -> Iterator[tuple[str, str]]:
    """backcopy/TRAINING/FIGURE, of the last model that a training kept: its first token, and what losing it costs."""
    rows = backcopy.measured()
    last = {training: max(step for name, step, _ in rows if name == training) for training in backcopy.TRAININGS}
    best = best_nll(text(0, 32_768).split())
    yield from (("backcopy/best", f"{best:.2f}"), ("backcopy/best/perplexity", f"{math.exp(best):.2f}"))
    for row in backcopy.losses(rows):
        name, loss = f"{row['training']}/{row['capacity']}", row["loss"]
        said = f"{loss:.0f} %" if abs(loss) >= 1 else f"{loss:.2f} %".replace("-0.00", "0.00")
        yield f"{name}/{row['step']}", said
        if row["step"] == last.get(row["training"]):
            yield name, said
    for training, step, record in rows:
        metrics, nll = backcopy.first_token(record), record.measured(NllMetrics)
        if step != last.get(training):
            continue
        if metrics is not None:
            yield f"{training}/attention", f"{metrics['attention']:.3f}"
            yield f"{training}/value", f"{metrics['value']:.3f}"
        if nll is not None:
            yield f"{training}/{record.cell.policy}/{record.cell.capacity}/perplexity", f"{math.exp(nll.nll):.2f}"


def written(text: str, known: dict[str, str]) -> str:
    """A page with today's figures.

    Raises:
        KeyError: there is no such figure.
    """
    return _MARKED.sub(lambda found: f"{found[1]}{known[found[2]]}{found[4]}", text)


if __name__ == "__main__":
    today = figures()
    if sys.argv[1:] == ["--list"]:
        print("\n".join(f"{name}: {value}" for name, value in today.items()))
    else:
        for page in PAGES:
            page.write_text(written(page.read_text(encoding="utf-8"), today), encoding="utf-8")
