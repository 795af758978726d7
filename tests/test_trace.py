"""Programs and their traces; answers that a model writes itself, judged word by word; and what a policy's cache does to them."""

import itertools
import json
import random
import re
from types import SimpleNamespace

import pytest
import torch
from factories import RECORDS, cell_record
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from kvbench.harness.core.errors import UserError
from kvbench.harness.data import register_machine
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import decoder
from kvbench.harness.engine.method import EAGER
from kvbench.harness.models.load import load_model, load_tokenizer
from kvbench.harness.records import RecordStore
from kvbench.harness.report.closing import closing
from kvbench.harness.report.shares import answers
from kvbench.harness.report.verify import problems
from kvbench.harness.run.estimate import estimates
from kvbench.harness.run.request import RunRequest
from kvbench.harness.tasks.task import Job, MeasurementError
from kvbench.harness.tasks.trace import Trace
from kvbench.harness.tasks.trace.programs import figures, judged, sources, trace_data
from kvbench.harness.tasks.trace.trace_options import TraceOptions
from kvbench.policies import Policy
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O
from kvbench.policies.random import Random
from kvbench.policies.recompute_window import RecomputeWindow
from kvbench.policies.window import Window

CPU = torch.device("cpu")


def naive(prompt: str) -> str:
    """The trace of a prompt, by another interpreter: it looks lines and values up in the text."""
    lines = dict(re.findall(r"(L\d+) (r\d M\d+ r\d N\d+ r\d O\d+ J\d+ Z\d+ (?:J\d+|end))", prompt))
    values = dict(re.findall(r"v(\d) (\d)", prompt))
    full, tell = prompt.startswith("full"), re.findall(r"tell r(\d)", prompt)
    label, said = prompt.split()[-1], []
    for _ in range(1000):
        a, second, b, third, to, goes, jump, if_zero, other = lines[label].split()
        a, b, to = a[1:], b[1:], to[1:]
        said += [f"v{a}", values[a], *([second] if full else []), f"v{b}", values[b], *([third] if full else [])]
        values[to] = str(int(values[a]) + int(values[b]))[-1]
        said += [f"v{to}", values[to], *(word for register in tell for word in (f"v{register}", values[register]))]
        goes, label = (if_zero, other) if values[to] == "0" else (goes, jump)
        label = label.replace("J", "L")
        said += [goes, label]
        if label == "end":
            return " ".join(said)
    return "it never ends"


@given(
    seed=st.integers(0, 10**9),
    lines=st.integers(2, 12),
    registers=st.none() | st.integers(3, 8),
    restate=st.sampled_from(["full", "reads"]),
    tell=st.booleans(),
    steps=st.integers(1, 12),
)
def test_a_trace_is_what_a_naive_interpreter_says_and_its_words_follow_from_their_sources(
    seed, lines, registers, restate, tell, steps
):
    made = register_machine.program(random.Random(seed), lines, restate, tell, (steps, 2 * steps + 4), registers)
    prompt, trace = made.prompt(), [word for step in made.steps() for word in step.words]
    assert " ".join(trace) == naive(" ".join(prompt))
    assert register_machine.Program.from_prompt(prompt) == made
    assert len(prompt) == register_machine.prompt_words(lines, registers or len(made.values), tell)
    words = register_machine.step_words(restate, tell)
    assert steps * words <= len(trace) <= (2 * steps + 4) * words
    text, places = prompt + trace, list(sources(made))
    assert len(places) == len(trace)
    for place, (word, source) in enumerate(zip(trace, places, strict=True), len(prompt)):
        said = [text[at] for at in source]
        assert max(source) < place
        if word.isdigit() and len(source) == 2:
            assert int(word) == (int(said[0]) + int(said[1])) % 10
        elif word.isdigit():
            assert said == [word]
            register = text[place - 1]
            assert text[source[0] - 1] == register
            assert register not in text[source[0] : place - 1], "where it was said last"
        elif len(source) == 2:
            assert (word[0] == "Z") == (said[1] == "0")
            assert said[0] == f"L{word[1:]}"
        else:
            assert (said[0], word) == ("end", "end") or said[0][1:] == word[1:]


# Two lines, three registers; it ends after two steps, as register 1 becomes 0. Each value's place is known.
PROMPT = "full L5 r0 M5 r1 N5 r0 O5 J7 Z5 J5 L7 r1 M7 r0 N7 r1 O7 J5 Z7 end v0 4 v1 3 v2 0 run L5"
STEPS = ["v0 4 M5 v1 3 N5 v0 7 O5 L7", "v1 3 M7 v0 7 N7 v1 0 Z7 end"]
RIGHT = " ".join(STEPS)
SMALL = TraceOptions(programs=1, lines=2, registers=3, steps=1)
READS = [8, 9, 7, 7]  # words from a value to where it was said last: twice the prompt, then the step before


def judge(said: str, prompt: str = PROMPT, options: TraceOptions = SMALL):
    return judged(prompt, said, options)


def test_reads_count_up_to_the_first_wrong_word_and_with_a_teacher_all_of_them():
    assert naive(PROMPT) == RIGHT
    found = judge(RIGHT)
    assert (found.right, found.final, found.ending, found.words_right, found.words) == (True, True, "ended", 20, 20)
    assert found.reads == [(distance, True) for distance in READS]
    found = judge(" ".join([STEPS[0], "v1 9 M7 v0 7 N7 v1 6 O7 L5"]))
    assert (found.right, found.final, found.ending, found.words_right, found.matches) == (False, False, "cut", 11, 16)
    assert found.reads == [(8, True), (9, True), (7, False)]
    found = judge(RIGHT.replace("v1 3 M7", "v1 9 M7"), options=SMALL.model_copy(update={"teacher": True}))
    assert (found.words_right, found.reads) == (11, [(8, True), (9, True), (7, False), (7, True)])


def test_an_answer_that_ends_early_is_wrong_at_its_end():
    found = judge(STEPS[0][:-2] + "end")
    assert (found.right, found.ending, found.words_right, found.words) == (False, "ended", 9, 10)


def test_an_answer_loops_if_as_many_steps_as_it_has_lines_came_before():
    first, second = STEPS[0], STEPS[1].replace("end", "L5")
    assert judge(" ".join(["ask", first, second, first, second])).ending == "looped"
    assert judge(" ".join([first, second, first])).ending == "cut", "one step is too short"
    assert judge(" ".join([first, second, first, second, "v0"])).ending == "looped", "wherever it is cut"
    assert judge(" ".join([first, second, first, second.replace("3", "4")])).ending == "cut"
    assert judge(" ".join([first, second, first, STEPS[1]])).ending == "ended"


@given(seed=st.integers(0, 10**9), lines=st.integers(2, 5), restate=st.sampled_from(["full", "reads"]))
def test_no_beginning_of_a_right_trace_loops(seed, lines, restate):
    """Else it would go on for ever."""
    options = TraceOptions(programs=1, lines=lines, registers=3, steps=20, restate=restate)
    made = register_machine.program(random.Random(seed), lines, restate, False, (20, 40), 3)
    words = [word for step in made.steps() for word in step.words]
    for end in range(options.step, len(words), 5):
        assert judge(" ".join(words[:end]), " ".join(made.prompt()), options).ending == "cut"


def line(said: str, held: float | None = None) -> dict:
    return {"prompt": PROMPT, "said": said, "held": held}


def test_figures_of_a_record_by_hand():
    wrong = RIGHT.replace("v1 0", "v1 6")
    found = figures([line(RIGHT), line(wrong, 0.5), line("ask ask", 0.25)], SMALL)
    assert (found["questions"], found["right"], found["outcomes"]) == (3, 1, "100")
    assert (found["words"], found["words_right"], found["tokens_read"]) == (42, [20, 17, 0], 42 + 3 * 29)
    assert found["endings"] == {"ended": 2, "looped": 0, "cut": 1}
    assert (found["final"], found["held"]) == (1, 0.375)
    assert found["reads"] == [{"from": 0, "to": 32, "count": 8, "right": 8}]
    assert not {"told", "pass_at", "word_accuracy"} & set(found)


@pytest.mark.parametrize("samples", [4, 6])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers(samples):
    options = TraceOptions(programs=3, lines=2, registers=3, steps=1, samples=samples, temperature=1.0)
    rights = [0, 1, 3]
    said = [RIGHT if sample < right else "ask" for right in rights for sample in range(samples)]
    found = figures([line(one) for one in said], options)
    assert [p["k"] for p in found["pass_at"]] == {4: [2, 4], 6: [2, 4, 6]}[samples]
    for entry in found["pass_at"]:
        chosen = [list(itertools.combinations(range(samples), entry["k"])) for _ in rights]
        expected = [sum(min(c) < r for c in choices) / len(choices) for r, choices in zip(rights, chosen, strict=True)]
        assert entry["share"] == pytest.approx(sum(expected) / 3)
        assert "low" not in entry, "three programs are too few"


def made(said, cell=(), **task):
    options = {"name": "trace", "programs": len(said), "lines": 2, "registers": 3, "steps": 1} | task
    found = figures([line(one, None if one == RIGHT else 0.5) for one in said], TraceOptions(**options))
    return cell_record(found | {"kv_bytes": 640, "state_bytes": 0}, task=options, data={"ids_sha256": "x"}, **dict(cell))


def test_options_that_contradict_each_other():
    for wrong, message in (
        ({"samples": 2}, "all of them are the same"),
        ({"teacher": True, "tokens": 10_000}, "writes nothing"),
        ({"teacher": True, "temperature": 1.0}, "writes nothing"),
        ({"tokens": 450}, "can't hold the trace of 48 steps: 480 words"),
    ):
        with pytest.raises(ValueError, match=message):
            TraceOptions(**wrong)
    assert TraceOptions().limit == 600
    assert TraceOptions(tokens=480).limit == 480


@pytest.fixture(scope="module")
def tokenizer(machine_dir):
    return load_tokenizer(machine_dir)


@pytest.fixture(scope="module")
def model(machine_dir):
    return load_model(machine_dir, "float32", CPU)


def run(options, tokenizer, model, policy, tmp_path, capacity=20, evict=1, block=64, at_once=None, **more):
    """Lines of the trace file, and figures."""
    options = options.model_copy(update={"side_by_side": at_once})
    data, config = trace_data(options, tokenizer), CacheConfig(policy, capacity, evict=evict)
    job = Job(model, config, data, block, EAGER, tmp_path / "x.jsonl", lambda *_: None, **more)
    found = Trace.run(options, job)
    return [json.loads(x) for x in job.trace.read_text().splitlines()], found


TINY = TraceOptions(programs=4, lines=2, registers=3, steps=2, tell=True)
POLICIES = [Window(), H2O(), Random(keep_prompt=True), RecomputeWindow()]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_answers_are_the_greedy_words_of_one_stream_after_the_other(policy, tokenizer, model, tmp_path):
    lines, found = run(TINY, tokenizer, model, policy, tmp_path)
    data = trace_data(TINY, tokenizer)
    assert data.prompts.shape == (4, 1 + TINY.prompt)
    for prompt, answer in zip(data.prompts, lines, strict=True):
        read, said = decoder(model, CacheConfig(policy, 20)), []
        logits = read.read_prompt(torch.from_numpy(prompt)[None], 1)
        while len(said) < TINY.limit and said[-1:] != ["end"]:
            token = int(logits[0].argmax())
            said += tokenizer.convert_ids_to_tokens([token])
            logits = read(torch.tensor([[token]]))[:, -1]
        assert answer["prompt"].split() == tokenizer.convert_ids_to_tokens(prompt[1:].tolist())
        assert answer["said"].split() == said
    assert found.kv_bytes == read.kv_bytes


SAMPLED = TINY.model_copy(update={"programs": 2, "samples": 3, "temperature": 1.0, "top_p": 0.9})


@pytest.mark.parametrize(
    ("options", "policy"),
    [(TINY, H2O()), (TINY, RecomputeWindow()), (SAMPLED, H2O()), (SAMPLED, Random(keep_prompt=True))],
    ids=lambda x: type(x).__name__ if isinstance(x, Policy) else "sampled" if x.temperature else "greedy",
)
def test_the_same_seeds_give_the_same_answers_twice_in_a_batch_and_alone(options, policy, tokenizer, model, tmp_path):
    whole = run(options, tokenizer, model, policy, tmp_path)[0]
    assert len({answer["said"] for answer in whole}) == len(whole)
    for at_once in (None, 1, 3):
        assert run(options, tokenizer, model, policy, tmp_path, at_once=at_once)[0] == whole
    if options.temperature:
        other = run(options.model_copy(update={"sample_seed": 1}), tokenizer, model, policy, tmp_path)[0]
        assert all(a["said"] != b["said"] for a, b in zip(whole, other, strict=True))
        fewer = run(options.model_copy(update={"samples": 2}), tokenizer, model, policy, tmp_path)[0]
        assert fewer == [answer for answer in whole if answer["sample"] < 2]


@pytest.mark.parametrize(
    ("policy", "evict"),
    [(H2O(), 1), (H2O(), "prompt"), (Window(), 5), (RecomputeWindow(), 1)],
    ids=lambda x: type(x).__name__ if isinstance(x, Policy) else None,
)
def test_right_traces_read_in_blocks_give_the_words_of_single_steps(policy, evict, tokenizer, model, tmp_path):
    options = TINY.model_copy(update={"teacher": True})
    steps, found = run(options, tokenizer, model, policy, tmp_path, evict=evict, block=1)
    for block, at_once in ((7, None), (64, 2)):
        assert run(options, tokenizer, model, policy, tmp_path, evict=evict, block=block, at_once=at_once) == (steps, found)


def test_logits_that_are_not_finite_are_a_failed_cell(tokenizer, tmp_path):
    broken = SimpleNamespace(read_prompt=lambda tokens, block: torch.full((len(tokens), 261), float("nan")))
    with pytest.raises(MeasurementError, match="not finite"):
        run(SMALL, tokenizer, SimpleNamespace(device=CPU), Window(), tmp_path, open=lambda *_, **__: broken)


def test_with_a_teacher_dense_says_what_the_models_own_forward_pass_says(tokenizer, model, machine_dir, tmp_path):
    options = TINY.model_copy(update={"teacher": True})
    lines, found = run(options, tokenizer, model, Dense(), tmp_path, None)
    data, matches, theirs = trace_data(options, tokenizer), 0, AutoModelForCausalLM.from_pretrained(machine_dir)
    for prompt, trace, answer in zip(data.prompts, data.traces, lines, strict=True):
        ids = torch.tensor([[*prompt, *trace]])
        likeliest = theirs(ids).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        assert answer["said"].split() == tokenizer.convert_ids_to_tokens(likeliest)
        matches += sum(a == b for a, b in zip(likeliest, trace.tolist(), strict=True))
    assert found.word_accuracy == matches / found.words
    assert found.endings is None


def test_a_model_without_the_words_and_programs_that_do_not_exist_are_mistakes_of_a_user(tokenizer, model_dir, monkeypatch):
    monkeypatch.setattr(register_machine, "_TRIES", 20)
    with pytest.raises(UserError, match="such as `bench pretrain machine` makes"):
        trace_data(SMALL, load_tokenizer(model_dir))
    with pytest.raises(UserError, match="no program of 2 lines ends after 120 to 240 steps: choose other lines"):
        trace_data(TraceOptions(lines=2, registers=3, steps=120), tokenizer)


SUITE = """
suite: traces
version: 1
model: {id: MODEL}
task:
  - {name: trace, programs: 4, lines: 2, registers: 3, steps: 2, tell: true, side_by_side: 3}
  - {name: trace, programs: 4, lines: 2, registers: 3, steps: 2, samples: 2, temperature: 1.0, restate: reads, evict: step}
  - {name: trace, programs: 4, lines: 2, registers: 3, steps: 2, teacher: true, evict: step}
capacity: 16
policies: [dense, recompute_window, {name: random, keep_prompt: true}, {name: h2o, evict: [step, {every: 8}, prompt]}]
"""


@pytest.fixture(scope="module")
def measured(machine_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    path = folder / "traces.yaml"
    path.write_text(SUITE.replace("MODEL", str(machine_dir)))
    request = RunRequest(str(path), threads=1, device="cpu")
    cells = request.cells()
    return folder / "records", cells, request.measure(folder / "records", cells, progress=False)


@pytest.mark.slow("measures a suite")
def test_every_figure_but_bytes_follows_from_the_trace_file(measured):
    folder, cells, records = measured
    assert len(records) == 14
    for record in records:
        assert record.status == "ok", record.error
        path = next(folder.rglob(record.trace.file))
        assert problems(record, path.parent) == []
        again = Trace.from_trace(record, path)
        assert set(record.metrics.as_json()) - set(again) == {"kv_bytes", "state_bytes"}
    sizes = {e.cell.id: e.kv_bytes // Trace.workload(e.cell.task).side_by_side for e in estimates(cells, "cpu")}
    bounded = {r.cell_id: r.metrics.kv_bytes for r in records if r.cell.most_kept is not None}
    assert bounded == {cell: sizes[cell] for cell in bounded}


def test_several_answers_to_a_program_are_one_cluster():
    twice = made([RIGHT, RIGHT, "ask", "ask"] * 20, programs=40, samples=2, temperature=1.0)
    assert len(answers([twice]).streams) == 40
    low, high = answers([twice]).ends
    alone_low, alone_high = answers([made([RIGHT, "ask"] * 40)]).ends
    assert high - low > 1.3 * (alone_high - alone_low)


def test_traces_of_other_lengths_are_never_pooled():
    """In the table at the end of a run: dense has read longer ones, too, and has a row in two tables."""
    records = RecordStore(RECORDS / "long_answers.jsonl").read_all()[0]
    tables = [table for table in closing(records) if "right traces read" in table.heading]
    assert len(tables) > 1
    for table in tables:
        assert all(line[table.head.index("right")] for line in table.lines)
        assert table.lines[0][0] == "dense"
