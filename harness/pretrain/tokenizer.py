"""A byte-level BPE of our own, learnt from the text of pretraining; the same for every reference model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SINKS = tuple(f"<|sink{i}|>" for i in range(4))  # learnable tokens; every model has them, most never see them
_NUMBER = r"\d{1,2}(?=(?:\d\d)*(?!\d))"  # pairs of digits from the right: 44615 is 4 46 15, and neighbours differ in the last
_PIECES = 2000  # of text that it is learnt from


def learn(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """The tokenizer of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([  # type: ignore[assignment]
        pre_tokenizers.Split(Regex(_NUMBER), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SINKS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(itertools.islice(texts, _PIECES), trainer)
    return tokenizer


def wrapped(tokenizer: Tokenizer, sinks: int) -> PreTrainedTokenizerFast:
    """As transformers takes it; a model with sink tokens has them put before every text."""
    if sinks:
        opening = SINKS[:sinks]
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=" ".join([*opening, "$A"]), special_tokens=[(s, tokenizer.token_to_id(s)) for s in opening]
        )
    special = {"bos_token": SINKS[0]} if sinks else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def stored(path: Path, texts: Callable[[], Iterator[str]], vocabulary: int) -> Tokenizer:
    """The tokenizer of a file, learnt from the text if there is none."""
    if not path.exists():
        learn(texts(), vocabulary).save(str(path))
    return Tokenizer.from_file(str(path))
