"""lm-eval's requests under a policy: dense equals lm-eval's own `hf`, both commands agree, and records work everywhere."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from functools import cache
from itertools import combinations

import lm_eval.tasks
import numpy as np
import pytest
import transformers
from conftest import bench
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import json_lines
from kvbench.harness.core.intervals import wilson
from kvbench.harness.data.stream import newline
from kvbench.harness.lm_eval import catalogue
from kvbench.harness.lm_eval.arguments import Arguments
from kvbench.harness.lm_eval.kvbench import KVBench
from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.load import load_tokenizer
from kvbench.harness.records import RecordStore
from kvbench.harness.records.aggregates import sample_figures
from kvbench.harness.report.compare import differences
from kvbench.harness.report.sections import section
from kvbench.harness.report.verify import problems
from kvbench.harness.run.request import RunRequest
from kvbench.harness.tasks.lm_eval import LmEval, LmEvalMetrics, LmEvalOptions, _pass_at
from kvbench.harness.tasks.lm_eval.measure import _template

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow("lm-eval")]  # lm-eval and its packages give warnings
TASKS = ["kvbench_cloze", "kvbench_cloze_said", "kvbench_registers", "kvbench_prose"]
SUITE = """
suite: lm
version: 1
model: {id: "builtin:sink_2"}
task:
  - {name: lm_eval, tasks: [kvbench_registers, kvbench_cloze_said, kvbench_prose], limit: 24}
  - {name: lm_eval, tasks: kvbench_registers, limit: 24, prompt: once, policies: [h2o]}
  - {name: lm_eval, tasks: kvbench_prose, limit: 24, prompt: once, policies: [h2o]}
capacity: 48
policies: [dense, h2o]
"""


@pytest.fixture(autouse=True)
def _logging():
    """lm-eval's command line sets up logging for a whole process. Its handlers would write to a closed capture."""
    loggers = [logging.getLogger(), logging.getLogger("lm_eval")]
    before = [list(log.handlers) for log in loggers]
    yield
    for log, handlers in zip(loggers, before, strict=True):
        log.handlers = handlers


@cache
def tokenizer_of(directory):
    """With an end-of-text token, because lm-eval's `hf` can't generate without one."""
    tokenizer = load_tokenizer(directory)
    if tokenizer.eos_token_id is None:
        tokenizer.eos_token = "<|sink3|>" if "<|sink3|>" in tokenizer.get_vocab() else tokenizer.bos_token
    return tokenizer


def prefix(tokenizer) -> int:
    return newline(tokenizer) if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def ours(directory, max_length=None, **arguments) -> KVBench:
    tokenizer = tokenizer_of(directory)
    reader, _ = Arguments.from_model_args(
        {"pretrained": str(directory), "batch_size": 5, "device": "cpu", "dtype": "float32"} | arguments
    ).loaded()
    return KVBench(reader, tokenizer, max_length, prefix_token_id=prefix(tokenizer))


def theirs(directory, max_length=None) -> HFLM:
    tokenizer = tokenizer_of(directory)
    hf = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    return HFLM(pretrained=hf, tokenizer=tokenizer, batch_size=4, max_length=max_length, prefix_token_id=prefix(tokenizer))


def asked(model, tasks, limit=12, fewshot=None):
    """Results and samples of lm-eval's own evaluation."""
    results, samples = {}, {}
    for name in tasks:
        loaded = catalogue.task(name, fewshot, 1234, [], {})
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(seed=1234)
        with catalogue.quiet():
            found = evaluate(model, loaded, limit=limit, bootstrap_iters=0)
        results[name], samples[name] = found["results"][name], found["samples"][name]
    return results, samples


def answers(samples):
    return [r[0] for s in samples for r in s["resps"]]


@pytest.fixture
def directory(request, model_dir):
    return model_dir if request.param == "random" else model_directory(request.param, None, False)


@pytest.mark.parametrize(
    ("directory", "max_length", "fewshot"),
    [("random", None, None), ("builtin:sink_2", 100, None), ("builtin:vanilla", 700, 1)],
    indirect=["directory"],
)
def test_dense_is_lm_evals_own_model(directory, max_length, fewshot):
    """Compares log-likelihoods, greedy flags, scores of whole texts and answers, also of truncated requests."""
    tasks = TASKS if fewshot is None else TASKS[:3]
    hf_results, hf = asked(theirs(directory, max_length), tasks, fewshot=fewshot)
    model = ours(directory, max_length)
    results, samples = asked(model, tasks, fewshot=fewshot)
    assert model.truncated > 0 or max_length != 100
    for name in tasks:
        for a, b in zip(answers(hf[name]), answers(samples[name]), strict=True):
            if isinstance(a, str):
                assert a == b
            elif isinstance(a, tuple):
                assert (a[0], a[1]) == (pytest.approx(b[0], abs=1e-3), b[1])
            else:
                assert a == pytest.approx(b, abs=1e-3)
        for metric, value in hf_results[name].items():
            if metric in ("acc,none", "acc_norm,none", "exact_match,first-word"):
                assert results[name][metric] == value


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Run the suite. -> its records, and their folder."""
    folder = tmp_path_factory.mktemp("lm")
    (folder / "lm.yaml").write_text(SUITE)
    request = RunRequest(str(folder / "lm.yaml"), threads=1)
    return request.measure(folder / "results", request.cells()), folder / "results"


def of(records, **what):
    (found,) = [r for r in records if all((r.cell.as_json() | r.cell.options).get(k) == v for k, v in what.items())]
    return found


def test_a_record_has_every_question_and_holds_to_its_trace(records):
    for record in records[0]:
        if record.status == "ok":
            assert problems(record, RecordStore(records[1]).path(record).parent) == []
            assert record.metrics.questions == 24
    binary, text = (of(records[0], policy="h2o", tasks=t, prompt="stream") for t in ("kvbench_registers", "kvbench_prose"))
    assert len(binary.metrics.outcomes) == 24
    assert binary.metrics.accuracy == binary.metrics.score == binary.metrics.right / 24
    assert binary.metrics.stderr == pytest.approx(binary.metrics.lm_eval["acc_stderr,none"])
    assert text.metrics.score < 0
    assert 2.718281828**-text.metrics.score == pytest.approx(text.metrics.lm_eval["word_perplexity,none"])
    trace = RecordStore(records[1]).trace_path(binary, ".samples.jsonl")
    first = json.loads(trace.read_text().splitlines()[0])
    assert len(first["said"]) == 4
    assert all(isinstance(logprob, float) and greedy in (True, False) for logprob, greedy in first["said"])


def test_a_text_has_no_prompt_to_be_cut_at_the_end_of(records):
    failed = of(records[0], policy="h2o", tasks="kvbench_prose", prompt="once")
    assert failed.status == "failed"
    assert "no prompt" in failed.error.message


def test_records_are_compared_question_by_question(records):
    dense, h2o = (of(records[0], policy=p, tasks="kvbench_prose", prompt="stream") for p in ("dense", "h2o"))
    (found,) = [d for d in differences(dense, h2o) if d.metric == "score"]
    assert found.low < found.change < found.high
    assert found.change == pytest.approx(h2o.metrics.score - dense.metrics.score, abs=1e-6)
    (same,) = [d for d in differences(h2o, h2o) if d.metric == "score"]
    assert same.verdict == "same"


def test_a_task_that_is_not_there_or_is_several(monkeypatch):
    manager = lm_eval.tasks.TaskManager(include_path=str(catalogue.GENERATED), include_defaults=False)
    monkeypatch.setattr(catalogue, "_manager", lambda *_: manager)
    with pytest.raises(UserError, match="did you mean 'kvbench_cloze"):
        catalogue.task("kvbench_clozed", None, 0, [], {})
    with pytest.raises(UserError, match="a group of lm-eval tasks; list its tasks: kvbench_anywhere, kvbench_chain"):
        catalogue.task("kvbench", None, 0, [], {})


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if not loop.last %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chatting(model_dir):
    """A tokenizer with a chat template."""
    tokenizer = load_tokenizer(model_dir)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("begun", [True, False])
def test_the_chat_template_is_applied_as_lm_evals_own_model_does(chatting, model_dir, begun):
    """The answer's opening is added, unless the prompt contains its beginning."""
    history = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "3?"}]
    reference = theirs(model_dir)
    reference.tokenizer = chatting
    ours = _template(chatting)(history, add_generation_prompt=begun)
    assert ours == reference.apply_chat_template(history, add_generation_prompt=begun)
    assert ours == "<user>2 + 2?</s><assistant>4</s><user>3?" + "<assistant>" * begun


SAMPLED = """
suite: sampled
version: 1
model: {id: "builtin:sink_2"}
task: {name: lm_eval, tasks: kvbench_cloze_said, limit: 24, temperature: 2.0, max_gen_toks: 4}
capacity: 48
policies: [dense, h2o]
"""


def sampled(folder, *settings):
    """Records of the suite, and their traces."""
    (folder / "sampled.yaml").write_text(SAMPLED)
    request = RunRequest(str(folder / "sampled.yaml"), threads=1, settings=settings)
    store = folder / "-".join(["results", *settings]).replace(":", "")
    records = request.measure(store, request.cells())
    assert all(r.status == "ok" for r in records)
    return records, [json_lines(RecordStore(store).trace_path(r, ".samples.jsonl")) for r in records], store


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four answers to each question."""
    return sampled(tmp_path_factory.mktemp("sampled"), "samples=4")


def test_several_answers_give_pass_at_k_and_lm_evals_own_figures_stay_its_own(four):
    """lm-eval takes the first answer alone, and so are its figures."""
    records, traces, store = four
    for record, trace in zip(records, traces, strict=True):
        figures = record.measured(LmEvalMetrics)
        assert (figures.samples, figures.requests, figures.outcomes, figures.accuracy) == (4, 96, None, None)
        assert all(len(line["said"]) == len(line["scores"]) == 4 for line in trace)
        assert figures.score == pytest.approx(np.mean([line["scores"] for line in trace])) == figures.pass_at["1"]
        assert figures.lm_eval["exact_match,first-word"] == pytest.approx(np.mean([line["scores"][0] for line in trace]))
        by_hand = [np.mean([any(c) for line in trace for c in combinations(line["scores"], k)]) for k in (1, 2, 4)]
        assert list(figures.pass_at) == ["1", "2", "4"]
        assert list(figures.pass_at.values()) == pytest.approx(by_hand)
        assert figures.pass_at["1"] < figures.pass_at["2"] < figures.pass_at["4"]
        assert problems(record, RecordStore(store).path(record).parent) == []
        wrong = LmEvalMetrics.from_json(figures.as_json() | {"pass_at": figures.pass_at | {"4": 0.5}})
        assert any("pass_at.4 is 0.5" in p for p in problems(dataclasses.replace(record, metrics=wrong, trace=None), store))
    (found,) = [d for d in differences(*records) if d.metric == "score"]
    assert found.why == "question by question"
    assert found.low < found.change < found.high
    page = section(records[0], records).text
    row = next(line for line in page.splitlines() if "pass@4" in line)
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["policy", "capacity", "task", "pass@1", "pass@2", "pass@4"]
    assert f"{100 * records[0].metrics.pass_at['4']:.1f} [" in page


def test_the_same_seed_gives_the_same_answers_in_any_batch(four, tmp_path):
    _, fewer, _ = sampled(tmp_path, "samples=2", "batch=5")
    assert [line["said"] for trace in fewer for line in trace] == [line["said"][:2] for trace in four[1] for line in trace]
    _, others, _ = sampled(tmp_path, "samples=4", "sample_seed=1")
    assert sum(a["said"] == b["said"] for a, b in zip(others[0], four[1][0], strict=True)) < 6


def test_lm_evals_own_command_draws_the_same_answers(capsys, tmp_path, monkeypatch):
    manager = lm_eval.tasks.TaskManager(include_path=str(catalogue.GENERATED), include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: manager)
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")  # asks pip and others for what is installed
    (record, _), _, _ = sampled(tmp_path, "sample_seed=3")
    model = "--model_args pretrained=builtin:sink_2,dtype=float32,sample_seed=3 --device cpu"
    tasks = "--tasks kvbench_cloze_said --limit 24 --gen_kwargs do_sample=true,temperature=2.0,max_gen_toks=4"
    out = ("--log_samples", "--output_path", tmp_path / "out")
    code, _, err = bench(capsys, "lm-eval", *model.split(), *tasks.split(), *out)
    assert code == 0, err
    (file,) = (tmp_path / "out").rglob("samples_*.jsonl")
    said = {line["doc_id"]: line["resps"][0][0] for line in map(json.loads, file.read_text().splitlines())}
    trace = json_lines(RecordStore(tmp_path / "results-sample_seed=3").trace_path(record, ".samples.jsonl"))
    assert said == {line["question"]: line["said"][0] for line in trace}


def test_a_task_in_the_chat_template_asks_other_questions(chatting):
    plain, chat = (
        LmEval.data(LmEvalOptions(tasks="kvbench_cloze", limit=2, chat_template=on), lambda: chatting, None)
        for on in (None, True)
    )
    asked = [[i.args[0] for task in data.loaded["tasks"].values() for i in task.instances] for data in (plain, chat)]
    assert [f"<user>{text}<assistant>" for text in asked[0]] == asked[1]
    assert plain.ids_sha256 != chat.ids_sha256


def test_intervals_of_pass_at_k_are_over_questions(four):
    """Where the four answers to a question are alike, 24 questions are worth 24 answers; fewer than 20 have no interval."""

    def shown(right, questions=24):
        """pass@1 of four answers to each question, so many of which are right. -> its width, and the text."""
        figures = sample_figures([{"score": c / 4, "scores": [1.0] * c + [0.0] * (4 - c)} for c in right[:questions]])
        kept = {k: v for k, v in four[0][0].metrics.as_json().items() if k not in figures}
        text = _pass_at(LmEvalMetrics.from_json(kept | figures), 1)
        ends = re.search(r"\[([\d.]+), ([\d.]+)\]", text)
        return (float(ends[2]) - float(ends[1])) / 100 if ends else None, text

    alike, mixed = [4] * 18 + [0] * 6, [3] * 24
    of_questions, of_answers = (float(np.diff(wilson(18 * n, 24 * n))[0]) for n in (1, 4))
    assert shown(alike)[0] == pytest.approx(of_questions, rel=0.1)
    assert shown(mixed)[0] == pytest.approx(of_answers, rel=0.1)
    assert shown(alike, 19) == (None, f"{100 * 18 / 19:.1f}")


def test_settings_of_one_cell_are_not_those_of_the_next(chatting):
    for temperature, expected in ((0.5, {"do_sample": True, "temperature": 0.5}), (None, {"do_sample": False})):
        data = LmEval.data(LmEvalOptions(tasks="kvbench_cloze_said", limit=1, temperature=temperature), lambda: chatting, None)
        (task,) = data.loaded["tasks"].values()
        assert {k: v for k, v in task.instances[0].args[1].items() if k not in ("until", "max_gen_toks")} == expected
