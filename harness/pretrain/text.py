"""The text of pretraining: books, generated records with questions, generated prose; one order for all models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import atomic_write
from kvbench.harness.data import pg19
from kvbench.harness.data.prose import Prose
from kvbench.harness.data.registers import HEADER, answer, question, record_line
from kvbench.harness.pretrain.config import Mix

_PIECE = 8192  # characters that one source gives at a time
_BOOKS_AT_ONCE = 16  # books open side by side, so that a piece is followed by one of another
_FARTHEST = 8  # lines that a question of the records looks back, at most: half a sample


def pieces(mix: Mix, seed: int, data: Path | None) -> Iterator[str]:
    """Pieces of text, each from one source, for ever: the one that has given least for its share of characters.

    Raises:
        UserError: the books can't be had.
    """
    sources = {"pg19": _books(seed, data), "records": _records(seed), "prose": _prose(seed)}
    shares = {name: share for name, share in mix.model_dump().items() if share}
    if not shares:
        raise UserError("text: all shares are 0")
    given = dict.fromkeys(shares, 0)
    while True:
        name = min(shares, key=lambda x: given[x] / shares[x])
        piece = next(sources[name])
        given[name] += len(piece)
        yield piece


def _books(seed: int, data: Path | None) -> Iterator[str]:
    draw, rounds = random.Random(f"books/{seed}"), 0
    while True:
        _, texts = pg19.books("train", data)
        opened: list[tuple[str, int]] = []
        more = True
        while more or opened:
            while more and len(opened) < _BOOKS_AT_ONCE:
                text = next(texts, None)
                more = text is not None
                opened += [(text.text, 0)] if text is not None else []
            if opened:
                at = draw.randrange(len(opened))
                book, start = opened[at]
                yield book[start : start + _PIECE]
                opened[at : at + 1] = [(book, start + _PIECE)] if start + _PIECE < len(book) else []
        rounds += 1


def _records(seed: int) -> Iterator[str]:
    """Records begun at any line number, most of them short; lines up to `_FARTHEST` back are asked for, or read again.

    A way to learn it in steps: whoever can copy the only number there is learns to choose among more, and a short number,
    or a line that is read again from its beginning, is easier than an answer.
    """
    draw = random.Random(f"records/{seed}")
    while True:
        piece = ""
        while len(piece) < _PIECE:
            first = 1 if draw.random() < 0.3 else draw.randrange(1, 3000)
            highest = draw.choice([99, 999, 50000, 50000])
            before = min(_FARTHEST, 1 + int(draw.expovariate(1 / 2.5)))  # lines that stand before the first question
            contents: list[int] = []
            piece += HEADER
            for _ in range(before + draw.choice([0, 0, draw.randint(0, 12)])):
                contents.append(draw.randint(1, highest))
                piece += record_line(first + len(contents) - 1, contents[-1])
                for _ in range(draw.randint(1, 3) if len(contents) >= before else 0):
                    line = len(contents) - draw.randint(1, min(_FARTHEST, len(contents)))
                    again, asked = f"Again: {record_line(first + line, contents[line])}", question(first + line)
                    piece += again if draw.random() < 0.6 else asked + answer(contents[line])
        yield piece


def _prose(seed: int) -> Iterator[str]:
    prose = Prose(seed + 1)  # the default suite reads that of seed 0
    while True:
        yield prose.text(_PIECE)


def token_file(path: Path, tokenizer: PreTrainedTokenizerFast, texts: Iterator[str], count: int) -> NDArray[np.uint16]:
    """The first `count` tokens of the texts, kept in a file so that a resumed run need not make them again. [count]."""
    if not path.exists() or path.stat().st_size != 2 * count:
        made = 0
        with atomic_write(path, "wb") as file:
            while made < count:
                batch = [next(texts) for _ in range(64)]
                for ids in tokenizer(batch, add_special_tokens=False)["input_ids"]:
                    part = np.array(ids[: count - made], np.uint16)
                    file.write(part.tobytes())
                    made += len(part)
    return np.memmap(path, np.uint16, "r")
