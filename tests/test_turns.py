"""Conversations: what is asked and right, what stays of a turn, and SCBench's data."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from factories import cell_record
from helpers import H2O, CacheConfig, Random, RecomputeWindow, Window, bench_in, decoder, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from test_answering import job_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvbench.harness.core.errors import UserError
from kvbench.harness.data import lookups, scbench
from kvbench.harness.data.quiz import QuizData, Script, quiz_data
from kvbench.harness.data.register_machine import WORDS
from kvbench.harness.models.load import load_model, load_tokenizer
from kvbench.harness.records import RecordStore
from kvbench.harness.records.aggregates import answer_figures
from kvbench.harness.tasks.turns import Turns, TurnsOptions, conversation
from kvbench.lab.pretrain.tokenizer import of_words, wrapped

SHORT = {"data": "words", "turns": 4, "streams": 2, "system": 2, "facts": 6, "filler": 1}
CONFIGS = {
    "window": CacheConfig(Window(), 12),
    "h2o, prompt cut": CacheConfig(H2O(), 12, evict="prompt"),
    "random": CacheConfig(Random(keep_prompt=True, window=2), 12),
    "recompute": CacheConfig(RecomputeWindow(), 12),
}
PAIRED = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture(scope="session")
def words_dir(tmp_path_factory) -> Path:
    """A random model with the tokenizer of words."""
    folder = tmp_path_factory.mktemp("models") / "words"
    wrapped(of_words(WORDS), 1).save_pretrained(folder)
    tiny_model("llama", vocab_size=261, initializer_range=0.2, bos_token_id=0, eos_token_id=None).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def words(words_dir):
    return load_tokenizer(words_dir)


@pytest.fixture(scope="session")
def model(words_dir):
    return load_model(words_dir, "float32", torch.device("cpu"))


def answered(options: TurnsOptions, data: QuizData, tmp_path, config, model) -> list[dict]:
    job = job_of(data, tmp_path, config, model)
    Turns.run(options, job)
    return [json.loads(line) for line in job.trace.read_text().splitlines()]


@st.composite
def options(draw) -> TurnsOptions:
    def few(least, most):
        return draw(st.integers(least, most))

    return TurnsOptions(
        data="words",
        mode=draw(st.sampled_from(["turns", "requests"])),
        turns=few(1, 9),
        streams=1,
        system=few(0, 3),
        facts=few(1, 9),
        told=few(0, 3),
        corrections=draw(st.sampled_from([0.0, 0.5, 1.0])),
        filler=few(0, 3),
        data_seed=few(0, 9),
    )


def read_naively(asked: TurnsOptions, text: str) -> list[dict]:
    """Return the expected entries of each question of a script, computed from its words alone."""
    first: dict[str, str] = {}  # names of the text, and their kinds
    values: dict[str, list[tuple[str, int]]] = {}  # of each name, with the turn that told it
    of_text: dict[str, list[tuple[str, int]]] = {}
    found, turn, at = [], 0, text.split()
    for verb, name, value in zip(at[::3], at[1::3], at[2::3], strict=True):
        if verb == "set":
            values.setdefault(name, []).append((value, turn))
            if turn == 0:
                first[name] = "system" if len(first) < asked.system else "text"
                if len(first) == asked.system + asked.facts:
                    turn, of_text = 1, {n: list(v) for n, v in values.items()}
            continue
        told = values[name]
        latest, since = told[-1]
        kind = "corrected" if len(told) > 1 else first.get(name, "turn")
        found.append({"gold": latest, "turn": turn, "kind": kind})
        found[-1] |= {"distance": turn - since} if since else {}
        found[-1] |= {"old": told[-2][0]} if len(told) > 1 else {}
        assert value == latest, "the answer that stays is the right one"
        turn += 1
        if asked.mode == "requests":
            values = {n: list(v) for n, v in of_text.items()}
    return found


@given(options())
def test_the_latest_value_is_right_and_questions_are_of_the_kind_that_they_say(asked):
    """Whatever is asked for was said before the turn; a request knows the text alone."""
    script = conversation(asked, 0)
    expected = read_naively(asked, script.text)
    assert [{"gold": answer, **about} for _, _, _, answer, _, about in script.questions] == expected
    assert len(expected) == asked.turns
    assert all(q.get("distance", 1) >= 1 and q.get("old") != q["gold"] for q in expected)
    assert asked.mode == "turns" or {q["kind"] for q in expected} <= {"system", "text"}
    assert conversation(asked, 0) == script != conversation(asked, 1)


@pytest.mark.parametrize("mode", ["turns", "requests"])
def test_evidence_is_the_line_that_said_the_value_and_the_prompt_is_the_text(words, mode):
    asked = TurnsOptions(data="words", mode=mode)
    data = Turns.data(asked, lambda: words, None)
    for quiz in data.quizzes:
        text = words.decode(quiz.ids[quiz.prefix : quiz.prompt]).split()
        assert len(text) == 3 * (asked.system + asked.facts)
        assert "ask" not in text
        for q in quiz.questions:
            line, question, answer = (
                words.decode(quiz.ids[a:b]) for a, b in (q.evidence, (q.start, q.prompt_end), (q.prompt_end, q.answer_end))
            )
            name = question.split()[-1]
            assert line == f"set {name} {q.answer}"
            assert answer == q.answer
            told = 0 if mode == "turns" else asked.told + asked.filler
            assert len(question.split()) == 2 + 3 * told, "a request begins where its turn begins"
    assert data.facts()["prompt_tokens"] == 1 + 3 * (asked.system + asked.facts)


def test_parts_that_come_alone_are_tokenised_alone():
    """The border of a question and its answer may lie inside what would be one token."""
    pairs = Tokenizer(models.BPE({c: i for i, c in enumerate(["<s>", *"abcd ", "b "])}, [("b", " ")]))
    pairs.pre_tokenizer = pre_tokenizers.Split(" x", "removed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs)
    script = Script("ab ", by_parts=True)
    script.prompt = 3
    script.ask("ab", "c", " c")
    (made_quiz,) = quiz_data([script], "x", tokenizer).quizzes
    (q,) = made_quiz.questions
    assert (made_quiz.prompt, q.start, q.prompt_end, q.answer_end) == (2, 2, 4, 6)
    script.by_parts = False
    with pytest.raises(UserError, match="in one token"):
        quiz_data([script], "x", tokenizer)


@PAIRED
@pytest.mark.parametrize("context", ["gold", "model"])
def test_turns_are_the_greedy_words_of_one_stream(model, words, tmp_path, config, context):
    """The cache goes on from turn to turn with the right answer or the model's; what is held is what the cache held then."""
    asked = TurnsOptions(**SHORT, context=context)
    data = Turns.data(asked, lambda: words, None)
    heard = [(a["said"], a["held"]) for a in answered(asked, data, tmp_path, config, model)]
    expected = []
    for quiz in data.quizzes:
        read, stream = decoder(model, config), list(quiz.ids[: quiz.prompt])
        read.read_prompt(torch.from_numpy(quiz.ids[None, : quiz.prompt]), 5)
        at = quiz.prompt
        for q in quiz.questions:
            for token in quiz.ids[at : q.prompt_end].tolist():
                logits = read(torch.tensor([[token]]))
                stream.append(token)
            said = int(logits[0, -1].argmax())
            value = lookups.stated_value(words.decode([said], skip_special_tokens=True))
            expected.append((value, read.held(list(range(*q.evidence)))))
            read(torch.tensor([[said if context == "model" else int(quiz.ids[q.prompt_end])]]))
            at = q.answer_end
    assert heard == expected


def reordered(quiz, order):
    """Return the quiz with its requests in another order."""
    ids, questions = [quiz.ids[: quiz.prompt]], []
    for number in order:
        q = quiz.questions[number]
        shift = sum(map(len, ids)) - q.start
        ids.append(quiz.ids[q.start : q.answer_end])
        questions.append(replace(q, start=q.start + shift, prompt_end=q.prompt_end + shift, answer_end=q.answer_end + shift))
    return replace(quiz, ids=np.concatenate(ids), questions=tuple(questions))


@PAIRED
def test_requests_leave_the_texts_cache_as_it_was(model, words, tmp_path, config):
    """They get the same answers in any order."""
    asked = TurnsOptions(**SHORT, mode="requests")
    data = Turns.data(asked, lambda: words, None)
    other = replace(data, quizzes=tuple(reordered(quiz, [2, 0, 3, 1]) for quiz in data.quizzes))
    runs = [answered(asked, each, tmp_path, config, model) for each in (data, other)]
    answers = [{(a["stream"], a["turn"]): (a["said"], a["held"], a["gold"]) for a in run} for run in runs]
    assert answers[0] == answers[1]
    assert len(answers[0]) == asked.turns * asked.streams
    assert [a["turn"] for a in runs[1][:4]] == [3, 1, 4, 2]


@PAIRED
def test_one_turn_is_one_request(model, words, tmp_path, config):
    turns, requests = (TurnsOptions(**SHORT | {"turns": 1, "streams": 5}, mode=mode) for mode in ("turns", "requests"))
    runs = [answered(o, Turns.data(o, lambda: words, None), tmp_path, config, model) for o in (turns, requests)]
    assert runs[0] == runs[1]


def test_a_text_is_cut_before_its_questions(model, words, tmp_path):
    """A policy that keeps the newest tokens of the text holds them at every turn, and nothing else of the text."""
    asked = TurnsOptions(**SHORT | {"streams": 6, "told": 0}, corrections=0.0)
    data = Turns.data(asked, lambda: words, None)
    for a in answered(asked, data, tmp_path, CacheConfig(Window(), 12, evict="prompt"), model):
        q = data.quizzes[a["stream"]].questions[a["question"]]
        assert a["held"] == float(q.evidence[0] >= data.quizzes[a["stream"]].prompt - 12)


TRACE = [
    {"gold": "1", "said": "1", "held": 1.0, "reach": 4, "turn": 1, "kind": "text"},
    {"gold": "2", "said": "3", "held": 0.0, "reach": 4, "turn": 2, "kind": "corrected", "old": "3"},
    {"gold": "1", "said": "7", "held": 0.5, "reach": 4, "turn": 1, "kind": "text"},
    {"gold": "2", "said": "2", "held": 1.0, "reach": 4, "turn": 2, "kind": "corrected", "old": "5"},
    {"gold": "4", "said": "9", "held": 0.0, "reach": 4, "turn": 10, "kind": "corrected", "old": "5"},
]
FIGURES = {
    "right": 2,
    "kinds": {"corrected": {"questions": 3, "right": 1}, "text": {"questions": 2, "right": 1}},
    "turns": {"1": {"questions": 2, "right": 1}, "2": {"questions": 2, "right": 1}, "10": {"questions": 1, "right": 0}},
    "stale": 1,
}


def made(policy: str = "h2o", capacity: int | None = 8, **changes):
    figures = answer_figures([a | {"right": a["said"] == a["gold"]} for a in TRACE])
    task = {"name": "turns", "data": "words", "mode": "turns", "streams": 1}
    return cell_record(figures, policy=policy, capacity=capacity, task=task, **changes)


def test_kinds_turns_and_old_values_are_counted_from_the_trace(tmp_path):
    trace = tmp_path / "x.answers.jsonl"
    trace.write_text("".join(json.dumps(a | {"right": False}) + "\n" for a in TRACE))
    figures = Turns.from_trace(made(), trace)
    assert {name: figures[name] for name in FIGURES} == FIGURES, "what a line says is compared again"
    assert list(figures["turns"]) == ["1", "2", "10"]
    assert not {"kinds", "turns", "stale"} & set(answer_figures([{"right": True, "held": None, "reach": None}]))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"facts": 60}, "are 77 names, but words has 64"),
        ({"system": 0, "facts": 0}, "nothing to ask about"),
        ({"streams": 10**6}, "lines together"),
        ({"data": "scbench", "subset": "scbench_summary"}, "only scbench_kv and scbench_prefix_suffix"),
    ],
)
def test_what_can_not_be_asked_is_refused_in_one_line(changes, says):
    with pytest.raises(ValueError, match=says):
        TurnsOptions(**{"data": "words"} | changes)
    TurnsOptions(data="keys", facts=200)


def rows_of(contexts: int, turns: int = 2) -> list[dict]:
    """SCBench's format: keys and values as JSON, and questions about them."""
    return [
        {
            "id": i,
            "context": json.dumps({f"key {n}": f"value {i}{n}" for n in range(4)}),
            "multi_turns": [
                {"input": f'Key: "key {n}"\nThe value associated with the specified key is: ', "answer": f"value {i}{n}"}
                for n in range(turns)
            ],
        }
        for i in range(contexts)
    ]


@pytest.fixture
def published(tmp_path) -> Path:
    """A folder of the hub's files: parquet in folders that are named after subsets."""
    for subset in ("scbench_kv", "scbench_prefix_suffix"):
        (tmp_path / "data" / subset).mkdir(parents=True)
        table = pa.Table.from_pylist(rows_of(3 if subset == "scbench_kv" else 2))
        pq.write_table(table, tmp_path / "data" / subset / "test-00000-of-00001.parquet")
    return tmp_path / "data"


def test_scbench_is_read_in_the_hubs_schema(published, tmp_path):
    source, scripts = scbench.conversations("scbench_kv", 2, 3, published)
    assert source == "local test-00000-of-00001.parquet"
    (first, *_) = scripts
    assert first.text[: first.prompt] == (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n" + rows_of(1)[0]["context"] + "\n\n"
    )
    assert first.text[first.prompt :] == (
        'Key: "key 0"\nThe value associated with the specified key is: value 00\n\n'
        'Key: "key 1"\nThe value associated with the specified key is: value 01\n\n'
    )
    assert [about["turn"] for *_, about in first.questions] == [1, 2]
    assert len(scbench.conversations("scbench_prefix_suffix", 1, 2, published)[1][0].questions) == 1
    lines = tmp_path / "scbench_kv.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows_of(3)))
    assert scbench.conversations("scbench_kv", 2, 3, lines)[1] == scripts
    lines.write_text('{"context": "x", "multi_turns": [{"question": "y"}]}\n')
    for turns, contexts, folder, says in [
        (3, 1, published, "row 0 has 2 turns, not 3"),
        (2, 4, published, "has 3 contexts, not 4"),
        (1, 1, published / "nowhere", "no such directory"),
        (1, 1, lines, "row 0 does not follow SCBench's schema"),
    ]:
        with pytest.raises(UserError, match=says):
            scbench.conversations("scbench_kv", turns, contexts, folder)


def test_scbenchs_answers_are_right_if_the_string_is_in_them(tmp_path):
    trace = tmp_path / "x.answers.jsonl"
    line = {"gold": "ab-12", "held": None, "reach": None, "turn": 1, "kind": "text"}
    said = ["it is ab-12.\nbye", "ab-1\u20282", "ab-12"]
    trace.write_text("".join(json.dumps(line | {"said": x}, ensure_ascii=False) + "\n" for x in said), encoding="utf-8")
    record = cell_record({}, task={"name": "turns", "data": "scbench"})
    assert Turns.from_trace(record, trace)["outcomes"] == "101", "a line separator in an answer ends no line of the trace"


def test_a_conversation_goes_from_a_suite_to_a_page(words_dir, tmp_path):
    """The suite that ships, shortened, on a random model."""
    small = "--set data=words --set turns=3 --set streams=2 --set capacity=24 --policy dense --policy window --results results"
    for command in (
        ("run", "turns", "--model", words_dir, *small.split(), "--threads", 1),
        ("leaderboard",),
        ("records", "verify"),
    ):
        done = bench_in(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr + done.stdout
    assert "asked in turns" in (tmp_path / "results/README.md").read_text(encoding="utf-8")
    records = RecordStore(tmp_path / "results").read_all()[0]
    assert {(r.status, r.cell.task.mode) for r in records} == {("ok", "turns"), ("ok", "requests")}
    assert sum(counts.questions for counts in records[0].metrics.kinds.values()) == 6
    shown = bench_in("show", "table", records[0].cell_id[:12], cwd=tmp_path)
    assert "Percent right by the turn" in shown.stdout
