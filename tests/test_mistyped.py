"""Values that users mistype, in options, suites, files and Python calls: one line that says what was expected."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from conftest import bench

import kvbench
from kvbench.harness.core.errors import UserError
from kvbench.harness.lm_eval import arguments
from kvbench.harness.lm_eval.arguments import Arguments
from kvbench.harness.models.families import tiny_model
from kvbench.harness.suite.axes import size_in_bytes
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
        ({"policy": "sink_window", "capacity": 64, "sinks": 4.5}, "SinkWindow: sinks: Input should be a valid integer"),
        ({"policy": "cake", "capacity": 64, "gamma": math.inf}, "Cake: gamma: Input should be a finite number"),
    ],
    ids=str,
)
def test_arguments_of_the_model_for_lm_eval(given, says):
    with pytest.raises(UserError, match=f"^{re.escape(says)}"):
        Arguments.from_model_args({"pretrained": "builtin:sink_2", "device": "cpu"} | given).loaded()


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
