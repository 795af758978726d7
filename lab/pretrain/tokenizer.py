"""A byte-level BPE tokenizer, trained on the pretraining text; the same for every model of one recipe.

Numbers below 1,000 are one token, and so is what stands around them in records: a small model looks things up only if few tokens
lie between a name and its value. Of a longer number the last two digits are a token: line numbers differ in it from their
neighbours, and contents (446 15) nearly always in what stands before it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvbench.harness.data.lookups import FIXED
from kvbench.lab.pretrain.config import MOST_SINKS, Shape

SINKS = tuple(f"<|sink{i}|>" for i in range(MOST_SINKS))  # in every model's vocabulary, even if its training text has none
NUMBERS = [*map(str, range(1000)), *(f"{n:02}" for n in range(10))]
_DIGITS = r"(?<!\d)\d{1,3}(?!\d)|\d{1,3}(?=(?:\d{3})*\d\d(?!\d))|\d\d(?!\d)"
_WHOLE = (*NUMBERS, *FIXED)
_TRAINING_PIECES = 2000


def learn(texts: Iterator[str], shape: Shape) -> Tokenizer:
    """Train a tokenizer on a text. After the sinks come whole numbers, then bytes, then what the text has often."""
    tokenizer = Tokenizer(models.BPE())
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False)
    no_digits = pre_tokenizers.Split(Regex(r"\d+"), "removed")  # they have tokens of their own
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([no_digits, bytewise])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    digits = 10  # each is a byte and a number at once
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary - len(_WHOLE) + digits,
        special_tokens=list(SINKS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(itertools.islice(texts, _TRAINING_PIECES), trainer)
    split = pre_tokenizers.Split(Regex(_DIGITS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])  # type: ignore[assignment]
    return _with_numbers(tokenizer)


def _with_numbers(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with a token for each number and for each fixed text."""
    spec = json.loads(tokenizer.to_str())
    learnt = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].__getitem__)
    names = list(dict.fromkeys([*SINKS, *NUMBERS, *learnt]))
    spec["model"] |= {"vocab": {name: i for i, name in enumerate(names)}, "ignore_merges": True}
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in FIXED])
    return tokenizer


def of_words(words: Sequence[str]) -> Tokenizer:
    """A token for each word; any other word is the last sink."""
    names = {name: number for number, name in enumerate([*SINKS, *words])}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token=SINKS[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
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


def stored(path: Path, texts: Callable[[], Iterator[str]], shape: Shape) -> Tokenizer:
    """The tokenizer stored in a file; trained on the text and stored if the file doesn't exist."""
    if not path.exists():
        learn(texts(), shape).save(str(path))
    return Tokenizer.from_file(str(path))
