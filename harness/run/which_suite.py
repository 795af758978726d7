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
_TIMED = ("dense", "sink_window", "h2o", "snapkv")  # whose steps are timed
_LATENCY = {"prompt": 16, "rounds": 6, "sittings": 2, "most_sittings": 2, "steps": 8, "precision": 0.1}
_CORE = ("dense", "sink_window", "random", "h2o")
_NEXT = ("snapkv", "expected_attention", "keydiff", "tova")
_STAGES = ("step", "prompt", "questions")
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
        options = [f"--budget {self.budget}", f"--minutes {self.minutes:g}", f"--device {self.device}", f"--dtype {self.dtype}"]
        options += [f"--data {self.data}"] if self.data else []
        return f"# Made by: bench which {self.model} {' '.join(options)}\n"


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
    length = _stream_length(wish, trained)
    text: dict[str, Any] = {"name": "perplexity", "data": "pg19" if wish.data else "prose"}
    fields: dict[str, Any] = {
        "suite": "which",
        "version": 1,
        "description": f"Which policy at {wish.budget} tokens",
        "model": {"id": wish.model, "dtype": wish.dtype},
        "task": [_sized(text, length, _STREAMS) | {"evict": "step"}],
        "capacity": wish.budget,
        "evict": ["step", "prompt"],
        "policies": [],
    }
    notes = _fill_policies(fields, wish.budget)
    core = [cell for cell in _cells(fields) if _tier(cell) == 0]
    core_seconds = sum(row.seconds or 0.0 for row in estimator.estimates(core))
    streams = int(_STREAMS * _CORE_SHARE * left / max(core_seconds, 1e-9))
    streams = _available(text, length, max(1, min(_MOST_STREAMS, streams)), tokenizer, wish)
    text, prompt = _sized(text, length, streams), max(wish.budget + _LEAST_EVICTED // 2, 3 * length // 4)
    fields["task"] = [text | {"evict": "step"}, text | {"prompt": prompt, "evict": "prompt"}]
    if streams < MIN_BLOCKS:
        fit = f"Only {streams} stream{'s' * (streams > 1)} of {length:,} tokens can be read"
        notes.append(f"{fit}: an interval needs {MIN_BLOCKS}. No questions are asked.")
    else:
        kinds = _LOOKUPS if wish.model.startswith("builtin:") else _FACTS
        asking, why = _questions(kinds, wish.budget + _LEAST_EVICTED, trained, tokenizer, streams)
        fields["task"] += asking
        notes += [why] if why else []
    fields["task"].append({"name": "latency", "tokens": wish.budget + _LEAST_EVICTED, **_LATENCY, "evict": "step"})
    return wish.command + yaml.safe_dump(fields, sort_keys=False), notes


def ordered(cells: Sequence[Cell]) -> list[Cell]:
    """Cells in the order in which they are measured: text, prompts, questions, each policy tier a stage later; latency last."""
    wanted = [cell for cell in cells if cell.task.name != "latency" or cell.name in _TIMED]
    return sorted(wanted, key=lambda c: (_stage(c) == len(_STAGES), _stage(c) + _tier(c), _tier(c)))


class Deadline:
    """Decides before each group of cells whether it is still measured."""

    def __init__(
        self, cells: Sequence[Cell], until: float, estimator: Estimator, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`until` is a moment of `clock`. Cells are estimated when the first group's turn comes: all may be finished."""
        self._hopeless = dict[str, None]()  # sentences, in order
        self._late = 0  # cells
        self._cells, self._until, self._clock = cells, until, clock
        self._estimator: Estimator | None = estimator
        self._seconds: dict[str, float] = {}
        self._latency = 0.0  # seconds reserved
        self._began, self._expected = 0.0, 0.0  # of the group that is measured
        self._spent = self._planned = 0.0  # seconds of all groups before

    def wants(self, group: Sequence[Cell], records: Mapping[str, Record]) -> bool:
        """Whether a group fits into the rest of the time, and dense was measured at its task, and did not fail. A `Wanted`."""
        self._estimate()
        now = self._clock()
        if self._expected:
            self._spent, self._planned = self._spent + now - self._began, self._planned + self._expected
            self._expected = 0.0
        dense = next((c for c in self._cells if c.name == "dense" and c.task == group[0].task), group[0])
        if dense not in group and self._is_hopeless(group[0], records.get(dense.id)):
            return False
        pace = self._spent / self._planned if self._planned else 1.0
        seconds, is_latency = sum(self._seconds[cell.id] for cell in group), group[0].task.name == "latency"
        has_reference = dense in group or dense.id in records
        if not has_reference or now + pace * (seconds + (0.0 if is_latency else self._latency)) > self._until:
            self._late += len(group)
            return False
        self._began, self._expected = now, seconds
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
        latency = sum(self._seconds[cell.id] for cell in self._cells if cell.task.name == "latency")
        self._latency = latency if latency <= _LATENCY_SHARE * left else 0.0
        self._estimator = None

    def _is_hopeless(self, cell: Cell, record: Record | None) -> bool:
        """Whether dense, whose record is given, answers so few questions that no policy is measured with a cell's task."""
        metrics = None if record is None else record.measured(QuestionMetrics)
        if metrics is None or metrics.accuracy is None or metrics.accuracy >= FLOOR:
            return False
        name, share = cell.as_json()["task"].get("tasks", cell.task.name), 100 * metrics.accuracy
        note = f"{name} is left out: dense answers only {share:.0f} % of its questions right."
        self._hopeless[note] = None
        return True


def _tier(cell: Cell) -> int:
    return 0 if cell.name in _CORE else 1 if cell.name in _NEXT else 2


def _stage(cell: Cell) -> int:
    """The stage of a cell's task; latency comes after all stages."""
    if cell.task.name == "perplexity":
        return 0 if cell.task.prompt is None else 1
    return 3 if cell.task.name == "latency" else 2


def _policies(budget: int) -> list[list[dict[str, Any]]]:
    """The entries of each policy, the most telling first."""
    sinks: dict[str, dict[str, Any]] = {"sink_window": {"sinks": 4}, "random": {"sinks": 4, "window": budget // 2}}
    names = [*_CORE[1:], *_NEXT, "adakv", "pyramidkv", "cake", "lagkv", "knorm", "rkv"]
    moments = ({"evict": "step", "positions": "cache"}, {"evict": "prompt", "positions": "stream"})
    return [[{"name": "dense"}], *([{"name": name} | sinks.get(name, {}) | moment for moment in moments] for name in names)]


def _fill_policies(fields: dict[str, Any], budget: int) -> list[str]:
    """Add the policies that can serve the budget. Returns a sentence on each of the others."""
    notes = []
    for entry in _policies(budget):
        try:
            _cells(fields | {"policies": entry})
            fields["policies"] += entry
        except UserError as error:
            notes.append(f"{entry[0]['name']} is left out: {str(error).rpartition(': ')[2]}.")
    return notes


def _cells(fields: dict[str, Any]) -> list[Cell]:
    """Cells of a suite."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "which.yaml"
        path.write_text(yaml.safe_dump(fields), encoding="utf-8")
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


def _sized(task: dict[str, Any], length: int, streams: int) -> dict[str, Any]:
    return task | {"tokens": length * streams, "streams": streams}


def _available(text: dict[str, Any], length: int, streams: int, tokenizer: Any, wish: Wish) -> int:
    """Return the number of streams that the text has, at most `streams`.

    Raises:
        UserError: it has less than one.
    """
    perplexity, directory = plugins.task_class("perplexity"), Path(wish.data).expanduser() if wish.data else None
    while True:
        try:
            perplexity.data(perplexity.options(**_sized(text, length, streams)), lambda: tokenizer, directory)
            return streams
        except UserError as error:
            if streams == 1:
                raise UserError(f"{error}; or leave out --data, to read built-in prose") from error
        streams = max(1, streams * 2 // 3)


def _questions(
    names: Sequence[str], least: int, trained: int | None, tokenizer: Any, limit: int
) -> tuple[list[dict[str, Any]], str]:
    """The task with questions whose prompts have at least so many tokens, or why there is none."""
    lm_eval, kinds = plugins.task_class("lm_eval"), []
    for kind in names:
        lengths = lm_eval.data(lm_eval.options(tasks=kind, limit=MIN_BLOCKS), lambda: tokenizer, None).lengths
        kinds += [kind] if min(lengths) >= least and (trained is None or max(lengths) <= trained) else []
    if not kinds:
        return [], f"No questions are asked: our prompts have fewer than {least:,} tokens, or more than the model was trained on."
    some = {"tasks": kinds, "question": ["seen", "unseen"], "limit": limit, "batch": 16}
    return [{"name": "lm_eval"} | some | {"evict": "prompt"}], ""
