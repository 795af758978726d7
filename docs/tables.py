"""Tables of the README and of docs/findings, from the published records. cog puts them into the pages: `make picture`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvbench.harness.core.intervals import Interval
from kvbench.harness.core.parameters import parameters_of, policy_from
from kvbench.harness.records import Record, RecordStore
from kvbench.harness.records.metrics import NllMetrics, PeakMetrics, QuestionMetrics, StepMetrics
from kvbench.harness.report.markdown import table
from kvbench.harness.report.pairing import paired
from kvbench.lab.studies.controls import holm, mean_of

sys.path.insert(0, str(Path(__file__).parent / "images"))

from recall import MERGING
from zoo import percents

RESULTS = Path(__file__).parents[1] / "leaderboard" / "records"
FACTS_BUDGET = 160  # tokens per KV head in the README's questions
_FACTS_BUDGETS = (FACTS_BUDGET, 96)
BUDGET = 256  # tokens per KV head in the tables of SmolLM2
SECOND_BOOK = "smollm2-second-book"
_CONTROL = "random, with sinks and recent tokens"
_IN_README = {"dense", "sink_window", "random", "h2o", "snapkv", "tova", "keydiff", "expected_attention"}
_NAMES = {"dense": "dense (keeps everything)", "random": _CONTROL}


@cache
def measured(suite: str) -> list[Record]:
    """Return the successful records of a suite."""
    records, _ = RecordStore(RESULTS / f"{suite.replace('-', '_')}.jsonl").read_all()
    return [record for record in records if record.status == "ok"]


def perplexities(suite: str, evict: str, capacity: int, positions: str) -> dict[str, Record]:
    """Return the perplexity records at one capacity and dense, by policy; several seeds of the control become their mean.

    Policies with parameters that are not their defaults, policies that merge, and formats of K and V are left out.
    """
    cells = [r for r in measured(suite) if r.measured(NllMetrics) and not r.cell.stored and not _is_variant(r)]
    chosen = [r for r in cells if (r.cell.capacity, r.cell.evict, r.cell.positions) == (capacity, evict, positions)]
    by_policy: dict[str, list[Record]] = {}
    for record in chosen + [r for r in cells if r.cell.policy == "dense" and _same_text(r, chosen)]:
        by_policy.setdefault(record.cell.policy, []).append(record)
    return {policy: records[0] if len(records) == 1 else mean_of(records) for policy, records in by_policy.items()}


def _is_variant(record: Record) -> bool:
    cell = record.cell
    if cell.capacity is None or cell.policy == "random":  # the control's parameters are the suite's
        return False
    defaults = parameters_of(policy_from(cell.policy, {}).bind(cell.capacity), recorded=True)
    return cell.policy in MERGING or dict(cell.parameters) != defaults


_POSITIONS = {"cache": "renumbered", "stream": "as in the text"}
_BESIDE_FORMATS = ("h2o", "expected_attention", "snapkv", "sink_window", "random", "window")
_AS_INT4 = 192  # tokens in float32 that hold as many bytes as 1,024 tokens in int4


def _same_text(record: Record, others: Sequence[Record]) -> bool:
    return record.data.ids_sha256 in {other.data.ids_sha256 for other in others}


def loss(record: Record, reference: Record) -> Interval:
    """Return the paired difference of NLL, in nats per token."""
    difference = paired(record, reference)
    assert difference is not None
    return difference


def percent(difference: Interval) -> str:
    """Return a difference of NLL as a difference of perplexity in percent, with its 95 % interval."""
    mean, low, high = percents(difference)
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]".replace("-", "−")


def name(policy: str) -> str:
    """Return a policy's name in a table."""
    return _NAMES.get(policy, f"`{policy}`")


def mebibytes(record: Record) -> str:
    """Return the bytes of K and V that one stream holds at its end, in MiB."""
    metrics = record.measured(NllMetrics)
    assert metrics is not None
    assert metrics.kv_held_bytes is not None
    streams = record.data.tokens / (metrics.stream_tokens or record.data.tokens)
    return f"{metrics.kv_held_bytes / streams / 2**20:.0f}"


def smollm2() -> str:
    """Return the README's table: policies that cut a prompt once, with perplexity lost, facts recalled, bytes and times."""
    column = perplexities("smollm2-prompt", "prompt", BUDGET, "stream")
    tied = {policy for policy, (_, p) in _against_control(column).items() if p >= 0.05}
    recalled, times = _recalled(), _step_times(4096)
    head = [
        f"policy, {BUDGET} tokens",
        "perplexity lost, %",
        f"facts at {FACTS_BUDGET}, %, seen/unseen",
        "K/V, MiB",
        "ms per step after 4,096",
    ]
    rows = [
        [name(p), _lost(p, column) + " =" * (p in tied), recalled[p], mebibytes(column[p]), times.get(p, "–")]
        for p in _best_first(column, (p for p in column if p in _IN_README))
    ]
    return _markdown(head, rows, "lrrrr")


def _recalled() -> dict[str, str]:
    """Return the percentage of right answers over all kinds of facts, the question seen and unseen, by policy."""
    answers: dict[str, dict[str, list[QuestionMetrics]]] = {}
    for record, metrics in _asked(FACTS_BUDGET):
        answers.setdefault(record.cell.policy, {"seen": [], "unseen": []})[_question(record)].append(metrics)
    return {policy: "/".join(_share(kind) for kind in kinds.values()) for policy, kinds in answers.items()}


def _asked(capacity: int) -> Iterable[tuple[Record, QuestionMetrics]]:
    """Yield the records of questions about facts at one capacity, and of dense."""
    for record in measured("smollm2-questions"):
        metrics = record.measured(QuestionMetrics)
        chosen = record.cell.is_dense or record.cell.capacity == capacity
        if metrics and chosen and record.cell.policy not in MERGING:
            yield record, metrics


def _question(record: Record) -> str:
    """Return "seen" or "unseen"."""
    return str(record.cell.options.get("question") or "seen")


def _share(answers: Sequence[QuestionMetrics]) -> str:
    right = [m.right for m in answers if m.right is not None]
    assert len(right) == len(answers)
    return f"{100 * sum(right) / sum(m.questions for m in answers):.0f}"


def _step_times(tokens: int = 1024) -> dict[str, str]:
    """Return milliseconds of a decode step after so many tokens, by policy."""
    steps = ((r, r.measured(StepMetrics)) for r in measured("smollm2-latency") if r.cell.options["tokens"] == tokens)
    return {record.cell.policy: _flagged(f"{metrics.step_ms:.0f}", record) for record, metrics in steps if metrics}


def _peaks(tokens: int) -> dict[str, str]:
    """Return the peak of memory above the weights after so many tokens, in MiB, by policy."""
    peaks = ((r, r.measured(PeakMetrics)) for r in measured("smollm2-memory") if r.cell.options["tokens"] == tokens)
    return {record.cell.policy: _flagged(f"{metrics.peak_bytes / 2**20:,.0f}", record) for record, metrics in peaks if metrics}


def _flagged(figure: str, record: Record) -> str:
    """Mark the figure of a flagged record with a star."""
    return f"{figure}*" if record.metrics.flags else figure


def steps_and_peaks() -> str:
    """Return times of a decode step and peaks of memory of SmolLM2, a row per policy. A star marks a flagged record."""
    lengths = (1024, 4096, 8192)
    columns = [part(tokens) for part in (_step_times, _peaks) for tokens in lengths]
    head = [f"{what} after {tokens:,}" for what in ("step, ms,", "peak, MiB,") for tokens in lengths]
    rows = [[name(p), *(column.get(p, "–") for column in columns)] for p in columns[0]]
    return _markdown(["policy, 256 tokens per head", *head], rows, "lrrrrrr")


def _lost(policy: str, column: dict[str, Record]) -> str:
    """Return perplexity lost to dense; empty if the policy was not measured."""
    if policy not in column:
        return ""
    return "0" if policy == "dense" else percent(loss(column[policy], column["dense"]))


def _best_first(column: dict[str, Record], policies: Iterable[str]) -> list[str]:
    """Return policies by their loss to dense."""
    return sorted(policies, key=lambda p: loss(column[p], column["dense"]).mean if p != "dense" else -math.inf)


def against_control() -> str:
    """Return perplexity lost to the control by moment of eviction, a row per policy; * after Holm's correction per column."""
    moments = {"step": ("smollm2-step", "cache"), "prompt": ("smollm2-prompt", "stream")}
    columns = [_against_control(perplexities(suite, evict, BUDGET, positions)) for evict, (suite, positions) in moments.items()]
    policies = sorted(columns[0] | columns[1], key=lambda p: (columns[0].get(p) or columns[1][p])[0].mean)
    rows = [[name(p), *(_starred(column.get(p)) for column in columns)] for p in policies]
    return _markdown(["policy", "at every step, %", "after a prompt, %"], rows, "lrr")


def _starred(difference: tuple[Interval, float] | None) -> str:
    """Return a difference in percent, with a star if p is below 0.05; empty if not measured."""
    return "" if difference is None else percent(difference[0]).split()[0] + "*" * (difference[1] < 0.05)


def _against_control(column: dict[str, Record]) -> dict[str, tuple[Interval, float]]:
    """Return each policy's difference to the control, and p after Holm's correction over the column."""
    differences = {policy: loss(record, column["random"]) for policy, record in column.items() if policy != "random"}
    corrected = holm([difference.p for difference in differences.values() if difference.p is not None])
    return {policy: (difference, p) for (policy, difference), p in zip(differences.items(), corrected, strict=True)}


def formats() -> str:
    """Return perplexity lost to dense by formats of K and V, and by policies at the same capacity."""
    rows = {f"all, {r.cell.stored}": r for r in measured("smollm2-prompt") if r.cell.policy == "dense" and r.cell.stored}
    for capacity in (_AS_INT4, BUDGET):
        column = perplexities("smollm2-prompt", "prompt", capacity, "stream")
        rows |= {f"{capacity}, {policy}": r for policy, r in column.items() if policy in _BESIDE_FORMATS}
    dense = column["dense"]
    order = sorted(rows, key=lambda row: loss(rows[row], dense).mean)
    figures = {row: (percent(loss(rows[row], dense)), _held(rows[row], dense)) for row in order}
    lines = [[row, *figures[row]] for row in order]
    return _markdown(["tokens kept, format or policy", "perplexity lost, %", "bytes of K and V, % of dense's"], lines, "lrr")


def _held(record: Record, dense: Record) -> str:
    """Return the bytes of K and V that a cell held, in percent of dense's."""
    return f"{100 * _bytes(record) / _bytes(dense):.0f}"


def _bytes(record: Record) -> int:
    metrics = record.measured(NllMetrics)
    assert metrics is not None
    held = metrics.kv_held_bytes or metrics.kv_bytes
    assert held is not None
    return held


def budgets() -> str:
    """Return perplexity lost to dense of policies with several budgets, evicting at every step."""
    capacities = sorted({r.cell.capacity for r in measured("smollm2-step") if r.cell.policy == "random" and r.cell.capacity})
    columns = {capacity: perplexities("smollm2-step", "step", capacity, "cache") for capacity in capacities}
    several = set.intersection(*map(set, columns.values())) - {"dense"}
    policies = _best_first(columns[BUDGET], several)
    rows = [[name(p), *(_lost(p, column) for column in columns.values())] for p in policies]
    return _markdown(["policy", *(f"{c} tokens, %" for c in columns)], rows, "l" + "r" * len(columns))


def positions_at_steps() -> str:
    """Return perplexity lost to dense inside the training length, evicting at every step, by the positions of kept tokens."""
    columns = [perplexities("smollm2-step", "step", BUDGET, positions) for positions in _POSITIONS]
    rows = [[name(p), *(_lost(p, column) for column in columns)] for p in columns[1] if p != "dense"]
    head = ["policy, 256 tokens per head", *(f"{where}, %" for where in _POSITIONS.values())]
    return _markdown(head, rows, "lrr")


_FACTS_SELECTED = ("dense", "quest", "bigbird", "h2o", "keydiff")
_FACTS = {
    "popular": "repeated",
    "needle": "once",
    "distracted": "beside",
}


def facts() -> str:
    """Return the percentage of right answers of SmolLM2 to each kind of fact, the question seen/unseen, at two budgets."""
    answers: dict[str, dict[tuple[str, int], dict[str, str]]] = {}
    for capacity in _FACTS_BUDGETS:
        for record, metrics in _asked(capacity):
            kind = str(record.cell.options["tasks"]).removeprefix("kvbench_facts_")
            of_policy = answers.setdefault(record.cell.policy, {})
            of_policy.setdefault((kind, capacity), {"seen": "–", "unseen": "–"})[_question(record)] = _share([metrics])
    columns = {(kind, capacity): f"{title}, {capacity}" for kind, title in _FACTS.items() for capacity in _FACTS_BUDGETS}
    rows = [[name(policy), *("/".join(of.get(column, {}).values()) for column in columns)] for policy, of in answers.items()]
    return _markdown(["seen/unseen, %", *columns.values()], rows, "l" + "r" * len(columns))


class Pair(NamedTuple):
    """Records of one policy that merges, and of the policy that drops the same tokens, a pair for each seed."""

    policy: str
    chooses: str  # the policy that drops
    capacity: int
    merged: list[Record]
    dropped: list[Record]


def merging_pairs(suite: str, positions: str, cut: bool | None = None) -> list[Pair]:
    """Return every merging policy of a suite beside the policy inside it. D2O keeps four first tokens more than H2O.

    cut: only texts with a prompt, or only those without; both when None.
    """
    records = [r for r in measured(suite) if r.cell.positions == positions and cut in (None, has_prompt(r))]
    by_cell = {(r.cell.policy, repr(r.cell.parameters), r.cell.capacity, r.cell.seed, repr(r.cell.options)): r for r in records}
    pairs: dict[tuple[str, str, int], Pair] = {}
    for record in records:
        cell, inside = record.cell, dict(record.cell.parameters.get("score") or {})
        if cell.policy not in MERGING or cell.capacity is None:
            continue
        chooses = str(inside.pop("name"))
        dropped = by_cell.get((chooses, repr(inside), cell.capacity, cell.seed, repr(cell.options)))
        if dropped is None:
            continue
        variant = cell.parameters.get("variant")
        policy = cell.policy if variant is None else f"{cell.policy}, {variant}"
        pair = pairs.setdefault((policy, chooses, cell.capacity), Pair(policy, chooses, cell.capacity, [], []))
        pair.merged.append(record)
        pair.dropped.append(dropped)
    return sorted(pairs.values(), key=lambda pair: (-pair.capacity, pair.chooses, pair.policy))


def has_prompt(record: Record) -> bool:
    """Return whether a text has prompts."""
    return bool(record.cell.options.get("prompt"))


def against_dropped(pair: Pair) -> Interval:
    """Return the paired difference of NLL of merging to dropping, in nats per token; seeds are averaged."""
    return loss(*(records[0] if len(records) == 1 else mean_of(records) for records in (pair.merged, pair.dropped)))


def merging() -> str:
    """Return what merging changes beside dropping the same 256 tokens: perplexity, and right answers about repeated facts."""
    moments = {"smollm2-prompt": ("stream", "after the prompt"), "smollm2-step": ("cache", "at every step")}
    answers = _merged_facts()
    rows = []
    for suite, (positions, moment) in moments.items():
        for mode in dict.fromkeys((positions, "stream")):
            again = {
                (pair.policy, pair.chooses): percent(against_dropped(pair))
                for pair in merging_pairs(SECOND_BOOK, mode, suite == "smollm2-prompt")
            }
            for pair in (pair for pair in merging_pairs(suite, mode) if pair.capacity == BUDGET):
                facts = answers.get((pair.chooses, pair.policy), "") if suite == "smollm2-prompt" else ""
                second = again.get((pair.policy, pair.chooses), "")
                rows.append([moment, name(pair.chooses), f"`{pair.policy}`", percent(against_dropped(pair)), second, facts])
    head = ["evicted", "chosen by", "merged by", f"perplexity at {BUDGET} tokens, merged against dropped, %", "second book"]
    return _markdown([*head, f"repeated facts at {FACTS_BUDGET} tokens, dropped → merged, %"], rows, "lllrrr")


def _merged_facts() -> dict[tuple[str, str], str]:
    """Return right answers about repeated facts, dropped → merged, seen/unseen, by the policies that drop and merge."""
    answers: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
    for pair in merging_pairs("smollm2-questions", "stream"):
        for merged, dropped in zip(pair.merged, pair.dropped, strict=True):
            if pair.capacity != FACTS_BUDGET or merged.cell.options["tasks"] != "kvbench_facts_popular":
                continue
            shares = [_share([metrics]) for r in (dropped, merged) if (metrics := r.measured(QuestionMetrics))]
            answers.setdefault((pair.chooses, pair.policy), {})[_question(merged)] = (shares[0], shares[1])
    return {
        key: " → ".join("/".join(of[question][side] for question in ("seen", "unseen")) for side in (0, 1))
        for key, of in answers.items()
    }


class Selected(NamedTuple):
    """Records of one policy of the suite `smollm2-select`, one per seed.

    Attributes:
        lost: paired difference of NLL to dense, in nats per token.
        held, read: bytes of one stream's cache at its end, and those that its last token read.
    """

    policy: str
    lost: Interval
    held: float
    read: float


def selecting(suite: str = "smollm2-select") -> list[Selected]:
    """Return the policies that select and those beside them that evict at every step, the smallest loss first."""
    by_policy: dict[str, list[Record]] = {}
    for record in measured(suite):
        if has_prompt(record) or record.cell.policy in MERGING or record.cell.positions == "stream":
            continue
        by_policy.setdefault(_selects(record), []).append(record)
    (dense,) = by_policy.pop("everything")
    rows = []
    for policy, records in by_policy.items():
        metrics = records[0].measured(NllMetrics)
        assert metrics is not None
        streams = records[0].data.tokens / (metrics.stream_tokens or records[0].data.tokens)
        held = (metrics.kv_held_bytes or 0) / streams
        lost = loss(records[0] if len(records) == 1 else mean_of(records), dense)
        rows.append(Selected(policy, lost, held, held if metrics.kv_read_bytes is None else metrics.kv_read_bytes / streams))
    return sorted(rows, key=lambda row: row.lost.mean)


def _selects(record: Record) -> str:
    """Describe what a query reads."""
    cell, given = record.cell, record.cell.parameters
    if cell.capacity is not None:
        return f"{name(cell.policy)}, {cell.capacity} tokens"
    everywhere = ", all layers" if given.get("dense_layers") == 0 and cell.model.id == "smollm2" else ""
    labels = {
        "dense": "everything",
        "quest": "`quest`, {budget} tokens in pages of {page}",
        "sparse_strided": "`sparse_strided`, stride {stride}",
        "longformer_dilated": "`longformer_dilated`, dilation {dilation}, {heads}",
        "bigbird": "`bigbird`, {blocks} blocks of {block}, {random} random",
    }
    dilated = given.get("heads")
    heads = "all heads" if dilated is None else "one head" if dilated == 1 else f"{dilated} heads"
    blocks = sum(given.get(part, 0) for part in ("first", "window", "random"))
    return labels[cell.policy].format(**{**given, "heads": heads, "blocks": blocks}) + everywhere


def selected() -> str:
    """Return what policies that select lose of SmolLM2's perplexity, up to 30 %, with the bytes that they hold and read."""
    again = {row.policy: percent(row.lost) for row in selecting(SECOND_BOOK)}
    rows = [
        [row.policy, percent(row.lost), again.get(row.policy, ""), f"{row.held / 2**20:.0f}", f"{row.read / 2**20:.0f}"]
        for row in selecting()
        if row.lost.mean < math.log(1.3)
    ]
    return _markdown(["policy", "perplexity lost, %", "on a second book", "held, MiB", "read by a step, MiB"], rows, "lrrrr")


def selected_facts() -> str:
    """Return right answers of SmolLM2, seen/unseen, if each query reads about 160 tokens, and if no more than 160 are kept."""
    answers: dict[tuple[str, str, str], list[QuestionMetrics]] = {}  # by what is read, kind of fact and question; seeds together
    for record in measured("smollm2-questions"):
        metrics, kind = record.measured(QuestionMetrics), str(record.cell.options["tasks"]).removeprefix("kvbench_facts_")
        if metrics and record.cell.policy in _FACTS_SELECTED and record.cell.capacity in (None, FACTS_BUDGET):
            answers.setdefault((_selects(record), kind, _question(record)), []).append(metrics)
    rows = [
        [reads, *("/".join(_share(answers[reads, kind, question]) for question in ("seen", "unseen")) for kind in _FACTS)]
        for reads in dict.fromkeys(reads for reads, _, _ in answers)
    ]
    rows.sort(key=lambda row: -sum(int(share) for cell in row[1:] for share in cell.split("/")))
    return _markdown(["seen/unseen, %", *_FACTS.values()], rows, "lrrr")


def _markdown(head: list[str], rows: list[list[str]], align: str) -> str:
    return "\n".join(table(head, rows, align))
