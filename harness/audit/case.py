"""A cache on a model under audit, what its checks share, and the definition of a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvbench.harness.audit.subject import Reader, Subject
from kvbench.harness.audit.trace import FAULTS, Trace, Tracer, new_faults
from kvbench.harness.core.checks import NotApplicableError, Outcome
from kvbench.harness.core.errors import UserError, described
from kvbench.harness.engine.comparison import logits_fault, rounding_of
from kvbench.harness.engine.foreign import longest
from kvbench.harness.engine.model import UnsupportedModelError, adopt
from kvbench.harness.engine.rotary import Rotation
from kvbench.harness.engine.slots import LayerShape

_TOKENS = 96  # read if no budget is known
_PAST_FULL = 33  # tokens read after the cache has been filled twice
_PROMPT = 16  # tokens
_MIN_HELD_SHARE = 0.5  # minimum number of tokens held after blocks, relative to the number held after single tokens
_STORED_EXACTLY = 0.01  # relative difference up to which values count as stored exactly


class AuditedCache:
    """A subject on a model.

    Attributes:
        subject: cache under test.
        hf: model in evaluation mode.
        like: policy of ours that should hold the same tokens; None to compare with none.
        tokenizer: tokenizer of the model; None for random weights.
        shapes: RoPE and sliding window of every layer; empty if they can't be measured.
        length: tokens of the longest text that is read.
    """

    def __init__(self, subject: Subject, hf: PreTrainedModel, like: Subject | None = None, tokenizer: Any = None) -> None:
        """Measure the model's RoPE.

        Raises:
            UserError: the cache can't be created, or the vocabulary has too few tokens to tell all of a text apart.
        """
        self.subject, self.hf, self.like, self.tokenizer = subject, hf, like, tokenizer
        self.shapes = _shapes(hf)
        self.vocabulary = int(hf.config.get_text_config().vocab_size)
        wanted = _TOKENS if subject.budget is None else 2 * subject.budget + _PAST_FULL
        self.length = int(min(wanted, _longest(subject, hf)))
        if self.length > self.vocabulary:
            raise UserError(
                f"budget {subject.budget}: the audit reads {self.length} distinct tokens, and the model has {self.vocabulary}: "
                "give a smaller budget"
            )

    @property
    def rotations(self) -> list[Rotation | None]:
        """RoPE of every layer; empty if it can't be measured."""
        return [shape.rotation for shape in self.shapes]

    def has_window(self, layer: int) -> bool:
        """Whether the model gives a layer a sliding window."""
        return bool(self.shapes) and self.shapes[layer].sliding_window is not None

    def text(self, rows: int = 1) -> Tensor:
        """Return texts of distinct tokens. [rows, length] int64."""
        generator = torch.Generator().manual_seed(0)
        texts = [torch.randperm(self.vocabulary, generator=generator)[: self.length] for _ in range(rows)]
        return torch.stack(texts).to(self.hf.device)

    def trace(
        self, blocks: list[int], *, explicit: bool | None = None, hf: PreTrainedModel | None = None, by: Subject | None = None
    ) -> Trace:
        """Read the text in blocks with a new cache, and record what every layer attends to. An exception ends the trace.

        PyTorch's generator is seeded by 0.

        Args:
            explicit: pass positions to the model, as `generate` does; for presses only when None.
            hf: other model.
            by: other subject, whose cache is traced.
        """
        torch.manual_seed(0)
        result, hf = Trace(), hf or self.hf
        try:
            tracer = Tracer(Reader(by or self.subject, hf, explicit), hf, self.rotations, result)
            for block in self.text()[:, : sum(blocks)].split(blocks, 1):
                tracer.read(block)
        except Exception as error:  # a user's cache may raise anything
            result.error = f"it raises {described(error)} after {result.passes[-1].end if result.passes else 0} tokens"
        return result

    @cached_property
    def prompt(self) -> int:
        """Tokens of the first block: almost all for a press that cuts prompts, otherwise fewer than the budget (or 1)."""
        if self.subject.press is not None and self.subject.press.cuts_prompts:
            return self.length - _PROMPT
        size = self.subject.budget or 2 * _PROMPT
        return max(1, size // 2, size - _PROMPT)

    @property
    def past_full(self) -> int:
        """Tokens after which a cache with a budget has evicted some."""
        return min(self.length - 24, (self.subject.budget or 24) + 8)

    def steps(self, *blocks: int, then: int | None = None) -> list[int]:
        """Return blocks, followed by single tokens: `then`, or all that remain."""
        return [*blocks, *[1] * (self.length - sum(blocks) if then is None else min(then, self.length - sum(blocks)))]

    @property
    def shortened(self) -> list[int]:
        """Blocks of `decode`, up to some steps after the first eviction."""
        return self.steps(self.prompt, then=max(_PROMPT, self.past_full + _PROMPT - self.prompt))

    @cached_property
    def decode(self) -> Trace:
        """Trace of a prompt and single tokens. Positions are passed for presses only, as kvpress' pipeline does."""
        return self.trace(self.steps(self.prompt))

    @cached_property
    def asking(self) -> Trace:
        """Trace in which the model asks the cache for its length; `decode`, except for presses."""
        return self.decode if self.subject.press is None else self.trace(self.shortened, explicit=False)

    @cached_property
    def known(self) -> list[str]:
        """Kinds of faults of `decode`, which other checks do not report again."""
        return [kind for kind, find in FAULTS.items() if find(self.decode)]

    @cached_property
    def sinks(self) -> int:
        """Number of first tokens that should stay: as declared, or as survive the first eviction by position.

        They survive by position if all heads of two or more layers without a sliding window hold the same tokens. In a single
        layer, a policy that keeps equal tokens in all heads can't be told from one that keeps them by position.
        """
        if self.subject.sinks:
            return self.subject.sinks
        for p in self.decode.passes:
            layers = [heads for layer, heads in enumerate(p.held) if not self.has_window(layer)]
            heads = [head for layer in layers for head in layer]
            if len(layers) < 2 or any(head != heads[0] for head in heads):
                return 0
            if len(heads[0]) < p.first:
                return next((t for t, held in enumerate(heads[0]) if t != held), 0)
        return 0

    def lost_sink(self, of: Trace) -> str:
        """Describe the first step at which a sink token is not held; empty if all sink tokens are held."""
        for p in of.passes:
            for layer, heads in enumerate(p.held):
                wanted = range(0 if self.has_window(layer) else min(self.sinks, p.first))
                missing = next((token for token in wanted if not all(token in head for head in heads)), None)
                if missing is not None:
                    return f"at step {p.first}, layer {layer}: token {missing} of the first {self.sinks} is no longer held"
        return ""

    @property
    def is_ours(self) -> bool:
        """Whether the cache runs a policy of ours, whose decoder gives equal results for blocks of any size."""
        return not self.decode.passes[0].reads

    @property
    def is_exact(self) -> bool:
        """Whether values are stored as given. Quantized values are not."""
        return self.decode.rounding <= _STORED_EXACTLY

    def differs(self, logits: Tensor, expected: Tensor, whose: str) -> str:
        """Describe the difference between logits and expected logits; empty if it is within rounding. [..., V], [..., V]."""
        return logits_fault(logits, expected, rounding_of(self.hf.dtype), whose)

    def fault_of(self, blocks: list[int]) -> str:
        """Describe the first fault of reading the text in these blocks; empty if there is none.

        The cache must respect the budget and keep the first tokens if it does so in `decode`. If values are stored exactly,
        logits must equal the logits of `decode` up to the first eviction. After the first eviction, only policies of ours are
        compared: under other caches, tokens of a block may see earlier tokens that `decode` has already evicted.
        """
        of = self.trace(blocks)
        if fault := new_faults(of, self.known) or self._lost(of) or self._not_held(of):
            return fault
        ends = [len(of.logits), len(self.decode.logits)]
        if not self.is_ours:
            ends += [t.first_eviction or ends[0] for t in (of, self.decode)]
        return self.differs(of.logits[: min(ends)], self.decode.logits[: min(ends)], "single tokens") if self.is_exact else ""

    def _lost(self, of: Trace) -> str:
        """Return the first step at which far fewer tokens are held than when single tokens are read."""
        held = {p.first: p.mean_held for p in self.decode.passes}
        lost = next((p for p in of.passes if p.mean_held < _MIN_HELD_SHARE * held.get(p.first, 0)), None)
        return "" if lost is None else f"at step {lost.first} it holds {lost.mean_held:g} tokens, not {held[lost.first]:g}"

    def _not_held(self, of: Trace) -> str:
        """Return the first step at which the budget or a first token is not held, although both are in `decode`."""
        size, first_tokens = self.subject.budget, self.lost_sink(of)
        if self.subject.press is not None:
            return ""
        if first_tokens and not self.lost_sink(self.decode):
            return first_tokens
        if size is None or any(p.mean_held > size for p in self.decode.passes):
            return ""
        over = next((p for p in of.passes if p.mean_held > size), None)
        return "" if over is None else f"at step {over.first} it holds {over.mean_held:g} tokens, budget {size}"


def _shapes(hf: PreTrainedModel) -> list[LayerShape]:
    try:
        return adopt(hf, shared=True).layers
    except UnsupportedModelError:
        return []


def _longest(subject: Subject, hf: PreTrainedModel) -> float:
    """Return the maximum length of a text, in tokens; infinite if the cache grows or evicts.

    Raises:
        UserError: the cache can't be created, or is no cache.
    """
    try:
        cache: Any = subject.new_cache(hf)
    except UserError:
        raise
    except Exception as error:  # a user's constructor may raise anything
        raise UserError(f"{subject.name}: the cache can't be created: {described(error)}") from error
    if not isinstance(cache, Cache):
        raise UserError(f"{subject.name}: expected a function that returns a transformers Cache, not a {type(cache).__name__}")
    return longest(cache)


@contextmanager
def refusable(operation: str) -> Iterator[None]:
    """Let a cache refuse an operation in this context, by an exception as transformers' caches raise."""
    try:
        yield
    except (NotImplementedError, ValueError, RuntimeError, AttributeError) as error:
        raise NotApplicableError(f"{operation} is refused: {described(error)}") from error


@dataclass(frozen=True)
class AuditCheck:
    """A check.

    Attributes:
        name: name in tables.
        question: what the check asks.
        usually: what a failure usually means.
        follows: names of checks whose failure may be the cause of a failure of this one.
    """

    name: str
    question: str
    usually: str
    follows: tuple[str, ...]
    find: Callable[[AuditedCache], Outcome]


def check(
    question: str, usually: str, follows: tuple[str, ...] = ()
) -> Callable[[Callable[[AuditedCache], Outcome]], AuditCheck]:
    """Make a function a check with the function's name."""
    return lambda find: AuditCheck(find.__name__, question, usually, follows, find)
