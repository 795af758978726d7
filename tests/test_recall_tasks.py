"""The questions of kvbench_recall: each answer follows from its text, and each kind asks for what its page says."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re

import pytest
from stored import RECORDS

from kvbench.harness.core.files import json_lines
from kvbench.harness.data.lookups import KINDS
from kvbench.harness.lm_eval import catalogue
from kvbench.harness.records import RecordStore
from kvbench.harness.records.beside import open_trace
from kvbench.harness.report.verify import problems
from kvbench.harness.tasks.lm_eval.measure import question_start


def documents(kind: str) -> list[dict]:
    name = f"kvbench_{kind}"
    loaded = catalogue.task(name, 0, 1234, [], {})["tasks"][name]
    assert len(list(loaded.training_docs())) == 50
    return list(loaded.test_docs())


def parts(kind: str, document: dict) -> tuple[str, str]:
    """Text and question."""
    start = question_start(document["text"], f"kvbench_{kind}", document)
    return document["text"][:start], document["text"][start:]


def told(text: str) -> list[str]:
    """Names of the keys, in the order in which they are told."""
    return re.findall(r"^#(\d+) = ", text, re.M)


@pytest.mark.parametrize("kind", ["recent", "once", "popular", "distracted", "values"])
def test_a_key_is_told_once_and_asked_for_at_the_end(kind):
    for document in documents(kind):
        text, question = parts(kind, document)
        key = re.fullmatch(r"\nQuestion: What is #(\d+)\?\nAnswer:", question)[1]
        assert re.findall(rf"^#{key} = (.*)$", text, re.M) == [document["answer"]]
        assert len(document["answer"].split()) == (4 if kind == "values" else 1)
        keys = told(text)
        assert len(keys) == len(set(keys)) == 40
        assert keys.index(key) >= 35 if kind == "recent" else keys.index(key) < 20
        asked = re.findall(r"What is #(\d+)\?\nAnswer: (\d+)$", text, re.M)
        assert len(asked) == (10 if kind in ("popular", "distracted") else 0)
        assert all(f"#{name} = {value}\n" in text.split(f"What is #{name}?")[0] for name, value in asked)
        assert (key in dict(asked)) == (kind == "popular")


def test_a_chain_takes_two_look_ups():
    for document in documents("chain"):
        text, question = parts("chain", document)
        key = re.fullmatch(r"\nQuestion: What does #(\d+) lead to\?\nAnswer:", question)[1]
        (other,) = re.findall(rf"^#{key} = #(\d+)$", text, re.M)
        (value,) = re.findall(rf"^#{other} = (\d+)$", text, re.M)
        assert document["answer"] == f"{other} {value}"
        assert len(told(text)) == 40


def test_a_needle_stands_once_in_the_first_half_of_prose():
    for document in documents("needle"):
        text, question = parts("needle", document)
        place = re.fullmatch(r"\nQuestion: What is the secret number of (\w+)\?\nAnswer:", question)[1]
        sentence = f"The secret number of {place} = {document['answer']}."
        assert text.count(sentence) == 1
        assert text.index(sentence) < 0.7 * len(text)
        assert len(re.findall(r"\d", text)) == len(document["answer"])


def test_a_published_answer_that_was_judged_otherwise_is_found(tmp_path):
    """Its trace and its figures agree with each other, but not with what was said."""
    files = [(p, r) for p, r in RecordStore(RECORDS / "recall.jsonl").files() if r.cell.policy == "h2o"]
    path, record = next((p, r) for p, r in files if r.cell.options["tasks"] == "kvbench_once")
    samples = json_lines(open_trace(record, path.parent))
    assert problems(record, path.parent) == []
    wrong = next(s for s in samples if s["score"] == 0)
    wrong["said"], wrong["score"] = [f"{wrong['target']} # = 62"], 1.0
    trace = tmp_path / record.trace.file
    trace.write_text("".join(json.dumps(s) + "\n" for s in samples))
    right = record.metrics.right + 1
    outcomes = "".join("01"[int(s["score"])] for s in samples)
    metrics = record.metrics.as_json() | {"right": right, "accuracy": right / 100, "score": right / 100, "outcomes": outcomes}
    edited = dataclasses.replace(
        record,
        metrics=type(record.metrics).from_json(metrics),
        trace=record.trace.model_copy(update={"sha256": hashlib.sha256(trace.read_bytes()).hexdigest()}),
    )
    assert f"right is {right}, but should be {right - 1}" in problems(edited, tmp_path)


def test_a_depth_is_the_place_of_what_was_told():
    for kind in KINDS:
        for document in documents(kind):
            text = document["text"][round(document["depth"] * len(parts(kind, document)[0])) :]
            assert 0 <= document["depth"] < 1
            if kind in ("recent", "once", "popular", "distracted"):
                assert document["answer"] in text[:40]
    anywhere = documents("anywhere")
    tenths = [min(9, int(10 * d["depth"])) for d in anywhere]
    assert all(10 <= tenths.count(tenth) <= 32 for tenth in range(10))
