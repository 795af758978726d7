"""Chooses what `bench which` measures: a suite whose policies, text and questions fit a model, a budget and a time."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from kvbench.harness.core import plugins
from kvbench.harness.core.durations import about
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.intervals import MIN_BLOCKS
from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.load import device_of, load_tokenizer
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import QuestionMetrics
from kvbench.harness.report.doubts import FLOOR
from kvbench.harness.run.estimate import Speeds
from kvbench.harness.suite import Cell, load
from kvbench.harness.suite.file import ModelSpec

SUITE = "which"
_LEAST_EVICTED = 64  # tokens of a stream beyond the budget
_FEWEST, _PLENTY = 4, 5  # policies at least; times as many streams and questions as an interval needs, at most
_WORTH_A_POLICY = 2  # times as many as needed: below it, a policy less is better
_SHARE = 0.9  # of the time that is planned
_CELL_S = 1.5  # of a cell, before it reads: its method is checked
_ANSWER_TOKENS = 8
_LATENCY = {"rounds": 6, "sittings": 2, "most_sittings": 3, "steps": 8, "precision": 0.1}
_LATENCY_STEPS = 200  # of a cell, warming up included
_ASKED_OFTEN = {"query_every": 4}  # lines of StreamEval
_SOME_LINES, _FEWEST_LINES = 40, 12


@dataclass(frozen=True)
class Asked:
    """What `bench which` is asked.

    Attributes:
        model: a directory, a hub id or `builtin:NAME`.
        budget: tokens per KV head kept between steps.
        minutes: that measuring may take.
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
        """The first line of the suite: a suite made for the same is used again."""
        options = [f"--budget {self.budget}", f"--minutes {self.minutes:g}", f"--device {self.device}", f"--dtype {self.dtype}"]
        options += [f"--data {self.data}"] if self.data else []
        return f"# Made by: bench which {self.model} {' '.join(options)}\n"


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        suite: the fields of a suite's file.
        seconds: that it takes, roughly.
        notes: sentences on what was left out, and why.
    """

    suite: dict[str, Any]
    seconds: float
    notes: Sequence[str]

    @property
    def says(self) -> str:
        """What is measured, and about how long that takes, in a sentence."""
        parts = [f"{len({entry['name'] for entry in self.suite['policies']})} policies"]
        for task in self.suite["task"]:
            match task["name"]:
                case "perplexity":
                    text = "built-in prose" if task["data"] == "prose" else "your text"
                    parts.append(f"{task['streams']} streams of {task['tokens'] // task['streams']:,} tokens of {text}")
                case "lm_eval":
                    parts.append(f"{task['limit']} questions of {' and '.join(task['tasks'])}, seen and unseen")
                case "streameval":
                    parts.append(f"StreamEval in {task['streams']} streams")
                case "latency":
                    parts.append("milliseconds a token")
        return f"Measured are {'; '.join(parts)}: {about(self.seconds)}, without loading."

    def write(self, path: Path, command: str) -> None:
        """Write the suite's file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(command + yaml.safe_dump(self.suite, sort_keys=False), encoding="utf-8")


def plan(asked: Asked) -> Plan:
    """Choose policies, tasks and sizes by a short trial of each policy.

    Raises:
        UserError: the model can't be loaded or has no tokenizer; it can't read more than the budget; the text is too short; or
            the least that has an interval takes longer than the time.
    """
    device = device_of(asked.device)
    spec = ModelSpec.model_validate({"id": asked.model, "dtype": asked.dtype})
    tokenizer = load_tokenizer(model_directory(spec.id, spec.revision, spec.pickle))
    speeds = Speeds.of(spec, device)
    length = _stream_length(asked, speeds.training_length)
    text, most = _text(asked, length, tokenizer)
    asking, tokens, notes = _questions(asked, length, speeds.training_length, tokenizer)
    many = {"side_by_side": "auto"} if device.type == "cuda" else {}
    least: dict[str, Any] = {
        "suite": SUITE, "version": 1, "description": f"Which policy at {asked.budget} tokens",
        "model": {"id": asked.model, "dtype": asked.dtype},
        "task": [text | many, *asking, {"name": "latency", "tokens": length, "prompt": 64, **_LATENCY, "evict": "step"}],
        "capacity": asked.budget, "evict": ["step", "prompt"], "policies": [],
    }  # fmt: skip
    entries, costs = [], []
    for entry in _policies(asked.budget):
        try:
            costs.append(_cost(least | {"policies": entry}, speeds, tokens))
            entries.append(entry)
        except UserError as error:  # the budget is too small for its window
            notes.append(f"{entry[0]['name']} is left out: {str(error).rpartition(': ')[2]}.")
    budget = 60 * asked.minutes * _SHARE
    while len(entries) > _FEWEST and _times(costs, budget) < _WORTH_A_POLICY:
        entries, costs = entries[:-1], costs[:-1]
    times = min(_PLENTY, _times(costs, budget))
    seconds = sum(c.fixed + max(1.0, times) * c.growing for c in costs)
    if times < 1:
        raise UserError(
            f"--minutes {asked.minutes:g}: {MIN_BLOCKS} streams of {length:,} tokens and as many questions, under {len(entries)} "
            f"policies, take {about(seconds / _SHARE)} on this machine"
        )
    grown = [_grown(task, min(times, most) if task["name"] == "perplexity" else times) for task in least["task"]]
    suite = least | {"task": grown, "policies": [one for entry in entries for one in entry]}
    return Plan(suite, seconds, notes)


def without_hopeless(path: Path, records: Sequence[Record]) -> list[str]:
    """Take the tasks that dense itself can't do out of a suite's file. Returns a sentence on each."""
    command, _, text = path.read_text(encoding="utf-8").partition("\n")
    suite, notes = yaml.safe_load(text), []
    for record in records:
        metrics, options = record.measured(QuestionMetrics), record.cell.options
        if metrics is None or metrics.accuracy is None or metrics.accuracy >= FLOOR:
            continue
        name = options.get("tasks", record.cell.task.name)
        said = (
            f"Dense answers {100 * metrics.accuracy:.0f} % of {name} right, so its answers say little about policies: left out."
        )
        notes += [said] if said not in notes else []
        for task in suite["task"]:
            if task["name"] == "lm_eval" == record.cell.task.name:
                task["tasks"] = [kind for kind in task["tasks"] if kind != name]
        suite["task"] = [t for t in suite["task"] if t.get("tasks") != [] and t["name"] != name]
    Plan(suite, 0.0, ()).write(path, f"{command}\n")
    return notes


def _policies(budget: int) -> list[list[dict[str, Any]]]:
    """The entries of each policy, the most wanted first."""
    names: list[dict[str, Any]] = [
        {"name": "sink_window", "sinks": 4},
        {"name": "random", "sinks": 4, "window": budget // 2},
        *({"name": name} for name in ("snapkv", "h2o", "keydiff", "tova", "expected_attention", "adakv", "pyramidkv")),
        *({"name": name} for name in ("rkv", "cake", "lagkv", "knorm")),
    ]
    moments = ({"evict": "step", "positions": "cache"}, {"evict": "prompt", "positions": "stream"})
    return [[{"name": "dense"}], *([name | moment for moment in moments] for name in names)]


def _stream_length(asked: Asked, trained: int | None) -> int:
    """Tokens of a stream: twice the budget, or what the model was trained on.

    Raises:
        UserError: that is no more than the budget.
    """
    wanted = asked.budget + max(asked.budget, 4 * _LEAST_EVICTED)
    length = wanted if trained is None else min(wanted, trained)
    if length < asked.budget + _LEAST_EVICTED:
        raise UserError(
            f"--budget {asked.budget}: {asked.model} was trained on {length:,} tokens, so such a cache has next to nothing to "
            f"evict; give at most {length - _LEAST_EVICTED}"
        )
    return length


def _text(asked: Asked, length: int, tokenizer: Any) -> tuple[dict[str, Any], int]:
    """The task of the text, with as many streams as an interval needs; and how many times as many it has.

    Raises:
        UserError: the text has too few tokens for them.
    """
    perplexity, directory = plugins.task_class("perplexity"), Path(asked.data).expanduser() if asked.data else None
    task = {"name": "perplexity", "data": "pg19" if asked.data else "prose", "tokens": MIN_BLOCKS * length, "streams": MIN_BLOCKS}
    for times in range(_PLENTY, 0, -1):
        try:
            perplexity.data(perplexity.options.model_validate(_grown(task, times)), lambda: tokenizer, directory)
            return task | {"evict": "step"}, times
        except UserError as error:
            problem = error
    raise UserError(f"{problem}; or leave out --data, to read built-in prose") from problem


def _questions(asked: Asked, length: int, trained: int | None, tokenizer: Any) -> tuple[list[dict[str, Any]], int, list[str]]:
    """The tasks with questions, the mean tokens of a prompt or stream, and what is to be said about them."""
    kinds = {kind: _prompts(kind, tokenizer) for kind in ("kvbench_once", "kvbench_needle")}
    least = asked.budget + _LEAST_EVICTED
    usable = [kind for kind, tokens in kinds.items() if tokens[0] >= least and (trained is None or tokens[-1] <= trained)]
    if usable:
        return [_lm_eval(usable)], sum(sum(kinds[kind]) for kind in usable) // sum(len(kinds[kind]) for kind in usable), []
    if all(tokens[0] < least for tokens in kinds.values()):
        why = f"Our questions have only {min(tokens[0] for tokens in kinds.values()):,} tokens"
        if find_spec("wonderwords"):  # of RULER's extra
            ruler = _lm_eval(["niah_single_1"]) | {"max_seq_length": length}
            return [ruler], length, [f"{why}: RULER's needle is asked for instead, in {length:,}."]
    else:
        why = "Our questions have more tokens than the model was trained on"
    lines = _lines(length, tokenizer)
    if lines < _FEWEST_LINES:
        return [], 0, [f"{why}, and no others fit: none are asked."]
    stream = {"name": "streameval", "lines": lines, "distance": [lines // 3, 3 * lines // 4]} | _ASKED_OFTEN
    return [stream | {"streams": MIN_BLOCKS, "evict": "step"}], length, [f"{why}: lines of a record are asked for instead."]


def _lines(length: int, tokenizer: Any) -> int:
    """Lines of StreamEval's record in a stream of so many tokens, its questions included."""
    streameval = plugins.task_class("streameval")
    some = streameval.options.model_validate({"lines": _SOME_LINES, "distance": 1} | _ASKED_OFTEN)
    return int(length * _SOME_LINES / streameval.data(some, lambda: tokenizer, None).tokens)


def _lm_eval(tasks: list[str]) -> dict[str, Any]:
    asked = {"question": ["seen", "unseen"], "limit": MIN_BLOCKS, "batch": 16}
    return {"name": "lm_eval", "tasks": tasks} | asked | {"evict": "prompt"}


def _prompts(kind: str, tokenizer: Any) -> list[int]:
    """Tokens of some prompts of a task of lm-eval, the shortest first."""
    lm_eval = plugins.task_class("lm_eval")
    return sorted(lm_eval.data(lm_eval.options(tasks=kind, limit=MIN_BLOCKS), lambda: tokenizer, None).lengths)


@dataclass(frozen=True)
class _Cost:
    """Seconds of a policy: those that stay, and those that grow with the streams and questions."""

    fixed: float
    growing: float


def _cost(suite: dict[str, Any], speeds: Speeds, prompt: int) -> _Cost:
    """Of all cells of a suite with one policy; its prompts have `prompt` tokens."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "which.yaml"
        Plan(suite, 0.0, ()).write(path, "")
        cells = load(path)[1]
    fixed, growing = _CELL_S * len(cells), 0.0
    for cell in cells:
        if cell.task.name == "latency":
            fixed += _LATENCY_STEPS / (speeds.tokens_per_second(cell, 1) or 1.0)
        else:
            growing += _tokens(cell, prompt) / (speeds.tokens_per_second(cell, speeds.side_by_side) or 1.0)
    return _Cost(fixed, growing)


def _tokens(cell: Cell, prompt: int) -> int:
    if cell.task.name == "lm_eval":
        return MIN_BLOCKS * (prompt + _ANSWER_TOKENS * 10)  # an answer is read step by step
    return int(cell.task.tokens if cell.task.name == "perplexity" else MIN_BLOCKS * prompt)


def _times(costs: Sequence[_Cost], budget: float) -> float:
    """How many times the least that has an interval fits into the time."""
    return (budget - sum(c.fixed for c in costs)) / max(1e-9, sum(c.growing for c in costs))


def _grown(task: dict[str, Any], times: float) -> dict[str, Any]:
    """The task with more streams, or questions."""
    streams = int(MIN_BLOCKS * times)
    if task["name"] == "perplexity":
        return task | {"streams": streams, "tokens": task["tokens"] // MIN_BLOCKS * streams}
    if task["name"] == "streameval":
        return task | {"streams": streams}
    return task | {"limit": streams} if task["name"] == "lm_eval" else task
