"""Suites whose data are on the hub run to records and a page, on small data sets in the published formats that are made here.

`datasets` reads `allenai/ai2_arc` from a folder of that name where there is one, so nothing of the reading is replaced.
"""

import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from helpers import bench

from kvbench.harness.data.lookups import key_line
from kvbench.harness.data.prose import Prose
from kvbench.harness.lm_eval.kvbench import KVBench
from kvbench.harness.models.hub import model_directory
from kvbench.harness.records import RecordStore
from kvbench.harness.report.sections import section, section_key
from kvbench.harness.report.verify import problems
from kvbench.harness.run.request import RunRequest
from kvbench.harness.tasks.lm_eval import LmEvalMetrics

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow("lm-eval")]  # lm-eval and its packages give warnings
SPLITS = ("train", "validation", "test")
FIRST, LAST = 0, 7  # places of the line that is asked for, of eight
PLACES = (FIRST, LAST) * 3


def publish(folder, config, files):
    """Write a data set as a repository of the hub: a file for each split, and a card that says where it is."""
    card = folder / "README.md"
    for path, rows in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".jsonl"):
            (folder / path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / path)
    if config is None:  # the names of the files say it
        return
    known = yaml.safe_load(card.read_text().strip("-\n"))["configs"] if card.exists() else []
    paths = [{"split": Path(path).stem.split("-")[0], "path": path} for path in files]
    card.write_text(f"---\n{yaml.safe_dump({'configs': [*known, {'config_name': config, 'data_files': paths}]})}---\n")


def told(draw, place):
    """Eight lines that the built-in model `recall` remembers, the key of one of them, its value, three others and another key."""
    keys, values = (draw.sample(range(100, 1000), 8) for _ in range(2))
    value, key = values[place], keys[place]
    others = draw.sample([v for v in values if v != value], 3)
    text = "Read.\n" + "".join(key_line(k, [v]) for k, v in zip(keys, values, strict=True))
    return text, key, str(value), [str(v) for v in others], draw.choice([k for k in keys if k != key])


def outcomes(results):
    """Right answers by task and policy; every record is ok, and its figures follow from its answers."""
    found = {}
    for path, record in RecordStore(results).files():
        assert record.status == "ok", record.error
        assert problems(record, path.parent) == []
        options = record.cell.options
        found[options.get("tasks", options.get("subset")), record.cell.policy] = record.metrics.outcomes
    return found


def page_of(results, capsys):
    """The leaderboard of a folder, and the tables of all its records."""
    code, _, err = bench(capsys, "leaderboard", "--results", results)
    assert code == 0, err
    records = RecordStore(Path(results)).read_all()[0]
    tables = {section_key(record): section(record, records).text for record in records}
    return "\n".join([(Path(results) / "README.md").read_text(), *tables.values()])


def arc_rows(draw, place):
    """The line is asked for at the end of the last choice, and the labels are values: what the model can say."""
    for number in range(4):
        text, key, value, others, _ = told(draw, place)
        choices = {"text": ["wind", "sky", "road", f"sea\nQuestion: What is #{key}?"], "label": [value, *others]}
        yield {"id": f"M_{number}", "question": text.strip(), "choices": choices, "answerKey": value}


def test_arc_comes_as_a_stream_in_which_a_window_forgets_what_a_question_began_with(hub, capsys):
    """The line that is asked for is the first of a question in one subset, the last in the other. Dense knows both."""
    draw, repository = random.Random(3), Path("allenai/ai2_arc")
    for subset, place in (("ARC-Easy", FIRST), ("ARC-Challenge", LAST)):
        rows = list(arc_rows(draw, place))
        publish(repository, subset, {f"{subset}/{split}-00000-of-00001.parquet": rows for split in ("train", "test")})
    for source in ((), ("--data", repository)):
        results = hub / f"results{len(source)}"  # each way to name the data
        small = ("--model", "builtin:recall", "--set", "capacity=32", "--results", results)
        code, out, err = bench(capsys, "run", "arc-stream", *small, *source, "--json")
        assert code == 0, err
        assert len(json.loads(out)) == 6
        assert outcomes(results) == {
            (subset, policy): "0000" if subset == "ARC-Easy" and policy != "dense" else "1111"
            for subset in ("ARC-Easy", "ARC-Challenge")
            for policy in ("dense", "window", "sink_window")
        }
        page = page_of(results, capsys)
        assert re.search(r"\| dense \| +\| 100\.0 \| 100\.0 \|", page)
        assert re.search(r"\| window \| 32 \| 0\.0 \| 100\.0 \|", page)
        assert page.count("(subset ARC-Easy, ") == page.count("(subset ARC-Challenge, ") == 1


def publish_zeroshot():
    """Five of the seven tasks of Table 9, each with the columns, subsets and splits of its data set."""
    draw, published = random.Random("zeroshot"), {}
    for split in SPLITS:
        rows = published[split] = {name: [] for name in ("arc", "hellaswag", "lambada", "winogrande")}
        for number, place in enumerate(PLACES):
            text, key, value, others, other = told(draw, place)
            texts = draw.sample([value, *others], 4)
            right, keys = texts.index(value), draw.sample([key, other], 2)
            asked = f"{text}Question: What is #{key}?"
            choices, hidden = {"text": texts, "label": list("ABCD")}, split == "test"  # whose answers are not published
            rows["arc"].append({"id": f"M_{number}", "question": asked, "choices": choices, "answerKey": "ABCD"[right]})
            contexts = {"activity_label": "Reading", "ctx_a": f"{asked}\nAnswer:", "ctx_b": "", "ctx": ""}
            rows["hellaswag"].append(contexts | {"endings": texts, "label": "" if hidden else str(right)})
            rows["lambada"].append({"text": f"{asked}\nAnswer: {value}"})
            first, second = (f"Question: What is #{k}?\nAnswer:" for k in keys)
            number_of_right = "" if hidden else str(keys.index(key) + 1)
            rows["winogrande"].append(
                {"sentence": f"{text}_ {value}", "option1": first, "option2": second, "answer": number_of_right}
            )
    for repository, config, folder, name in (
        ("allenai/ai2_arc", "ARC-Easy", "ARC-Easy", "arc"),
        ("allenai/ai2_arc", "ARC-Challenge", "ARC-Challenge", "arc"),
        ("Rowan/hellaswag", "default", "data", "hellaswag"),
        ("EleutherAI/lambada_openai", "default", "data", "lambada"),
        ("allenai/winogrande", "winogrande_xl", "winogrande_xl", "winogrande"),
    ):
        splits = ("test",) if name == "lambada" else SPLITS
        publish(Path(repository), config, {f"{folder}/{s}-00000-of-00001.parquet": published[s][name] for s in splits})


def test_zero_shot_questions_are_all_answered_by_dense_and_by_others_if_they_kept_the_line(hub, capsys):
    publish_zeroshot()
    tasks = ["arc_easy", "arc_challenge", "hellaswag", "lambada_openai", "winogrande"]
    small = ("--model", "builtin:recall", "--set", "capacity=32", "--set", f"tasks=[{','.join(tasks)}]")
    code, out, err = bench(capsys, "run", "zeroshot", *small, "--results", "results", "--json")
    assert code == 0, err
    assert len(json.loads(out)) == 3 * len(tasks)  # lm-eval says on stdout that it bootstraps; none of that is in the way
    right = outcomes(Path("results"))
    for task in tasks:
        assert right[task, "dense"] == "111111"
        assert right[task, "sink_window"][1::2] == "111"  # the last line is in the window
    assert right["lambada_openai", "sink_window"] == "010101"  # all words compete, so a line that is gone can't be guessed
    page = page_of("results", capsys)
    assert re.search(r"\| dense \| +(\| 100\.0 ± 0\.0 ){5}", page)


TEMPLATE = "{% for m in messages %}User: {{ m['content'] }}\n{% endfor %}Answer:"
PROBLEMS = [f"{Prose(number).text(900)} How many were there on day {number}?" for number in range(3)]
ANSWERS = {  # as published, and as a model may write the same number
    "gsm8k": {"18": "18", "1,080": "$1080", "7": "7"},
    "aime24": {"18": "18", "204": "204", "7": "7"},
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

    else:
        rows = [
            {"ID": f"2024-I-{i}", "Problem": text, "Solution": solutions[i], "Answer": int(answer)} for i, (text, answer) in asked
        ]
        publish(Path("Maxwell-Jia/AIME_2024"), None, {"aime_2024_problems.parquet": rows})


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

    publish_problems(task)
    few = ("capacity=24", "samples=2", "max_gen_toks=6")
    request = RunRequest("reasoning", str(model), threads=1, dtype="float32", settings=few)
    cells = [cell for cell in request.cells() if cell.task.tasks == task]
    if task == "gsm8k":  # under other policies nothing depends on the task
        cells = [cell for cell in cells if cell.name in ("dense", "recompute_window", "random", "rkv")]
    else:
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
