"""The running text of pretraining: books and generated prose, in one order for all models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import atomic_write
from kvbench.harness.data import lookups, pg19
from kvbench.harness.data.prose import Prose
from kvbench.lab.pretrain.config import Mix

_PIECE_CHARACTERS = 8192
_OPEN_BOOKS = 16  # pieces are drawn from this many books at random, so that neighbours come from different ones


def pieces(mix: Mix, seed: int, data: Path | None) -> Iterator[str]:
    """Endless pieces of text. Each comes from the source that is furthest below its share of characters.

    Raises:
        UserError: the books are not available.
    """
    sources = {"pg19": _books(seed, data), "prose": _prose(seed)}
    shares = {name: share for name, share in mix.model_dump().items() if share}
    if not shares:
        raise UserError("text: all shares are 0")
    characters = dict.fromkeys(shares, 0)
    while True:
        name = min(shares, key=lambda x: characters[x] / shares[x])
        piece = next(sources[name])
        characters[name] += len(piece)
        yield piece


def _books(seed: int, data: Path | None) -> Iterator[str]:
    draw = random.Random(f"books/{seed}")
    while True:
        source, texts = pg19.books("train", data)
        is_empty = True
        opened: list[tuple[str, int]] = []
        more = True
        while more or opened:
            while more and len(opened) < _OPEN_BOOKS:
                text = next(texts, None)
                more = text is not None
                opened += [(text.text, 0)] if text is not None and text.text else []
            if opened:
                is_empty = False
                at = draw.randrange(len(opened))
                book, start = opened[at]
                yield book[start : start + _PIECE_CHARACTERS]
                opened[at : at + 1] = [(book, start + _PIECE_CHARACTERS)] if start + _PIECE_CHARACTERS < len(book) else []
        if is_empty:
            raise UserError(f"{source}: no book has any text")


def for_tokenizer(mix: Mix, seed: int, data: Path | None) -> Iterator[str]:
    """The running text, and texts with questions in between, so that their words become tokens too."""
    draw = random.Random(f"tokenizer/{seed}")
    for piece in pieces(mix, seed, data):
        yield piece
        yield "".join(generate(draw, 20).text for generate in (lookups.registers, lookups.keys, lookups.chains))
        for place in lookups.PLACES:
            number = draw.randrange(1, 1000)
            yield lookups.needle(place, number) + lookups.needle_question(place) + lookups.needle_answer(number)


def _prose(seed: int) -> Iterator[str]:
    prose = Prose(seed + 1)  # the default suite reads that of seed 0
    while True:
        yield prose.text(_PIECE_CHARACTERS)


def token_file(path: Path, tokenizer: PreTrainedTokenizerFast, texts: Iterator[str], count: int) -> NDArray[np.uint16]:
    """The first `count` tokens of the texts, kept in a file so that a resumed run can reuse them. [count]."""
    if not path.exists() or path.stat().st_size != 2 * count:
        written = 0
        with atomic_write(path, "wb") as file:
            while written < count:
                batch = [next(texts) for _ in range(64)]
                for ids in tokenizer(batch, add_special_tokens=False)["input_ids"]:
                    part = np.array(ids[: count - written], np.uint16)
                    file.write(part.tobytes())
                    written += len(part)
    return np.memmap(path, np.uint16, "r")
