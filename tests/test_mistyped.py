"""Values that users mistype, in options, suites, files and Python calls: one line that says what was expected."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import yaml
from conftest import bench

import kvbench
from kvbench.harness.core.errors import UserError
from kvbench.harness.engine.model import adopt
from kvbench.harness.lm_eval import arguments
from kvbench.harness.lm_eval.arguments import Arguments
from kvbench.harness.lm_eval.generation import checked
from kvbench.harness.models.families import tiny_model
from kvbench.harness.run.speeds import Rates, Speeds
from kvbench.harness.suite import find, load
from kvbench.harness.suite.axes import evict_from, kv_from, size_in_bytes
from kvbench.lab.pretrain import config as pretraining
from kvbench.lab.pretrain.text import pieces

BOUNDLESS = ("cake", "gamma")  # a parameter whose policy sets no bounds


@pytest.mark.parametrize("value", [".nan", ".inf"])
def test_a_parameter_of_a_policy_is_finite(value, tmp_path, capsys):
    """Records are JSON, which has neither."""
    name, parameter = BOUNDLESS
    entry = f"{{name: {name}, {parameter}: {value}}}"
    code, _, err = bench(capsys, "run", "quickstart", "--policy", entry, "--dry-run", "--results", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{parameter}: Input should be a finite number" in err
    with pytest.raises(UserError, match=f"{parameter}: Input should be a finite number"):
        kvbench.Cache(tiny_model("llama"), name, 16, **{parameter: float(value.removeprefix("."))})


@pytest.mark.parametrize(
    "command",
    [
        ("run", "quickstart", "--set", "seed=2024-13-45"),
        ("pretrain", "vanilla", "--set", "seed=2024-13-45"),
        ("pretrain", "vanilla", "--set", "seed=["),
        ("policy", "check", "h2o", "--set", "window=["),
    ],
    ids=" ".join,
)
def test_an_option_that_is_no_yaml_is_a_users_mistake(command, capsys):
    code, _, err = bench(capsys, *command)
    assert (code, err) == (2, f"bench: --set {command[-1]}: '{command[-1].partition('=')[2]}' is not YAML\n")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("probe", "builtin:sink_2", "--out", "t.json", "--dtype", "half"), "'half' is not one of"),
        (("which", "builtin:recall", "--budget", 96, "--minutes", "nan"), "nan: expected minutes, such as 30"),
        (("which", "builtin:recall", "--budget", 96, "--minutes", "inf"), "inf: expected minutes, such as 30"),
        (("run", "quickstart", "--block", 10**20), "is not in the range"),
        (("pretrain", "vanilla", "--set", f"seed={10**20}"), "seed: Input should be less than"),
        (("pretrain", "vanilla", "--set", "training.learning_rate=.inf"), "Input should be a finite number"),
    ],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, tuple) else "",
)
def test_an_option_out_of_range_is_a_users_mistake(command, says, capsys):
    code, _, err = bench(capsys, *command)
    assert (code, err.count("\n")) == (2, 1)
    assert says in err


@pytest.mark.parametrize(("size", "expected"), [("1.5MiB", 3 * 2**19), (65536, 65536), ("0.5kB", 500)])
def test_sizes(size, expected):
    assert size_in_bytes(size) == expected


@pytest.mark.parametrize("size", ["9" * 400 + "MiB", f"{10**12}GiB", "0.1B", math.nan, "٣ apples"])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match="bytes is a size such as 65536, 64KiB or 1.5MiB"):
        size_in_bytes(size)


@pytest.mark.parametrize("arguments", [{"threads": -1}, {"threads": "2"}, {"block": 1.5}, {"workers": True}], ids=str)
def test_numbers_of_a_call(arguments):
    (name,) = arguments
    with pytest.raises(UserError, match=f"^{name}: expected a whole number from 1 to "):
        kvbench.run("quickstart", **arguments)


def test_numbers_of_numpy_are_numbers(tmp_path):
    entry = {"name": "sink_window", "sinks": np.int64(4)}
    with pytest.raises(UserError, match="capacity 4 "):
        kvbench.run("quickstart", capacity=np.int64(4), policies=entry, tasks="perplexity", results=tmp_path, progress=False)
    with pytest.raises(UserError, match="expected a number, a text, a list or a mapping"):
        kvbench.run("quickstart", capacity=object())


def test_books_without_text_end_a_pretraining(tmp_path):
    (tmp_path / "train.txt").write_text("")
    with pytest.raises(UserError, match=r"train\.txt: no book has any text"):
        next(pieces(pretraining.Mix(pg19=1, prose=0), 0, tmp_path))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch_size": "many"}, "--model_args: batch_size: Input should be a valid integer"),
        ({"batch_size": 0}, "--model_args: batch_size: Input should be greater than or equal to 1"),
        ({"policy": "sink_window", "capacity": 64, "sinks": 4.5}, "--model_args: sinks: Input should be a valid integer"),
        ({"policy": "cake", "capacity": 64, "gamma": math.inf}, "--model_args: gamma: Input should be a finite number"),
        ({"capacity": True}, "--model_args: capacity: expected a number, not true"),
        ({"evict": True}, "--model_args: evict: expected a number, not true"),
        ({"seed": 10**20}, "--model_args: seed: 100000000000000000000 is beyond"),
        ({"rope_length": 10**18}, "--model_args: rope_length: Input should be less than"),
        ({"policy": "window", "capacity": 10**15}, "capacity 1,000,000,000,000,000: its slots take"),
        ({"prefix_token_id": 10**6}, "--model_args: prefix_token_id 1000000: the tokenizer has"),
        ({"policy": "adakv", "capacity": 64, "score": "dense"}, "--model_args: dense never evicts"),
    ],
    ids=str,
)
def test_arguments_of_the_model_for_lm_eval(given, says):
    with pytest.raises(UserError, match=f"^{re.escape(says)}"):
        Arguments.from_model_args({"pretrained": "builtin:sink_2", "device": "cpu"} | given).loaded()


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("until", 5, "until: Input should be a valid list, not 5"),
        ("until", ["a", 5], "until: Input should be a valid string, not 5"),
        ("max_gen_toks", 0, "max_gen_toks: Input should be greater than or equal to 1, not 0"),
        ("max_tokens", 2.5, "max_tokens: Input should be a valid integer, got a number with a fractional part, not 2.5"),
        ("max_gen_toks", True, "max_gen_toks: expected a number, not true"),
        ("temperature", math.inf, "temperature: Input should be a finite number, not inf"),
        ("top_p", math.nan, "top_p: Input should be a finite number, not nan"),
        ("top_p", 2, "top_p: Input should be less than or equal to 1, not 2"),
        ("top_k", 1.5, "top_k: Input should be a valid integer, got a number with a fractional part, not 1.5"),
        ("top_k", 10**20, "top_k: 100000000000000000000 is beyond 9,223,372,036,854,775,807"),
    ],
)
def test_settings_of_generated_answers(setting, value, says):
    with pytest.raises(UserError, match=f"^mine: {re.escape(says)}$"):
        checked({setting: value}, "mine")


def test_settings_of_generated_answers_are_what_they_mean():
    given = {"until": "a", "max_gen_toks": "5", "do_sample": "no", "top_p": None, "num_beams": 1}
    assert checked(given, "mine") == {"until": ["a"], "max_gen_toks": 5, "do_sample": False, "num_beams": 1}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("seed", [1, True], "seed.1: expected a number, not true"),
        ("resources", {"gpus": False}, "gpus: expected a number, not false"),
        ("task", {"tokens": 40000, "until": {"interval": True}}, "until.interval: expected a number, not true"),
        ("task", {"tokens": 40000, "until": {"interval": math.inf}}, "until: Input should be a finite number, not inf"),
        ("task", {"tokens": 40000, "until": {}}, "'until.interval' is missing"),
        ("task", {"tokens": 300, "streams": 151}, "streams 151 are too many for 300 tokens: each needs at least 2"),
    ],
    ids=str,
)
def test_values_inside_a_suite(key, value, says, tmp_path):
    value = {"name": "perplexity", **value} if key == "task" else value
    file = tmp_path / "mine.yaml"
    suite = {
        "suite": "mine",
        "version": 1,
        "model": {"id": "builtin:sink_2"},
        "task": {"name": "perplexity"},
        "policies": ["dense"],
    }
    file.write_text(yaml.safe_dump(suite | {key: value}))
    with pytest.raises(UserError, match=rf"mine\.yaml:\d+: {re.escape(says)}$"):
        load(file)


def test_a_cache_that_does_not_fit_is_not_tried_for_an_estimate(monkeypatch):
    cell = next(cell for cell in load(find("quickstart"))[1] if cell.name == "dense")
    speeds = Speeds(adopt(tiny_model("llama")))
    monkeypatch.setattr(Speeds, "_adds", lambda *_: Rates(0.0, 0.0))
    monkeypatch.setattr(Speeds, "_block", lambda *_: 0.0)
    assert speeds.rates(cell, 1, 1000) == Rates(0.0, 0.0)
    assert speeds.rates(cell, 1, 10**15) is None


@pytest.mark.parametrize("number", [True, False, 1.0, -1, 10**20, "1"], ids=repr)
def test_numbers_inside_axes_are_whole(number):
    exempt, every, group = (
        {"codec": "int4", "exempt": {"sinks": number}},
        {"every": number},
        {"codec": "kivi4", "group": number},
    )
    for axis, value in ((kv_from, exempt), (kv_from, group), (evict_from, every), (evict_from, {"pages": number})):
        with pytest.raises(ValueError, match="numbers, at least 1|is a number of tokens, at least 1"):
            axis(value)


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
