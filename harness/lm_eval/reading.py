"""Requests in the decode loop: score continuations of a context, and generate answers to a prompt.

The requests of a batch are streams of equal length, so that the fast block methods work. The common start of their contexts is
read once and forked; the remaining tokens are padded at the end. This module does not depend on lm-eval.

Axis letters: B streams, R requests, T tokens, L tokens of the longest stream, K tokens whose logits are returned, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvbench.harness.engine.decoder import CacheConfig, Decoder, read_blocks
from kvbench.harness.engine.loop import CachedDecoder, read_bytes
from kvbench.harness.engine.loop import decoder as open_decoder
from kvbench.harness.engine.method import EAGER, Method
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.sampling import Sampler

Prompt = Literal["stream", "once", "truncate"]
Request = tuple[Sequence[int], Sequence[int]]  # token ids of a context, at least one, and of its continuation
_MAX_LENGTH_DIFFERENCE = 32  # largest difference of a batch's prompts, in tokens, which are read one step at a time
Item = TypeVar("Item")


def _ignore_progress(_: int) -> None:
    pass


class Scored(NamedTuple):
    """The score of a continuation after its context."""

    logprob: float  # nats, summed over its tokens
    greedy: bool  # whether greedy decoding would produce the continuation


@dataclass
class _Group:
    """Requests that differ only in their last token. The last token is never read, so all requests share one stream."""

    context: list[int]
    prompt: int  # number of tokens of the context that are its prompt
    continuation: list[int]  # without the last token
    last_tokens: dict[int, int] = field(default_factory=dict)  # last token of each request, by the request's number


class _Batch:
    """A batch of groups as tensors, with running sums of the scores of its requests.

    Attributes:
        ids: the streams, padded at the end. [B, L] int64.
        scored: whether the token after each token of a request's stream is in the continuation. [R, L] bool.
    """

    def __init__(self, groups: Sequence[_Group]) -> None:
        texts = [group.context + group.continuation for group in groups]
        length = max(len(text) for text in texts)
        requests = [(row, number, last) for row, group in enumerate(groups) for number, last in group.last_tokens.items()]
        self._numbers = [number for _, number, _ in requests]
        self._streams = torch.tensor([row for row, _, _ in requests])  # stream of every request. [R] int64
        # For every request, the token after each token of its stream. [R, L] int64
        self._targets = torch.tensor([[*texts[row][1:], last, *[0] * (length - len(texts[row]))] for row, _, last in requests])
        self._logprob = torch.zeros(len(requests), dtype=torch.float64)
        self._greedy = torch.ones(len(requests), dtype=torch.bool)
        starts = torch.tensor([len(group.context) - 1 for group in groups])[self._streams, None]
        ends = torch.tensor([len(text) for text in texts])[self._streams, None]
        place = torch.arange(length)
        self.ids = torch.tensor([text + [0] * (length - len(text)) for text in texts])
        self.scored = (place >= starts) & (place < ends)

    def add(self, logits: Tensor, columns: Tensor) -> None:
        """Add the scores of the targets in some columns.

        Args:
            logits: logits after the tokens in the columns. [B, K, V].
            columns: indices of the columns. [K] int64.

        Raises:
            ArithmeticError: a log-probability is not finite.
        """
        target = self._targets[:, columns].to(logits.device)
        stream = self._streams.to(logits.device)[:, None]
        place = torch.arange(len(columns), device=logits.device)
        logits = logits.float()
        target_logits = logits[stream, place, target]
        logprobs = (target_logits - logits.logsumexp(-1)[stream, place]).cpu().double()
        is_best = (target_logits >= logits.amax(-1)[stream, place]).cpu()  # `argmax` takes ten times as long
        scored = self.scored[:, columns]
        if not bool(logprobs[scored].isfinite().all()):
            raise ArithmeticError("a log-probability is not finite")
        self._logprob += logprobs.where(scored, 0.0).sum(1)
        self._greedy &= (is_best | ~scored).all(1)

    def scores(self) -> dict[int, Scored]:
        """Return the score of every request, by its number."""
        return dict(zip(self._numbers, map(Scored, self._logprob.tolist(), self._greedy.tolist()), strict=True))


@dataclass
class RequestReader:
    """Reader of requests, each as a separate stream with an empty cache.

    `prompt` decides how a prompt longer than the cache is read. `stream`: with eviction as in `config.evict`. `once`: the whole
    prompt under full attention, then one eviction, then as in `config.evict`. `truncate`: only the first and last tokens.
    """

    model: Model
    config: CacheConfig
    prompt: Prompt = "stream"
    longest: int | None = None  # tokens of a prompt that `truncate` keeps; None: the capacity
    batch: int = 16  # requests run together
    block: int = 2048  # tokens per forward pass, all streams together
    method: Method = EAGER
    sizes: dict[str, int | None] = field(  # largest numbers of a stream's bytes so far, by the names of `Metrics`
        default_factory=lambda: {"kv_bytes": 0, "kv_held_bytes": 0, "state_bytes": 0, "kv_read_bytes": None}
    )

    def __post_init__(self) -> None:
        if self.prompt == "truncate" and self.longest is None:
            self.longest = self.config.capacity
        if self.prompt == "truncate" and self.longest is None:
            raise ValueError("prompt 'truncate' needs prompt_tokens where the policy has no capacity")
        if self.prompt == "truncate" and (self.longest or 0) < 2:
            raise ValueError("prompt 'truncate' needs at least 2 tokens: a first and a last one")
        if self.prompt != "truncate" and self.longest is not None:
            raise ValueError(f"prompt_tokens is for prompt 'truncate', not '{self.prompt}'")
        if self.prompt == "once" and not self.config.policy.caches:
            raise ValueError(f"{type(self.config.policy).__name__} keeps no cache, so prompt 'once' has nothing to evict")
        if self.config.evict == "prompt" and self.prompt != "stream":
            raise ValueError(f"evict 'prompt' reads the whole prompt and evicts at its end, so prompt can't be '{self.prompt}'")

    @property
    def reads_whole_prompts(self) -> bool:
        """Whether prompts are read in full before any eviction, so that all prompts of a batch have one length."""
        return self.prompt == "once" or self.config.evict == "prompt"

    def loglikelihoods(
        self, requests: Sequence[Request], done: Callable[[int], Any] = _ignore_progress, prompts: Sequence[int] | None = None
    ) -> list[Scored]:
        """Score the continuation of every request, which has at least one token.

        Args:
            done: called with the number of requests just done.
            prompts: number of tokens of each context that are its prompt, 0 without a prompt; None: all. The question after the
                prompt is read after the eviction.

        Raises:
            ArithmeticError: a log-probability is not finite.
        """
        groups: dict[tuple[tuple[int, ...], ...], _Group] = {}
        for number, (context, continuation) in enumerate(requests):
            first, rest = tuple(self.shortened(context)), tuple(continuation)
            prompt = len(first) if prompts is None else prompts[number]
            group = groups.setdefault((first, rest[:-1]), _Group([*first], prompt, [*rest[:-1]]))
            group.last_tokens[number] = rest[-1]
        order = sorted(groups.values(), key=lambda group: (group.prompt, len(group.context), group.context, group.continuation))
        scores: dict[int, Scored] = {}
        for batch in self._batches(order, lambda group: group.prompt, 0 if self.reads_whole_prompts else None):
            scores |= self._scored(batch)
            done(sum(len(group.last_tokens) for group in batch))
        return [scores[number] for number in range(len(requests))]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        ended: Callable[[list[int]], bool],
        done: Callable[[int], Any] = _ignore_progress,
        cuts: Sequence[int] | None = None,
        seeds: Sequence[int] | None = None,
        sampler: Callable[[Sequence[int]], Sampler] = Sampler,
    ) -> list[list[int]]:
        """Generate after every prompt, which has at least one token. An answer includes the token that completed it.

        Args:
            ended: returns whether an answer is complete.
            done: called with the number of prompts just done.
            cuts: number of tokens of each prompt before the eviction; None: all. The question after them is read afterwards.
            seeds: seed of each answer.
            sampler: function of a batch's seeds that returns the sampler of its tokens; greedy by default.
        """
        shortened = [list(self.shortened(prompt)) for prompt in prompts]
        lengths = [len(x) for x in shortened] if cuts is None else cuts
        order = sorted(range(len(shortened)), key=lambda i: (lengths[i], len(shortened[i]), shortened[i]))
        answers: dict[int, list[int]] = {}
        max_difference = 0 if self.reads_whole_prompts else _MAX_LENGTH_DIFFERENCE
        for batch in self._batches(order, lambda i: lengths[i], max_difference):
            draw = sampler([0 if seeds is None else seeds[i] for i in batch])
            batch_answers = self._answers([shortened[i] for i in batch], [lengths[i] for i in batch], max_tokens, ended, draw)
            answers |= dict(zip(batch, batch_answers, strict=True))
            done(len(batch))
        return [answers[i] for i in range(len(shortened))]

    def shortened(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return the prompt, or its first and last tokens under `truncate`."""
        if self.longest is None or len(prompt) <= self.longest:
            return prompt
        first = self.longest // 2
        return [*prompt[:first], *prompt[len(prompt) - (self.longest - first) :]]

    def _batches(self, order: Sequence[Item], length: Callable[[Item], int], max_difference: int | None) -> Iterator[list[Item]]:
        """Split items, sorted by length, into batches whose lengths differ by at most `max_difference` (None: any)."""
        batch: list[Item] = []
        for item in order:
            too_long = bool(batch) and max_difference is not None and length(item) - length(batch[0]) > max_difference
            if len(batch) == self.batch or too_long:
                yield batch
                batch = []
            batch.append(item)
        if batch:
            yield batch

    @torch.inference_mode()
    def _scored(self, batch: Sequence[_Group]) -> dict[int, Scored]:
        """Score a batch. Streams with a common start are forked from a stream that has read the start."""
        logits: Tensor | None = None
        # Tokens of every stream that come before the scored ones.
        shared = batch[0].prompt if self.reads_whole_prompts else min(len(group.context) for group in batch) - 1
        rows = _numbered((group.prompt, *group.context[:shared]) for group in batch)
        if self.reads_whole_prompts or (shared and max(rows) + 1 < len(batch)):
            decoder, logits = self._opened(rows, [group.context[:shared] for group in batch], [group.prompt for group in batch])
        else:  # nothing in common
            shared, decoder = 0, self._open([group.prompt for group in batch])
        return self._scored_from(decoder, _Batch(batch), shared, logits if self.reads_whole_prompts else None)

    def _scored_from(self, decoder: Decoder, batch: _Batch, start: int, logits: Tensor | None) -> dict[int, Scored]:
        """Read every stream from its token `start` on, and score the requests.

        Args:
            logits: logits after the token before `start`, if a request needs them. [B, V].
        """
        streams, length = batch.ids.shape
        if logits is not None:
            batch.add(logits[:, None], torch.tensor([start - 1]))
        width = self._width(streams)
        for first in range(start, length, width):
            part = torch.arange(first, min(first + width, length))
            columns = part[batch.scored[:, part].any(0)]
            keep = columns - first if len(columns) else torch.tensor([0])
            logits = decoder(batch.ids[:, part].to(self.model.device), keep=keep.to(self.model.device))
            if len(columns):
                batch.add(logits, columns)
        self._note_bytes(decoder, streams)
        return batch.scores()

    @torch.inference_mode()
    def _answers(
        self,
        prompts: Sequence[list[int]],
        cuts: Sequence[int],
        max_tokens: int,
        ended: Callable[[list[int]], bool],
        draw: Sampler,
    ) -> list[list[int]]:
        """Answer a batch of prompts. The first `min(cuts)` tokens are read in blocks, and equal prompts are read once.

        Then all streams step together: longer prompts are still read while shorter prompts are answered.
        """
        shared, numbers = min(cuts), _numbered(zip(map(tuple, prompts), cuts, strict=True))
        decoder, logits = self._opened(numbers, [prompt[:shared] for prompt in prompts], cuts)
        answers: list[list[int]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))  # the prompt that each stream reads
        unfinished = set(rows)
        for place in itertools.count(shared):
            answering = [row for row, which in enumerate(rows) if place >= len(prompts[which])]
            chosen = iter(draw(logits[answering], [rows[row] for row in answering]).tolist() if answering else [])
            following = [prompts[which][place] if place < len(prompts[which]) else next(chosen) for which in rows]
            for row in answering:
                which = rows[row]
                if which in unfinished:
                    answers[which].append(following[row])
                    if len(answers[which]) >= max_tokens or ended(answers[which]):
                        unfinished.remove(which)
            if not unfinished:
                break
            if 2 * len(unfinished) <= len(rows):  # drop the finished streams
                kept = [row for row, which in enumerate(rows) if which in unfinished]
                decoder, rows, following = decoder.fork(kept), [rows[r] for r in kept], [following[r] for r in kept]
            logits = decoder(torch.tensor(following, device=self.model.device)[:, None])[:, -1]
        self._note_bytes(decoder, len(rows))
        return answers

    def _open(self, prompts: Sequence[int]) -> Decoder:
        """Return a decoder with a stream for each prompt, and pass the prompts' lengths to the policy.

        Args:
            prompts: number of tokens of each prompt.
        """
        decoder = open_decoder(self.model, self.config, len(prompts), self.method)
        if isinstance(decoder, CachedDecoder):
            decoder.begin_prompt(torch.tensor(prompts))
        return decoder

    def _opened(self, rows: Sequence[int], openings: Sequence[list[int]], prompts: Sequence[int]) -> tuple[Decoder, Tensor]:
        """Read the beginnings of a batch's streams. Streams of the same row are read once, and forked.

        Args:
            rows: row of each stream, counted from 0. [B].
            openings: first tokens of each stream, all of one length.
            prompts: number of tokens of each stream's prompt.

        Returns:
            The decoder, and the logits after the last token. [B, V].
        """
        distinct = [rows.index(row) for row in range(max(rows) + 1)]
        tokens = torch.tensor([openings[stream] for stream in distinct], device=self.model.device)
        decoder, width = self._open([prompts[stream] for stream in distinct]), self._width(len(distinct))
        if self.reads_whole_prompts:
            logits = decoder.read_prompt(tokens, width, once=self.prompt == "once")
        else:
            logits = read_blocks(decoder, tokens, width)
        return (decoder.fork(rows), logits[rows]) if len(distinct) < len(rows) else (decoder, logits)

    def _width(self, streams: int) -> int:
        """Return the number of tokens of each stream in a forward pass."""
        return max(1, self.block // streams)

    def _note_bytes(self, decoder: Decoder, streams: int) -> None:
        """Update `sizes`."""
        sizes = {"kv_bytes": decoder.kv_bytes, "kv_held_bytes": decoder.held_bytes, "state_bytes": decoder.state_bytes}
        sizes |= {} if (selected := read_bytes(decoder)) is None else {"kv_read_bytes": selected}
        self.sizes |= {name: max(self.sizes[name] or 0, size // streams) for name, size in sizes.items()}


def _numbered(items: Iterator[Any]) -> list[int]:
    """Return the number of every item. Distinct items are numbered from 0 in order of appearance."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(item, len(numbers)) for item in items]
