"""The samples of a training run: running text, texts that ask for what they told, and repeats.

A sample is drawn from the seed and its number alone, so that a resumed run goes on exactly.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from kvbench.harness.data import backcopy, lookups, register_machine
from kvbench.harness.data.lookups import Lookups
from kvbench.lab.pretrain.config import Kinds, PretrainConfig, Repeats
from kvbench.lab.pretrain.tokenizer import SINKS

READING = ("text", "needles")  # samples of running text
MACHINE = ("programs", "turns", "far_programs", "far_turns")  # samples of words
WORDED = ("programs", "turns", "backcopy", "far_programs", "far_turns")  # whose words are tokens; new ones last, for equal draws
NAMES = (*READING, "registers", "keys", "chains", *WORDED)
_LINE_TOKENS = 5  # at least, of a text with questions; what is longer than a sample is cut off
_MOST_NEEDLES, _NEEDLE_TOKENS = 3, 40


class Sample(NamedTuple):
    """Tokens of a sample."""

    ids: list[int]
    weights: list[float]  # what each counts in the loss
    answers: list[bool]  # whether it follows from what was told before


def kinds_of(config: PretrainConfig, seed: int) -> list[str]:
    """The kind of each sample, in order of training; the same for every model of one recipe."""
    training, repeats = config.training, config.repeats
    draw, total = np.random.default_rng(seed), config.steps * training.batch
    early = np.arange(total) < repeats.until * total
    repeated = draw.random(total) < np.where(early, repeats.share, repeats.later)
    shares = np.array([getattr(config.kinds, name) for name in NAMES])
    drawn = draw.choice(len(NAMES), total, p=shares / shares.sum())
    before = int(config.kinds.text_from * total)
    if before:
        asking = shares * [name not in READING for name in NAMES]
        drawn[:before] = draw.choice(len(NAMES), before, p=asking / asking.sum())
    return ["repeats" if again else NAMES[kind] for again, kind in zip(repeated, drawn, strict=True)]


class TrainingSamples(Dataset[dict[str, Tensor]]):
    """Samples, each after the model's sinks, shorter ones in the beginning. Every model is scored on the same tokens."""

    def __init__(
        self,
        config: PretrainConfig,
        kinds: list[str],
        ids: NDArray[np.uint16],
        tokenizer: PreTrainedTokenizerFast,
        seed: int,
        staged: bool = True,
    ) -> None:
        """Share out the running text `ids`, [N], among the samples, whose kinds are given in order.

        The tokenizer has no sinks. The seed decides the order of the running text, and what is drawn. If `staged`, samples are
        shorter and have fewer kinds of tokens in the beginning, as in training.
        """
        self._staged = staged
        self._config, self._kinds, self._ids, self._tokenizer, self._seed = config, kinds, ids, tokenizer, seed
        reading = np.cumsum([kind in READING for kind in kinds])
        self._order = np.random.default_rng(seed).permutation(len(ids) // config.training.sample)
        assert len(self._order) >= int(reading[-1]), "the running text is too short"
        self._text_number = reading - 1

    def __len__(self) -> int:
        return len(self._kinds)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        """A sample as [pieces, T] tensors: `input_ids`, `weights` in the loss, and `answers`, which follow from what was told."""
        training, kind = self._config.training, self._kinds[place]
        pieces = self._config.pieces(place // training.batch) if self._staged else 1
        draw, length = random.Random(f"{self._seed}/{place}"), training.sample // pieces
        made = [_filled(self._made(kind, draw, place, length, part), length) for part in range(pieces)]
        sinks = self._config.sinks
        return {
            "input_ids": torch.tensor([[*range(sinks), *piece.ids[:length]] for piece in made]),
            "weights": torch.tensor([[0.0] * (sinks + 1) + piece.weights[1:length] for piece in made]),
            "answers": torch.tensor([[False] * sinks + piece.answers[:length] for piece in made]),
        }

    def _made(self, kind: str, draw: random.Random, place: int, length: int, part: int) -> Sample:
        """Return at least `length` tokens, or a program that ends before. part: of the sample's running text."""
        if kind == "repeats":
            progress = place / len(self._kinds) if self._staged else 1.0
            return repeats(draw, length, self._config.repeats, self._config.repeats.tokens(progress))
        if kind in READING:
            at = int(self._order[self._text_number[place]]) * self._config.training.sample + part * length
            text = self._ids[at : at + length].tolist()
            return self._with_needles(draw, text) if kind == "needles" else Sample(text, [1.0] * length, [False] * length)
        if kind == "backcopy":
            made = list(itertools.islice(backcopy.words(draw), length))
            return Sample([len(SINKS) + word for word, _ in made], [1.0] * length, [copied for _, copied in made])
        if kind in MACHINE:
            return self._weighted(getattr(register_machine, kind)(draw, length), self._config.kinds)
        generate: Callable[[random.Random, int], Lookups] = getattr(lookups, kind)
        return self._weighted(generate(draw, length // _LINE_TOKENS + 2), self._config.kinds)

    def _with_needles(self, draw: random.Random, text: list[int]) -> Sample:
        """Running text with sentences in it; at its end it asks for them."""
        count = draw.randint(1, max(1, min(_MOST_NEEDLES, len(text) // _NEEDLE_TOKENS)))
        places = draw.sample(lookups.PLACES, count)
        numbers = [draw.randrange(1, 1000) for _ in places]
        told = [self._encoded(lookups.needle(*x)) for x in zip(places, numbers, strict=True)]
        asked = Lookups()
        for place, number in draw.sample(list(zip(places, numbers, strict=True)), count):
            asked.ask(lookups.needle_question(place), lookups.needle_answer(number))
        end = self._weighted(asked, None)
        kept = text[: len(text) - len(end.ids) - sum(map(len, told))]
        cuts = sorted(draw.randrange(len(kept) + 1) for _ in told)
        ids: list[int] = []
        for start, stop, sentence in zip([0, *cuts], [*cuts, len(kept)], [*told, []], strict=True):
            ids += kept[start:stop] + sentence
        return Sample(ids + end.ids, [1.0] * len(text), [False] * len(ids) + end.answers)

    def _weighted(self, text: Lookups, kinds: Kinds | None) -> Sample:
        """Answers and what else is counted count 1, the rest as `kinds` says, or 1."""
        made = self._tokenizer(text.text, add_special_tokens=False, return_offsets_mapping=True)
        starts, rest = np.array([start for start, _ in made["offset_mapping"]]), 1.0 if kinds is None else kinds.rest
        answers, counted = (np.zeros(len(starts), bool) for _ in range(2))
        for within, spans in ((answers, text.answers), (counted, text.answers + text.counted)):
            for start, end in spans:
                within[np.searchsorted(starts, start) : np.searchsorted(starts, end)] = True
        return Sample(list(made["input_ids"]), np.where(counted, 1.0, rest).tolist(), answers.tolist())

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _filled(sample: Sample, length: int) -> Sample:
    """Return at least `length` tokens: a program that ends before is followed by tokens that don't count."""
    lacking = length - len(sample.ids)
    if lacking <= 0:
        return sample
    return Sample(sample.ids + lacking * sample.ids[-1:], sample.weights + lacking * [0.0], sample.answers + lacking * [False])


def repeats(draw: random.Random, length: int, options: Repeats, tokens: int) -> Sample:
    """Random tokens out of the first `tokens`. Stretches come again, and that counts in the loss, but for its first token."""
    ids: list[int] = []
    weights: list[float] = []
    first, last = len(SINKS), len(SINKS) + tokens
    while len(ids) < length:
        size = draw.randint(options.shortest, options.longest)
        if len(ids) >= size and draw.random() < 0.5:
            start = draw.randrange(len(ids) - size + 1)
            ids += ids[start : start + size]
            weights += [0.0, *[1.0] * (size - 1)]
        else:
            ids += [draw.randrange(first, last) for _ in range(size)]
            weights += [0.0] * size
    return Sample(ids, weights, [weight > 0 for weight in weights])
