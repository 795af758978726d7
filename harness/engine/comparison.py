"""Compare decoders layer by layer on identical inputs, so that rounding errors do not grow from layer to layer.

The queries, keys and values of one forward pass are recorded. A `ReplayedModel` then feeds them to any decoder, which answers the
attention of every layer without the rest of the model.

Axis letters: B streams, T tokens, Q query heads, H KV heads, S slots, D key dim, Dv value dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Backend, Terms
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.recompute import CausalAttention
from kvbench.harness.engine.walk import Walk

_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-6}  # relative to the largest logit, or to the largest output of a head
_ROUNDING_16_BITS = 4e-2
_COUNTED = 0.75  # share of a block's tokens, by smallest error, that count where rounding may swap two evictions
_MAX_SWAPPED = 0.05  # share of rows in which rounding may do so, in more than 16 bits
_SAME_CODES = 1e-3  # relative to the largest number of a row; half a step of an 8-bit code is larger

Row = tuple[int, int, int]  # layer, stream and KV head


class LayerInputs(NamedTuple):
    """Inputs of one layer's attention.

    Attributes:
        layer: index in the model.
        query: [B, Q, T, D].
        keys: [B, H, T, D].
        values: [B, H, T, Dv].
        terms: other parameters of the attention.
    """

    layer: int
    query: Tensor
    keys: Tensor
    values: Tensor
    terms: Terms

    def part(self, tokens: slice, dtype: torch.dtype) -> LayerInputs:
        """Return the inputs of some tokens in a dtype, with the tensors laid out as a model lays them out."""
        by_token = (x[:, :, tokens].transpose(1, 2) for x in (self.query, self.keys, self.values))
        query, keys, values = (x.to(dtype, copy=True).contiguous().transpose(1, 2) for x in by_token)
        sinks = self.terms.sink_logits
        terms = self.terms if sinks is None else self.terms._replace(sink_logits=sinks.to(dtype))
        return LayerInputs(self.layer, query, keys, values, terms)


class _Recorder:
    """Attention backend that records the inputs of every layer, and attends causally.

    Attributes:
        inputs: inputs of the layers, in the order in which the layers ran.
    """

    def __init__(self, model: Model, tokens: int) -> None:
        self.inputs: list[LayerInputs] = []
        self._attention = CausalAttention(model, tokens)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Record the inputs of a layer, and compute its attention."""
        self.inputs.append(LayerInputs(layer, query, keys, values, terms))
        return self._attention.attend(layer, query, keys, values, terms)


@torch.inference_mode()
def record_inputs(model: Model, tokens: Tensor) -> list[LayerInputs]:
    """Record the inputs of every layer's attention in one forward pass under full attention. tokens: [B, T] int64."""
    recorder = _Recorder(model, tokens.shape[1])
    model(tokens, recorder, 1)
    return recorder.inputs


class ReplayedModel(Model):
    """Stand-in for a model that replays recorded inputs of the attention of every layer, and keeps the answers for `take`."""

    def __init__(self, model: Model, inputs: Sequence[LayerInputs], dtype: torch.dtype) -> None:
        """Replay `inputs` in a dtype, from the first token on."""
        super().__init__(**vars(model))
        self._inputs, self._kind, self._start = inputs, dtype, 0
        self._answers: list[list[Tensor]] = [[] for _ in inputs]

    def __call__(self, tokens: Tensor, backend: Backend, keep: Tensor | int = 0, positions: Tensor | None = None) -> Tensor:
        """Replay a block. Returns meaningless logits. [B, T, 1]."""
        part = slice(self._start, self._start + tokens.shape[1])
        for inputs, answers in zip(self._inputs, self._answers, strict=True):
            answers.append(backend.attend(*inputs.part(part, self._kind)))
        self._start = part.stop
        return torch.zeros(*tokens.shape, 1, device=tokens.device)

    def take(self) -> list[Tensor]:
        """Return the answers since the last call, by recorded layer. [B, Q, T, Dv] each."""
        answers = [torch.cat(of_layer, 2) for of_layer in self._answers]
        self._answers = [[] for _ in self._inputs]
        return answers


class Verdict(NamedTuple):
    """Result of a comparison.

    Attributes:
        max_error: largest error of the candidate, relative to the tolerance; infinite if an answer is no number.
        rounding_error: largest rounding error of the reference itself, in the same unit; 0.0 if the reference counts as exact.
        diverged: rows that held other tokens than the reference after some block, so that not all blocks were compared.
        swapped: relative errors of other rows that err in less than a quarter of a block, as if two evictions were swapped;
            empty if there are many such rows.
        uncompared: layers of which no row was compared, in blocks or in single tokens.
        other_victims: share of the tokens evicted by the reference that the candidate still holds.
    """

    max_error: float
    rounding_error: float
    diverged: frozenset[Row]
    swapped: Mapping[Row, float]
    uncompared: frozenset[int]
    other_victims: float


class ReferenceComparison:
    """Compares a candidate with a reference decoder while both replay the same blocks.

    Heads that hold other tokens than the reference are not compared, because rounding may change which token is evicted. Heads
    of a coded cache with large errors and different codes are not compared either, because rounding may change a code by a step.
    If the policy reads attention, rounding may also swap two evictions within a block, which can't be observed afterwards. A
    quarter of the block's tokens is therefore ignored: in 16 bits in every row, in more bits in a few rows, which are reported.
    Single tokens always count.
    """

    def __init__(self, inputs: Sequence[LayerInputs], reads: Mapping[CachedDecoder, torch.dtype], tokens_before: int) -> None:
        """Let decoders replay recorded inputs instead of running their model.

        Args:
            inputs: recorded inputs of every layer.
            reads: decoders with the dtypes of their inputs: the reference, the candidate, and optionally the reference in a wider
                dtype. The answers of the wider reference then count as exact.
            tokens_before: tokens of each stream that the decoders have read before.
        """
        self._reads, self._tokens_read = [*reads], tokens_before
        self._layers = [layer for layer, *_ in inputs]
        self._models = [ReplayedModel(read.model, inputs, dtype) for read, dtype in reads.items()]
        for read, model in zip(self._reads, self._models, strict=True):
            read.model = model
        self._is_16_bit = not is_exact(reads[self._reads[0]])
        self._errors: dict[tuple[int, bool], list[Tensor]] = {}  # by layer, and whether the block is a single token; [heads, 2]
        self._alike: dict[int, Tensor] = {}  # after the last block: rows that hold the same tokens in all decoders, by layer
        self._diverged: set[Row] = set()
        self._swapped: dict[Row, float] = {}  # largest relative error of rows that may have swapped two evictions

    def read(self, tokens: Tensor) -> None:
        """Replay a block, and compare the answers of rows that hold the same tokens before and after it. [B, T] int64."""
        single = tokens.shape[1] == 1
        self._tokens_read += tokens.shape[1]
        for read in self._reads:
            read(tokens)
        judging = [walk.slots for walk in self._reads[0].walks if walk.slots.sees]  # with policies that read attention
        evicts = any(slots.capacity is not None and self._tokens_read > slots.capacity for slots in judging)
        swaps = not single and evicts
        before, self._alike = self._alike, self._rows_alike()
        self._compare(single, swaps, {layer: rows & before.get(layer, rows) for layer, rows in self._alike.items()})

    def read_prompt(self, tokens: Tensor, block: int) -> None:
        """Replay a prompt that is cut at its end, and compare the answers of all rows. tokens: [B, T] int64."""
        self._tokens_read += tokens.shape[1]
        for read in self._reads:
            read.read_prompt(tokens, block)
        self._alike = self._rows_alike()
        self._compare(single=False, swaps=False, alike={layer: torch.ones_like(rows) for layer, rows in self._alike.items()})

    def verdict(self) -> Verdict:
        """Return the result over all blocks. The allowed error is the tolerance, or twice the reference's rounding error."""
        max_error, rounding_error, uncompared = 0.0, 0.0, set()
        for (layer, _), parts in self._errors.items():
            errors, own = torch.cat(parts).unbind(-1)
            if not len(errors):
                uncompared.add(layer)
                continue
            allowed = 2 * (own.amax() if self._is_16_bit else own)
            max_error = max(max_error, float((errors / allowed.clamp(min=1)).nan_to_num(torch.inf).amax()))
            rounding_error = max(rounding_error, float(own.amax()))
        swapped = self._swapped
        if len(swapped) > max(1, _MAX_SWAPPED * sum(rows.numel() for rows in self._alike.values())):
            max_error, swapped = max(max_error, *swapped.values()), {}
        swapped = {row: error for row, error in swapped.items() if row not in self._diverged}
        diverged, uncompared_layers = frozenset(self._diverged), frozenset(uncompared)
        return Verdict(max_error, rounding_error, diverged, swapped, uncompared_layers, self._other_victims())

    def _compare(self, single: bool, swaps: bool, alike: dict[int, Tensor]) -> None:
        """Note the errors of the last answers. alike: rows that are compared, by layer. [B, H] bool each."""
        by_layer = zip(self._layers, *(model.take() for model in self._models), strict=True)
        for layer, reference, candidate, *wider in by_layer:
            exact, dtype = wider[0] if wider else reference, reference.dtype
            share = _COUNTED if swaps and self._is_16_bit else 1.0
            errors = torch.stack([self._relative(x, exact, dtype, share) for x in (candidate, reference)], -1)
            if self._reads[0].config.kv is not None and bool((errors[..., 0] > 1).any()):  # rounding may have flipped a code
                alike[layer] &= _same_codes(self._reads[1], self._reads[0], layer)
            rows = alike[layer]
            if swaps and not self._is_16_bit:
                rows = rows & ~self._note_swapped(layer, errors, self._relative(candidate, exact, dtype, _COUNTED), rows)
            rows = rows.to(errors.device)
            counted = rows.repeat_interleave(errors.shape[1] // rows.shape[1], 1)
            self._errors.setdefault((layer, single), []).append(errors[counted].cpu())
        for layer, rows in alike.items():
            self._diverged |= {(layer, stream, head) for stream, head in (~rows).nonzero().tolist()}

    def _note_swapped(self, layer: int, errors: Tensor, counted: Tensor, alike: Tensor) -> Tensor:
        """Note the compared rows that err in a few tokens of a block alone.

        Args:
            errors: largest errors of candidate and reference. [B, Q, 2].
            counted: largest error of the candidate over the tokens that count. [B, Q].
            alike: rows that are compared. [B, H] bool.

        Returns:
            Rows that were noted. [B, H] bool.
        """
        allowed = (2 * errors[..., 1]).clamp(min=1)
        of_rows = [(x / allowed).unflatten(1, (alike.shape[1], -1)).amax(-1) for x in (errors[..., 0], counted)]
        swapped = ((of_rows[0] > 1) & of_rows[0].isfinite() & (of_rows[1] <= 1)).to(alike.device) & alike
        for stream, head in swapped.nonzero().tolist():
            row = layer, stream, head
            self._swapped[row] = max(self._swapped.get(row, 0.0), float(of_rows[0][stream, head]))
        return swapped

    def _relative(self, x: Tensor, exact: Tensor, dtype: torch.dtype, share: float) -> Tensor:
        """Return the error of each head's answers, relative to the tolerance. x, exact: [B, Q, T, Dv] -> [B, Q] float64.

        The tolerance is a share of the head's largest answer; in 16 bits, of the layer's largest answer. share: share of the
        tokens that count, by smallest error.
        """
        x, exact = x.double(), exact.double()
        largest = exact.abs().amax() if self._is_16_bit else exact.abs().amax((-2, -1))[..., None]
        tiny = torch.finfo(torch.float32).tiny  # heads whose values are all zero
        errors = (x - exact).abs().amax(-1) / (rounding_of(dtype) * largest).clamp(min=tiny)
        errors = errors.nan_to_num(torch.inf).sort(-1).values
        return errors[..., ceil(errors.shape[-1] * share) - 1]

    def _held(self, layer: int) -> list[Tensor]:
        """Return the tokens that the rows of a layer hold, for each decoder. [B, H, tokens read] bool each."""
        return [_held_tokens(read, layer, self._tokens_read) for read in self._reads]

    def _rows_alike(self) -> dict[int, Tensor]:
        """Return the rows that hold the same tokens in all decoders, by layer. [B, H] bool each."""
        alike = {}
        for layer in self._layers:
            reference, *others = self._held(layer)
            alike[layer] = torch.stack([(held == reference).all(-1) for held in others]).all(0)
        return alike

    def _other_victims(self) -> float:
        """Return the share of the tokens evicted by the reference that the candidate still holds."""
        others = evicted = 0
        for layer in self._layers:
            reference, candidate, *_ = self._held(layer)
            others += int((candidate & ~reference).sum())
            evicted += int((~reference).sum())
        return others / max(evicted, 1)


def _held_tokens(read: CachedDecoder, layer: int, tokens_read: int) -> Tensor:
    """Return which of the first `tokens_read` tokens the rows of a layer hold. [B, H, tokens_read] bool."""
    parts: list[tuple[Tensor | slice, Tensor]] = []
    for walk, heads, _ in read.shares[layer]:
        slots = read.walks[walk].slots
        rows = read.walks[walk].rows(slots.num_slots, layer)
        column = rows.position.masked_fill(rows.rank == slots.empty_rank, tokens_read)  # empty slots go to an extra column
        held = torch.zeros(len(column), tokens_read + 1, dtype=torch.bool, device=column.device).scatter_(1, column, value=True)
        parts.append((slice(None) if heads is None else heads, held[:, :-1].unflatten(0, (read.streams, -1))))
    out = parts[0][1].new_empty(read.streams, read.model.layers[layer].heads, tokens_read)
    for of_heads, held in parts:
        out[:, of_heads] = held
    return out


def _same_codes(ours: CachedDecoder, theirs: CachedDecoder, layer: int) -> Tensor:
    """Compare the codes of each row of a coded cache, assuming the rows hold the same tokens. -> [B, H] bool."""
    same = torch.ones(ours.streams, ours.model.layers[layer].heads, dtype=torch.bool, device=ours.walks[0].slots.device)
    for mine, other in zip(ours.shares[layer], theirs.shares[layer], strict=True):
        pairs = zip(_stored(ours.walks[mine.walk], layer), _stored(theirs.walks[other.walk], layer), strict=True)
        alike = [(x - y).abs().amax((1, 2)) <= _SAME_CODES * y.abs().amax((1, 2)) for x, y in pairs]
        same[:, slice(None) if mine.heads is None else mine.heads] = torch.stack(alike).all(0).unflatten(0, (ours.streams, -1))
    return same


def _stored(walk: Walk, layer: int) -> list[Tensor]:
    """Return the decoded keys and values of a layer's rows, ordered by position; 0 in empty slots. [N, S, D] each."""
    rows = walk.rows(walk.slots.num_slots, layer)
    held = rows.rank < walk.slots.empty_rank
    order = rows.position.masked_fill(~held, -1).argsort(-1)[..., None]
    return [x.masked_fill(~held[..., None], 0.0).take_along_dim(order, 1).float() for x in (rows.keys, rows.values)]


def is_exact(dtype: torch.dtype) -> bool:
    """Return whether the dtype has more than 16 bits, so that rounding hardly ever changes an eviction."""
    return dtype in _ROUNDING


def relative_difference(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest magnitude or to 1; infinite if there is a NaN. Any shape."""
    if not logits.numel():
        return 0.0
    return float(((logits - expected).abs().max() / expected.abs().max().clamp(min=1)).nan_to_num(torch.inf))


def rounding_of(dtype: torch.dtype) -> float:
    """Return the tolerance for two computations of the same logits or attention, relative to the largest magnitude."""
    return _ROUNDING.get(dtype, _ROUNDING_16_BITS)


def logits_fault(logits: Tensor, expected: Tensor, tolerance: float, whose: str) -> str:
    """Describe how logits differ from those of a reference; empty if within the relative tolerance. [..., V], [..., V]."""
    relative = relative_difference(logits, expected)
    return "" if relative <= tolerance else f"logits differ from those of {whose} by {relative:.2g} of the largest"
