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
from torch.nn.functional import pad

from kvbench.harness.engine.attention import Backend, Terms
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.slots import Slots
from kvbench.harness.engine.walk import Walk
from kvbench.policies.dense import Dense

_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-6}  # relative to the largest logit, or the largest answer of a head
_ROUNDING_16_BITS = 4e-2
_COUNTED = 0.75  # of a block's tokens, those with the smallest errors, where rounding may change the order of two evictions
_SAME_CODES = 1e-3  # relative to the largest number of a row: half a step of an 8-bit code is more

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


def record_inputs(model: Model, tokens: Tensor) -> list[LayerInputs]:
    """Record the inputs of every layer's attention in one forward pass under full attention. tokens: [B, T] int64."""
    recorded = _RecordedModel(model)
    CachedDecoder(recorded, CacheConfig(Dense(), positions="stream"), len(tokens))(tokens)
    return recorded.inputs()


class ReplayedModel(Model):
    """Stand-in for a model that replays recorded inputs of the attention of every layer, and keeps the answers.

    Attributes:
        answers: of the last call or calls since `take`, by recorded layer. [B, Q, T, Dv] each.
    """

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


class _RecordedModel(Model):
    """Stand-in for a model that records the inputs of every layer's attention."""

    def __init__(self, model: Model) -> None:
        super().__init__(**vars(model))
        self._recorded: dict[int, list[LayerInputs]] = {}
        self._backend: Backend | None = None

    def __call__(self, tokens: Tensor, backend: Backend, keep: Tensor | int = 0, positions: Tensor | None = None) -> Tensor:
        self._backend = backend
        return super().__call__(tokens, self, 1, positions)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Record the inputs of a layer, and return the answer of the decoder."""
        assert self._backend is not None
        self._recorded.setdefault(layer, []).append(LayerInputs(layer, query, keys, values, terms))
        return self._backend.attend(layer, query, keys, values, terms)

    def inputs(self) -> list[LayerInputs]:
        """Return the inputs of all tokens, in the order in which the layers ran."""
        joined = []
        for layer, parts in self._recorded.items():
            query, keys, values = (torch.cat([part[field] for part in parts], 2) for field in (1, 2, 3))  # type: ignore[misc]
            joined.append(LayerInputs(layer, query, keys, values, parts[0].terms))
        return joined


class Verdict(NamedTuple):
    """Result of a comparison.

    Attributes:
        max_error: largest error of the candidate, relative to the tolerance; infinite if an answer is no number.
        rounding_error: largest rounding error of the reference itself, in the same unit; 0.0 if the reference counts as exact.
        diverged: rows that held other tokens than the reference's after some block, so that not all was compared.
        uncompared: layers of which no row was compared, in blocks or in single tokens.
    """

    max_error: float
    rounding_error: float
    diverged: frozenset[Row]
    uncompared: frozenset[int]


class ReferenceComparison:
    """Compares a candidate with a reference decoder while both replay the same blocks.

    Heads that hold other tokens than the reference's are not compared: rounding may change which token is evicted. Nor are heads
    of a coded cache whose errors are large and whose codes differ, because rounding may change a code by a step. In 16 bits,
    two evictions may also change places within a block, which can't be observed afterwards. There a quarter of a block's tokens
    don't count, if the policy looks at attention. All single tokens count.
    """

    def __init__(self, inputs: Sequence[LayerInputs], reads: Mapping[CachedDecoder, torch.dtype], tokens_before: int) -> None:
        """Let decoders replay recorded inputs instead of running their model.

        Args:
            inputs: of every layer.
            reads: the reference, the candidate and perhaps the reference in a wider dtype, whose answers then count as exact;
                with the dtypes of their inputs.
            tokens_before: tokens of each stream that the decoders have read before.
        """
        self._reads, self._tokens_read = [*reads], tokens_before
        self._layers = [layer for layer, *_ in inputs]
        self._models = [ReplayedModel(read.model, inputs, dtype) for read, dtype in reads.items()]
        for read, model in zip(self._reads, self._models, strict=True):
            read.model = model
        self._is_16_bit = not is_exact(reads[self._reads[0]])
        self._errors: dict[tuple[int, bool], list[Tensor]] = {}  # by layer, and whether of single tokens; [heads, 2]
        self._alike: dict[int, Tensor] = {}  # after the last block: rows that hold the same tokens in all decoders, by layer
        self._diverged: set[Row] = set()

    def read(self, tokens: Tensor) -> None:
        """Replay a block, and compare the answers of rows that hold the same tokens before and after it. [B, T] int64."""
        single = tokens.shape[1] == 1
        self._tokens_read += tokens.shape[1]
        for read in self._reads:
            read(tokens)
        evicts = any(_evicts_by_attention(walk.slots, self._tokens_read) for walk in self._reads[0].walks)
        swaps = self._is_16_bit and not single and evicts
        before, self._alike = self._alike, self._rows_alike()
        self._compare(single, swaps, {layer: rows & before.get(layer, rows) for layer, rows in self._alike.items()})

    def read_prompt(self, tokens: Tensor, block: int) -> None:
        """Replay a prompt that is cut at its end, and compare the answers of all rows. tokens: [B, T] int64."""
        for read in self._reads:
            read.read_prompt(tokens, block)
        self._alike = self._rows_alike()
        self._compare(single=False, swaps=False, alike={layer: torch.ones_like(rows) for layer, rows in self._alike.items()})

    def verdict(self) -> Verdict:
        """Return the judgement over all that was read: an error may be the tolerance, or twice the reference's own error."""
        max_error, rounding_error, uncompared = 0.0, 0.0, set()
        for (layer, _), parts in self._errors.items():
            errors, own = torch.cat(parts).unbind(-1)
            if not len(errors):
                uncompared.add(layer)
                continue
            allowed = 2 * (own.amax() if self._is_16_bit else own)
            max_error = max(max_error, float((errors / allowed.clamp(min=1)).nan_to_num(torch.inf).amax()))
            rounding_error = max(rounding_error, float(own.amax()))
        return Verdict(max_error, rounding_error, frozenset(self._diverged), frozenset(uncompared))

    def _compare(self, single: bool, swaps: bool, alike: dict[int, Tensor]) -> None:
        """Note the errors of the last answers. alike: the rows that count, by layer. [B, H] bool each."""
        by_layer = zip(self._layers, *(model.take() for model in self._models), strict=True)
        for layer, reference, candidate, *wider in by_layer:
            exact = wider[0] if wider else reference
            errors = torch.stack([self._relative(x, exact, reference.dtype, swaps) for x in (candidate, reference)], -1)
            if self._reads[0].config.kv is not None and bool((errors[..., 0] > 1).any()):  # rounding may have flipped a code
                alike[layer] &= _same_codes(self._reads[1], self._reads[0], layer)
            rows = alike[layer].to(errors.device)
            counted = rows.repeat_interleave(errors.shape[1] // rows.shape[1], 1)
            self._errors.setdefault((layer, single), []).append(errors[counted].cpu())
        for layer, rows in alike.items():
            self._diverged |= {(layer, stream, head) for stream, head in (~rows).nonzero().tolist()}

    def _relative(self, x: Tensor, exact: Tensor, dtype: torch.dtype, swaps: bool) -> Tensor:
        """Error of each head's answers, relative to the tolerance. [B, Q, T, Dv] twice -> [B, Q] float64.

        The tolerance is a share of the head's largest answer, or in 16 bits of the layer's.
        """
        x, exact = x.double(), exact.double()
        largest = exact.abs().amax() if self._is_16_bit else exact.abs().amax((-2, -1))[..., None]
        tiny = torch.finfo(torch.float32).tiny  # heads whose values are all zero
        errors = (x - exact).abs().amax(-1) / (rounding_of(dtype) * largest).clamp(min=tiny)
        errors = errors.nan_to_num(torch.inf).sort(-1).values
        return errors[..., ceil(errors.shape[-1] * (_COUNTED if swaps else 1.0)) - 1]

    def _rows_alike(self) -> dict[int, Tensor]:
        """Rows that hold the same tokens in all decoders, by layer. [B, H] bool each."""
        return {layer: self._alike_in(layer) for layer in self._layers}

    def _alike_in(self, layer: int) -> Tensor:
        """Rows of a layer that hold the same tokens in all decoders. [B, H] bool."""
        first, *others = (_held_positions(read, layer) for read in self._reads)
        return torch.stack([_same_positions(first, other) for other in others]).all(0)


def _evicts_by_attention(slots: Slots, tokens_read: int) -> bool:
    """Whether a policy that looks at attention has evicted tokens, after `tokens_read` of each stream."""
    return bool(slots.sees) and slots.capacity is not None and tokens_read > slots.capacity


def _held_positions(read: CachedDecoder, layer: int) -> Tensor:
    """Positions of the tokens that the rows of a layer hold, in order, after -1 for each empty slot. [B, H, S] int64."""
    parts: list[tuple[Tensor | slice, Tensor]] = []
    for walk, heads, _ in read.shares[layer]:
        rows = read.walks[walk].rows(read.walks[walk].slots.num_slots, layer)
        held = rows.position.masked_fill(rows.rank == read.walks[walk].slots.empty_rank, -1).sort(-1).values
        parts.append((slice(None) if heads is None else heads, held.unflatten(0, (read.streams, -1))))
    longest = max(held.shape[2] for _, held in parts)
    out = parts[0][1].new_full((read.streams, read.model.layers[layer].heads, longest), -1)
    for of_heads, held in parts:
        out[:, of_heads, longest - held.shape[2] :] = held
    return out


def _same_positions(ours: Tensor, theirs: Tensor) -> Tensor:
    """Compare the cached positions of each row, sorted and of equal number. [B, H, S], [B, H, S'] int64 -> [B, H] bool."""
    longest = max(ours.shape[2], theirs.shape[2])
    ours, theirs = (pad(x, (longest - x.shape[2], 0), value=-1) for x in (ours, theirs))
    return (ours == theirs).all(-1)


def _same_codes(ours: CachedDecoder, theirs: CachedDecoder, layer: int) -> Tensor:
    """Compare the codes of each row of a coded cache, assuming the rows hold the same tokens. -> [B, H] bool."""
    same = torch.ones(ours.streams, ours.model.layers[layer].heads, dtype=torch.bool, device=ours.walks[0].slots.device)
    for mine, other in zip(ours.shares[layer], theirs.shares[layer], strict=True):
        pairs = zip(_stored(ours.walks[mine.walk], layer), _stored(theirs.walks[other.walk], layer), strict=True)
        alike = [(x - y).abs().amax((1, 2)) <= _SAME_CODES * y.abs().amax((1, 2)) for x, y in pairs]
        same[:, slice(None) if mine.heads is None else mine.heads] = torch.stack(alike).all(0).unflatten(0, (ours.streams, -1))
    return same


def _stored(walk: Walk, layer: int) -> list[Tensor]:
    """Keys and values of the rows of a layer, as decoded, by age; 0 in empty slots. [N, S, D] each."""
    rows = walk.rows(walk.slots.num_slots, layer)
    held = rows.rank < walk.slots.empty_rank
    order = rows.position.masked_fill(~held, -1).argsort(-1)[..., None]
    return [x.masked_fill(~held[..., None], 0.0).take_along_dim(order, 1).float() for x in (rows.keys, rows.values)]


def is_exact(dtype: torch.dtype) -> bool:
    """Whether rounding decides next to nothing."""
    return dtype in _ROUNDING


def rounding_of(dtype: torch.dtype) -> float:
    """Tolerance for two computations of the same logits or attention, relative to the largest magnitude."""
    return _ROUNDING.get(dtype, _ROUNDING_16_BITS)
