"""Flags of a cache that evicts nothing, and of an eviction that changes no figure. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvbench.harness.records import Record
from kvbench.harness.records.figure_rules import MEAN_NATS, SUM
from kvbench.harness.records.metrics import NllMetrics, QuestionMetrics, ScoreMetrics
from kvbench.harness.report.task_report import task_of
from kvbench.harness.report.verify import ITEM_BYTES

_MOST_HELD = 0.9  # share of dense's bytes above which too few tokens were evicted to change every figure
_GRADED = 10  # questions with a score other than 0 and 1, which chance makes equal to dense's once in a while, but not all
_ANSWERS, _OF_EACH_KIND = 60, 10  # questions; those among them that dense answers right, and those that it answers wrong


def eviction_flags(record: Record, dense: Record | None) -> Iterator[str]:
    """The flags of a record. dense: of the same questions or text, if there is one."""
    yield from _not_evicting(record, None if dense is None else dense.metrics.kv_held_bytes)
    if dense is None or record.cell.stored or record.cell.is_dense:
        return
    share = (record.metrics.kv_held_bytes or 0) / (dense.metrics.kv_held_bytes or math.inf)
    if 0 < share <= _MOST_HELD and (equal := _equal_figures(record, dense)):
        yield f"no effect: all {equal} equal those of dense, but {1 - share:.0%} of dense's bytes are evicted"


def _not_evicting(record: Record, of_dense: int | None) -> Iterator[str]:
    """A flag if somebody else's cache holds more than it should. of_dense: bytes that dense holds."""
    if record.facts.code is None:
        return
    held, most, ratio = _held_tokens(record), record.cell.parameters.get("holds"), _ratio(record.cell.parameters)
    if held is not None and most is not None and held > most + 1:  # the newest token may come on top
        yield f"not evicting: it holds {held:,.0f} tokens per KV head, but should hold {most:,} at most"
    elif ratio and of_dense and (record.metrics.kv_held_bytes or 0) >= of_dense:
        yield f"not evicting: it holds all bytes that dense holds, but should evict {ratio:.0%} of a prompt"


def _equal_figures(record: Record, dense: Record) -> str:
    """The figures that equal those of dense, in words; empty if some differ, or if chance may have made them equal."""
    ours, theirs = record.measured(NllMetrics), dense.measured(NllMetrics)
    if ours is not None and theirs is not None:
        return "NLLs" if _same_nll(ours, theirs) else ""
    answers, reference = record.measured(QuestionMetrics), dense.measured(QuestionMetrics)
    return "answers" if answers is not None and reference is not None and _same_answers(answers, reference) else ""


def _same_nll(ours: NllMetrics, theirs: NllMetrics) -> bool:
    """Whether every run of tokens has the same NLL, up to rounding in float32."""
    tokens = np.array(ours.blocks.tokens)
    if ours.blocks.tokens != theirs.blocks.tokens:
        return False
    return bool((np.abs(np.subtract(ours.blocks.nll_sum, theirs.blocks.nll_sum)) <= MEAN_NATS * tokens).all())


def _same_answers(ours: QuestionMetrics, theirs: QuestionMetrics) -> bool:
    """Whether all questions are scored alike, and are enough of them, not all right or all wrong."""
    if ours.outcomes != theirs.outcomes:
        return False
    if isinstance(ours, ScoreMetrics) and isinstance(theirs, ScoreMetrics) and ours.scores is not None:
        pairs = list(zip(ours.scores, theirs.scores or [], strict=False))
        graded = sum(score not in (0, 1) for score, _ in pairs)
        return graded >= _GRADED and all(math.isclose(a, b, rel_tol=SUM) for a, b in pairs) and len(pairs) == len(ours.scores)
    wrong = theirs.questions - (theirs.right or 0)
    return ours.evicted_questions >= _ANSWERS and min(theirs.right or 0, wrong) >= _OF_EACH_KIND


def _held_tokens(record: Record) -> float | None:
    """Tokens held at the end, mean over layers and streams; None if the record does not say."""
    held, shapes, item = record.metrics.kv_held_bytes, record.facts.kv_shapes, ITEM_BYTES.get(record.cell.model.dtype)
    if not held or not shapes or item is None or record.cell.stored:
        return None
    streams = task_of(record).workload(record.cell.task).kv_streams
    return held / (streams * item * sum(s.layers * s.heads * (s.key_dim + s.value_dim) for s in shapes))


def _ratio(parameters: Mapping[str, Any]) -> float | None:
    """The share of a prompt that a press, or the one inside it, evicts."""
    if isinstance(parameters.get("compression_ratio"), (int, float)):
        return float(parameters["compression_ratio"])
    inner = parameters.get("press")
    return _ratio(inner) if isinstance(inner, Mapping) else None
