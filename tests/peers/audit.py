"""Prints whether others' code, run as a contestant, does what our policy of that name does, step by step.

    OMP_NUM_THREADS=1 PYTHONPATH=tests:. .cache/peers/bin/python -m peers.audit

It runs where kvpress does, and on a built-in model and generated prose, so that its figures need nothing else.

Axis letters: L layers, B streams, H KV heads, N tokens read, S tokens kept, D head dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from kvbench.harness.core.parameters import policy_from
from kvbench.harness.data.prose import Prose
from kvbench.harness.engine.decoder import CacheConfig, Evict
from kvbench.harness.engine.foreign import ForeignDecoder
from kvbench.harness.engine.foreigncheck import own_loop
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import EAGER
from kvbench.harness.engine.model import Model
from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.load import load_model, load_tokenizer
from kvbench.harness.report.markdown import table

MODEL = "builtin:sink_2"
PROMPT, KEPT = 128, 64  # tokens
AFTER = (0, 16, 32, 96, 192)  # tokens after the prompt at which kept positions are compared


@dataclass(frozen=True)
class Audited:
    """A contestant, the policy of ours that its documentation describes, when tokens go, and how long the prompt is."""

    theirs: str
    parameters: dict[str, Any]
    ours: str
    given: dict[str, Any]
    evict: Evict
    prompt: int


POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "StreamingLLMPress": ("sink_window", {"sinks": 4}),
    "TOVAPress": ("tova", {"variant": "kvpress"}),
    "KeyDiffPress": ("keydiff", {}),
    "KnormPress": ("knorm", {}),
}
CLAIMS: list[tuple[str, dict[str, Any], str]] = [
    ("kvpress:SnapKVPress", {"compression_ratio": 0.5}, "half of the tokens"),
    ("kvpress:ThinKPress", {"key_channel_compression_ratio": 0.5}, "half of the keys' channels: three quarters of the bytes"),
    ("kvpress:AdaKVPress", {"press": {"name": "kvpress:SnapKVPress", "compression_ratio": 0.5}}, "half of the tokens"),
    ("hf:StaticCache", {"max_cache_len": 2 * PROMPT}, "room for twice the prompt"),
]


def rows() -> Iterator[Audited]:
    """Of the table of positions. A prompt that is cut at its end has twice the tokens that stay; else it fits."""
    for name, (ours, given) in POLICIES.items():
        yield Audited(f"kvpress:{name}", {"compression_ratio": 1 - KEPT / PROMPT}, ours, given, "prompt", PROMPT)
    for interval in (1, 16):
        for name, (ours, given) in POLICIES.items():
            inside = {"base_press": {"name": f"kvpress:{name}"}, "target_size": KEPT, "compression_interval": interval}
            yield Audited("kvpress:DecodingPress", inside, ours, given, interval, KEPT)


class KeyNotes:
    """Which token each key of a cache belongs to, by the bytes that were written."""

    def __init__(self) -> None:
        self._written: dict[int, list[Tensor]] = {}  # of every layer

    @contextmanager
    def noting(self, cache: Any) -> Iterator[None]:
        """Note what is written meanwhile."""
        update = cache.update

        def noted(keys: Tensor, values: Tensor, layer: int, *rest: Any, **named: Any) -> Any:
            self._written.setdefault(layer, []).append(keys.clone())
            return update(keys, values, layer, *rest, **named)

        cache.update = noted
        try:
            yield
        finally:
            del cache.update

    def kept(self, cache: Any) -> list[list[set[int]]] | None:
        """Positions by layer and head, of the first stream; None if a key is not one that was written."""
        found = []
        for number, layer in enumerate(cache.layers):
            written = torch.cat(self._written[number], 2)[0]
            heads = []
            for head, keys in enumerate(layer.keys[0]):
                where = {key.numpy().tobytes(): at for at, key in enumerate(written[head])}
                places = [where.get(key.numpy().tobytes()) for key in keys]
                if None in places:
                    return None
                heads.append({place for place in places if place is not None})
            found.append(heads)
        return found


def kept_by_ours(read: CachedDecoder, tokens: int) -> list[list[set[int]]]:
    """Positions by layer and head."""
    layers: dict[int, list[set[int]]] = {}
    for walk in read.walks:
        held = walk.slots.held(torch.arange(tokens))
        for layer, of_heads in zip(walk.slots.layers, held, strict=True):
            layers[layer] = [set(bits.nonzero().flatten().tolist()) for bits in of_heads]
    return [layers[layer] for layer in sorted(layers)]


def audited(row: Audited, model: Model, tokens: Tensor) -> list[str]:
    """A line of the table of positions. tokens: [1, N]."""
    theirs = CacheConfig(policy_from(row.theirs, row.parameters), positions="stream")
    ours = CacheConfig(policy_from(row.ours, row.given), KEPT, "stream", evict=row.evict)
    read, mine, notes = _reader(model, theirs), CachedDecoder(model, ours), KeyNotes()
    shares, nlls = [], []
    with notes.noting(read.cache):
        pair = [read.read_prompt(tokens[:, : row.prompt], row.prompt)]
    pair.append(mine.read_prompt(tokens[:, : row.prompt], row.prompt))
    for step in range(AFTER[-1] + 1):
        at = row.prompt + step
        if step in AFTER:
            shares.append(_same(notes.kept(read.cache), kept_by_ours(mine, at)))
        nlls.append([-x.float().log_softmax(-1)[0, tokens[0, at]].item() for x in pair])
        token = tokens[:, at : at + 1]
        with notes.noting(read.cache):
            pair = [read(token)[:, -1]]
        pair.append(mine(token)[:, -1])
    difference = sum(a - b for a, b in nlls) / len(nlls)
    when = "at the prompt's end" if row.evict == "prompt" else f"every {row.evict}" if row.evict > 1 else "at every step"
    inside = row.parameters.get("base_press", {"name": ""})["name"].removeprefix("kvpress:")
    named = f"{row.theirs.removeprefix('kvpress:')}{f'({inside})' if inside else ''}"
    return [named, row.ours, when, *shares, f"{difference:+.3f}" if abs(difference) >= 5e-4 else "0"]


def claimed(name: str, parameters: dict[str, Any], claim: str, model: Model, tokens: Tensor) -> list[str]:
    """A line of the table of bytes: after a prompt."""
    read = _reader(model, CacheConfig(policy_from(name, parameters), positions="stream"))
    read.read_prompt(tokens[:, :PROMPT], PROMPT)
    dense = model.kv_bytes(PROMPT - 1)
    told = ", ".join(f"{k} {v}" for k, v in parameters.items() if not isinstance(v, dict))
    inside = f"({parameters['press']['name'].removeprefix('kvpress:')}) 0.5" if "press" in parameters else f" {told}"
    return [f"{name.removeprefix('kvpress:')}{inside}", claim, f"{read.kv_bytes:,}", f"{100 * read.kv_bytes / dense:.0f} %"]


def _reader(model: Model, config: CacheConfig) -> ForeignDecoder:
    return ForeignDecoder(model, config, method=replace(EAGER, own_loop=own_loop(model, config).loop))


def _same(theirs: Sequence[Sequence[set[int]]] | None, ours: Sequence[Sequence[set[int]]]) -> str:
    """How many of the positions that ours keeps are kept there, over layers and heads, and how many of the first four."""
    if theirs is None:
        return "unknown"
    pairs = [(a, b) for la, lb in zip(theirs, ours, strict=True) for a, b in zip(la, lb, strict=True)]
    same, all_ = sum(len(a & b) for a, b in pairs), sum(len(b) for _, b in pairs)
    first, of_ours = (sum(len(x & {0, 1, 2, 3}) for x in side) for side in zip(*pairs, strict=True))
    lost = f", {first} of {of_ours} sinks" if of_ours == 4 * len(pairs) != first else ""
    return "same" if same == all_ == sum(len(a) for a, _ in pairs) else f"**{same}** of {all_}{lost}"


def page(model: Model, tokens: Tensor) -> str:
    """Return what is printed: kept positions after so many tokens, and bytes held. docs/comparison.md sums it up."""
    positions = [audited(row, model, tokens) for row in rows()]
    sizes = [claimed(*claim, model, tokens) for claim in CLAIMS]
    head = ["theirs", "ours", "tokens go", *(f"after {n}" for n in AFTER), "NLL"]
    about = f"kvpress {version('kvpress')}, transformers {version('transformers')}, {MODEL}, prompt {PROMPT}, {KEPT} tokens kept"
    found = table(head, positions, "l" * 3 + "r" * (len(AFTER) + 1))
    return "\n".join(
        [about, "", *found, *table(["theirs", "what it is said to save", "bytes held", "of dense's"], sizes, "llrr")]
    )


if __name__ == "__main__":
    loaded = load_model(model_directory(MODEL, None, allow_pickle=False), "float32", torch.device("cpu"))
    tokenizer = load_tokenizer(model_directory(MODEL, None, allow_pickle=False))
    ids = tokenizer(Prose(1).text(4000), add_special_tokens=False)["input_ids"][: PROMPT + AFTER[-1] + 2]
    print(page(loaded, torch.tensor([ids])))
