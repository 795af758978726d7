"""Where a question begins in a prompt, so that a prompt can be cut before the policy has seen it."""

from __future__ import annotations

import json
from pathlib import Path

import lm_eval
import pytest
import yaml
from conftest import bench

from kvbench.harness.lm_eval import catalogue
from kvbench.harness.records import RecordStore
from kvbench.harness.tasks.lm_eval.measure import question_start

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


RULER = {
    "niah_single_1": "A special magic number is hidden within the following text.\nText. What is the special magic number?\n"
    "More text.|\nWhat is the special magic number for x mentioned in the provided text? The special magic number for x is",
    "niah_multivalue": "Some special magic numbers are hidden.\nText.|\nWhat are all the special magic numbers for x mentioned "
    "in the provided text? The special magic numbers for x mentioned in the provided text are",
    "ruler_vt": "Memorize.\n\nVAR X = 1\nQuestion: Find all variables of an example. Answer: X\n\nVAR A = 2|\nQuestion: Find all "
    "variables that are assigned the value 2 in the text above.",
    "ruler_qa_squad": "Answer the question.\n\nDocument 1:\nText.\n\nAnswer the question.\n|\nQuestion: Who?",
}


@pytest.mark.parametrize("task", RULER)
def test_rulers_questions_begin_where_they_are_asked(task):
    before, question = RULER[task].split("|")
    assert question_start(before + question, task, {}) == len(before)


@pytest.mark.parametrize("task", ["kvbench_registers", "kvbench_cloze", "kvbench_cloze_said"])
def test_our_tasks_have_a_question_and_a_context_before_it(task):
    loaded = catalogue.task(task, 0, 1234, [], {})["tasks"][task]
    for document in list(loaded.test_docs())[:50]:
        start = question_start(document["text"], task, document)
        before, question = document["text"][:start], document["text"][start:]
        if task == "kvbench_registers":
            assert question.startswith("\nQuestion: What is the REGISTER_CONTENT of line")
            assert before.count("REGISTER_CONTENT is") == 3
        else:
            assert len(before) > 500
            assert before[-1] in ".!?"
            assert not set(question) & set(".!?")


@pytest.mark.parametrize(
    ("prompt", "task", "document", "pattern", "says"),
    [
        ("A text", "arc_easy", {}, None, "arc_easy: where does the question begin? it has no context before it"),
        ("A text", "longbench_x", {"context": "Another"}, None, "it has no context before it"),
        ("A text", "longbench_x", {"context": "A text"}, None, "it has no context before it"),
        ("A text", "ruler_vt", {}, None, r"nothing before its end matches '\\nQuestion: '"),
        ("Question: all of it", "arc_easy", {}, "Question", "nothing before its end matches 'Question'"),
        ("A text", "arc_easy", {"context": "A"}, "$", r"nothing before its end matches '\$'"),
    ],
)
def test_a_prompt_without_a_question_is_refused(prompt, task, document, pattern, says):
    with pytest.raises(ValueError, match="give question_from: REGEX") as caught:
        question_start(prompt, task, document, pattern)
    assert says.replace(r"\$", "$") in str(caught.value)


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
