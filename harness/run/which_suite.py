"""Choose the cells that `bench which` measures: the most informative cells first, as many as the time allows."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.intervals import MIN_BLOCKS
from kvbench.harness.core.parameters import policy_from
from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.load import load_tokenizer
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import QuestionMetrics
from kvbench.harness.report.closing import WHICH
from kvbench.harness.report.doubts import FLOOR
from kvbench.harness.run.estimate import Estimator
from kvbench.harness.suite import Cell, ModelSpec, load

TRIAL_SHARE = 0.15  # of the time, after which no more policies are tried
_LEAST_EVICTED = 64  # tokens of a stream beyond the budget
_STREAMS, _MOST_STREAMS = 24, 100  # slightly more than an interval needs, and the maximum
_CORE_SHARE = 0.5  # of the time: for the text under the first policies
_TIERS = (  # the most informative policies first
    ("dense", "sink_window", "random", "h2o"),
    ("snapkv", "expected_attention", "keydiff", "tova"),
    ("adakv", "pyramidkv", "cake", "lagkv", "knorm", "rkv"),
)
_MOMENTS = ({"evict": "step", "positions": "cache"}, {"evict": "prompt", "positions": "stream"})
_LOOKUPS = ("kvbench_once", "kvbench_needle")  # questions that built-in models were trained for
_FACTS = ("kvbench_facts_popular", "kvbench_facts_needle")  # questions that a pretrained model can complete


def suite_for(model: ModelSpec, budget: int, data: str | None, estimator: Estimator, left: float) -> tuple[str, list[str]]:
    """Choose streams and questions that fit into the `left` seconds, for policies that keep `budget` tokens per KV head.

    The text is read from the directory `data`; None reads built-in prose. Returns the content of a suite file, and sentences on
    policies and questions that are left out, with reasons.

    Raises:
        UserError: the model is not available, has no tokenizer or can't read more than the budget; or there is no text.
    """
    tokenizer = load_tokenizer(model_directory(model.id, model.revision, model.pickle, model.gguf_file))
    speeds = estimator.speeds(model)
    trained = (speeds and speeds.training_length) or sys.maxsize
    least = budget + _LEAST_EVICTED
    if trained < least:
        most = f"give at most {trained - _LEAST_EVICTED}"
        raise UserError(
            f"--budget {budget}: {model.id} was trained on {trained:,} tokens, so almost none would be evicted; {most}"
        )
    length = min(trained, budget + max(budget, 4 * _LEAST_EVICTED))

    def text(streams: int, **more: Any) -> dict[str, Any]:
        name = "pg19" if data else "prose"
        return {"name": "perplexity", "data": name, "tokens": length * streams, "streams": streams} | more

    perplexity, directory = plugins.task_class("perplexity"), Path(data).expanduser() if data else None
    policies, notes = _policies(budget)
    fields = {"suite": WHICH, "version": 1, "description": f"Which policy at {budget} tokens"}
    fields |= {"model": {"id": model.id, "dtype": model.dtype}, "capacity": budget, "evict": ["step", "prompt"]}
    core_seconds = _core_seconds(fields | {"task": [text(_STREAMS, evict="step")], "policies": policies}, estimator)
    streams = max(1, min(_MOST_STREAMS, int(_STREAMS * _CORE_SHARE * left / max(core_seconds, 1e-9))))
    while True:
        try:
            perplexity.data(perplexity.options(**text(streams)), lambda: tokenizer, directory)
            break
        except UserError as error:  # the text is too short
            if streams == 1:
                raise UserError(f"{error}; or leave out --data, to read built-in prose") from error
            streams = streams * 2 // 3
    prompt = max(budget + _LEAST_EVICTED // 2, 3 * length // 4)
    tasks = [text(streams, evict="step"), text(streams, prompt=prompt, evict="prompt")]
    if streams < MIN_BLOCKS:
        notes.append(f"An interval needs {MIN_BLOCKS} streams of {length:,} tokens; there are {streams}. No questions are asked.")
    elif kinds := _questions(_LOOKUPS if model.id.startswith("builtin:") else _FACTS, least, trained, tokenizer):
        some = {"tasks": kinds, "question": ["seen", "unseen"], "limit": streams, "batch": 16}
        tasks.append({"name": "lm_eval"} | some | {"evict": "prompt"})
    else:
        notes.append(f"No questions are asked: ours have fewer than {least:,} tokens, or more than the model was trained on.")
    return yaml.safe_dump(fields | {"task": tasks, "policies": policies}, sort_keys=False), notes


def ordered(cells: Sequence[Cell]) -> list[Cell]:
    """Return cells in the order of measurement: text, prompts, questions; each policy tier comes a stage later."""

    def place(cell: Cell) -> tuple[int, int]:
        stage = 2 if cell.task.name != "perplexity" else 0 if cell.task.prompt is None else 1
        return stage + _tier(cell), _tier(cell)

    return sorted(cells, key=place)


class Deadline:
    """Decides before each group of cells whether to measure the group."""

    def __init__(
        self, cells: Sequence[Cell], until: float, estimator: Estimator, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Store the cells. They are estimated only when the first group's turn comes, because all groups may be finished.

        until: moment of `clock`.
        """
        self._cells, self._until, self._clock = cells, until, clock
        self._estimator: Estimator | None = estimator
        self._seconds: dict[str, float] = {}  # estimated seconds by cell id
        self._began, self._planned = 0.0, 0.0  # start of the first group, and estimated seconds of all groups so far
        self._left_out = Counter[str]()  # number of cells, by reason

    def wants(self, group: Sequence[Cell], records: Mapping[str, Record]) -> bool:
        """Return whether a group fits into the remaining time, and dense was measured at its task and can solve it."""
        if self._estimator is not None:
            self._seconds = {row.cell.id: row.seconds or 0.0 for row in self._estimator.estimates(self._cells)}
            self._seconds[self._cells[0].id] += self._estimator.load_seconds
            self._estimator, self._began = None, self._clock()  # frees its model
        dense = next((c for c in self._cells if c.name == "dense" and c.task == group[0].task), group[0])
        reference = None if dense in group else records.get(dense.id)
        answers = None if reference is None else reference.measured(QuestionMetrics)
        seconds, now = sum(self._seconds[cell.id] for cell in group), self._clock()
        pace = (now - self._began) / self._planned if self._planned else 1.0
        if answers is not None and answers.accuracy is not None and answers.accuracy < FLOOR:
            self._left_out[f"are left out: dense answers less than {100 * FLOOR:.0f} % of their questions right"] += len(group)
        elif (reference is None and dense not in group) or now + pace * seconds > self._until:
            self._left_out["did not fit into the time; the same command measures them"] += len(group)
        else:
            self._planned += seconds
            return True
        return False

    @property
    def notes(self) -> list[str]:
        """Sentences on the cells that were left out."""
        return [f"{count} of {len(self._cells)} cells {reason}." for reason, count in self._left_out.items()]


def _tier(cell: Cell) -> int:
    return next((tier for tier, names in enumerate(_TIERS) if cell.name in names), len(_TIERS) - 1)


def _policies(budget: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the entries of the policies that can serve the budget, and a sentence on each policy that can't."""
    sinks: dict[str, dict[str, Any]] = {"sink_window": {"sinks": 4}, "random": {"sinks": 4, "window": "half"}}
    chosen, notes = [], []
    for name in (name for tier in _TIERS for name in tier):
        given = sinks.get(name, {})
        try:
            policy = policy_from(name, given)
            policy.bind(budget)
            chosen += [{"name": name} | given | moment for moment in (_MOMENTS if policy.evicts else [{}])]
        except ValueError as error:
            notes.append(f"{name} is left out: {str(error).rpartition(': ')[2]}.")
    return chosen, notes


def _core_seconds(fields: Mapping[str, Any], estimator: Estimator) -> float:
    """Estimate the seconds of a suite's cells under the first policies."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "which.yaml"
        path.write_text(yaml.safe_dump(dict(fields)), encoding="utf-8")
        cells = [cell for cell in load(path)[1] if _tier(cell) == 0]
    return sum(row.seconds or 0.0 for row in estimator.estimates(cells))


def _questions(names: Sequence[str], least: int, trained: int, tokenizer: Any) -> list[str]:
    """Return the kinds of questions whose prompts have at least `least` and at most `trained` tokens."""
    lm_eval, kinds = plugins.task_class("lm_eval"), []
    for kind in names:
        lengths = lm_eval.data(lm_eval.options(tasks=kind, limit=MIN_BLOCKS), lambda: tokenizer, None).lengths
        kinds += [kind] if min(lengths) >= least and max(lengths) <= trained else []
    return kinds
