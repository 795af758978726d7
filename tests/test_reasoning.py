"""The suite `reasoning` runs to its end on problems of our own in the hub's files: records, pass@k as by hand, a page."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from test_published_formats import page_of, publish

from kvbench.harness.data.prose import Prose
from kvbench.harness.lm_eval.kvbench import KVBench
from kvbench.harness.models.hub import model_directory
from kvbench.harness.records import RecordStore
from kvbench.harness.report.verify import problems
from kvbench.harness.run.request import RunRequest
from kvbench.harness.tasks.lm_eval import LmEvalMetrics

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow("lm-eval")]  # lm-eval and its packages give warnings
TEMPLATE = "{% for m in messages %}User: {{ m['content'] }}\n{% endfor %}Answer:"
PROBLEMS = [f"{Prose(number).text(900)} How many were there on day {number}?" for number in range(3)]
ANSWERS = {  # as published, and as a model may write the same number
    "gsm8k": {"18": "18", "1,080": "$1080", "7": "7"},
    "minerva_math500": {"18": "18", "\\frac{1}{2}": "0.5", "7": "7"},
    "aime24": {"18": "18", "204": "204", "7": "7"},
    "aime25": {"18": "18", "204": "204", "7": "7"},
}
RIGHT = [(True, True), (False, True), (False, False)]  # the two answers to each problem


@pytest.fixture
def model(tmp_path):
    """A built-in model that has a chat template."""
    folder = tmp_path / "model"
    shutil.copytree(model_directory("builtin:vanilla", None, False), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def publish_problems(task):
    """The problems, with the columns and in the kind of file of the task's data set."""
    asked = list(enumerate(zip(PROBLEMS, ANSWERS[task], strict=True)))
    solutions = [f"We count them, so the answer is $\\boxed{{{answer}}}$." for answer in ANSWERS[task]]
    if task == "gsm8k":
        rows = [{"question": text, "answer": f"3 + 4 = <<3+4=7>>7\n#### {answer}"} for _, (text, answer) in asked]
        files = {f"main/{split}-00000-of-00001.parquet": rows for split in ("train", "test")}
        publish(Path("openai/gsm8k"), "main", files)
    elif task == "minerva_math500":
        rows = [
            {
                "problem": text,
                "solution": solutions[i],
                "answer": answer,
                "subject": "Algebra",
                "level": 1 + i,
                "unique_id": f"test/algebra/{i}.json",
            }
            for i, (text, answer) in asked
        ]
        publish(Path("HuggingFaceH4/MATH-500"), None, {"test.jsonl": rows})
    elif task == "aime24":
        rows = [
            {"ID": f"2024-I-{i}", "Problem": text, "Solution": solutions[i], "Answer": int(answer)} for i, (text, answer) in asked
        ]
        publish(Path("Maxwell-Jia/AIME_2024"), None, {"aime_2024_problems.parquet": rows})
    else:
        rows = [{"problem": text, "answer": answer, "id": f"{i}"} for i, (text, answer) in asked]
        publish(Path("math-ai/aime25"), "default", {"test.jsonl": rows})


@pytest.fixture
def generated(task, monkeypatch):
    """Lets the model generate, and replaces what it said by right and wrong answers. -> (prompt, seed) of every answer."""
    generate, found, drawn = KVBench._generated, [], Counter()

    def said(text):
        problem = next(i for i, asked in enumerate(PROBLEMS) if asked in text)
        right = RIGHT[problem][drawn[text] % 2]
        drawn[text] += 1
        last = list(ANSWERS[task].values())[problem] if right else "8"  # a wrong answer has the right one on the way
        boxed = last if task == "gsm8k" else f"$\\boxed{{{last}}}$"
        return f"At first {list(ANSWERS[task])[problem]}, and so {boxed}."

    def replaced(self, contexts, settings, seeds, bar):
        assert settings | {"temperature": 0.6, "top_p": 0.95, "do_sample": True} == settings
        assert len(generate(self, contexts, settings, seeds, bar)) == len(contexts)
        found.extend(zip(contexts, seeds, strict=True))
        return [said(text) for text in contexts]

    monkeypatch.setattr(KVBench, "_generated", replaced)
    return found


@pytest.mark.parametrize("task", ANSWERS)
def test_the_suite_runs_to_its_end(task, hub, model, generated, capsys):
    """With few tokens and one capacity. Of two answers to each problem both are right, the second, and none."""
    if task == "minerva_math500":
        pytest.importorskip("math_verify", reason="needs lm-eval's extra: pip install 'lm-eval[math]'")
        pytest.importorskip("antlr4", reason="needs lm-eval's extra: pip install 'lm-eval[math]'")
    publish_problems(task)
    few = ("capacity=24", "samples=2", "max_gen_toks=6")
    request = RunRequest("reasoning", str(model), threads=1, dtype="float32", settings=few)
    cells = [cell for cell in request.cells() if cell.task.tasks == task]
    if task != "gsm8k":  # under other policies nothing depends on the task
        cells = [cell for cell in cells if cell.name in ("dense", "rkv")]
    records = request.measure(hub / "results", cells)
    assert [r.error for r in records if r.status != "ok"] == []
    controls = [("dense", 0), ("recompute_window", 0), *(("random", seed) for seed in range(5))]
    found = [(r.cell.policy, r.cell.seed) for r in records if r.cell.policy in ("dense", "recompute_window", "random")]
    assert found == (controls if task == "gsm8k" else controls[:1])
    assert all(r.cell.as_json()["evict"] == {"every": 128} for r in records if r.cell.policy not in ("dense", "recompute_window"))
    for record in records:
        figures = record.measured(LmEvalMetrics)
        assert figures.scores == [1, 0.5, 0]
        assert figures.pass_at == pytest.approx({"1": 1 / 2, "2": 2 / 3})
        assert figures.over_capacity == (6 if record.cell.capacity else 0)
        assert problems(record, RecordStore(hub / "results").path(record).parent) == []
    assert len(generated) == 6 * len(records)
    assert len(set(generated)) == len({seed for _, seed in generated}) == 6  # every policy draws with the same seeds
    assert all(text.startswith("User: ") and text.endswith("\nAnswer:") for text, _ in generated)
    page = page_of(hub / "results", capsys)
    assert page.count("| 50.0 | 66.7 |") == 2 * len(records)  # of pass@1 and pass@2, in the leaderboard and in the table
    assert re.search(r"\| dense \(positions stream\) \| +\| 50\.0 ± 28\.9 \|", page)  # 100 * 0.5 / sqrt(3)
