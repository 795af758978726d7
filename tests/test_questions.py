"""Questions in prompts: where they begin; and those of kvbench_recall and kvbench_facts: answers follow from their texts."""

import json
import re
from pathlib import Path

import lm_eval
import pytest
import yaml
from helpers import bench

from kvbench.harness.data.lookups import KINDS
from kvbench.harness.lm_eval import catalogue
from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.load import load_tokenizer
from kvbench.harness.records import RecordStore
from kvbench.harness.report.doubts import with_doubts
from kvbench.harness.report.sections import section
from kvbench.harness.report.verify import problems
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


RECALL_SUITE = """suite: asked
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
    (tmp_path / "asked.yaml").write_text(RECALL_SUITE)
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


def recall_documents(kind: str) -> list[dict]:
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
    for document in recall_documents(kind):
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
    for document in recall_documents("chain"):
        text, question = parts("chain", document)
        key = re.fullmatch(r"\nQuestion: What does #(\d+) lead to\?\nAnswer:", question)[1]
        (other,) = re.findall(rf"^#{key} = #(\d+)$", text, re.M)
        (value,) = re.findall(rf"^#{other} = (\d+)$", text, re.M)
        assert document["answer"] == f"{other} {value}"
        assert len(told(text)) == 40


def test_a_needle_stands_once_in_the_first_half_of_prose():
    for document in recall_documents("needle"):
        text, question = parts("needle", document)
        place = re.fullmatch(r"\nQuestion: What is the secret number of (\w+)\?\nAnswer:", question)[1]
        sentence = f"The secret number of {place} = {document['answer']}."
        assert text.count(sentence) == 1
        assert text.index(sentence) < 0.7 * len(text)
        assert len(re.findall(r"\d", text)) == len(document["answer"])


def test_a_depth_is_the_place_of_what_was_told():
    for kind in KINDS:
        for document in recall_documents(kind):
            text = document["text"][round(document["depth"] * len(parts(kind, document)[0])) :]
            assert 0 <= document["depth"] < 1
            if kind in ("recent", "once", "popular", "distracted"):
                assert document["answer"] in text[:40]
    anywhere = recall_documents("anywhere")
    tenths = [min(9, int(10 * d["depth"])) for d in anywhere]
    assert all(10 <= tenths.count(tenth) <= 32 for tenth in range(10))


FACTS_KINDS = ("needle", "distracted", "popular", "values", "recent")


def facts_documents(kind: str, **settings: str) -> list[dict]:
    name = f"kvbench_facts_{kind}"
    return list(catalogue.task(name, 0, 1234, [], settings)["tasks"][name].test_docs())


@pytest.mark.parametrize("kind", FACTS_KINDS)
def test_the_question_is_the_beginning_of_a_sentence_of_the_text(kind):
    for document in facts_documents(kind):
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
    depths = [(document["depth"] - low) / (high - low) for document in facts_documents(kind)[:count]]
    if kind == "recent":
        assert min(depths) >= 0
    else:
        counts = [sum(int(4 * depth) == quarter for depth in depths) for quarter in range(4)]
        assert min(counts) >= 0.7 * count / 4


def test_a_needle_in_a_book_stands_among_the_sentences_of_the_book(tmp_path):
    sentences = [f"The {number}th day was as grey as the day before it, and nothing came." for number in range(6000)]
    (tmp_path / "book.txt").write_text(" ".join(sentences))
    for document in facts_documents("book", data=str(tmp_path)):
        text, _, question = document["text"].partition("\n\n")
        needle = f"{question} {document['answer']}."
        prose = [s for s in re.split(r"(?<=\.) ", text) if s != needle]
        assert text.count(needle) == 1
        assert len(prose) > 10
        assert set(prose) <= set(sentences)


FACTS_SUITE = """suite: facts
version: 1
model: {id: "builtin:sink_2"}
task: {name: lm_eval, tasks: [kvbench_cloze_said, kvbench_facts_needle], limit: 3, question: [seen, unseen]}
capacity: 24
evict: prompt
policies: [dense, window]
"""


@pytest.mark.slow("measures a suite")
def test_a_row_says_that_its_answers_preceded_the_cut_and_that_dense_cant(tmp_path, capsys):
    (tmp_path / "facts.yaml").write_text(FACTS_SUITE)
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
