"""docs/validity.md, size and seed: how alike two small models order policies."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parents[1] / "docs"
POLICIES = ["random", "h2o", "knorm", "keydiff", "cur"]
TASKS = ["a", "b"]


@pytest.fixture(scope="module")
def sizes():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        return importlib.import_module("model_sizes")


@pytest.fixture
def answers(sizes, tmp_path):
    """Two small models, of which the second orders policies like the first, and a large one that reverses them."""
    draw = np.random.default_rng(0)
    lines = [{"name": name, "parameters": n, "hidden": 8, "seed": seed, "tokens": 9} for name, n, seed in MODELS]
    for name, parameters, _ in MODELS:
        shares = np.linspace(0.1, 0.9, len(POLICIES))[:: 1 if parameters == 100 else -1]
        for task in TASKS:
            for question in sizes.QUESTIONS:
                for mode in sizes.MODES:
                    for policy, share in [*zip(POLICIES, shares, strict=True), ("dense", 1.0)]:
                        share = 0.5 if task == "b" and policy != "dense" else share  # where nothing differs
                        outcomes = "".join(map(str, (draw.random(200) < share).astype(int)))
                        asked = {"task": task, "question": question, "positions": mode, "outcomes": outcomes, "key": "k"}
                        lines.append({"model": name, "policy": policy, "parameters": {}, "capacity": 4, **asked})
    file = tmp_path / "sizes.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return sizes.Answers(file)


MODELS = [("small-1", 100, 1), ("small-2", 100, 2), ("large", 900, 1)]


def test_orders_that_agree_and_that_are_reversed(sizes, answers):
    small, again, large = (answers.scores(name, "a", "seen", "stream") for name, _, _ in MODELS)
    assert sizes.alike([(small, again)])[0] == pytest.approx(1)
    assert sizes.alike([(small, large)])[0] == pytest.approx(-1)
    assert sizes.alike([(small, again), (small, large)])[0] == pytest.approx(0)


def test_scores_that_differ_by_no_more_than_noise_say_nothing(sizes, answers):
    noise = answers.scores("small-1", "b", "seen", "stream")
    assert sizes.alike([(noise, answers.scores("small-2", "a", "seen", "stream"))]) is None


def test_the_section_compares_seeds_sizes_and_halves_of_the_questions(sizes, answers):
    text = "\n".join(sizes.section(answers))
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert rows["other seed, 0.00 million"].count("+1.00 [") == 4
    assert rows["0.00 and 0.00 million"].count("-1.00 [") == 4
    assert rows["other questions"].count("+1.00 [") >= 3  # half of the questions order nearly as well
    assert "3 models of 2 sizes" in text
    assert "5 rules" in text


def test_a_model_and_its_records_become_lines(sizes, tmp_path):
    """The shipped model's facts, and one cell measured here."""
    from conftest import bench_in

    suite = tmp_path / "s.yaml"
    suite.write_text(
        "{suite: s, version: 1, model: {id: 'builtin:recall'}, evict: prompt, capacity: 96, policies: [random],"
        " positions: stream, task: {name: lm_eval, tasks: kvbench_once, question: seen, limit: 2}}"
    )
    assert bench_in("run", suite, "--results", tmp_path / "r", "--threads", 1, cwd=tmp_path).returncode == 0
    file = tmp_path / "lines.jsonl"
    sizes.collect([("mine", DOCS.parent / "harness/models/builtin/recall", tmp_path / "r")], file)
    found = sizes.Answers(file)
    (model,), (cell,) = found.models, found.cells
    assert (model.parameters, model.hidden, model.seed, model.tokens) == (806_784, 128, 0, 19_008_000)
    assert (cell["policy"], cell["capacity"], len(cell["outcomes"])) == ("random", 96, 2)
