"""Judges of answers: what a completion is worth, by rows written out by hand from the rule on each task's page.

A row goes through the code that measures and through the code that verifies a record from its trace.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from factories import cell_record
from lm_eval.api.instance import Instance

from kvbench.harness.data.quiz import Script, quiz_data
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.method import EAGER
from kvbench.harness.lm_eval import catalogue
from kvbench.harness.models.load import load_tokenizer
from kvbench.harness.tasks.arc_stream import ArcStream, ArcStreamOptions
from kvbench.harness.tasks.lm_eval import LmEval
from kvbench.harness.tasks.streameval import StreamEval, StreamEvalOptions
from kvbench.harness.tasks.task import Job
from kvbench.harness.tasks.trace import Trace
from kvbench.harness.tasks.trace.programs import TraceData
from kvbench.harness.tasks.trace.trace_options import TraceOptions
from kvbench.harness.tasks.turns import Turns, TurnsOptions
from kvbench.policies.dense import Dense

pytestmark = pytest.mark.fast


CPU = torch.device("cpu")


class Scripted:
    """A decoder that predicts fixed tokens, one after the other from the end of the prompt on, whatever it reads."""

    kv_bytes = held_bytes = state_bytes = 0

    def __init__(self, tokens: list[int], vocabulary: int) -> None:
        self.tokens, self.vocabulary = tokens, vocabulary

    def read_prompt(self, tokens, block):
        return self._next(1)[:, -1]

    def __call__(self, tokens, valid=None, keep=None):
        return self._next(1 if keep is not None else tokens.shape[1])

    def _next(self, count):
        following, self.tokens = self.tokens[:count], self.tokens[count:]
        return torch.nn.functional.one_hot(torch.tensor([following]), self.vocabulary).float()

    def fork(self, streams):
        return self

    def held(self, positions):
        return 1.0


def job_of(data, scripted: Scripted, tmp_path) -> Job:
    def opened(*_, **__):
        return scripted

    model = SimpleNamespace(device=CPU)
    return Job(model, CacheConfig(Dense()), data, 10_000, EAGER, tmp_path / "trace", lambda tokens, text: None, open=opened)


KEYS, WORDS, SCBENCH = (TurnsOptions(data=data) for data in ("keys", "words", "scbench"))
# (task, options, what ends an answer, right answer, completions that are right, completions that are wrong)
STREAMS = [
    # The first line without surrounding spaces, `<`, `>` and a full stop equals the number (docs/tasks/streameval.md).
    (
        StreamEval,
        StreamEvalOptions(),
        "\n",
        "123",
        [" <123>\n", " <123>", "123\n", " 123.\n", " < 123 >\n", " <123>.\n"],
        [
            " \n",
            "\n<123>\n",
            " the <123>\n",
            " <123> it is\n",
            " <1234>\n",
            " <12>\n",
            " <0123>\n",
            " <12 3>\n",
            " <124>\n <123>\n",
        ],
    ),
    # The first word of the first line, without punctuation, equals the label (docs/tasks/streameval.md).
    (
        ArcStream,
        ArcStreamOptions(),
        "\n",
        "B",
        [" B\n", " B", " (B) sand\n", " B. Sand\n", "B) or C\n"],
        ["\n", " \n", "\nB\n", " b\n", " A or B\n", " The answer is B\n", " Bad\n", " AB\n", " -B\n", " A\n B\n"],
    ),
    # As StreamEval's (docs/tasks/turns.md).
    (
        Turns,
        KEYS,
        "\n",
        "34",
        [" 34\n", "34\n", " 34"],
        ["\n", " 35\n", " 34 35\n", " 35 34\n", " 134\n", " 340\n", " 3 4\n", " the 34\n", " 43\n"],
    ),
    (Turns, KEYS, "\n", "12 7", [" 12 7\n"], [" 12 8\n", " 12\n", " 7 12\n", " 12  7\n", " 12 7 7\n", " 12 7 and 5\n"]),
    (Turns, WORDS, None, "5", [" 5"], [" 6", " 15", " 55", " L5", " 5 5"]),
    # The right string is anywhere in what was said, as SCBench has it (docs/tasks/turns.md).
    (
        Turns,
        SCBENCH,
        None,
        "a1-b2",
        [" a1-b2", " The value is a1-b2.", " xa1-b2y", "\na1-b2\n", " c3, no: a1-b2"],
        [" ", " A1-B2", " a1-b", " a1 b2", " a1- b2", " b2-a1"],
    ),
]
ANSWERS = [
    pytest.param(task, options, stop, completion, gold, completion in right, id=f"{task.__name__}, {gold}, {completion!r}")
    for task, options, stop, gold, right, wrong in STREAMS
    for completion in right + wrong
]


@pytest.mark.parametrize(("task", "options", "stop", "completion", "gold", "right"), ANSWERS)
def test_an_answer_in_a_stream(task, options, stop, completion, gold, right, model_dir, tmp_path):
    tokenizer, script = load_tokenizer(model_dir), Script()
    script.line("A line.\n")
    script.ask("Question:", gold, f" {gold}\n", line=0)
    tokens = tokenizer.encode(completion, add_special_tokens=False)
    data = quiz_data([script], "by hand", tokenizer, stop, len(tokens))
    job = job_of(data, Scripted(tokens, len(tokenizer)), tmp_path)
    assert task.run(options, job).outcomes == "01"[right]
    record = SimpleNamespace(cell=SimpleNamespace(task=options))
    assert task.from_trace(record, job.trace)["outcomes"] == "01"[right]


PROMPT = "full L5 r0 M5 r1 N5 r0 O5 J7 Z5 J5 L7 r1 M7 r0 N7 r1 O7 J5 Z7 end v0 4 v1 3 v2 0 run L5"
RIGHT = "v0 4 M5 v1 3 N5 v0 7 O5 L7 v1 3 M7 v0 7 N7 v1 0 Z7 end"
# An answer is right if it is the program's trace, word by word, and ends there (docs/tasks/trace.md).
TRACES = [
    (RIGHT, True),
    (f" {RIGHT} ", True),
    ("ask", False),
    (RIGHT.removesuffix(" end"), False),
    (RIGHT.removesuffix("end") + "L5", False),
    (f"{RIGHT} end", False),
    (f"ask {RIGHT}", False),
    (RIGHT.replace("v0 4 M5", "M5 v0 4"), False),
    (RIGHT.replace("v1 0", "v1 6"), False),
]
SMALL = TraceOptions(programs=1, lines=2, registers=3, steps=1)
TEACHER = SMALL.model_copy(update={"teacher": True})


@pytest.mark.parametrize(("answer", "right"), TRACES)
@pytest.mark.parametrize("options", [SMALL, TEACHER], ids=["written", "teacher"])
def test_a_trace(answer, right, options, tmp_path):
    (tmp_path / "trace").write_text(json.dumps({"prompt": PROMPT, "said": answer, "held": None}) + "\n")
    record = SimpleNamespace(cell=SimpleNamespace(task_options=lambda kind: options))
    figures = Trace.from_trace(record, tmp_path / "trace")
    assert (figures["outcomes"], figures["right"], figures["accuracy"]) == ("01"[right], int(right), float(right))


# (completion, right answer, exact: nothing else is said; contained: as whole words, whatever the case and spaces, not denied;
# docs/tasks/recall.md)
COMPLETIONS = [
    (" 534", "534", True, True),
    ("534 \n", "534", True, True),
    (" 534.", "534", False, True),
    (" The answer is 534", "534", False, True),
    (" 534, as the text says", "534", False, True),
    (' "534"', "534", False, True),
    (" 447>", "447", False, True),
    (" 1534", "534", False, False),
    (" 535", "534", False, False),
    (" 12,534", "534", False, False),
    (" 534.5", "534", False, False),
    (" -534", "534", False, False),
    (" 53 4", "534", False, False),
    (" 534QuestionQuestion", "534", False, False),
    (" It isn't 534", "534", False, False),
    (" not 211 but 534", "534", False, True),
    ("", "534", False, False),
    (" copper lantern", "copper lantern", True, True),
    (" Copper Lantern!", "copper lantern", False, True),
    (" copper  lantern", "copper lantern", False, True),
    (" copper lanterns", "copper lantern", False, False),
    (" lantern copper", "copper lantern", False, False),
    (" 809 and 695 and 12", "809 and 695", False, True),
    (" 12 7 300", "12 7 300 4", False, False),
    (" abc", "a.c", False, False),
]
# (completion, right answer, its first word is the answer; docs/tasks/lm_eval.md)
FIRST_WORDS = [
    (" river", "river", True),
    (" river bank", "river", True),
    (" the river", "river", False),
    (" River", "river", False),
    (" rivers", "river", False),
    ("", "river", False),
]
# (log-likelihoods of the choices, number of the right one, the likeliest is right, the likeliest per character is)
CHOICES = ["abcdefgh", "ab", "abcd"]
CHOSEN = [
    ([-1.0, -2.0, -3.0], 0, True, True),
    ([-3.0, -2.0, -3.0], 0, False, True),
    ([-3.0, -2.0, -3.0], 1, True, False),
    ([-8.0, -2.0, -1.0], 2, True, True),
    ([-8.0, -2.0, -3.9], 2, False, True),
    ([-9.0, -8.0, -7.0], 1, False, False),
]
LM_EVAL_TASKS = sorted({p.stem for p in catalogue.GENERATED.glob("kvbench_*.yaml")} - {"kvbench_prose", "kvbench_facts_book"})


@pytest.mark.parametrize("last", ["end", "ask", "L5"])
@pytest.mark.parametrize("options", [SMALL, TEACHER], ids=["written", "teacher"])
def test_a_trace_is_judged_to_its_last_word(last, options, machine_dir, tmp_path):
    tokenizer = load_tokenizer(machine_dir)
    prompt, right = (np.array(tokenizer.convert_tokens_to_ids(words.split())) for words in (PROMPT, RIGHT))
    data = TraceData(prompt[None], (right,), 0, 1, 2.0, "by hand", tokenizer)
    tokens = tokenizer.convert_tokens_to_ids([*RIGHT.split()[:-1], last, *["ask"] * options.limit])
    job = job_of(data, Scripted(tokens, len(tokenizer)), tmp_path)
    figures = Trace.run(options, job)
    assert (figures.outcomes, figures.words_right) == (("1", [20]) if last == "end" else ("0", [19]))
    assert json.loads(job.trace.read_text())["said"].split()[19] == last


@pytest.mark.parametrize("name", LM_EVAL_TASKS)
def test_an_answer_to_a_question_of_lm_eval(name):
    task = catalogue.task(name, 0, 1234, [], {})["tasks"][name]

    def scores(document, responses):
        instances = [Instance(task.OUTPUT_TYPE, document, ("a prompt", {}), 0, resps=[response]) for response in responses]
        (kind,) = task._filters
        kind.apply(instances)
        return task.process_results(document, [instance.filtered_resps[kind.name] for instance in instances])

    if task.OUTPUT_TYPE == "multiple_choice":
        for likelihoods, gold, *expected in CHOSEN:
            document = {"text": "", "choices": CHOICES, "gold": gold}
            figures = scores(document, [(value, False) for value in likelihoods])
            assert [figures["acc"], figures.get("acc_norm", expected[1])] == expected, likelihoods
    elif name == "kvbench_cloze_said":
        for completion, gold, right in FIRST_WORDS:
            assert scores({"answer": gold}, [completion]) == {"exact_match": float(right)}, completion
    else:
        for completion, gold, exact, contained in COMPLETIONS:
            figures = scores({"answer": gold}, [completion])  # the first score is the record's
            assert [*figures.items()] == [("exact_match", float(exact)), ("contained", float(contained))], completion


@pytest.mark.parametrize("name", [name for name in LM_EVAL_TASKS if "cloze" not in name and "registers" not in name])
@pytest.mark.parametrize("metric", [None, "contained"])
def test_an_answer_to_a_question_of_lm_eval_that_is_verified(name, metric, tmp_path):
    """A trace's own scores are not believed."""
    lines = [
        {"question": n, "score": 1.0, "target": gold, "said": [completion]}
        for n, (completion, gold, *_) in enumerate(COMPLETIONS)
    ]
    (tmp_path / "trace").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = {"name": "lm_eval", "tasks": name} | ({} if metric is None else {"metric": metric})
    record = cell_record({"lm_eval": {"contained,none": 1.0}}, task=task)
    figures = LmEval.from_trace(record, tmp_path / "trace")
    exact, contained = ("".join("01"[row[place]] for row in COMPLETIONS) for place in (2, 3))
    assert figures["outcomes"] == (exact if metric is None else contained)
    assert figures["lm_eval.contained,none"] == contained.count("1") / len(COMPLETIONS)
