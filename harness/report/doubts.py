"""Doubts about records, faults of rows, and troubles of a run, as sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.grouped import grouped
from kvbench.harness.core.perplexity import perplexity
from kvbench.harness.core.shown import visible
from kvbench.harness.records import Record
from kvbench.harness.records.figure_rules import MEAN_NATS, SUM
from kvbench.harness.records.metrics import NllMetrics, QuestionMetrics, ScoreMetrics
from kvbench.harness.report.pairing import past_training, question
from kvbench.harness.report.rows import Row, without_folder
from kvbench.harness.report.task_report import OF_MACHINE, task_of
from kvbench.harness.report.verify import ITEM_BYTES

_CLIFF_NATS = math.log(2)  # twice the perplexity
_MIN_CLIFF_BLOCKS = 4
FLOOR = 0.5  # share of right answers below which dense says nothing about policies
_MOST_HELD = 0.9  # share of dense's bytes above which too few tokens were evicted to change every figure
_GRADED = 10  # questions with a score other than 0 and 1; chance does not make so many scores equal to dense's
_ANSWERS, _OF_EACH_KIND = 60, 10  # smallest number of questions, and of questions that dense answers right and wrong each
_MAX_NAMES = 3  # names in a line, before "and 4 more"
_WALKED = ("walk", "compiled steps")  # methods that read token by token inside a layer

Floats = NDArray[np.float64]


def faults(row: Row, others: Sequence[Row]) -> list[str]:
    """Return the failures by kind, the flags, and the token where a cliff begins."""
    problems = []
    for record in row.records:
        if record.status != "ok":
            message = record.error.message if record.error else ""
            reason = f"NaN: {message}" if "not finite" in message else record.failure
            problems.append(f"{record.cell.task.name} failed: {reason}")
        problems += record.metrics.flags
    token = cliff(row, others)
    return [*dict.fromkeys(problems), *([f"cliff at token {token:,}"] if token is not None else [])]


def cliff(row: Row, others: Sequence[Row]) -> int | None:
    """Return the first token from which on perplexity stays above twice that of the best other cache; None without a cliff.

    The other cache is bounded, or was not read past its training length.
    From that token on, the mean NLL difference exceeds log 2 over every stretch of more than `_MIN_CLIFF_BLOCKS` blocks.
    """
    scored = [r for r in others if r is not row and r.nll is not None and r.kv_bytes]
    rivals = [r for r in scored if r.perplexity is not None and not past_training(r.perplexity)]
    best = min(rivals, key=lambda r: r.nll or math.inf, default=None)
    if best is None or best.perplexity is None or row.perplexity is None:
        return None
    blocks = _paired_blocks(row.perplexity, best.perplexity)
    if blocks is None:
        return None
    excess, tokens, size = blocks
    if excess[-_MIN_CLIFF_BLOCKS:].sum() <= _CLIFF_NATS * tokens[-_MIN_CLIFF_BLOCKS:].sum():
        return None  # a cliff must last until the end of the stream
    for start in range(len(excess) - _MIN_CLIFF_BLOCKS):
        means = np.cumsum(excess[start:]) / np.maximum(np.cumsum(tokens[start:]), 1)
        if means[_MIN_CLIFF_BLOCKS:].min() > _CLIFF_NATS:
            return size * (start + int(np.argmax(excess[start:] > _CLIFF_NATS * tokens[start:])))
    return None


def _paired_blocks(a: Record, b: Record) -> tuple[Floats, Floats, int] | None:
    """Return (NLL of a minus b, tokens) of each block, and the block size; None unless both scored one long enough text."""
    if question(a) != question(b):
        return None
    ours, theirs = a.measured(NllMetrics), b.measured(NllMetrics)
    if ours is None or theirs is None or ours.blocks.tokens != theirs.blocks.tokens:
        return None
    if len(ours.blocks.tokens) <= 2 * _MIN_CLIFF_BLOCKS:
        return None
    (nll, tokens), (other_nll, _) = ours.blocks.arrays, theirs.blocks.arrays
    return nll - other_nll, tokens, ours.blocks.size


def with_doubts(records: Sequence[Record]) -> list[Record]:
    """Return the records with the doubts about their model, their questions and their eviction added to their flags.

    A doubt that one record raises about its model is added to all records of the model. Questions that dense can't answer are
    flagged in all records of the questions.
    """
    questions = [question(record) for record in records]
    dense = {key: r for key, r in zip(questions, records, strict=True) if r.cell.is_dense and r.status == "ok"}
    models = [(r.cell.model.id, r.cell.model.revision, r.facts.weights_sha256) for r in records]  # weights and tokenizer
    doubts: dict[tuple[str | None, ...], list[str]] = {model: [] for model in models}
    for model, record in zip(models, records, strict=True):
        doubts[model] += _doubts(record)
    of_records = zip(records, models, questions, strict=True)
    return [_flagged(record, doubts[model], dense.get(key)) for record, model, key in of_records]


def _doubts(record: Record) -> Iterator[str]:
    """Yield the doubts that a record raises about its model."""
    if record.facts.tokenizer_differs is not None:
        yield record.facts.tokenizer_differs
    metrics, length, guess = record.measured(NllMetrics), record.facts.training_length, record.facts.vocab_size
    if metrics is None or guess is None or not record.cell.is_dense:
        return
    trained = [bucket for bucket in metrics.buckets if length is None or bucket.to <= length]
    tokens = sum(bucket.tokens for bucket in trained)
    nats = sum(bucket.nll * bucket.tokens for bucket in trained) / tokens if tokens else 0.0
    if nats > math.log(guess):
        yield (
            "dense is worse than a uniform guess within the model's training length (perplexity "
            f"{perplexity(nats):,.0f}, vocabulary {guess:,}): are these its tokenizer, its weights and its kind of text?"
        )


def _flagged(record: Record, of_model: Sequence[str], dense: Record | None) -> Record:
    """Return the record with the doubts added to its flags. dense: record of dense with the same questions or text, if any."""
    if record.status != "ok":
        return record
    score = None if dense is None else dense.measured(ScoreMetrics)
    doubts = [*dict.fromkeys(of_model)]
    if score is not None and score.accuracy is not None and score.accuracy < FLOOR:
        right = f"{100 * score.accuracy:.0f} % right"
        doubts.append(f"dense can't: it answers {right}, so answers to these questions say little about policies")
    doubts += _eviction_flags(record, dense)
    flags = [*record.metrics.flags, *doubts]
    return replace(record, metrics=record.metrics.model_copy(update={"flags": flags})) if doubts else record


def _eviction_flags(record: Record, dense: Record | None) -> Iterator[str]:
    """Yield flags about a record's eviction. dense: record of dense with the same questions or text, if any."""
    if record.facts.code is not None:
        yield from _not_evicting(record, None if dense is None else dense.metrics.kv_held_bytes)
    if dense is None or record.cell.stored or record.cell.is_dense:
        return
    share = (record.metrics.kv_held_bytes or 0) / (dense.metrics.kv_held_bytes or math.inf)
    if 0 < share <= _MOST_HELD and (equal := _equal_figures(record, dense)):
        yield f"no effect: all {equal} equal those of dense, but {1 - share:.0%} of dense's bytes are evicted"


def _not_evicting(record: Record, of_dense: int | None) -> Iterator[str]:
    """Yield a flag if a third-party cache holds more than it should. of_dense: bytes that dense holds."""
    held, most, ratio = _held_tokens(record), record.cell.parameters.get("holds"), _ratio(record.cell.parameters)
    if held is not None and most is not None and held > most + 1:  # the newest token may be held in addition
        yield f"not evicting: it holds {held:,.0f} tokens per KV head, but should hold {most:,} at most"
    elif ratio and of_dense and (record.metrics.kv_held_bytes or 0) >= of_dense:
        yield f"not evicting: it holds all bytes that dense holds, but should evict {ratio:.0%} of a prompt"


def _equal_figures(record: Record, dense: Record) -> str:
    """Return the name of the figures that all equal dense's; empty if some differ, or if equality may be due to chance.

    NLLs of runs of tokens are compared up to rounding in float32.
    """
    ours, theirs = record.measured(NllMetrics), dense.measured(NllMetrics)
    if ours is not None and theirs is not None:
        (nll, tokens), (reference_nll, reference_tokens) = ours.blocks.arrays, theirs.blocks.arrays
        same_tokens = np.array_equal(tokens, reference_tokens)
        return "NLLs" if same_tokens and (np.abs(nll - reference_nll) <= MEAN_NATS * tokens).all() else ""
    answers, reference = record.measured(QuestionMetrics), dense.measured(QuestionMetrics)
    return "answers" if answers is not None and reference is not None and _same_answers(answers, reference) else ""


def _same_answers(ours: QuestionMetrics, theirs: QuestionMetrics) -> bool:
    """Return whether all questions have equal scores, and whether there are enough right and wrong answers."""
    if ours.outcomes != theirs.outcomes:
        return False
    if isinstance(ours, ScoreMetrics) and isinstance(theirs, ScoreMetrics) and ours.scores is not None:
        pairs = list(zip(ours.scores, theirs.scores or [], strict=False))
        graded = sum(score not in (0, 1) for score, _ in pairs)
        return graded >= _GRADED and all(math.isclose(a, b, rel_tol=SUM) for a, b in pairs) and len(pairs) == len(ours.scores)
    wrong = theirs.questions - (theirs.right or 0)
    return ours.evicted_questions >= _ANSWERS and min(theirs.right or 0, wrong) >= _OF_EACH_KIND


def _held_tokens(record: Record) -> float | None:
    """Return the tokens held at the end, mean over layers and streams; None if the record lacks the bytes or shapes."""
    held, shapes, item = record.metrics.kv_held_bytes, record.facts.kv_shapes, ITEM_BYTES.get(record.cell.model.dtype)
    if not held or not shapes or item is None or record.cell.stored:
        return None
    streams = task_of(record).workload(record.cell.task).kv_streams
    return held / (streams * item * sum(s.layers * s.heads * (s.key_dim + s.value_dim) for s in shapes))


def _ratio(parameters: Mapping[str, Any]) -> float | None:
    """Return the share of a prompt that a press, or the press inside it, evicts."""
    if isinstance(parameters.get("compression_ratio"), (int, float)):
        return float(parameters["compression_ratio"])
    inner = parameters.get("press")
    return _ratio(inner) if isinstance(inner, Mapping) else None


def troubles(records: Sequence[Record]) -> list[str]:
    """Return a line for each failure and flag, with the reason, and a line for each way of reading without a faster method."""
    return [*_failures(records), *_flags(records), *_slow(records)]


def _failures(records: Sequence[Record]) -> list[str]:
    """Describe failed cells in a line per policy and reason."""
    failures = grouped((r for r in records if r.failure), lambda r: (without_folder(r.cell.policy), _reason(r)))
    return [
        visible(f"{policy} failed ({f'{len(failed)} cells' if len(failed) > 1 else failed[0].cell.task.name}): {reason}")
        for (policy, reason), failed in failures.items()
    ]


def _reason(record: Record) -> str:
    return record.error.reason if record.error else "no reason given"


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
