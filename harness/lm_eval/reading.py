"""Requests through the decode loop: what a continuation is worth after a context, and what a model says after a prompt.

Requests are read side by side as streams of one length, so that whatever reads blocks quickly does: what the contexts of a
batch have in common is read once and forked, what is left is padded at the end and thrown away. Nothing of lm-eval in here.
Axis letters: B streams, T tokens, K tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from harness.engine.loop import CacheConfig, CachedDecoder, Decoder, decoder
from harness.engine.model import Model
from harness.engine.once import read_once

Prompt = Literal["stream", "once", "truncate"]
Request = tuple[Sequence[int], Sequence[int]]  # token ids of a context, at least one, and of its continuation
_SPREAD = 32  # tokens by which prompts of a batch may differ in length: so many are read one by one
X = TypeVar("X")


def _nobody(_: int) -> None:
    """Who asked to be told of nothing."""


class Scored(NamedTuple):
    """What a continuation is worth after its context."""

    logprob: float  # nats, summed over its tokens
    greedy: bool  # greedy decoding would have said it


@dataclass
class Reader:
    """Reads requests, each as a stream of its own with a fresh cache.

    Attributes:
        model: to drive.
        config: what the cache keeps.
        prompt: how a prompt is taken in that is longer than the cache. `stream`: token by token, evicting; `once`: all of it
            under full attention, and then evicted once; `truncate`: its first and last tokens, the rest never seen.
        longest: tokens of a prompt that `truncate` leaves; the capacity when None.
        batch: requests side by side.
        block: tokens that pass a layer at once, all streams together.
        how: `walk`, `closed` and `compiled` of a decoder.
        kv_bytes: of a stream's K and V, the most that was seen.
        state_bytes: of everything else that a stream keeps, likewise.
    """

    model: Model
    config: CacheConfig
    prompt: Prompt = "stream"
    longest: int | None = None
    batch: int = 16
    block: int = 2048
    how: dict[str, bool] = field(default_factory=dict)
    kv_bytes: int = 0
    state_bytes: int = 0

    def __post_init__(self) -> None:
        if self.prompt == "truncate" and self.longest is None:
            self.longest = self.config.capacity
        if self.prompt == "truncate" and self.longest is None:
            raise ValueError("prompt 'truncate' needs prompt_tokens where the policy has no capacity")
        if self.prompt == "truncate" and (self.longest or 0) < 2:
            raise ValueError("prompt 'truncate' needs at least 2 tokens: a first and a last one")
        if self.prompt != "truncate" and self.longest is not None:
            raise ValueError(f"prompt_tokens is of prompt 'truncate', not of '{self.prompt}'")
        if self.prompt == "once" and not self.config.policy.caches:
            raise ValueError(f"{type(self.config.policy).__name__} keeps no cache, so prompt 'once' has nothing to evict")

    def loglikelihoods(self, requests: Sequence[Request], done: Callable[[int], Any] = _nobody) -> list[Scored]:
        """What each continuation is worth.

        Args:
            requests: continuations have a token at least.
            done: is told how many more are.

        Raises:
            ArithmeticError: a logit is not finite.
        """
        asked = [(list(self._shortened(context)), list(continuation)) for context, continuation in requests]
        order = sorted(range(len(asked)), key=lambda i: (len(asked[i][0]), asked[i]))  # answers of a question side by side
        found: dict[int, Scored] = {}
        for batch in self._batches(order, lambda i: len(asked[i][0]), 0 if self.prompt == "once" else None):
            found |= dict(zip(batch, self._scored([asked[i] for i in batch]), strict=True))
            done(len(batch))
        return [found[i] for i in range(len(asked))]

    def generate(
        self, prompts: Sequence[Sequence[int]], most: int, ended: Callable[[list[int]], bool],
        done: Callable[[int], Any] = _nobody,
    ) -> list[list[int]]:  # fmt: skip
        """What the model says, greedily.

        Args:
            prompts: token ids, at least one each.
            most: tokens said, at most.
            ended: whether what was said so far is complete.
            done: is told how many more are.

        Returns:
            Token ids of each, the last one included that completed it.
        """
        asked = [list(self._shortened(prompt)) for prompt in prompts]
        order = sorted(range(len(asked)), key=lambda i: (len(asked[i]), asked[i]))
        found: dict[int, list[int]] = {}
        for batch in self._batches(order, lambda i: len(asked[i]), 0 if self.prompt == "once" else _SPREAD):
            found |= dict(zip(batch, self._said([asked[i] for i in batch], most, ended), strict=True))
            done(len(batch))
        return [found[i] for i in range(len(asked))]

    def _shortened(self, prompt: Sequence[int]) -> Sequence[int]:
        """Its first and last tokens, where it is to be truncated."""
        if self.longest is None or len(prompt) <= self.longest:
            return prompt
        first = self.longest // 2
        return [*prompt[:first], *prompt[len(prompt) - (self.longest - first) :]]

    def _batches(self, order: Sequence[X], length: Callable[[X], int], spread: int | None) -> Iterator[list[X]]:
        """What is read side by side: not too many, and where `spread` is given, of lengths that differ by no more."""
        batch: list[X] = []
        for item in order:
            if batch and (len(batch) == self.batch or (spread is not None and length(item) - length(batch[0]) > spread)):
                yield batch
                batch = []
            batch.append(item)
        if batch:
            yield batch

    @torch.inference_mode()
    def _scored(self, requests: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        """A batch of continuations."""
        contexts = [context for context, _ in requests]
        before: Tensor | None = None
        read: Decoder
        shared = min(len(context) for context in contexts) - (self.prompt != "once")  # up to where the first of them is scored
        rows = _numbered(tuple(context[:shared]) for context in contexts)
        opening = [contexts[rows.index(row)][:shared] for row in range(max(rows) + 1)]
        if self.prompt == "once":
            read, before = self._once(opening)
            before = before[rows]
            read = read.fork(rows)
        elif len(opening) == len(requests) or not shared:  # nothing in common
            shared, read = 0, self._open(len(requests))
        else:
            read = self._open(len(opening))
            self._take_in(read, opening)
            read = read.fork(rows)
        return self._scored_from(read, requests, shared, before)

    def _scored_from(
        self, read: Decoder, requests: Sequence[tuple[list[int], list[int]]], at: int, before: Tensor | None
    ) -> list[Scored]:
        """The continuations of streams that were read up to a place; what is padding is read too, and not looked at.

        Args:
            read: has taken in `at` tokens of every stream.
            requests: contexts and continuations.
            at: where it stands.
            before: logits after the last of those. [B, V].
        """
        texts = [context + continuation for context, continuation in requests]
        length = max(len(text) for text in texts)
        ids = torch.tensor([text + [0] * (length - len(text)) for text in texts])
        places = torch.arange(length)
        starts = torch.tensor([len(context) for context, _ in requests])[:, None]
        ends = torch.tensor([len(text) for text in texts])[:, None]
        asked = (places >= starts) & (places < ends)  # tokens whose log-probability counts. [B, L]
        total, greedy = torch.zeros(len(texts), dtype=torch.float64), torch.ones(len(texts), dtype=torch.bool)

        def count(logits: Tensor, columns: Tensor) -> None:
            """Logits [B, K, V] for the tokens in these columns [K]."""
            wanted, target = asked[:, columns], ids[:, columns].to(logits.device)
            logprobs = torch.log_softmax(logits.float(), -1)
            said = logprobs.gather(-1, target[..., None])[..., 0].cpu().double()
            same = (logits.argmax(-1) == target).cpu()
            if not bool(said[wanted].isfinite().all()):
                raise ArithmeticError("a log-probability is not finite")
            total.add_(said.where(wanted, 0.0).sum(1))
            greedy.logical_and_((same | ~wanted).all(1))

        if before is not None:
            count(before[:, None], torch.tensor([at]))
        width = self._width(len(texts))
        for first in range(at, length - 1, width):
            part = torch.arange(first, min(first + width, length - 1))
            columns = part[asked[:, part + 1].any(0)] + 1
            keep = columns - 1 - first if len(columns) else torch.tensor([0])
            logits = read(ids[:, part].to(self.model.device), keep=keep.to(self.model.device))
            if len(columns):
                count(logits, columns)
        self._note(read, len(texts))
        return [Scored(float(a), bool(b)) for a, b in zip(total, greedy, strict=True)]

    @torch.inference_mode()
    def _said(self, prompts: Sequence[list[int]], most: int, ended: Callable[[list[int]], bool]) -> list[list[int]]:
        """A batch of answers: streams step side by side, and those whose prompt is longer read it on while others answer."""
        shared = min(len(prompt) for prompt in prompts)
        opening = [prompt[:shared] for prompt in prompts]
        read: Decoder
        if self.prompt == "once":
            read, logits = self._once(opening)
        else:
            read = self._open(len(prompts))
            logits = self._take_in(read, opening)
        said: list[list[int]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))  # which prompt each stream reads
        going = set(rows)
        for at in itertools.count(shared):
            best, following = logits.argmax(-1).tolist(), []
            for row, which in enumerate(rows):
                prompt = prompts[which]
                following.append(prompt[at] if at < len(prompt) else best[row])
                if at >= len(prompt) and which in going:
                    said[which].append(best[row])
                    if len(said[which]) >= most or ended(said[which]):
                        going.remove(which)
            if not going:
                break
            if 2 * len(going) <= len(rows):  # the others are done, and read on for nothing
                kept = [row for row, which in enumerate(rows) if which in going]
                read, rows, following = read.fork(kept), [rows[r] for r in kept], [following[r] for r in kept]
            logits = read(torch.tensor(following, device=self.model.device)[:, None])[:, -1]
        self._note(read, len(rows))
        return said

    def _open(self, streams: int) -> Decoder:
        return decoder(self.model, self.config, streams, **self.how)

    def _once(self, prompts: Sequence[Sequence[int]]) -> tuple[CachedDecoder, Tensor]:
        tokens = torch.tensor(prompts, device=self.model.device)
        return read_once(self.model, self.config, tokens, self._width(len(prompts)), **self.how)

    def _take_in(self, read: Decoder, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Prompts of one length; the logits after the last token. [B, V]."""
        tokens = torch.tensor(prompts, device=self.model.device)
        for part in tokens.split(self._width(len(prompts)), 1):
            logits = read(part, keep=torch.tensor([part.shape[1] - 1], device=self.model.device))
        return logits[:, -1]

    def _width(self, streams: int) -> int:
        """Tokens of each stream that pass a layer at once."""
        return max(1, self.block // streams)

    def _note(self, read: Decoder, streams: int) -> None:
        self.kv_bytes = max(self.kv_bytes, read.kv_bytes // streams)
        self.state_bytes = max(self.state_bytes, read.state_bytes // streams)


def _numbered(items: Iterator[Any]) -> list[int]:
    """For each the number of its first equal."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(item, len(numbers)) for item in items]
