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

from kvbench.harness.engine.decoder import CacheConfig, Decoder
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.loop import decoder as open_decoder
from kvbench.harness.engine.method import EAGER, Method
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.once import read_once

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
class _Read:
    """What is read of one request, or of several that differ in their last token only, which nobody reads."""

    context: list[int]
    said: list[int]  # the continuation's tokens but the last
    last: dict[int, int] = field(default_factory=dict)  # by the request's number


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
        method: shortcuts that decoders may take.
        kv_bytes: of a stream's K and V, the most that was seen.
        state_bytes: of everything else that a stream keeps, likewise.
    """

    model: Model
    config: CacheConfig
    prompt: Prompt = "stream"
    longest: int | None = None
    batch: int = 16
    block: int = 2048
    method: Method = EAGER
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
        groups: dict[tuple[tuple[int, ...], ...], _Read] = {}
        for number, (context, continuation) in enumerate(requests):
            first, rest = tuple(self.shortened(context)), tuple(continuation)
            read = groups.setdefault((first, rest[:-1]), _Read([*first], [*rest[:-1]]))
            read.last[number] = rest[-1]
        order = sorted(groups.values(), key=lambda read: (len(read.context), read.context, read.said))
        found: dict[int, Scored] = {}
        for batch in self._batches(order, lambda read: len(read.context), 0 if self.prompt == "once" else None):
            found |= self._scored(batch)
            done(sum(len(read.last) for read in batch))
        return [found[number] for number in range(len(requests))]

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
        asked = [list(self.shortened(prompt)) for prompt in prompts]
        order = sorted(range(len(asked)), key=lambda i: (len(asked[i]), asked[i]))
        found: dict[int, list[int]] = {}
        for batch in self._batches(order, lambda i: len(asked[i]), 0 if self.prompt == "once" else _SPREAD):
            found |= dict(zip(batch, self._said([asked[i] for i in batch], most, ended), strict=True))
            done(len(batch))
        return [found[i] for i in range(len(asked))]

    def shortened(self, prompt: Sequence[int]) -> Sequence[int]:
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
    def _scored(self, batch: Sequence[_Read]) -> dict[int, Scored]:
        """What is read side by side, and what it says of each request."""
        contexts = [read.context for read in batch]
        before: Tensor | None = None
        decoder: Decoder
        shared = min(len(context) for context in contexts) - (self.prompt != "once")  # up to where the first of them is scored
        rows = _numbered(tuple(context[:shared]) for context in contexts)
        opening = [contexts[rows.index(row)][:shared] for row in range(max(rows) + 1)]
        if self.prompt == "once":
            decoder, before = self._once(opening)
            decoder, before = decoder.fork(rows), before[rows]
        elif len(opening) == len(batch) or not shared:  # nothing in common
            shared, decoder = 0, self._open(len(batch))
        else:
            decoder = self._open(len(opening))
            self._take_in(decoder, opening)
            decoder = decoder.fork(rows)
        return self._scored_from(decoder, batch, shared, before)

    def _scored_from(self, decoder: Decoder, batch: Sequence[_Read], at: int, before: Tensor | None) -> dict[int, Scored]:
        """Streams read on from a place, and their requests scored; what is padding is read too, and not looked at.

        Args:
            decoder: has taken in `at` tokens of every stream.
            batch: of each stream.
            at: where it stands.
            before: logits after the last of those. [B, V].
        """
        texts = [read.context + read.said for read in batch]
        asked = [(row, number, last) for row, read in enumerate(batch) for number, last in read.last.items()]
        length = max(len(text) for text in texts)
        ids = torch.tensor([text + [0] * (length - len(text)) for text in texts])
        of = torch.tensor([row for row, _, _ in asked])  # the stream of every request. [R]
        targets = torch.tensor([[*texts[row][1:], last, *[0] * (length - len(texts[row]))] for row, _, last in asked])
        place = torch.arange(length)  # of the token after which a target comes
        starts, ends = (torch.tensor(x)[of, None] for x in ([len(r.context) - 1 for r in batch], [len(t) for t in texts]))
        wanted = (place >= starts) & (place < ends)  # targets that count. [R, L]
        total, greedy = torch.zeros(len(asked), dtype=torch.float64), torch.ones(len(asked), dtype=torch.bool)

        def count(logits: Tensor, columns: Tensor) -> None:
            """Logits [B, K, V] after the tokens in these columns [K]."""
            target, stream = targets[:, columns].to(logits.device), of.to(logits.device)
            logits, at = logits.float(), (stream[:, None], torch.arange(len(columns), device=logits.device))
            of_target = logits[*at, target]
            said = (of_target - logits.logsumexp(-1)[at]).cpu().double()
            same = (of_target >= logits.amax(-1)[at]).cpu()  # `argmax` takes ten times as long
            counts = wanted[:, columns]
            if not bool(said[counts].isfinite().all()):
                raise ArithmeticError("a log-probability is not finite")
            total.add_(said.where(counts, 0.0).sum(1))
            greedy.logical_and_((same | ~counts).all(1))

        if before is not None:
            count(before[:, None], torch.tensor([at - 1]))
        width = self._width(len(texts))
        for first in range(at, length, width):
            part = torch.arange(first, min(first + width, length))
            columns = part[wanted[:, part].any(0)]
            keep = columns - first if len(columns) else torch.tensor([0])
            logits = decoder(ids[:, part].to(self.model.device), keep=keep.to(self.model.device))
            if len(columns):
                count(logits, columns)
        self._note(decoder, len(texts))
        scores = zip(total.tolist(), greedy.tolist(), strict=True)
        return {number: Scored(*score) for (_, number, _), score in zip(asked, scores, strict=True)}

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
        return open_decoder(self.model, self.config, streams, self.method)

    def _once(self, prompts: Sequence[Sequence[int]]) -> tuple[CachedDecoder, Tensor]:
        tokens = torch.tensor(prompts, device=self.model.device)
        return read_once(self.model, self.config, tokens, self._width(len(prompts)), self.method)

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
