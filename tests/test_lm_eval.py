"""lm-eval's requests under a policy: dense equals lm-eval's own `hf`, both commands agree, and records work everywhere."""

import dataclasses
import json
import logging
import re
from collections import Counter
from functools import cache
from itertools import combinations, product

import lm_eval.tasks
import numpy as np
import pytest
import torch
import transformers
from helpers import bench
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from scipy.stats import chi2, chi2_contingency

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
from kvbench.harness.records.aggregates import pass_at, pass_sizes, sample_figures
from kvbench.harness.report.compare import differences
from kvbench.harness.report.sections import section
from kvbench.harness.report.verify import problems
from kvbench.harness.run.request import RunRequest
from kvbench.harness.tasks.lm_eval import LmEval, LmEvalMetrics, LmEvalOptions, _pass_at
from kvbench.harness.tasks.lm_eval.evaluate_requests import _sample, _template
from kvbench.harness.tasks.task import MeasurementError

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
    return KVBench(reader, tokenizer, max_length=max_length, prefix_token_id=prefix(tokenizer))


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


@pytest.mark.parametrize("policy", ["h2o", "sink_window"])  # a walk with a statistic, and a closed form
def test_a_capacity_that_covers_every_request_equals_dense_and_a_smaller_one_does_not(model_dir, policy):
    _, dense = asked(ours(model_dir, 2000), TASKS[:3], 6)
    large, small = ours(model_dir, policy=policy, capacity=2000), ours(model_dir, policy=policy, capacity=32)
    _, same = asked(large, TASKS[:3], 6)
    _, other = asked(small, TASKS[:3], 6)
    assert (large.over_capacity, small.over_capacity) == (0, small.requests)
    moved = 0
    for name in TASKS[:3]:
        for a, b, c in zip(answers(dense[name]), answers(same[name]), answers(other[name]), strict=True):
            assert a == b if isinstance(a, str) else a[0] == pytest.approx(b[0], abs=1e-3)
            moved += a != c if isinstance(a, str) else abs(a[0] - c[0]) > 1e-2
    assert moved > 20, "eviction moves the scores, as lm-eval's own path never would"


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


def test_both_entrances_agree(records, capsys, tmp_path, monkeypatch):
    """`bench lm-eval` prints the figures of the suite's record."""
    manager = lm_eval.tasks.TaskManager(include_path=str(catalogue.GENERATED), include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: manager)
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")  # asks pip and others for what is installed
    arguments = "pretrained=builtin:sink_2,policy=h2o,capacity=48,dtype=float32"
    code, out, err = bench(
        capsys,
        "lm-eval",
        "--model_args",
        arguments,
        "--tasks",
        "kvbench_registers",
        "--limit",
        24,
        "--device",
        "cpu",
        "--output_path",
        tmp_path / "out",
        "--log_samples",
    )
    assert code == 0, err
    record = of(records[0], policy="h2o", tasks="kvbench_registers", prompt="stream")
    row = next(line.split("|") for line in out.splitlines() if "|acc " in line)
    assert float(row[7]) == pytest.approx(record.metrics.score, abs=1e-4)
    (found,) = (json.loads(p.read_text()) for p in (tmp_path / "out").rglob("results_*.json"))
    assert found["results"]["kvbench_registers"]["acc,none"] == pytest.approx(record.metrics.score)
    assert found["config"]["policy"] == "H2O"
    assert found["config"]["over_capacity"] == record.metrics.over_capacity == record.metrics.requests
    assert record.metrics.lm_eval["acc,none"] == pytest.approx(record.metrics.score)


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


def test_query_aware_and_query_blind_are_never_in_one_table(records):
    once, stream = (
        section(next(r for r in records[0] if r.cell.task.prompt == prompt), records[0]).text for prompt in ("once", "stream")
    )
    assert [page.splitlines()[0] for page in (once, stream)] == ["## lm-eval, prompt once", "## lm-eval, prompt stream"]
    assert "query-blind" in stream
    assert "query-aware" not in stream
    assert "± " in stream
    assert "paired by question" in stream


def test_truncate_keeps_the_first_tokens_of_a_prompt_that_is_longer_than_the_model():
    """Follows Table 8: cutting at `max_length` does not remove the beginning, which `truncate` keeps."""
    model = ours(model_directory("builtin:vanilla", None, False), prompt="truncate", prompt_tokens=20)
    long = list(range(300))
    assert model._fitting(long, [1, 2])[0] == [*range(10), *range(290, 300)]
    text = "The wind came from the north and the sky was grey. " * 60
    ids = model.tok_encode(text)
    assert len(ids) > model.max_length
    assert model._prompt(text, 100) == [*ids[:10], *ids[-10:]]
    assert model.truncated == 0


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [
        ("acc", np.bool_(True), {"score": 1.0}),
        ("acc", 0, {"score": 0.0}),
        ("f1", np.float64(0.25), {"score": 0.25}),
        ("perplexity", -2.5, {"score": -2.5, "weight": 1}),
        ("word_perplexity", (-30.0, 12), {"score": -30.0, "weight": 12}),
    ],
)
def test_a_questions_score_is_a_number_or_a_log_likelihood_with_its_weight(metric, value, expected):
    """lm-eval turns log-likelihoods into a perplexity. Pairs are compared by log-likelihood."""
    sample = {metric: value, "doc_id": 3, "doc": {}, "target": "x", "resps": [[(-1.0, True)]]}
    line = _sample(sample, metric)
    assert {k: v for k, v in line.items() if k in ("score", "weight")} == expected
    json.dumps(line)


def test_a_metric_that_is_no_number_is_refused():
    with pytest.raises(MeasurementError, match="choose another"):
        _sample({"f1": {"a": 1}, "doc_id": 0, "target": "", "resps": []}, "f1")


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


CONTEXTS = ["The wind came from the", "He said that she", "Line 7: the register holds <", "It was", "The old"]


def drawn(model, **settings):
    """Count the short answers to each context."""
    requests = [
        Instance("generate_until", {}, (text, {"until": [], **settings}), 0, ("drawn", number, 200))
        for number, text in enumerate(CONTEXTS)
    ]
    answers = model.generate_until([request for request in requests for _ in range(request.repeats)])
    return [Counter(answers[start : start + 200]) for start in range(0, len(answers), 200)]


def unlike(a, b) -> float:
    """The p-value of two lists of counts coming from the same distributions. Answers given less than ten times count as one."""
    statistic, degrees = 0.0, 0
    for x, y in zip(a, b, strict=True):
        often = [answer for answer, count in (x + y).items() if count >= 10]
        table = np.array([[c[answer] for answer in often] + [c.total() - sum(c[answer] for answer in often)] for c in (x, y)])
        found = chi2_contingency(table[:, table.sum(0) > 0], correction=False)
        statistic, degrees = statistic + found.statistic, degrees + found.dof
    return float(chi2.sf(statistic, degrees))


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.8, "top_k": 0}, {"temperature": 1.5, "top_k": 3}, {"temperature": 1.2, "top_p": 0.6, "top_k": 0}],
    ids=str,
)
def test_answers_are_drawn_from_the_distribution_of_lm_evals_own_model(settings):
    """Shares of 200 answers to each of five prompts, by a test that another temperature fails."""
    directory = model_directory("builtin:vanilla", None, False)
    sampling = {"do_sample": True, "max_gen_toks": 2, **settings}
    reference = theirs(directory)
    reference.batch_size_per_gpu = 100
    torch.manual_seed(1)
    expected = drawn(reference, **sampling)
    assert unlike(drawn(ours(directory, batch_size=100), **sampling), expected) > 0.01
    other = {"temperature": settings["temperature"] * 2}
    assert unlike(drawn(ours(directory, batch_size=100), **sampling | other), expected) < 1e-4


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


@pytest.mark.parametrize("number", [1, 2, 7, 8])
def test_pass_at_k_counts_choices(number):
    """By hand: all choices of k answers, of c right ones and the others wrong."""
    for k, right in product(range(1, number + 1), range(number + 1)):
        choices = [any(c) for c in combinations([i < right for i in range(number)], k)]
        assert pass_at(np.array([float(right)]), number, k)[0] == pytest.approx(sum(choices) / len(choices))
    assert pass_sizes(number) == {1: [1], 2: [1, 2], 7: [1, 2, 4, 7], 8: [1, 2, 4, 8]}[number]


def test_a_task_in_the_chat_template_asks_other_questions(chatting):
    plain, chat = (
        LmEval.data(LmEvalOptions(tasks="kvbench_cloze", limit=2, chat_template=on), lambda: chatting, None)
        for on in (None, True)
    )
    asked = [[i.args[0] for task in data.loaded["tasks"].values() for i in task.instances] for data in (plain, chat)]
    assert [f"<user>{text}<assistant>" for text in asked[0]] == asked[1]
    assert plain.ids_sha256 != chat.ids_sha256


def test_intervals_of_pass_at_k_are_over_questions(four):
    """If the four answers to a question are equal, 24 questions count as 24 answers. Fewer than 20 have no interval."""

    def shown(right, questions=24):
        """pass@1 of four answers to each question, so many of which are right. -> its width, and the text."""
        figures = sample_figures([{"score": c / 4, "scores": [1.0] * c + [0.0] * (4 - c)} for c in right[:questions]])
        kept = {k: v for k, v in four[0][0].metrics.as_json().items() if k not in figures}
        text = _pass_at(LmEvalMetrics.from_json(kept | figures), "1")
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
