"""Use of lm-eval by users: answers kept in a file, mistakes that lm-eval reports, stop strings, whole texts."""

import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import bench
from lm_eval._cli import HarnessCLI
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kvbench.harness.cli import cli
from kvbench.harness.core.errors import UserError
from kvbench.harness.lm_eval import arguments, catalogue
from kvbench.harness.lm_eval.arguments import Arguments
from kvbench.harness.lm_eval.kvbench import KVBench
from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.load import load_tokenizer
from kvbench.harness.tasks.lm_eval import LmEval, evaluate_requests
from kvbench.harness.tasks.lm_eval.lm_eval_options import LmEvalOptions

REQUEST = ("loglikelihood", {}, ("reg 3 = 41\n" * 20, "reg 3"), 0)


def model_of(arguments: str) -> KVBench:
    return KVBench.create_from_arg_string(f"pretrained=builtin:sink_2,{arguments}", {"device": "cpu", "batch_size": 1})


def answers(model, file):
    return CachingLM(model, str(file)).loglikelihood([Instance(REQUEST[0], *REQUEST[1:])])


def test_kept_answers_are_those_of_the_same_arguments(tmp_path):
    dense = model_of("policy=dense")
    first = answers(dense, tmp_path / "a.db")
    assert answers(model_of("policy=dense"), tmp_path / "a.db") == first
    for other in ("policy=sink_window,capacity=16", "policy=dense,dtype=bfloat16", "policy=dense,add_bos_token=false"):
        with pytest.raises(UserError, match=r"a\.db holds answers of another model, policy"):
            answers(model_of(other), tmp_path / "a.db")
    assert answers(model_of("policy=sink_window,capacity=16"), tmp_path / "b.db") != first


def test_kept_answers_are_those_of_the_same_tokenizer(tmp_path):
    copied = Path(shutil.copytree(model_directory("builtin:sink_2", None, False), tmp_path / "model"))
    arguments = {"pretrained": str(copied)}
    signatures = [Arguments.from_model_args(arguments).signature()]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copied / name).write_text((copied / name).read_text() + "\n")
        signatures.append(Arguments.from_model_args(arguments).signature())
    assert len({*signatures}) == 3
    assert signatures[-1] == Arguments.from_model_args(arguments).signature()


def test_what_lm_eval_keeps_is_of_the_file_that_was_read(monkeypatch):
    """A folder may hold several GGUF files."""
    read: list[str | None] = []
    own = arguments.model_directory

    def noted(model, revision, pickle, gguf_file=None):
        read.append(gguf_file)
        return own(model, revision, pickle)

    monkeypatch.setattr(arguments, "model_directory", noted)
    Arguments(pretrained="builtin:sink_2", gguf_file="a.gguf", device="cpu").signature()
    assert read == ["a.gguf"]


def test_answers_of_which_nothing_is_known_are_not_used(tmp_path):
    class Other:
        cache_hook = None

        def set_cache_hook(self, hook):
            hook.dbdict["a hash"] = (1.0, True)

    CachingLM(Other(), str(tmp_path / "a.db")).dbdict.close()
    with pytest.raises(UserError, match="holds answers of another model"):
        answers(model_of("policy=dense"), tmp_path / "a.db")


BASE = ("lm-eval", "--model_args", "pretrained=builtin:sink_2", "--tasks", "kvbench_cloze")


def test_a_users_folder_of_tasks_stands_beside_ours(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("include_path: theirs\n")
    ours = str(catalogue.GENERATED)
    assert catalogue.with_our_tasks(None, None) == ours
    assert catalogue.with_our_tasks("mine", None) == [ours, "mine"]
    assert catalogue.with_our_tasks(None, str(config)) == [ours, "theirs"]
    assert catalogue.with_our_tasks("mine", str(config)) == [ours, "mine"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--limit", "2", "--apply_chat_template"), "chat_template"),
        (("--limit", "0"), "did not find any docs"),
        (("--limit", "2", "--log_samples"), "--output_path"),
        (("--limit", "-3"), "limit: expected 0 or more, not -3"),
        (("--limit", "2", "--output_path", f"{__file__}/out"), "out can't be made (Not a directory)"),
    ],
    ids=str,
)
def test_what_lm_eval_and_transformers_refuse_is_one_line(options, says, capsys, monkeypatch):
    manager = catalogue.TaskManager(include_path=str(catalogue.GENERATED), include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: manager)
    code, _, err = bench(capsys, *BASE, *options)
    assert code == 2
    assert says in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(("before", "after"), [("<s> ", ""), ("<s> ", " </s>"), ("", " </s>")])
def test_a_tokenizer_that_adds_a_token_after_a_text_is_refused(before, after, model_dir):
    """lm-eval would score it in place of a token of the answer."""
    tokenizer = load_tokenizer(model_dir)
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(["<s>", "</s>"])
    marks = [(mark, backend.token_to_id(mark)) for mark in ("<s>", "</s>") if mark in before + after]
    backend.post_processor = TemplateProcessing(single=f"{before}$A{after}", special_tokens=marks)
    changed = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    reader = model_of("policy=dense").reader
    if after:
        with pytest.raises(UserError, match="adds </s> after a text"):
            KVBench(reader, changed)
    else:
        assert KVBench(reader, changed).reader is reader


TASK = """task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 5}
metric_list: [{metric: exact_match}]
"""
BROKEN = {
    "data": ("DATA", "OTHER", "JSON parse error"),
    "split": ("test_split: test", "test_split: train", "KeyError: 'train'"),
    "column": ("{{a}}", "{{b}}", "UndefinedError: 'b' is undefined"),
    "key": ("test_split", "no_such_key: 1\ntest_split", "unexpected keyword argument 'no_such_key'"),
    "examples": ("test_split", "num_fewshot: 50\ntest_split", "Sample larger than population"),
    "temperature": ("max_gen_toks: 5", "temperature: .inf", "generation_kwargs: temperature: Input should be a finite number"),
    "repeats": ("test_split", "repeats: '2'\ntest_split", "mine: repeats: Input should be a valid integer, not '2'"),
}


@pytest.mark.parametrize(("was", "becomes", "says"), BROKEN.values(), ids=BROKEN)
def test_a_mistake_in_a_task_is_one_line(was, becomes, says, tmp_path, monkeypatch, capsys):
    """Covers suites and the command, except `repeats`, for which the command accepts text."""
    (tmp_path / "data.jsonl").write_text('{"q": "a", "a": "b"}\n' * 2)
    (tmp_path / "other.jsonl").write_text('{"q": "a"\nno json')
    text = TASK.replace(was, becomes)
    for name in ("data", "other"):
        text = text.replace(name.upper(), str(tmp_path / f"{name}.jsonl"))
    (tmp_path / "mine.yaml").write_text(text)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer = load_tokenizer(model_directory("builtin:sink_2", None, False))
    with pytest.raises(UserError) as error:
        LmEval.data(LmEvalOptions(tasks="mine", include=str(tmp_path)), lambda: tokenizer, None)
    assert says in str(error.value)
    with pytest.raises(UserError, match=r"include: .*none: no such folder"):
        LmEval.data(LmEvalOptions(tasks="mine", include=str(tmp_path / "none")), lambda: tokenizer, None)
    if "repeats" not in becomes:
        manager = catalogue.TaskManager(include_path=str(tmp_path), include_defaults=False)
        monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: manager)
        code, _, err = bench(capsys, *BASE[:-1], "mine", "--device", "cpu")
        assert code == 2
        assert says in err.splitlines()[-1]
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("file", "was", "becomes"),
    [("mine.yaml", "max_gen_toks: 5", "max_gen_toks: 6"), ("data.jsonl", '"a": "b"', '"a": "c"')],
    ids=["length of answers", "right answer"],
)
def test_a_users_task_that_was_edited_is_another_version(file, was, becomes, tmp_path, monkeypatch):
    """The prompts stay the same, so their digest can't tell."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "data.jsonl").write_text('{"q": "a", "a": "b"}\n' * 2)
    (tmp_path / "tasks/mine.yaml").write_text(TASK.replace("DATA", str(tmp_path / "data.jsonl")))
    tokenizer = load_tokenizer(model_directory("builtin:sink_2", None, False))
    edited = tmp_path / ("tasks" if file == "mine.yaml" else "") / file
    facts = []
    for place in range(3):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / f"cache{place}")
        if place == 2:
            edited.write_text(edited.read_text().replace(was, becomes))
        data = LmEval.data(LmEvalOptions(tasks="mine", include=str(tmp_path / "tasks")), lambda: tokenizer, None)
        facts.append(data.facts())
    assert facts[0] == facts[1]
    assert facts[1]["ids_sha256"] == facts[2]["ids_sha256"]
    assert facts[1]["task_version"] != facts[2]["task_version"]


class Pieces:
    """Decodes each token as its bytes, as a byte-level tokenizer does."""

    def __init__(self, pieces):
        self.pieces = pieces

    def tok_decode(self, tokens, skip_special_tokens):
        return b"".join(self.pieces[t] for t in tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("before", "stop"),
    [
        ([b"word "] * 30, [bytes([b]) for b in "🙂🙃🙂".encode()]),
        ([b"a"] * 30, [b"", b"", b"S", *[b""] * 40, b"T", *[b""] * 40, b"OP"]),
    ],
    ids=["12 tokens for 3 characters", "tokens without text"],
)
def test_an_answer_ends_when_its_text_contains_the_stop_string(before, stop):
    model = Pieces([*before, *stop])
    text = "🙂🙃🙂" if len(stop) == 12 else "STOP"
    contains = [text in KVBench._end_of(model, list(range(n)), len(text)) for n in range(1, len(model.pieces) + 1)]
    assert contains == [False] * (len(model.pieces) - 1) + [True]


def test_silence_is_that_of_a_thread(capsys):
    """State that two threads change at once is restored, and a third thread prints meanwhile."""
    stdout, entered, leave = sys.stdout, threading.Barrier(2, timeout=10), threading.Event()

    def silent() -> None:
        with catalogue.quiet():
            print("silent")
            entered.wait()
            leave.wait(10)

    threads = [threading.Thread(target=silent, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    entered.wait()
    print("said")
    leave.set()
    entered.wait()
    for thread in threads:
        thread.join()
    assert sys.stdout is stdout
    assert capsys.readouterr().out == "said\n"


def test_add_bos_token_decides_whether_a_text_is_scored_after_one_bos_or_two(shared):
    """lm-eval puts a BOS before a whole text that already begins with the tokenizer's own, and scores the second as text."""
    directory, text, scores = shared / "models/stories260K", "Once upon a time, there was a little girl.", []
    for option in ("", ",add_bos_token=false"):
        model = KVBench.create_from_arg_string(f"pretrained={directory}{option}", {"device": "cpu", "batch_size": 1})
        scores += model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
    bos, ids = model.tokenizer.bos_token_id, model.tokenizer(text, add_special_tokens=False)["input_ids"]
    plain = AutoModelForCausalLM.from_pretrained(directory)
    for tokens, score in (([bos, bos, *ids], scores[0]), ([bos, *ids], scores[1])):
        with torch.no_grad():
            logits = plain(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        assert score == pytest.approx(float(logits[range(len(tokens) - 1), tokens[1:]].sum()), abs=1e-2)


def test_kept_requests_are_those_of_the_same_command(tmp_path, monkeypatch):
    from lm_eval.caching import cache

    folders = []
    config = tmp_path / "config.yaml"
    for option, changed in (("a", "x"), ("b", "x"), ("a", "y"), ("a", "x")):
        monkeypatch.setattr(cache, "PATH", "root")
        config.write_text(changed)
        requests = "refresh" if not folders else "true"
        catalogue.keep_requests_apart({"gen_kwargs": option, "config": str(config), "cache_requests": requests})
        folders.append(cache.PATH)
    assert len({*folders}) == 3
    assert folders[0] == folders[3]


@pytest.mark.parametrize(
    ("options", "model", "batch_size"),
    [
        ([], "kvbench", "16"),
        (["--batch_size", "4"], "kvbench", "4"),
        (["--batch", "4"], "kvbench", "4"),
        (["-b4", "-M", "hf"], "hf", "4"),
        (["-C", "config.yaml"], None, None),
        (["--config=config.yaml"], None, None),
    ],
)
def test_the_command_has_our_defaults_unless_an_option_or_a_configuration_sets_them(options, model, batch_size, monkeypatch):
    parsed = []
    monkeypatch.setattr(sys, "argv", ["bench"])
    monkeypatch.setattr(HarnessCLI, "execute", lambda _, arguments: parsed.append(arguments))
    monkeypatch.setattr(catalogue, "refuse_settings", lambda _: None)
    monkeypatch.setattr(catalogue, "with_our_tasks", lambda *_: None)
    cli.main(["lm-eval", *options, "--tasks", "kvbench_cloze"], standalone_mode=False)
    assert (parsed[0].model, getattr(parsed[0], "batch_size", None)) == (model, batch_size)


def test_a_suite_with_a_chat_template_that_a_base_model_lacks_is_refused():
    tokenizer = load_tokenizer(model_directory("builtin:sink_2", None, False))
    with pytest.raises(UserError, match="kvbench_cloze: .*chat_template"):
        LmEval.data(LmEvalOptions(tasks="kvbench_cloze", limit=1, chat_template=True), lambda: tokenizer, None)


def test_a_suite_passes_add_bos_token_on(monkeypatch):
    passed = []

    class PassedError(Exception):
        pass

    def model(*_, add_bos_token, **__):
        passed.append(add_bos_token)
        raise PassedError

    monkeypatch.setattr(evaluate_requests, "KVBench", model)
    monkeypatch.setattr(evaluate_requests, "RequestReader", lambda *_: None)
    data = SimpleNamespace(tokens=1, lengths=[1], tokenizer=None)
    job = SimpleNamespace(data=data, at_once=1, model=None, config=None, block=None, method=None)
    for value in (None, False):
        with pytest.raises(PassedError):
            evaluate_requests.measure(LmEvalOptions(tasks="a", add_bos_token=value), job)
    assert passed == [None, False]
    assert "add_bos_token" not in LmEvalOptions(tasks="a").model_dump(exclude_none=True), "cells without it stay as they were"
