"""Tables of the README and of docs/findings, from the published records. cog puts them into the pages: `make picture`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from kvbench.harness.core.codec import QUANTIZED_CACHE
from kvbench.harness.core.intervals import Interval
from kvbench.harness.records import Record, RecordStore
from kvbench.harness.records.metrics import NllMetrics, QuestionMetrics
from kvbench.harness.report.markdown import table
from kvbench.harness.report.pairing import mean_of, paired
from kvbench.harness.report.ranks import holm

RESULTS = Path(__file__).parents[1] / "leaderboard" / "records"
BUDGET = 256  # tokens per KV head in the tables of SmolLM2
_CONTROL = "random, with sinks and recent tokens"
_NAMES = {"dense": "dense (keeps everything)", "random": _CONTROL}


@cache
def measured(suite: str) -> list[Record]:
    """Return the successful records of a suite."""
    records, _ = RecordStore(RESULTS / f"{suite.replace('-', '_')}.jsonl").read_all()
    return [record for record in records if record.status == "ok"]


def perplexities(suite: str, evict: str, capacity: int, positions: str) -> dict[str, Record]:
    """Return the perplexity records at one capacity and dense, by policy; several seeds of the control become their mean.

    Policies with parameters that are not their defaults, and formats of K and V, are left out.
    """
    cells = [r for r in measured(suite) if r.measured(NllMetrics) and not r.cell.stored and not _is_variant(r)]
    chosen = [r for r in cells if (r.cell.capacity, r.cell.evict, r.cell.positions) == (capacity, evict, positions)]
    by_policy: dict[str, list[Record]] = {}
    for record in chosen + [r for r in cells if r.cell.policy == "dense" and _same_text(r, chosen)]:
        by_policy.setdefault(record.cell.policy, []).append(record)
    return {policy: records[0] if len(records) == 1 else mean_of(records) for policy, records in by_policy.items()}


def _is_variant(record: Record) -> bool:
    return record.cell.policy == "sink_window" and record.cell.parameters.get("sinks") != 4


_POSITIONS = {"cache": "renumbered", "stream": "as in the text", "clamped": "clamped"}
_BESIDE_FORMATS = ("h2o", "expected_attention", "snapkv", "sink_window", "random", "window")


def _same_text(record: Record, others: Sequence[Record]) -> bool:
    return record.data.ids_sha256 in {other.data.ids_sha256 for other in others}


def loss(record: Record, reference: Record) -> Interval:
    """Return the paired difference of NLL, in nats per token."""
    difference = paired(record, reference)
    assert difference is not None
    return difference


def percent(difference: Interval) -> str:
    """Return a difference of NLL as a difference of perplexity with its 95 % interval."""
    value, low, high = (100 * math.expm1(x or 0.0) for x in (difference.mean, difference.low, difference.high))
    return f"{value:+.1f} % [{low:+.1f}, {high:+.1f}]".replace("-", "−")


def name(policy: str) -> str:
    """Return a policy's name in a table."""
    return _NAMES.get(policy, f"`{policy}`")


def megabytes(record: Record) -> str:
    """Return the allocated bytes of K and V of one stream, in MB."""
    metrics = record.measured(NllMetrics)
    assert metrics is not None
    return f"{metrics.kv_bytes / (record.data.streams or 1) / 1e6:.1f}"


def smollm2() -> str:
    """Return the README's table: perplexity lost by SmolLM2 at one budget, evicting at every step and once after a prompt."""
    columns = [
        perplexities("smollm2-step", "step", BUDGET, "cache"),
        perplexities("smollm2-prompt", "prompt", BUDGET, "stream"),
    ]
    both = columns[0].keys() & columns[1].keys()
    policies = sorted(both, key=lambda p: _mean_loss(p, columns))
    rows = [
        [name(policy), *(_cell(column, policy, lambda r, c: percent(loss(r, c["dense"]))) for column in columns)]
        for policy in policies
    ]
    return _markdown(["policy, 256 tokens per head", "evicting at every step", "evicting once, after 1,024 tokens"], rows, "lrr")


def _mean_loss(policy: str, columns: Sequence[dict[str, Record]]) -> float:
    """Return a policy's mean loss over the columns that have the policy; dense comes first."""
    if policy == "dense":
        return -math.inf
    losses = [loss(column[policy], column["dense"]).mean for column in columns if policy in column]
    return sum(losses) / len(losses)


def _cell(column: dict[str, Record], policy: str, write: Callable[[Record, dict[str, Record]], str]) -> str:
    if policy not in column:
        return ""
    return "0" if policy == "dense" else write(column[policy], column)


def against_control(suite: str, evict: str, positions: str, capacity: int = BUDGET) -> str:
    """Return perplexity lost to the control, a row per policy, with p after Holm's correction over the rows."""
    column = perplexities(suite, evict, capacity, positions)
    control = column.pop("random")
    differences = {policy: loss(record, control) for policy, record in column.items()}
    corrected = dict(zip(differences, holm([d.p or 0.0 for d in differences.values()]), strict=True))
    rows = [
        [name(policy), percent(differences[policy]), "<0.001" if corrected[policy] < 0.001 else f"{corrected[policy]:.3f}"]
        for policy in sorted(differences, key=lambda p: differences[p].mean)
    ]
    return _markdown(["policy", "perplexity against the control", "p, corrected"], rows, "lrr")


def formats() -> str:
    """Return perplexity lost to dense by formats of K and V, and by policies at the same capacity."""
    exact = perplexities("smollm2-prompt", "prompt", BUDGET, "stream")
    rows = {f"dense as {r.cell.stored}": r for r in measured("smollm2-prompt") if r.cell.policy == "dense" and r.cell.stored} | {
        f"{policy} of {BUDGET} tokens": r for policy, r in exact.items() if policy in _BESIDE_FORMATS
    }
    order = sorted(rows, key=lambda row: loss(rows[row], exact["dense"]).mean)
    lines = [[row, percent(loss(rows[row], exact["dense"])), _held(rows[row], exact["dense"])] for row in order]
    return _markdown(["kept", "perplexity lost to dense", "bytes of K and V, of dense's"], lines, "lrr")


def _held(record: Record, dense: Record) -> str:
    ours, theirs = (m.kv_held_bytes or m.kv_bytes for m in (record.measured(NllMetrics), dense.measured(NllMetrics)) if m)
    return f"{100 * ours / theirs:.0f} %"


def budgets() -> str:
    """Return perplexity lost to dense at every budget of the control, evicting at every step; empty where not measured."""
    capacities = sorted({r.cell.capacity for r in measured("smollm2-step") if r.cell.policy == "random" and r.cell.capacity})
    columns = {capacity: perplexities("smollm2-step", "step", capacity, "cache") for capacity in capacities}
    policies = sorted((p for p in columns[BUDGET] if p != "dense"), key=lambda p: _mean_loss(p, [columns[BUDGET]]))
    rows = [
        [name(p), *(_cell(column, p, lambda r, c: percent(loss(r, c["dense"]))) for column in columns.values())] for p in policies
    ]
    return _markdown(["policy", *(f"{c} tokens" for c in columns)], rows, "l" + "r" * len(columns))


def long_stream() -> str:
    """Return perplexities of SmolLM2 in one stream past its training length."""
    records = sorted(measured("smollm2-stream"), key=lambda r: (r.cell.policy, r.cell.positions))
    rows = [[name(r.cell.policy), _POSITIONS[r.cell.positions], f"{r.metrics.as_json()['perplexity']:.1f}"] for r in records]
    return _markdown(["policy", "positions of kept tokens", "perplexity"], rows, "llr")


def questions(task: str) -> str:
    """Return the share of right answers of SmolLM2 to one kind of fact, seen or unseen at the cut."""
    records = [r for r in measured("smollm2-questions") if r.cell.options["tasks"] == f"kvbench_facts_{task}"]
    shares: dict[str, dict[str, str]] = {}
    for record in records:
        metrics = record.measured(QuestionMetrics)
        assert metrics is not None
        right = f"{100 * (metrics.accuracy or 0):.0f} %"
        shares.setdefault(record.cell.policy, {})[str(record.cell.options.get("question") or "seen")] = right
    rows = [[name(policy), by.get("seen", ""), by.get("unseen", "")] for policy, by in shares.items()]
    return _markdown(["policy, 160 tokens per head", "question seen at the cut", "question unseen"], rows, "lrr")


def formats_on_books() -> str:
    """Return perplexity lost by stories260K on books in each format of K and V, with everything kept.

    It reads past its training length, where differences have no interval.
    """
    formats = {r.cell.stored: r for r in measured("equal-bytes-pg19") if r.cell.policy in ("dense", QUANTIZED_CACHE)}
    exact = formats.pop("")
    rows = [
        [f"`{name}`", f"{100 * (_perplexity(r) / _perplexity(exact) - 1):+.1f} %".replace("-", "−"), _held(r, exact)]
        for name, r in sorted(formats.items())
    ]
    return _markdown(["K and V", "perplexity lost to dense", "of dense's bytes"], rows, "lrr")


def _perplexity(record: Record) -> float:
    metrics = record.measured(NllMetrics)
    assert metrics is not None
    return metrics.perplexity


def _markdown(head: list[str], rows: list[list[str]], align: str) -> str:
    return "\n".join(table(head, rows, align))
