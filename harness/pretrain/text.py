"""The running text of pretraining: books, records and generated prose, in one order for all models."""

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
from kvbench.harness.data.registers import HEADER, answer, question, record_line
from kvbench.harness.pretrain.config import Mix

_PIECE_CHARACTERS = 8192
_MAX_LINES_BACK = 8  # from a question to the line that answers it: half a sample
_OPEN_BOOKS = 16  # pieces are drawn from this many books at random, so that neighbours come from different ones


def pieces(mix: Mix, seed: int, data: Path | None) -> Iterator[str]:
    """Endless pieces of text. Each comes from the source that is furthest below its share of characters.

    Raises:
        UserError: the books are not available.
    """
    sources = {"pg19": _books(seed, data), "records": _records(seed), "prose": _prose(seed)}
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
    draw, rounds = random.Random(f"books/{seed}"), 0
    while True:
        _, texts = pg19.books("train", data)
        opened: list[tuple[str, int]] = []
        more = True
        while more or opened:
            while more and len(opened) < _OPEN_BOOKS:
                text = next(texts, None)
                more = text is not None
                opened += [(text.text, 0)] if text is not None else []
            if opened:
                at = draw.randrange(len(opened))
                book, start = opened[at]
                yield book[start : start + _PIECE_CHARACTERS]
                opened[at : at + 1] = [(book, start + _PIECE_CHARACTERS)] if start + _PIECE_CHARACTERS < len(book) else []
        rounds += 1


def _records(seed: int) -> Iterator[str]:
    """Records that start at any line number, most of them short, with questions about lines up to `_MAX_LINES_BACK` back.

    The mix is a curriculum. A model first learns to copy the only number in a record, then to choose among several. Short
    numbers and repeated lines are easier than answers.
    """
    draw = random.Random(f"records/{seed}")
    while True:
        piece = ""
        while len(piece) < _PIECE_CHARACTERS:
            first = 1 if draw.random() < 0.3 else draw.randrange(1, 3000)
            highest = draw.choice([99, 999, 50000, 50000])
            lines_before_questions = min(_MAX_LINES_BACK, 1 + int(draw.expovariate(1 / 2.5)))
            contents: list[int] = []
            piece += HEADER
            for _ in range(lines_before_questions + draw.choice([0, 0, draw.randint(0, 12)])):
                contents.append(draw.randint(1, highest))
                piece += record_line(first + len(contents) - 1, contents[-1])
                for _ in range(draw.randint(1, 3) if len(contents) >= lines_before_questions else 0):
                    line = len(contents) - draw.randint(1, min(_MAX_LINES_BACK, len(contents)))
                    repetition = f"Again: {record_line(first + line, contents[line])}"
                    piece += repetition if draw.random() < 0.6 else question(first + line) + answer(contents[line])
        yield piece


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
