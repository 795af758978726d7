"""Keep maps: record the positions that every layer and KV head keeps at chosen steps, and convert a map for replay.

The task's decoder is wrapped. The wrapper splits blocks at the chosen steps, which changes numbers by no more than rounding, and
waits for the device only there.

Axis letters: B streams, T tokens, V vocabulary, K tokens whose logits are returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kvbench.harness.core.contestants import Contestant
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import atomic_write, new_partial
from kvbench.harness.engine.decoder import Decoder, read_blocks
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.records import Record, RecordStore
from kvbench.harness.report.keep_map import SUFFIX, Map, evictions, replayable_capacities
from kvbench.harness.run.prepare import Prepared
from kvbench.harness.run.request import KeepSteps
from kvbench.harness.tasks.task import Job

_POSITIONS_PER_ROW_GROUP = 2**20


def mapped_steps(item: Prepared, steps: KeepSteps) -> list[int] | None:
    """Return the steps of a cell's keep map; None if the policy has no cache of ours, or the task reads no plain streams.

    Raises:
        UserError: the cell's streams have no such step.
    """
    tokens = item.task.tokens_read(item.cell.task, item.data)
    policy = item.cell.policy
    return None if tokens is None or not policy.caches or isinstance(policy, Contestant) else steps.of(tokens)


def refuse_unmappable(prepared: Sequence[Prepared], steps: KeepSteps) -> None:
    """Refuse `--trace kept` before anything is measured.

    Raises:
        UserError: no cell can have a keep map, or a chosen step lies beyond a stream.
    """
    if all(mapped_steps(item, steps) is None for item in prepared):
        names = ", ".join(dict.fromkeys(item.cell.task.name for item in prepared))
        mapped = "only perplexity, and right traces (trace with teacher: true), under policies with a cache have keep maps"
        raise UserError(f"--trace kept: {mapped}; this runs {names}")


class KeepMapWriter:
    """Writer of a keep map: a parquet file with a row per stream, chosen step, layer and KV head."""

    def __init__(self, path: Path, steps: Sequence[int]) -> None:
        """Open the file."""
        import pyarrow as pa
        from pyarrow import parquet

        self._path = path
        self._schema = pa.schema(
            [
                ("stream", pa.int32()),
                ("step", pa.int32()),
                ("layer", pa.int16()),
                ("head", pa.int16()),
                ("positions", pa.list_(pa.int32())),
            ]
        )
        self._writer = parquet.ParquetWriter(
            path,
            self._schema,
            compression="zstd",
            use_dictionary=["stream", "step", "layer", "head"],
            column_encoding={"positions.list.element": "DELTA_BINARY_PACKED"},
        )
        self._table: Any = pa.table
        self._rows: list[tuple[int, int, int, int, list[int]]] = []
        self._positions = 0  # number of positions in these rows
        self._left = set(steps)  # steps that are not recorded yet

    def recorded(self, job: Job) -> Job:
        """Return the job with a decoder that writes this map."""

        def opened(*args: Any) -> Decoder:
            decoder = job.open(*args)
            assert isinstance(decoder, CachedDecoder), "the policy keeps a cache"
            return cast(Decoder, RecordingDecoder(decoder, self))

        return dataclasses.replace(job, open=opened)

    def cuts(self, first: int, stop: int) -> list[int]:
        """Return the chosen steps in a block that holds the steps from `first` to `stop` - 1."""
        return sorted(step for step in self._left if first <= step < stop)

    def add(self, step: int, kept: Sequence[Sequence[Sequence[list[int]]]]) -> None:
        """Record the positions kept after a step, by layer, stream and KV head."""
        self._left.remove(step)
        for layer, of_layer in enumerate(kept):
            for stream, of_stream in enumerate(of_layer):
                for head, positions in enumerate(of_stream):
                    self._rows.append((stream, step, layer, head, positions))
                    self._positions += len(positions)
        if self._positions >= _POSITIONS_PER_ROW_GROUP:
            self._flush()

    def finished(self) -> Path:
        """Complete the file, and return its path."""
        self._flush()
        self._writer.close()
        return self._path

    def discard(self) -> None:
        """Remove the file, unless it was moved to its place."""
        self._writer.close()
        self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        columns = zip(*self._rows, strict=True) if self._rows else [()] * len(self._schema)
        self._writer.write_table(self._table([list(c) for c in columns], schema=self._schema))
        self._rows, self._positions = [], 0


class RecordingDecoder:
    """Decoder of streams of equal length that records the positions kept after chosen steps. Its forks record nothing."""

    def __init__(self, decoder: CachedDecoder, keep_map: KeepMapWriter) -> None:
        self._decoder, self._map = decoder, keep_map
        self._tokens_read = 0  # tokens of each stream

    def __call__(self, tokens: Tensor, valid: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """Read a block; see `Decoder`. `keep` must be in ascending order. [B, T] int64 -> [B, T or K, V]."""
        if valid is not None:
            raise ValueError("a keep map needs streams of equal length")
        first, count = self._tokens_read, tokens.shape[1]
        cuts = [step + 1 - first for step in self._map.cuts(first, first + count)]
        parts = []
        for start, stop in _parts(cuts, count):
            part = keep if keep is None or stop - start == count else keep[(keep >= start) & (keep < stop)] - start
            parts.append(self._decoder(tokens[:, start:stop], keep=part))
            if stop in cuts:
                self._map.add(first + stop - 1, self._decoder.kept())
        self._tokens_read += count
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def read_prompt(self, tokens: Tensor, block: int, once: bool = False) -> Tensor:
        """Read the prompt; see `Decoder`. A prompt that is cut at its end has no kept positions before its end."""
        if once or self._decoder.config.evict == "prompt":
            logits = self._decoder.read_prompt(tokens, block, once)
            self._tokens_read = tokens.shape[1]
            for step in self._map.cuts(0, self._tokens_read):
                self._map.add(step, self._decoder.kept() if step == self._tokens_read - 1 else [])
            return logits
        self._decoder.begin_prompt(tokens.shape[1])
        return read_blocks(cast(Decoder, self), tokens, block)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped decoder. A fork therefore records nothing."""
        return getattr(self._decoder, name)


def _parts(cuts: Sequence[int], count: int) -> Iterator[tuple[int, int]]:
    """Return the (start, stop) of each part of a block of `count` tokens that is cut at these places."""
    ends = [*cuts] if cuts and cuts[-1] == count else [*cuts, count]
    return zip([0, *ends], ends, strict=False)


def open_map(item: Prepared, store: RecordStore, keep: KeepSteps) -> KeepMapWriter | None:
    """Open the keep map of a cell before its measurement; None if the cell can't have a keep map.

    Raises:
        OSError: the folder of the record can't be written to.
    """
    steps = mapped_steps(item, keep)
    return None if steps is None else KeepMapWriter(new_partial(store.trace_path(item.record, SUFFIX)), steps)


def write_replay(record: Record, kept: Map, path: Path) -> None:
    """Write the table of evictions that the policy `replay` reads.

    Raises:
        UserError: the map can't be replayed.
    """
    if kept.stream.any():
        raise UserError("only a map of one stream can be replayed: measure it with --set streams=1")
    evicted = evictions(kept)
    table = {"evicted": torch.from_numpy(evicted), "capacities": replayable_capacities(record, evicted)}
    with atomic_write(path, "wb") as file:
        torch.save(table, file)
