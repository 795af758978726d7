"""Questions about facts in prose: each answer follows from its text, both scores judge rightly, and rows say what is doubtful."""

from __future__ import annotations

import re

import pytest
from conftest import bench

from kvbench.harness.lm_eval import catalogue
from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.load import load_tokenizer
from kvbench.harness.records import RecordStore
from kvbench.harness.report.doubts import with_doubts
from kvbench.harness.report.sections import section
from kvbench.harness.report.verify import problems
from kvbench.harness.tasks.lm_eval.evaluate_requests import question_start

KINDS = ("needle", "distracted", "popular", "values", "recent")


def documents(kind: str, **settings: str) -> list[dict]:
    name = f"kvbench_facts_{kind}"
    return list(catalogue.task(name, 0, 1234, [], settings)["tasks"][name].test_docs())


@pytest.mark.parametrize("kind", KINDS)
def test_the_question_is_the_beginning_of_a_sentence_of_the_text(kind):
    for document in documents(kind):
        start = question_start(document["text"], f"kvbench_facts_{kind}", document)
        text, question = document["text"][:start], document["text"][start:]
        answers = re.findall(rf"{re.escape(question.strip())} ([\d and]+)\.", text)
        assert set(answers) == {document["answer"]}
        assert len(answers) == (4 if kind == "popular" else 1)
        assert text.index(f"{question.strip()} {answers[0]}.") == pytest.approx(document["depth"] * len(text), abs=1)
        facts = re.findall(r"account numbers? of (\w+)", text)
        assert len(set(facts)) == {"needle": 1, "values": 1, "recent": 3}.get(kind, 2)
        assert len(facts) == len(set(facts)) + 3 * (kind in ("popular", "distracted"))


@pytest.mark.parametrize(("kind", "low", "high"), [("needle", 0.0, 1.0), ("values", 0.0, 1.0), ("recent", 0.8, 1.0)])
@pytest.mark.parametrize("count", [20, 50, 200])
def test_depths_are_spread_evenly_over_the_first_questions(kind, low, high, count):
    depths = [(document["depth"] - low) / (high - low) for document in documents(kind)[:count]]
    if kind == "recent":
        assert min(depths) >= 0
    else:
        counts = [sum(int(4 * depth) == quarter for depth in depths) for quarter in range(4)]
        assert min(counts) >= 0.7 * count / 4


def test_a_needle_in_a_book_stands_among_the_sentences_of_the_book(tmp_path):
    sentences = [f"The {number}th day was as grey as the day before it, and nothing came." for number in range(6000)]
    (tmp_path / "book.txt").write_text(" ".join(sentences))
    for document in documents("book", data=str(tmp_path)):
        text, _, question = document["text"].partition("\n\n")
        needle = f"{question} {document['answer']}."
        prose = [s for s in re.split(r"(?<=\.) ", text) if s != needle]
        assert text.count(needle) == 1
        assert len(prose) > 10
        assert set(prose) <= set(sentences)


SUITE = """suite: facts
version: 1
model: {id: "builtin:sink_2"}
task: {name: lm_eval, tasks: [kvbench_cloze_said, kvbench_facts_needle], limit: 3, question: [seen, unseen]}
capacity: 24
evict: prompt
policies: [dense, window]
"""


@pytest.mark.slow("measures a suite")
def test_a_row_says_that_its_answers_preceded_the_cut_and_that_dense_cant(tmp_path, capsys):
    (tmp_path / "facts.yaml").write_text(SUITE)
    code, _, err = bench(capsys, "run", tmp_path / "facts.yaml", "--results", tmp_path / "r", "--device", "cpu")
    assert code == 0, err
    records = RecordStore(tmp_path / "r").read_all()[0]
    flags = {(r.cell.options["tasks"], r.cell.options.get("question"), r.cell.policy): r.metrics.flags for r in records}
    words = load_tokenizer(model_directory("builtin:sink_2", None, False))
    answers = list(catalogue.task("kvbench_cloze_said", 0, 1234, [], {})["tasks"]["kvbench_cloze_said"].test_docs())[:3]
    short = sum(len(words.tokenize(f" {document['answer']}")) == 1 for document in answers)
    before = [f"the first token of an answer was chosen before the cut, and {short} of 3 answers have no other"]
    assert short
    assert flags.pop(("kvbench_cloze_said", None, "window")) == before
    assert len(flags) == 7
    assert not any(flags.values())
    assert all(problems(r, RecordStore(tmp_path / "r").path(r).parent) == [] for r in records)
    doubted = {r.cell.options["tasks"]: r.metrics.flags for r in with_doubts(records) if r.cell.options.get("question")}
    assert doubted["kvbench_cloze_said"] == []
    assert doubted["kvbench_facts_needle"] == [
        "dense can't: it answers 0 % right, so answers to these questions say little about policies"
    ]
    needles = [r for r in records if r.cell.options["tasks"] == "kvbench_facts_needle" and not r.cell.options.get("question")]
    assert "in parentheses, those that contain it" in section(needles[0], needles).text
