"""Traces of a cache that reads a text in blocks, and the faults that a trace shows.

A fault is one line with the step, the layer and the KV head at which it first occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.harness.audit.attended import UNKNOWN, UNPLACED, Read, Recorder
from kvbench.harness.audit.subject import Reader
from kvbench.harness.engine.rotary import Rotation
from kvbench.harness.engine.stored import storage_bytes, tensors_in
from kvbench.harness.run.generate import Cache as PolicyCache

Held = list[list[list[int]]]  # tokens held, ascending, by layer and KV head


@dataclass(frozen=True)
class Pass:
    """One forward pass of a trace.

    Attributes:
        first: index of the block's first token.
        count: tokens of the block.
        held: tokens held before the pass.
        reads: rows that each layer attended to; empty for a policy of ours, whose decoder answers the model's calls.
        length: result of `get_seq_length` after the pass.
        allocated: bytes of the storage of the cache's tensors after the pass.
        logits: logits of the block. [T, V] float32.
    """

    first: int
    count: int
    held: Held
    reads: list[Read]
    length: int
    allocated: int
    logits: Tensor

    @property
    def end(self) -> int:
        """Number of tokens read after the pass."""
        return self.first + self.count

    @property
    def mean_held(self) -> float:
        """Tokens held before the pass, averaged over layers and KV heads."""
        counts = [len(head) for layer in self.held for head in layer]
        return sum(counts) / max(1, len(counts))

    @property
    def most_held(self) -> int:
        """Tokens held before the pass by the KV head that holds most."""
        return max((len(head) for layer in self.held for head in layer), default=0)


@dataclass
class Trace:
    """Trace of a cache that reads one text.

    Attributes:
        token_bytes: bytes of the keys and values of one token, over all layers.
        error: description of the exception that ended the trace; empty if none did.
    """

    passes: list[Pass] = field(default_factory=list)
    token_bytes: float = 0
    error: str = ""

    @cached_property
    def logits(self) -> Tensor:
        """Logits of all tokens read. [N, V] float32."""
        return torch.cat([p.logits for p in self.passes]) if self.passes else torch.zeros(0)

    @property
    def first_eviction(self) -> int | None:
        """Number of tokens read before the first pass with a missing token; None if nothing was evicted."""
        return next((p.first for p in self.passes if any(len(head) < p.first for layer in p.held for head in layer)), None)

    @property
    def rounding(self) -> float:
        """Largest relative difference between a stored value and the value that was given."""
        return max((read.error for p in self.passes for read in p.reads), default=0.0)


class Tracer:
    """Reads blocks with a cache, and appends a `Pass` per block to a trace."""

    def __init__(self, reader: Reader, hf: PreTrainedModel, rotations: list[Rotation | None], into: Trace) -> None:
        """Trace an empty cache. rotations: RoPE of every layer; empty if unknown."""
        self._reader, self._hf, self._recorder, self._trace = reader, hf, Recorder(rotations), into

    def read(self, block: Tensor) -> None:
        """Read the next tokens, all distinct from the tokens of earlier blocks. [1, T] int64."""
        first, cache, of = self._reader.tokens, self._reader.cache, self._trace
        if isinstance(cache, PolicyCache):
            held, logits, report = cache.kept(), self._reader(block)[0], cache.report()
            allocated, reads = report["allocated_bytes"], list[Read]()
            of.token_bytes = report["held_bytes"] / max(1, report["kept"])
        else:
            with self._recorder.on(self._hf, cache):
                logits = self._reader(block)[0]
            reads = [self._recorder.reads[layer] for layer in sorted(self._recorder.reads)]
            held, of.token_bytes = [read.held() for read in reads], self._recorder.token_bytes
            allocated = storage_bytes(tensors_in(cache, (nn.Module, type)))
        of.passes.append(Pass(first, block.shape[1], held, reads, int(cache.get_seq_length()), allocated, logits))

    def crop(self, count: int) -> None:
        """Remove the newest tokens by the cache's own `crop`. Rows of removed tokens are unknown from now on."""
        self._reader.crop(count)
        self._recorder.crop(count)


def _reads(of: Trace) -> Iterator[tuple[Read, str]]:
    for p in of.passes:
        for read in p.reads:
            yield read, f"at step {p.end - 1}, layer {read.layer}"


def rows_fault(of: Trace) -> str:
    """Describe the first fault: a visible row holds no token read, a row's key is not its token's, or a token is held twice."""
    for read, when in _reads(of):
        is_visible = read.visible.any(0)
        unknown = int(((read.tokens == UNKNOWN) & is_visible).sum())
        if unknown:
            total = read.tokens.numel()
            return f"{when}: {unknown} of {total} rows that it attends to hold the value of none of the tokens read"
        if bool(((read.places == UNPLACED) & (read.tokens != UNKNOWN)).any()):
            token = int(read.tokens[(read.places == UNPLACED) & (read.tokens != UNKNOWN)][0])
            return f"{when}: a row has the value of token {token} and a key that is no rotation of this token's key"
        for head, tokens in enumerate(read.tokens.tolist()):
            known = sorted(t for t in tokens if t != UNKNOWN)
            twice = next((a for a, b in pairwise(known) if a == b), None)
            if twice is not None:
                return f"{when}: KV head {head} holds token {twice} twice"
    return ""


def order_fault(of: Trace) -> str:
    """Return the first block whose own tokens are not the last rows, in order of time, as a causal mask expects."""
    for read, when in _reads(of):
        end = read.first + len(read.queries)
        for tokens in read.tokens.tolist():
            known = [t for t in tokens if t != UNKNOWN]
            if read.queries.shape[0] and known[-len(read.queries) :] != list(range(read.first, end)):
                missing = sorted(set(range(read.first, end)) - set(known))
                if missing:
                    return f"{when}: token {missing[0]} is not among the rows of its own step"
                return f"{when}: the newest rows are not the newest tokens in order, but {known[-len(read.queries) :][:8]}"
    return ""


def mask_fault(of: Trace) -> str:
    """Return the first query that does not see a row that it should, or sees a later token."""
    for read, when in _reads(of):
        queries = torch.arange(read.first, read.first + len(read.queries))[:, None]
        for tokens in read.tokens[:, None]:
            is_past, known = tokens <= queries, tokens != UNKNOWN
            in_window = queries - tokens < (read.window or 2**62)
            hidden = known & is_past & in_window & ~read.visible
            later = known & ~is_past & read.visible
            for wrong, verb in ((hidden, "does not see"), (later, "sees the later")):
                if bool(wrong.any()):
                    query, row = wrong.nonzero()[0].tolist()
                    return f"{when}: the query of token {read.first + query} {verb} token {int(tokens[0, row])}, which is held"
    return ""


def placement(of: Trace) -> tuple[str, str]:
    """Return how the cache places keys, `stream` or `rank`, and the first fault of the placement that holds longest.

    With `stream`, the distance between a query and a key is the distance between their tokens in the stream. With `rank`, it is
    the distance between their ranks among the rows held.
    """
    faults = {mode: _misplaced(of, mode) for mode in ("stream", "rank")}
    mode = max(faults, key=lambda m: (not faults[m][1], faults[m][0]))
    return mode, faults[mode][1]


def _misplaced(of: Trace, mode: str) -> tuple[int, str]:
    """Return the number of reads before the first fault, and the fault; "" if there is none."""
    count = 0
    for count, (read, when) in enumerate(_reads(of)):
        for head, (tokens, places) in enumerate(zip(read.tokens, read.places, strict=True)):
            known = (tokens != UNKNOWN) & (places != UNPLACED)
            tokens, places = tokens[known], places[known]
            ranks = tokens.argsort().argsort()
            for index in (0, len(read.queries) - 1):
                query, distances = read.first + index, read.queries[index] - places
                expected = {"stream": query - tokens, "rank": (tokens <= query).sum() - 1 - ranks}
                wrong = (distances != expected[mode]) & (tokens <= query)
                if bool(wrong.any()):
                    row = int(wrong.nonzero()[0])
                    stream, rank = (int(of_mode[row]) for of_mode in expected.values())
                    text = f"{stream}" if stream == rank else f"{stream} (by position in the stream) or {rank} (by rank)"
                    return count, (
                        f"{when}, KV head {head}: RoPE puts the key of token {int(tokens[row])} at distance "
                        f"{int(distances[row])} of its query, expected {text}"
                    )
    return count, ""


FAULTS: dict[str, Callable[[Trace], str]] = {
    "rows": rows_fault,
    "order": order_fault,
    "mask": mask_fault,
    "positions": lambda of: placement(of)[1],
}


def new_faults(of: Trace, known: Sequence[str]) -> str:
    """Return the first fault of a kind that is not among the known kinds; empty if there is none."""
    if of.error:
        return of.error
    return next((fault for kind, find in FAULTS.items() if kind not in known and (fault := find(of))), "")
