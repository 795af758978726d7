"""A byte-level BPE tokenizer, trained on the pretraining text; the same for every reference model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SINKS = tuple(f"<|sink{i}|>" for i in range(4))  # in every model's vocabulary, even if its training text has none
_DIGIT_PAIRS = r"\d{1,2}(?=(?:\d\d)*(?!\d))"  # pairs from the right: 44615 is 4 46 15, so 44616 differs in the last alone
_TRAINING_PIECES = 2000


def learn(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """Train a tokenizer on a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([  # type: ignore[assignment]
        pre_tokenizers.Split(Regex(_DIGIT_PAIRS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SINKS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(itertools.islice(texts, _TRAINING_PIECES), trainer)
    return tokenizer


def wrapped(tokenizer: Tokenizer, sinks: int) -> PreTrainedTokenizerFast:
    """Wrap it for transformers. With `sinks`, it puts that many sink tokens before every text."""
    if sinks:
        opening = SINKS[:sinks]
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=" ".join([*opening, "$A"]), special_tokens=[(s, tokenizer.token_to_id(s)) for s in opening]
        )
    special = {"bos_token": SINKS[0]} if sinks else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def stored(path: Path, texts: Callable[[], Iterator[str]], vocabulary: int) -> Tokenizer:
    """The tokenizer stored in a file; trained on the text and stored if the file doesn't exist."""
    if not path.exists():
        learn(texts(), vocabulary).save(str(path))
    return Tokenizer.from_file(str(path))
