"""Which rules are compared, on which models, prompts and budgets. Both environments read this, so it imports neither of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.rows import Row

CONTINUATION = 64  # tokens read after the prompt, whose NLLs are compared
MODELS = ("stories260K", "random-qwen2")


@dataclass(frozen=True)
class Prompt:
    """`length` tokens of a prompt, and `CONTINUATION` more: of a book, or uniform random ids."""

    name: str
    length: int
    book: bool = False
    seed: int = 0  # of random ids; of a book, how many of these prompts to skip


PROMPTS: dict[str, tuple[Prompt, ...]] = {
    "stories260K": (Prompt("book-320", 320, True), Prompt("book-200", 200, True, 1), Prompt("random-128", 128, seed=1)),
    "random-qwen2": (Prompt("random-320", 320, seed=2), Prompt("random-200", 200, seed=3), Prompt("random-128", 128, seed=4)),
}


@dataclass(frozen=True)
class Cell:
    """One rule, on one model and prompt, at one budget."""

    row: Row
    model: str
    prompt: Prompt
    ratio: float
    capacity: int = field(default=0)

    @property
    def key(self) -> str:
        """The name of the cell's arrays."""
        return f"{self.row.key}|{self.model}|{self.prompt.name}|{self.ratio}"


def kept_by_kvpress(length: int, ratio: float) -> int:
    """How many of a prompt's tokens kvpress keeps at a compression ratio."""
    return max(1, int(length * (1 - ratio)))


def cells_of(row: Row, model: str) -> list[Cell]:
    """All prompts and budgets that a row is compared at."""
    ratios = row.ratios if row.takes_capacity else (0.0,)
    found = [Cell(row, model, p, r, kept_by_kvpress(p.length, r)) for p in PROMPTS[model] for r in ratios]
    return [cell for cell in found if cell.capacity >= row.min_capacity and cell.prompt.length >= row.min_length]


def streaming_heads(layers: int, heads: int) -> list[list[int]]:
    """DuoAttention's table for a model without one: 1 for a head that streams, by turns. [L][H]."""
    return [[(layer + head) % 2 for head in range(heads)] for layer in range(layers)]


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, so that a diff shows what changed."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
