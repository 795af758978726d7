"""Chooses what `bench which` measures: cells in order, the most telling first, as many as the time allows."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.intervals import MIN_BLOCKS
from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.load import load_tokenizer
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import QuestionMetrics
from kvbench.harness.report.doubts import FLOOR
from kvbench.harness.run.estimate import Estimator
from kvbench.harness.suite import Cell, load
from kvbench.harness.suite.file import ModelSpec

TRIAL_SHARE = 0.15  # of the time, after which no more policies are tried
_LEAST_EVICTED = 64  # tokens of a stream beyond the budget
_STREAMS, _MOST_STREAMS = 24, 100  # a few more than an interval needs; and enough
_CORE_SHARE, _LATENCY_SHARE = 0.5, 0.1  # of the time: for the text under the first policies; for latency
_LATENCY = {"prompt": 16, "rounds": 6, "sittings": 2, "most_sittings": 2, "steps": 8, "precision": 0.1, "evict": "step"}
_TIMED = ("dense", "sink_window", "h2o", "snapkv")  # whose steps are timed
_TIERS = (  # the most telling policies first
    ("dense", "sink_window", "random", "h2o"),
    ("snapkv", "expected_attention", "keydiff", "tova"),
    ("adakv", "pyramidkv", "cake", "lagkv", "knorm", "rkv"),
)
_MOMENTS = ({"evict": "step", "positions": "cache"}, {"evict": "prompt", "positions": "stream"})
_LOOKUPS = ("kvbench_once", "kvbench_needle")  # questions that built-in models were trained for
_FACTS = ("kvbench_facts_popular", "kvbench_facts_needle")  # questions that a pretrained model can complete


@dataclass(frozen=True)
class Wish:
    """The arguments of `bench which`.

    Attributes:
        model: a directory, a hub id or `builtin:NAME`.
        budget: tokens per KV head kept between steps.
        minutes: that the command may take.
        data: directory of the text; built-in prose when None.
        device: auto, cpu, cuda, cuda:1.
        dtype: of the weights and the cache.
    """

    model: str
    budget: int
    minutes: float
    data: str | None
    device: str
    dtype: str

    @property
    def command(self) -> str:
        """The first line of the suite: a suite made for the same wish is used again."""
        options = f"--budget {self.budget} --minutes {self.minutes:g} --device {self.device} --dtype {self.dtype}"
        return f"# Made by: bench which {self.model} {options}{f' --data {self.data}' if self.data else ''}\n"


def suite_for(wish: Wish, estimator: Estimator, left: float) -> tuple[str, list[str]]:
    """Choose streams and questions that fit into the `left` seconds.

    Returns the content of a suite's file, and sentences on what is left out, and why.

    Raises:
        UserError: the model is not available or has no tokenizer, it can't read more than the budget, or there is no text.
    """
    spec = ModelSpec(id=wish.model, dtype=wish.dtype)
    tokenizer = load_tokenizer(model_directory(spec.id, spec.revision, spec.pickle, spec.gguf_file))
    speeds = estimator.speeds(spec)
    trained = None if speeds is None else speeds.training_length
    length, least = _stream_length(wish, trained), wish.budget + _LEAST_EVICTED

    def text(streams: int, **more: Any) -> dict[str, Any]:
        name = "pg19" if wish.data else "prose"
        return {"name": "perplexity", "data": name, "tokens": length * streams, "streams": streams} | more

    fields: dict[str, Any] = {
        "suite": "which",
        "version": 1,
        "description": f"Which policy at {wish.budget} tokens",
        "model": {"id": wish.model, "dtype": wish.dtype},
        "task": [text(_STREAMS, evict="step")],
        "capacity": wish.budget,
        "evict": ["step", "prompt"],
    }
    fields["policies"], notes = _policies(fields, wish.budget)
    core_seconds = sum(row.seconds or 0.0 for row in estimator.estimates([c for c in _cells(fields) if _tier(c) == 0]))
    streams = int(_STREAMS * _CORE_SHARE * left / max(core_seconds, 1e-9))
    streams = _available(text, max(1, min(_MOST_STREAMS, streams)), tokenizer, wish.data)
    prompt = max(wish.budget + _LEAST_EVICTED // 2, 3 * length // 4)
    fields["task"] = [text(streams, evict="step"), text(streams, prompt=prompt, evict="prompt")]
    if streams < MIN_BLOCKS:
        fit = f"Only {streams} stream{'s' * (streams > 1)} of {length:,} tokens can be read"
        notes.append(f"{fit}: an interval needs {MIN_BLOCKS}. No questions are asked.")
    elif kinds := _questions(_LOOKUPS if wish.model.startswith("builtin:") else _FACTS, least, trained, tokenizer):
        some = {"tasks": kinds, "question": ["seen", "unseen"], "limit": streams, "batch": 16}
        fields["task"].append({"name": "lm_eval"} | some | {"evict": "prompt"})
    else:
        long = "or more than the model was trained on"
        notes.append(f"No questions are asked: our prompts have fewer than {least:,} tokens, {long}.")
    fields["task"].append({"name": "latency", "tokens": least} | _LATENCY)
    return wish.command + yaml.safe_dump(fields, sort_keys=False), notes


def ordered(cells: Sequence[Cell]) -> list[Cell]:
    """Cells in the order in which they are measured: text, prompts, questions, each policy tier a stage later; latency last."""

    def place(cell: Cell) -> tuple[bool, int, int]:
        stage = 2 if cell.task.name != "perplexity" else 0 if cell.task.prompt is None else 1
        return _is_latency(cell), stage + _tier(cell), _tier(cell)

    return sorted((cell for cell in cells if not _is_latency(cell) or cell.name in _TIMED), key=place)


class Deadline:
    """Decides before each group of cells whether it is still measured."""

    def __init__(
        self, cells: Sequence[Cell], until: float, estimator: Estimator, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`until` is a moment of `clock`. Cells are estimated when the first group's turn comes: all may be finished."""
        self._cells, self._until, self._clock = cells, until, clock
        self._estimator: Estimator | None = estimator
        self._seconds: dict[str, float] = {}  # of each cell, estimated
        self._latency = 0.0  # seconds reserved
        self._began, self._planned = 0.0, 0.0  # of the groups before: the moment of the first, and their estimated seconds
        self._late = 0  # cells
        self._hopeless = dict[str, None]()  # sentences, in order

    def wants(self, group: Sequence[Cell], records: Mapping[str, Record]) -> bool:
        """Whether a group fits into the rest of the time, and dense was measured at its task, and did not fail. A `Wanted`."""
        self._estimate()
        dense = next((c for c in self._cells if c.name == "dense" and c.task == group[0].task), group[0])
        if dense not in group and self._is_hopeless(group[0], records.get(dense.id)):
            return False
        now, seconds = self._clock(), sum(self._seconds[cell.id] for cell in group)
        pace = (now - self._began) / self._planned if self._planned else 1.0
        reserved = 0.0 if _is_latency(group[0]) else self._latency
        has_reference = dense in group or dense.id in records
        if not has_reference or now + pace * (seconds + reserved) > self._until:
            self._late += len(group)
            return False
        self._planned += seconds
        return True

    @property
    def notes(self) -> list[str]:
        """Sentences on what was left out: tasks that dense can't do, and cells that did not fit into the time."""
        late = f"{self._late} of {len(self._cells)} cells did not fit into the time; the same command measures them."
        return [*self._hopeless, *([late] if self._late else [])]

    def _estimate(self) -> None:
        """Estimate all cells, once; then free the estimator's model."""
        if self._estimator is None:
            return
        left = self._until - self._clock()
        self._seconds = {row.cell.id: row.seconds or 0.0 for row in self._estimator.estimates(self._cells)}
        self._seconds[self._cells[0].id] += self._estimator.load_seconds
        latency = sum(self._seconds[cell.id] for cell in self._cells if _is_latency(cell))
        self._latency = latency if latency <= _LATENCY_SHARE * left else 0.0
        self._estimator, self._began = None, self._clock()

    def _is_hopeless(self, cell: Cell, record: Record | None) -> bool:
        """Whether dense, whose record is given, answers so few questions that no policy is measured with a cell's task."""
        metrics = None if record is None else record.measured(QuestionMetrics)
        if metrics is None or metrics.accuracy is None or metrics.accuracy >= FLOOR:
            return False
        name, share = cell.as_json()["task"].get("tasks", cell.task.name), 100 * metrics.accuracy
        self._hopeless[f"{name} is left out: dense answers only {share:.0f} % of its questions right."] = None
        return True


def _tier(cell: Cell) -> int:
    return next((tier for tier, names in enumerate(_TIERS) if cell.name in names), len(_TIERS) - 1)


def _is_latency(cell: Cell) -> bool:
    return cell.task.name == "latency"


def _policies(fields: Mapping[str, Any], budget: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The entries of the policies that can serve the budget, and a sentence on each of the others."""
    sinks: dict[str, dict[str, Any]] = {"sink_window": {"sinks": 4}, "random": {"sinks": 4, "window": budget // 2}}
    chosen: list[dict[str, Any]] = []
    notes = []
    for name in (name for tier in _TIERS for name in tier):
        entries = [{"name": name} | sinks.get(name, {}) | moment for moment in (_MOMENTS if name != "dense" else [{}])]
        try:
            _cells({**fields, "policies": entries})
            chosen += entries
        except UserError as error:
            notes.append(f"{name} is left out: {str(error).rpartition(': ')[2]}.")
    return chosen, notes


def _cells(fields: Mapping[str, Any]) -> list[Cell]:
    """Cells of a suite."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "which.yaml"
        path.write_text(yaml.safe_dump(dict(fields)), encoding="utf-8")
        return load(path)[1]


def _stream_length(wish: Wish, trained: int | None) -> int:
    """Tokens of a stream: twice the budget, or what the model was trained on.

    Raises:
        UserError: that is no more than the budget.
    """
    length = wish.budget + max(wish.budget, 4 * _LEAST_EVICTED)
    length = length if trained is None else min(length, trained)
    if length < wish.budget + _LEAST_EVICTED:
        raise UserError(
            f"--budget {wish.budget}: {wish.model} was trained on {length:,} tokens, so almost no token would be "
            f"evicted; give at most {length - _LEAST_EVICTED}"
        )
    return length


def _available(text: Callable[[int], dict[str, Any]], streams: int, tokenizer: Any, data: str | None) -> int:
    """Return the number of streams that the text has, at most `streams`.

    Raises:
        UserError: it has less than one.
    """
    perplexity, directory = plugins.task_class("perplexity"), Path(data).expanduser() if data else None
    while True:
        try:
            perplexity.data(perplexity.options(**text(streams)), lambda: tokenizer, directory)
            return streams
        except UserError as error:
            if streams == 1:
                raise UserError(f"{error}; or leave out --data, to read built-in prose") from error
        streams = max(1, streams * 2 // 3)


def _questions(names: Sequence[str], least: int, trained: int | None, tokenizer: Any) -> list[str]:
    """The kinds of questions whose prompts have at least so many tokens, and no more than the model was trained on."""
    lm_eval, kinds = plugins.task_class("lm_eval"), []
    for kind in names:
        lengths = lm_eval.data(lm_eval.options(tasks=kind, limit=MIN_BLOCKS), lambda: tokenizer, None).lengths
        kinds += [kind] if min(lengths) >= least and (trained is None or max(lengths) <= trained) else []
    return kinds
