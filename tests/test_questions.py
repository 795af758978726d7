"""The beginning of a question in a prompt, and the questions of kvbench_recall: each answer follows from its text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import lm_eval
import pytest
import yaml
from conftest import bench

from kvbench.harness.data.lookups import KINDS
from kvbench.harness.lm_eval import catalogue
from kvbench.harness.records import RecordStore
from kvbench.harness.tasks.lm_eval.evaluate_requests import question_start

RULER = {
    "niah_single_1": "A special magic number is hidden within the following text.\nText. What is the special magic number?\n"
    "More text.|\nWhat is the special magic number for x mentioned in the provided text? The special magic number for x is",
    "ruler_vt": "Memorize.\n\nVAR X = 1\nQuestion: Find all variables of an example. Answer: X\n\nVAR A = 2|\nQuestion: Find all "
    "variables that are assigned the value 2 in the text above.",
    "ruler_qa_squad": "Answer the question.\n\nDocument 1:\nText.\n\nAnswer the question.\n|\nQuestion: Who?",
}


@pytest.mark.parametrize("task", RULER)
def test_rulers_questions_begin_where_they_are_asked(task):
    before, question = RULER[task].split("|")
    assert question_start(before + question, task, {}) == len(before)


LONGBENCH = sorted((Path(lm_eval.__file__).parent / "tasks" / "longbench").glob("[!_]*.yaml"))


class _Loader(yaml.SafeLoader):
    """Reads lm-eval's YAML, and leaves its functions alone."""


_Loader.add_constructor("!function", lambda loader, node: node.value)


@pytest.mark.parametrize("file", LONGBENCH[::6], ids=lambda p: p.stem)
def test_longbenchs_questions_begin_where_the_context_ends(file):
    task = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    template = task["doc_to_text"]
    document = {"context": "A story. Question: who? It ends here.", "question": "Who did it?"}
    prompt = template.replace("{{context}}", document["context"]).replace("{{question}}", document["question"])
    prompt = prompt.replace("{{input}}", document["question"])
    start = question_start(prompt, task["task"], document)
    assert prompt[:start] == template[: template.index("{{context}}")] + document["context"]


@pytest.mark.parametrize(
    ("prompt", "task", "document", "pattern"),
    [
        ("A text", "arc_easy", {}, None),
        ("A text", "longbench_x", {"context": "Another"}, None),
        ("A text", "ruler_vt", {}, None),
        ("Question: all of it", "arc_easy", {}, "Question"),
    ],
)
def test_a_prompt_without_a_question_is_refused(prompt, task, document, pattern):
    with pytest.raises(ValueError, match="give question_from: REGEX"):
        question_start(prompt, task, document, pattern)


def test_our_tasks_have_a_question_and_a_context_before_it():
    for task, opening in (("kvbench_registers", "\nQuestion: What is the REGISTER_CONTENT of line"), ("kvbench_cloze", " ")):
        for document in list(catalogue.task(task, 0, 1234, [], {})["tasks"][task].test_docs())[:50]:
            start = question_start(document["text"], task, document)
            assert document["text"][start:].startswith(opening)
            assert start > len(document["text"]) / 2


def _logprobs(said: list[list[list]]) -> list[float]:
    return [logprob for question in said for logprob, _ in question]


SUITE = """suite: asked
version: 1
model: {id: "builtin:sink_2"}
task: {name: lm_eval, tasks: [kvbench_registers, kvbench_cloze_said], limit: 6, question: [seen, unseen], batch: 4}
capacity: 24
policies:
  - dense
  - {name: h2o, evict: [step, prompt]}
"""


@pytest.mark.slow("measures suites")
def test_questions_that_are_not_seen_change_what_a_cut_prompt_knows_and_nothing_else(tmp_path, capsys):
    (tmp_path / "asked.yaml").write_text(SUITE)
    code, _, err = bench(capsys, "run", tmp_path / "asked.yaml", "--results", tmp_path / "r", "--device", "cpu")
    assert code == 0, err
    said = {}
    for record in RecordStore(tmp_path / "r").read_all()[0]:
        options = record.cell.options
        lines = (tmp_path / "r" / "asked" / "builtin_sink_2" / record.trace.file).read_text().splitlines()
        key = (options["tasks"], record.cell.policy, record.cell.evicts, options.get("question"))
        said[key] = [json.loads(line)["said"] for line in lines]
        assert 0 < record.metrics.kv_held_bytes <= record.metrics.kv_bytes
    assert len(said) == 12
    for policy in ("dense", "h2o"):  # token by token, no question is seen before it comes
        assert said["kvbench_cloze_said", policy, "step", None] == said["kvbench_cloze_said", policy, "step", "unseen"]
        seen, unseen = (_logprobs(said["kvbench_registers", policy, "step", q]) for q in (None, "unseen"))
        assert seen == pytest.approx(unseen, abs=1e-3)
    assert seen != pytest.approx(_logprobs(said["kvbench_registers", "h2o", "prompt", None]), abs=1e-2)
    assert said["kvbench_registers", "h2o", "prompt", None] != said["kvbench_registers", "h2o", "prompt", "unseen"]


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
