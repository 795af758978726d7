"""Questions in a stream: the questions, which policies can answer them, and the scores."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import DEVICE, EAGER, H2O, CacheConfig, RecomputeWindow, Window, decoder, model_of

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.intervals import wilson
from kvbench.harness.data import arc
from kvbench.harness.models.load import load_tokenizer
from kvbench.harness.records.aggregates import answer_figures
from kvbench.harness.tasks import streameval
from kvbench.harness.tasks.arc_stream import ArcStream, ArcStreamOptions
from kvbench.harness.tasks.streameval import StreamEval, StreamEvalOptions
from kvbench.harness.tasks.task import Job, MeasurementError

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return load_tokenizer(model_dir)


def job_of(data, tmp_path, config, model=None, **rest) -> Job:
    return Job(model, config, data, 16, EAGER, tmp_path / "answers", lambda tokens, text: None, **rest)


@dataclass
class Oracle:
    """A decoder that remembers the last `capacity` tokens of its stream. It answers from them, or else with a 0."""

    tokenizer: object
    capacity: int
    seen: list[int]
    kv_bytes = held_bytes = state_bytes = 0

    def __call__(self, tokens, valid=None, keep=None):
        self.seen += tokens[0].tolist()
        logits = torch.zeros(1, 1, 257)
        logits[0, 0, self._next()] = 1
        return logits

    def _next(self) -> int:
        text = self.tokenizer.decode(self.seen)
        before, asked, so_far = text.rpartition("\nAnswer:")
        if not asked:
            return 0
        began = len(self.seen) - len(self.tokenizer.encode(so_far, add_special_tokens=False))
        known = self.tokenizer.decode(self.seen[max(0, began - self.capacity) : began])
        number = before.rpartition("line ")[2].removesuffix("?")
        lines = [x for x in known.split("\n") if x.startswith(f"line {number}: ")]
        answer = " " + lines[0].rpartition(" ")[2] + "\n" if lines else " <0>\n"
        return self.tokenizer.encode(answer[len(so_far) :] or "\n", add_special_tokens=False)[0]

    def fork(self, streams):
        return Oracle(self.tokenizer, self.capacity, [*self.seen])

    def held(self, positions):
        return sum(p >= len(self.seen) - self.capacity for p in positions) / len(positions)


@pytest.mark.slow("long streams")
@pytest.mark.parametrize("context", ["gold", "model", "none"])
def test_an_oracle_of_the_last_tokens_is_right_inside_its_cache_and_never_beyond(tokenizer, tmp_path, context):
    """This holds at every distance, and the task knows for every question whether its line was still held."""
    capacity, seen = 700, {}
    config = CacheConfig(Window(), capacity)
    for distance in range(1, 26, 4):
        options = StreamEvalOptions(distance=distance, lines=60, query_every=5, context=context)
        data = StreamEval.data(options, lambda: tokenizer, None)

        def open_oracle(*_, **__):
            return Oracle(tokenizer, capacity, [])

        job = job_of(data, tmp_path, config, SimpleNamespace(device=torch.device("cpu")), open=open_oracle)
        found = StreamEval.run(options, job).as_json()
        answers = [json.loads(line) for line in job.trace.read_text().splitlines()]
        assert len(answers) == found["questions"] == len(range(5, 61, 5)) - (distance - 1) // 5
        for answer in answers:
            assert answer["right"] == (answer["held"] == 1.0) == (answer["reach"] <= capacity)
            assert answer["said"] == (answer["gold"] if answer["right"] else "0")
        places = found["in_cache"]
        assert all(x["right"] == (x["questions"] if place == "whole" else 0) for place, x in places.items())
        seen[distance] = found["accuracy"]
        assert found["outcomes"].count("1") == found["right"]
        assert sum(x["questions"] for x in found["in_cache"].values()) == found["questions"]
    assert seen[1] == 1.0
    assert seen[25] == 0.0
    assert found["reach"] > capacity


def test_the_stream_is_the_same_whatever_the_distance_and_holds_every_line(tokenizer):
    near, far = (streameval.script(StreamEvalOptions(distance=d, lines=50), 0) for d in (5, 30))
    assert [near.text[a:b] for a, b in near.lines] == [far.text[a:b] for a, b in far.lines]
    assert [near.text[a:b].split(":")[0] for a, b in near.lines] == [f"line {i}" for i in range(1, 51)]
    assert streameval.script(StreamEvalOptions(distance=5, lines=50, data_seed=1), 0).text != near.text
    assert streameval.script(StreamEvalOptions(distance=5, lines=50), 1).text != near.text


def test_a_question_points_at_its_line_in_tokens(tokenizer):
    data = StreamEval.data(StreamEvalOptions(distance=7, lines=40, streams=2), lambda: tokenizer, None)
    for quiz in data.quizzes:
        for n, q in enumerate(quiz.questions, 1):
            line, question, answer = (
                tokenizer.decode(quiz.ids[a:b]) for a, b in (q.evidence, (q.start, q.prompt_end), (q.prompt_end, q.answer_end))
            )
            assert line == f"line {10 * n - 6}: REGISTER_CONTENT is <{q.answer}>\n"
            assert f"line {10 * n - 6}?" in question
            assert answer == f" <{q.answer}>\n"
    assert data.facts()["line_tokens"] == pytest.approx(len("line 12: REGISTER_CONTENT is <12345>\n"), abs=1)


@pytest.mark.slow("takes seconds")
@pytest.mark.parametrize(
    ("context", "policy"),
    [("gold", H2O()), ("model", H2O()), ("none", H2O()), ("model", Window()), ("none", RecomputeWindow())],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_answers_are_the_greedy_tokens_of_the_same_loop(model_dir, tokenizer, tmp_path, policy, context):
    """Reading blocks with forks equals reading token by token, and the stream keeps exactly the requested text."""
    from kvbench.harness.models.load import load_model

    model = load_model(model_dir, "float32", torch.device("cpu"))
    options = StreamEvalOptions(distance=1, lines=4, query_every=2, context=context)
    data = StreamEval.data(options, lambda: tokenizer, None)
    job = job_of(data, tmp_path, CacheConfig(policy, 48), model)
    StreamEval.run(options, job)
    heard = [json.loads(line)["said"] for line in job.trace.read_text().splitlines()]

    quiz, read, at, expected = data.quizzes[0], decoder(model, job.config), 0, []
    longest = max(q.answer_end - q.prompt_end for q in quiz.questions) + 4

    def feed(to, ids):
        for i in ids:
            logits = to(torch.tensor([[i]]))
        return logits

    for q in quiz.questions:
        if context == "none":
            feed(read, quiz.ids[at : q.start].tolist())
            side = read.fork([0])
            logits = feed(side, quiz.ids[q.start : q.prompt_end].tolist())
        else:
            logits = feed(read, quiz.ids[at : q.prompt_end].tolist())
            side = read if context == "model" else read.fork([0])
        tokens = [int(logits[0, -1].argmax())]
        while "\n" not in tokenizer.decode(tokens) and len(tokens) < longest:
            tokens.append(int(side(torch.tensor([tokens[-1:]]))[0, -1].argmax()))
        if context == "model":
            feed(read, tokens[-1:] + ([] if "\n" in tokenizer.decode(tokens) else [int(quiz.ids[q.answer_end - 1])]))
        expected.append(streameval.stated_value(tokenizer.decode(tokens, skip_special_tokens=True)))
        at = q.prompt_end if context == "gold" else q.answer_end
    assert heard == expected


def test_a_line_longer_than_the_cache_is_a_failed_cell(tokenizer, tmp_path):
    data = StreamEval.data(StreamEvalOptions(), lambda: tokenizer, None)
    with pytest.raises(MeasurementError, match="record line takes"):
        StreamEval.run(StreamEvalOptions(), job_of(data, tmp_path, CacheConfig(Window(), 16), model_of("llama")))


@pytest.mark.parametrize("held", [[0], [40], [0, 40], [47, 48, 49]])
@pytest.mark.parametrize("policy", [Window(), H2O(window=5), RecomputeWindow()], ids=lambda p: type(p).__name__)
def test_held_is_what_kept_says(policy, held):
    read = decoder(model_of("llama"), CacheConfig(policy, 10))
    for block in torch.arange(50, device=DEVICE)[None].split(7, 1):
        read(block)
    rows = [h for layer in read.kept() for h in layer[0]] if policy.caches else [list(range(40, 50))]
    expected = sum(p in row for row in rows for p in held) / (len(rows) * len(held))
    assert read.held(held) == pytest.approx(expected)


def test_accuracy_is_the_share_of_all_answers_that_are_right():
    answers = [{"right": right, "held": None, "reach": None} for right in (True, False, True, True)]
    figures = answer_figures(answers)
    assert [figures[name] for name in ("questions", "right", "accuracy", "outcomes")] == [4, 3, 3 / 4, "1011"]


def test_wilson_is_that_of_the_published_examples():
    """Figures from Newcombe 1998, Statistics in Medicine 17, Table I."""
    for hits, trials, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert wilson(hits, trials) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


QUESTIONS = [
    {"id": "a", "question": "What is wet?", "choices": {"text": ["Water", "Sand"], "label": ["A", "B"]}, "answerKey": "A"},
    {"id": "b", "question": "What is 1 + 1?", "choices": {"text": ["1", "2", "3"], "label": ["1", "2", "3"]}, "answerKey": "2"},
]


@pytest.fixture
def arc_dir(tmp_path) -> Path:
    for subset in ("ARC-Easy", "ARC-Challenge"):
        (tmp_path / "arc" / subset).mkdir(parents=True)
        for split in ("train", "test"):
            rows = QUESTIONS[: 1 if split == "train" else 2]
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / "arc" / subset / f"{split}-00000-of-00001.parquet")
    return tmp_path / "arc"


def test_arc_is_read_from_a_directory_in_the_hubs_schema(arc_dir):
    source, items = arc.items("ARC-Easy", "test", arc_dir)
    assert [i.answer for i in items] == ["A", "2"]
    assert items[1].choices == ("1", "2", "3")
    assert "test" in source
    assert len(arc.items("ARC-Challenge", "train", arc_dir)[1]) == 1
    with pytest.raises(UserError, match="no such directory"):
        arc.items("ARC-Easy", "test", arc_dir / "nowhere")
    with pytest.raises(UserError, match="validation"):
        arc.items("ARC-Easy", "validation", arc_dir)
    bad = arc_dir / "bad.jsonl"
    bad.write_text(json.dumps(QUESTIONS[0] | {"answerKey": "C"}) + "\n")
    with pytest.raises(UserError, match="not one of the choices"):
        arc.items("ARC-Easy", "test", bad)
    bad.write_text('{"question": "x"}\n')
    with pytest.raises(UserError, match="no column"):
        arc.items("ARC-Easy", "test", bad)


def test_arc_is_one_stream_or_one_stream_a_question(arc_dir, tokenizer, tmp_path, model_dir):
    from kvbench.harness.models.load import load_model

    stream = ArcStream.data(ArcStreamOptions(), lambda: tokenizer, arc_dir)
    single = ArcStream.data(ArcStreamOptions(one_at_a_time=True), lambda: tokenizer, arc_dir)
    assert [len(q.questions) for q in stream.quizzes] == [2]
    assert [len(q.questions) for q in single.quizzes] == [1, 1]
    text = tokenizer.decode(stream.quizzes[0].ids[stream.quizzes[0].prefix :])
    assert text == (
        "Question: What is wet?\nA. Water\nB. Sand\nAnswer: A\n\nQuestion: What is 1 + 1?\n1. 1\n2. 2\n3. 3\nAnswer: 2\n\n"
    )
    config = CacheConfig(Window(), 40)
    found = ArcStream.run(
        ArcStreamOptions(), job_of(stream, tmp_path, config, load_model(model_dir, "float32", torch.device("cpu")))
    ).as_json()
    assert found["questions"] == 2
    assert "no evidence" in found["in_cache"]


def test_a_distance_beyond_the_stream_can_not_be_asked():
    with pytest.raises(ValueError, match="beyond the stream"):
        StreamEvalOptions(distance=1001)
    StreamEvalOptions(distance=1000)
    with pytest.raises(ValueError, match="below lowest"):
        StreamEvalOptions(lowest=5, highest=4)
