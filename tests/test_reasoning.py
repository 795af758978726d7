"""The suite `reasoning` runs to its end on problems in the published formats, without the hub: records, scores, a page."""

from __future__ import annotations

import shutil
from pathlib import Path

import datasets
import lm_eval.tasks
import pytest

from kvbench.harness.lm_eval import catalogue
from kvbench.harness.lm_eval.kvbench import KVBench
from kvbench.harness.models.hub import model_directory
from kvbench.harness.records import RecordStore
from kvbench.harness.report.sections import section
from kvbench.harness.report.verify import problems
from kvbench.harness.run.request import RunRequest
from kvbench.harness.tasks.lm_eval import LmEvalMetrics

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow("lm-eval")]  # lm-eval and its packages give warnings
TEMPLATE = "{% for m in messages %}User: {{ m['content'] }}\n{% endfor %}Answer:"
PROBLEM = "The wind came from the north and the sky was grey. " * 20 + "How many days are there in a week?"
SOLUTION = "There are $7$ of them, so the answer is $\\boxed{7}$."
PUBLISHED = {  # columns and splits as on the hub
    "openai/gsm8k": {split: {"question": PROBLEM, "answer": "There are 7.\n#### 7"} for split in ("train", "test")},
    "HuggingFaceH4/MATH-500": {
        "test": {
            "problem": PROBLEM,
            "solution": SOLUTION,
            "answer": "7",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "a/1.json",
        }
    },
    "Maxwell-Jia/AIME_2024": {"train": {"ID": "2024-I-1", "Problem": PROBLEM, "Solution": SOLUTION, "Answer": 7}},
    "math-ai/aime25": {"test": {"problem": PROBLEM, "answer": "7", "id": "0"}},
}
SAID = {"gsm8k": "So there are 7 days."}  # a right answer; boxed for the others


@pytest.fixture
def model(tmp_path):
    """A built-in model that has a chat template."""
    folder = tmp_path / "model"
    shutil.copytree(model_directory("builtin:vanilla", None, False), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def offline(monkeypatch):
    """lm-eval's own tasks, on two problems each."""
    folders = [Path(lm_eval.tasks.__file__).parent / name for name in ("gsm8k", "aime", "minerva_math")]
    manager = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)
    monkeypatch.setattr(catalogue, "_manager", lambda *_: manager)

    def load_dataset(path, name=None, **_):
        return datasets.DatasetDict(
            {split: datasets.Dataset.from_list([row | {"number": i} for i in range(2)]) for split, row in PUBLISHED[path].items()}
        )

    monkeypatch.setattr("datasets.load_dataset", load_dataset)


@pytest.mark.parametrize("task", ["gsm8k", "minerva_math500", "aime24", "aime25"])
def test_the_suite_runs_to_its_end(task, model, offline, monkeypatch, tmp_path):
    """With few tokens and one capacity. Every second answer is replaced by a right one, so that it counts how each is judged."""
    if task == "minerva_math500":
        pytest.importorskip("math_verify", reason="needs lm-eval's extra: pip install 'lm-eval[math]'")
    generated = KVBench._generated
    prompts = []

    def every_second_right(self, contexts, settings, seeds, bar):
        prompts.extend(contexts)
        assert settings | {"temperature": 0.6, "top_p": 0.95, "do_sample": True} == settings
        answers = generated(self, contexts, settings, seeds, bar)
        return [SAID.get(task, SOLUTION) if i % 2 else answer for i, answer in enumerate(answers)]

    monkeypatch.setattr(KVBench, "_generated", every_second_right)
    few = ("capacity=24", "samples=2", "max_gen_toks=6")
    request = RunRequest("reasoning", str(model), threads=1, dtype="float32", settings=few)
    cells = [cell for cell in request.cells() if cell.task.tasks == task]
    if task != "gsm8k":  # under other policies nothing depends on the task
        cells = [cell for cell in cells if cell.name in ("dense", "rkv")]
    records = request.measure(tmp_path / "results", cells)
    assert [r.error for r in records if r.status != "ok"] == []
    controls = [("dense", 0), ("recompute_window", 0), *(("random", seed) for seed in range(5))]
    found = [(r.cell.policy, r.cell.seed) for r in records if r.cell.policy in ("dense", "recompute_window", "random")]
    assert found == (controls if task == "gsm8k" else controls[:1])
    assert all(r.cell.as_json()["evict"] == {"every": 128} for r in records if r.cell.policy not in ("dense", "recompute_window"))
    for record in records:
        figures = record.measured(LmEvalMetrics)
        assert figures.pass_at == {"1": 0.5, "2": 1.0}
        assert figures.over_capacity == (4 if record.cell.capacity else 0)
        assert problems(record, RecordStore(tmp_path / "results").path(record).parent) == []
    assert all(text.startswith("User: ") and text.endswith("\nAnswer:") for text in prompts)
    assert "pass@2" in section(records[0], records).text
