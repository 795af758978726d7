"""Whether size or seed of a small model changes how policies are ordered: a section of docs/validity.md.

    bench run sizes --model pretrained/wide1/model --results results/wide1
    python -m kvbench.lab.studies.model_sizes wide1=pretrained/wide1/model=results/wide1 ...   # writes docs/data/sizes.jsonl

The records are thousands, so a line for each cell is kept: a line has its answers and its record's key. P policies, R draws.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvbench.harness.records import RecordStore
from kvbench.harness.records.metrics import QuestionMetrics
from kvbench.lab.studies import DOCS
from kvbench.lab.studies.rank_agreement import Scores, Values, differ, drawn, tau

FILE = DOCS / "data" / "sizes.jsonl"
MODES = ("stream", "cache")
QUESTIONS = ("unseen", "seen")
_TITLE = """
## Do size and seed of a small model matter?

"""
_ABOUT = """

The suite `sizes` asks {models} models of {sizes} sizes, trained by one recipe, about prompts of which {policies} rules of
kvpress' leaderboard keep a quarter to a half.
"""
_LEARNT = 0.75  # of the questions, answered by dense: of models below it an order says little about policies


@dataclass(frozen=True)
class Model:
    """A model of the comparison.

    Attributes:
        name: in the lines of its cells.
        parameters: number of weights.
        hidden: width of a layer.
        seed: seed of the model's weights and samples.
        tokens: number of training tokens.
    """

    name: str
    parameters: int
    hidden: int
    seed: int
    tokens: int


def collect(sources: Sequence[tuple[str, Path, Path]], file: Path = FILE) -> None:
    """Write models and their cells' answers. Each source is a name, the model's folder and the folder of its records."""
    lines: list[dict[str, Any]] = []
    for name, model, results in sources:
        lines.append({"name": name, **_facts(model)})
        for record in RecordStore(results).read_all()[0]:
            answers, cell = record.measured(QuestionMetrics), record.cell
            if answers and answers.outcomes:
                policy = {"policy": cell.policy, "parameters": cell.parameters, "capacity": cell.capacity}
                seen = cell.options.get("question", "seen")
                asked = {"task": cell.options["tasks"], "question": seen, "positions": cell.positions}
                lines.append({"model": name, **policy, **asked, "outcomes": answers.outcomes, "key": record.key})
    file.write_text("".join(text + "\n" for text in sorted(json.dumps(line) for line in lines)), encoding="utf-8")


def _facts(model: Path) -> dict[str, int]:
    """Return the facts of a model that `bench pretrain` made."""
    from safetensors import safe_open

    seed = re.search(r"; seed (\d+)", (model / "README.md").read_text(encoding="utf-8"))
    assert seed, model
    with safe_open(model / "model.safetensors", framework="np") as weights:
        parameters = sum(int(np.prod(weights.get_slice(key).get_shape())) for key in weights.keys())  # noqa: SIM118
    return {
        "parameters": parameters,
        "hidden": json.loads((model / "config.json").read_bytes())["hidden_size"],
        "seed": int(seed[1]),
        "tokens": json.loads((model / "training.jsonl").read_text().splitlines()[-1])["tokens"],
    }


class Answers:
    """All models, and the answers of each."""

    def __init__(self, file: Path = FILE) -> None:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        models = [Model(**line) for line in lines if "model" not in line]
        self.models = sorted(models, key=lambda model: (model.parameters, model.seed))
        self.cells = [line for line in lines if "model" in line]
        rules = {_rule(x): None for x in sorted(self.cells, key=_rule) if x["policy"] != "dense"}
        self.rules = list(rules)
        self.tasks = sorted({str(x["task"]) for x in self.cells})
        self._outcomes = {(x["model"], x["task"], x["question"], x["positions"], _rule(x)): x["outcomes"] for x in self.cells}

    @property
    def records(self) -> list[Any]:
        """The rules as far as a record tells them: what `validity.Ours` compares with published ones."""
        by_rule = {_rule(x): x for x in self.cells}
        cells = [SimpleNamespace(**{k: by_rule[rule][k] for k in ("policy", "parameters", "capacity")}) for rule in self.rules]
        return [SimpleNamespace(cell=cell) for cell in cells]

    def dense(self, model: str, task: str) -> float:
        """Share of questions that dense answers."""
        right = [x["outcomes"] for x in self.cells if (x["model"], x["task"], x["policy"]) == (model, task, "dense")]
        return right[0].count("1") / len(right[0])

    def scores(self, model: str, task: str, question: str, positions: str, half: slice = slice(None)) -> Scores:
        """Return the scores of all rules, in the order of `rules`; over some of the questions, if these are given."""
        outcomes = [self._outcomes[model, task, question, positions, rule] for rule in self.rules]
        units = np.array([[int(digit) for digit in text[half]] for text in outcomes], float)
        return Scores(units, drawn(units, answers=True))


def _rule(line: Mapping[str, Any]) -> str:
    return f"{line['policy']} {json.dumps(line['parameters'], sort_keys=True)}"


def alike(pairs: Sequence[tuple[Scores, Scores]]) -> Values | None:
    """Mean tau of pairs of scores that differ by more than noise, as measured and drawn anew: [1 + R]; None without a pair."""
    everybody = frozenset(range(len(pairs[0][0].units)))
    taus = [tau(one.draws.T, other.draws.T) for one, other in pairs if differ(one, everybody) and differ(other, everybody)]
    return np.nanmean(taus, axis=0) if taus else None


def section(answers: Answers) -> list[str]:
    """The section of docs/validity.md."""
    sizes = {model.parameters for model in answers.models}
    return [_verdict(answers) + _ABOUT.format(models=len(answers.models), sizes=len(sizes), policies=len(answers.rules))]


def _verdict(answers: Answers) -> str:
    """State the result over the models that have learnt the tasks."""
    learnt = [m for m in answers.models if np.mean([answers.dense(m.name, task) for task in answers.tasks]) >= _LEARNT]
    kinds = _kinds(answers, learnt)
    told = []
    for question in QUESTIONS:
        ranges = []
        for start, words in (("other seed", "two trainings of one size agree"), ("", "trainings of two sizes")):
            names = [name for name in kinds if name.startswith(start) and (start or not name.startswith("other"))]
            draws = [kinds[name](question, mode) for name in names for mode in MODES]
            taus = [float(x[0]) for x in draws if x is not None]
            ranges.append(f"{words} by {min(taus):.2f} to {max(taus):.2f}" if taus else f"{words}: not known")
        told.append(f"with the question {question}, {', '.join(ranges)}")
    of_whom = f"{len(learnt)} models of which dense answers {100 * _LEARNT:.0f} % or more"
    return f"{_TITLE}**Kendall's tau: {'; '.join(told)}** ({of_whom})."


def _kinds(answers: Answers, of: Sequence[Model] | None = None) -> dict[str, Any]:
    """Return the figures to compare, by name: functions of question and positions."""
    models = answers.models if of is None else of

    def between(pairs: Sequence[tuple[Model, Model]], question: str, mode: str) -> Values | None:
        return alike(
            [
                (answers.scores(a.name, task, question, mode), answers.scores(b.name, task, question, mode))
                for a, b in pairs
                for task in answers.tasks
            ]
        )

    def kind(pairs: Sequence[tuple[Model, Model]]) -> Any:
        return lambda question, mode: between(pairs, question, mode)

    pairs = list(combinations(models, 2))
    kinds: dict[str, Any] = {}
    same = [(a, b) for a, b in pairs if a.parameters == b.parameters]
    for size in sorted({a.parameters for a, _ in same}):
        kinds[f"other seed, {size / 1e6:.2f} million"] = kind([(a, b) for a, b in same if a.parameters == size])
    for small, large in combinations(sorted({m.parameters for m in models}), 2):
        name = f"{small / 1e6:.2f} and {large / 1e6:.2f} million"
        kinds[name] = kind([(a, b) for a, b in pairs if {a.parameters, b.parameters} == {small, large}])
    return kinds


def main() -> Iterator[tuple[str, Path, Path]]:
    """The command line: NAME=MODEL=RESULTS each."""
    for argument in sys.argv[1:]:
        name, model, results = argument.split("=")
        yield name, Path(model), Path(results)


if __name__ == "__main__":
    collect([*main()])
