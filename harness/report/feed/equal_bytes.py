"""Comparison of policies at equal bytes, across the formats in which they store K and V."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from kvbench.harness.core.grouped import grouped
from kvbench.harness.core.shown import visible
from kvbench.harness.report.feed import words
from kvbench.harness.report.feed.question import Question
from kvbench.harness.report.feed.row import answers_json, figure, loss_to
from kvbench.harness.report.feed.words import finding
from kvbench.harness.report.ranks import pair_changes, ranks
from kvbench.harness.report.rows import Row

SHARES = tuple(Fraction(1, 2**halvings) for halvings in range(1, 6))  # shares of dense's bytes in the model's dtype


@dataclass(frozen=True)
class Formats:
    """Questions that differ only in the format of K and V (`parts`), combined to one question with the rows of all (`whole`).

    dense: row of dense in the model's dtype.
    """

    parts: Sequence[Question]
    whole: Question
    dense: Row

    def at(self, share: Fraction) -> list[Row]:
        """Return, for every policy and format, the largest cache that holds no more than this share of dense's bytes."""
        most, largest = share * (_held(self.dense) or 0), dict[str, Row]()
        for row in sorted(self.whole.rows, key=lambda r: _held(r) or 0):
            if 0 < (_held(row) or 0) <= most and self.whole.figure(row) is not None:
                largest[self._kind(row)] = row
        return list(largest.values())

    @property
    def largest(self) -> int:
        """Largest capacity in tokens. Perplexities are over the tokens after a cache of this capacity has filled."""
        return max(row.cell.capacity or 0 for row in self.whole.rows)

    def _kind(self, row: Row) -> str:
        """Return a key of a policy and format at any capacity, with parameters only if a capacity has several variants.

        Parameters may depend on the capacity: H2O's window is half of it.
        """
        alike = [other for other in self.whole.rows if _alike(other) == _alike(row)]
        several = max(Counter(other.cell.capacity for other in alike).values()) > 1
        return repr([_alike(row), row.cell.parameters if several else None])


def entries(questions: Iterable[Question]) -> Iterator[dict[str, Any]]:
    """Yield the feed's entries of the questions with more than one format and a dense cache in the model's dtype."""
    for group in grouped(questions, lambda question: words.identifier(replace(question, stored=""))).values():
        rows = {row.id: row for question in group for row in (*question.rows, *question.coded)}
        records = {record.cell_id: record for row in rows.values() for record in row.records}
        dense = next((row for row in rows.values() if row.cell.is_dense and not row.cell.stored and _held(row)), None)
        if len(group) > 1 and dense is not None:
            whole = replace(group[0], records=list(records.values()), rows=list(rows.values()), stored="")
            yield _entry(Formats(group, whole, dense))


def _entry(formats: Formats) -> dict[str, Any]:
    question = formats.whole
    rows = {row.id: _row(formats, row) for row in question.rows if _held(row) and question.figure(row) is not None}
    kept = {share: {row.id: row for row in formats.at(share)} for share in SHARES}
    shares = [share for share, largest in kept.items() if len({row.cell.stored for row in largest.values()}) > 1]
    return {
        **words.identity(question),
        "dense_bytes": _held(formats.dense),
        "questions": [words.identifier(part) for part in formats.parts],
        "rows": list(rows.values()),
        "sizes": [_size(formats, share, kept[share], rows) for share in shares],
    }


def _row(formats: Formats, row: Row) -> dict[str, Any]:
    """Return the feed's entry of a row without its rank, which depends on the size."""
    question, held, whole = formats.whole, _held(row), _held(formats.dense)
    tokens = f" of {row.cell.capacity:,} tokens" if row.cell.capacity else ""
    return {
        "id": row.id,
        "policy": visible(row.cell.policy),
        "name": visible(f"{row.cell.policy}{tokens}{f' as {row.cell.stored}' if row.cell.stored else ''}"),
        "stored": visible(row.cell.stored),
        "capacity": row.cell.capacity,
        "held_bytes": held,
        "kv_share": figure(held / whole) if held and whole else None,
        "perplexity": figure(question.perplexity(row, formats.largest)),
        "answers": answers_json(row),
        "loss": loss_to(question, row, formats.dense),
    }


def _size(formats: Formats, share: Fraction, kept: dict[str, Row], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the feed's entry of a size, with all policies and formats, best first."""
    question = formats.whole
    changes = pair_changes(list(kept.values()), question.comparison)
    shown = [rows[name] | {"rank": rank and list(rank)} for name, rank in ranks(list(kept), changes).items()]
    shown.sort(
        key=lambda row: (row["rank"] is None, row["rank"] or [0], question.figure(kept[row["id"]], formats.largest) or 0.0)
    )
    first = shown[0]["id"]
    beaten = {name for name in kept if (first, name) in changes and changes[first, name].sign > 0}
    priced = [row | {"loss_to_dense": None, "times_dense": None, "kv_read_bytes": None} for row in shown]
    sentence = finding(question, priced, beaten)
    size = (_held(formats.dense) or 0) * share
    return {
        "share": float(share),
        "bytes": int(size),
        "ranks": [{"id": row["id"], "rank": row["rank"]} for row in shown],
        "finding": sentence,
        "answer": f"At 1/{share.denominator} of dense's bytes, {words.scope(question)}, in any format: {sentence}",
    }


def _alike(row: Row) -> list[object]:
    return [row.cell.policy, row.cell.seed, row.cell.stored]


def _held(row: Row) -> int | None:
    """Return the bytes of K and V of the tokens held at the end; for older records, the bytes of the slots."""
    sizes = [r.metrics.kv_held_bytes or r.metrics.kv_bytes for r in row.records if r.status == "ok"]
    return next((size for size in sizes if size), None)
