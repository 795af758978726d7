"""Mistakes in options, suites, files and Python calls: one line that says what was expected, before anything is measured.

Errors: which line of the user's code they come from, the exit codes of `bench`, and what `bench doctor` reports.
"""

import importlib.util
import json
import math
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from helpers import bench

import kvbench
from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError, location_of
from kvbench.harness.lm_eval.arguments import Arguments
from kvbench.harness.lm_eval.generation import checked
from kvbench.harness.suite.axes import evict_from, kv_from, size_in_bytes
from kvbench.lab.pretrain import config as pretraining
from kvbench.lab.pretrain.text import pieces


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("run", "quickstart", "--set", "seed=2024-13-45"), "--set seed=2024-13-45: '2024-13-45' is not YAML"),
        (("pretrain", "vanilla", "--set", "seed=["), "--set seed=[: '[' is not YAML"),
        (("policy", "check", "h2o", "--set", "window=["), "--set window=[: '[' is not YAML"),
        (("run", "quickstart", "--policy", "{name: cake, gamma: .nan}"), "gamma: Input should be a finite number"),
        (("run", "quickstart", "--policy", "{name: cake, gamma: .inf}"), "gamma: Input should be a finite number"),
        (("run", "quickstart", "--policy", "{name: random, window: haf}"), "valid integer or 'half', not 'haf'"),
        (("run", "quickstart", "--block", 10**20), "is not in the range"),
        (("probe", "builtin:sink_2", "--out", "t.json", "--dtype", "half"), "'half' is not one of"),
        (("which", "builtin:recall", "--budget", 96, "--minutes", "nan"), "nan: expected minutes, such as 30"),
        (("which", "builtin:recall", "--budget", 96, "--minutes", "inf"), "inf is not in the range"),
        (("which", "builtin:recall", "--budget", "0.5"), "0.5: expected tokens that a KV head keeps"),
        (("pretrain", "vanilla", "--set", f"seed={10**20}"), "seed: Input should be less than"),
        (("pretrain", "vanilla", "--set", "training.learning_rate=.inf"), "Input should be a finite number"),
    ],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, tuple) else "",
)
def test_an_option_that_is_wrong_is_a_users_mistake(command, says, capsys):
    code, _, err = bench(capsys, *command)
    assert (code, err.count("\n")) == (2, 1)
    assert says in err


@pytest.mark.parametrize("size", ["9" * 400 + "MiB", f"{10**12}GiB", "0.1B", math.nan, "٣ apples"])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match="bytes is a size such as 65536, 64KiB or 1.5MiB"):
        size_in_bytes(size)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"threads": -1}, "^threads: expected a whole number from 1 to "),
        ({"block": 1.5}, "^block: expected a whole number from 1 to "),
        ({"workers": True}, "^workers: expected a whole number from 1 to "),
        ({"capacity": object}, "expected a number, a text, a list or a mapping"),
        ({"capacity": np.int64(4), "policies": {"name": "sink_window", "sinks": np.int64(4)}}, "capacity 4 "),
    ],
    ids=str,
)
def test_numbers_of_a_call(arguments, says):
    """Numbers of NumPy are numbers."""
    with pytest.raises(UserError, match=says):
        kvbench.run("quickstart", **arguments)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"policy": "h2o"}, "H2O needs a capacity"),
        ({"policy": "h2o", "capacity": 64, "sinks": 3}, "sinks: not an argument of kvbench, nor a parameter of h2o"),
        ({"policy": "nonsense", "capacity": 64}, "unknown policy 'nonsense'"),
        ({"policy": "sink_window", "sinks": 9, "capacity": 8}, "capacity 8 can't hold sinks 9"),
        ({"prompt": "backwards"}, "--model_args: prompt: Input should be 'stream'"),
        ({"prompt": "truncate"}, "prompt 'truncate' needs prompt_tokens"),
        ({"capacity": 64}, "Dense takes no capacity"),
        ({"policy": "recompute_window", "capacity": 8, "prompt": "once"}, "RecomputeWindow keeps no cache"),
        ({"batch_size": "many"}, "--model_args: batch_size: Input should be a valid integer"),
        ({"policy": "sink_window", "capacity": 64, "sinks": 4.5}, "--model_args: sinks: Input should be a valid integer"),
        ({"policy": "cake", "capacity": 64, "gamma": math.inf}, "--model_args: gamma: Input should be a finite number"),
        ({"capacity": True}, "--model_args: capacity: expected a number, not true"),
        ({"seed": 10**20}, "--model_args: seed: 100000000000000000000 is beyond"),
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
        ("max_gen_toks", True, "max_gen_toks: expected a number, not true"),
        ("temperature", math.inf, "temperature: Input should be a finite number, not inf"),
        ("top_p", 2, "top_p: Input should be less than or equal to 1, not 2"),
        ("top_k", 1.5, "top_k: Input should be a valid integer, got a number with a fractional part, not 1.5"),
    ],
)
def test_settings_of_generated_answers(setting, value, says):
    with pytest.raises(UserError, match=f"^mine: {re.escape(says)}$"):
        checked({setting: value}, "mine")
    given = {"until": "a", "max_gen_toks": "5", "do_sample": "no", "top_p": None, "num_beams": 1}
    assert checked(given, "mine") == {"until": ["a"], "max_gen_toks": 5, "do_sample": False, "num_beams": 1}


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


@pytest.mark.parametrize(("size", "expected"), [("1.5MiB", 3 * 2**19), (65536, 65536), ("0.5kB", 500)])
def test_sizes(size, expected):
    assert size_in_bytes(size) == expected


def test_books_without_text_end_a_pretraining(tmp_path):
    (tmp_path / "train.txt").write_text("")
    with pytest.raises(UserError, match=r"train\.txt: no book has any text"):
        next(pieces(pretraining.Mix(pg19=1, prose=0), 0, tmp_path))


MINE = """
from dataclasses import dataclass

from kvbench import Composed, Policy
from kvbench.policies.window import Window


@dataclass(frozen=True)
class Wrong(Composed):
    score: Policy = Window()
    more: int = 0
    layers: int = 0

    def budgets(self, capacity, layers, heads, prompt):
        return [[capacity + self.more] * heads] * (self.layers or layers)


@dataclass(frozen=True)
class Floor(Composed):
    score: Policy = Window()

    def pool_floor(self, capacity):
        return capacity + 1
"""
SUITE = """suite: mine
version: 1
description: budgets
model: {id: "builtin:sink_2"}
task: {name: perplexity, data: prose, tokens: 64}
policies:
  - {name: window, capacity: 16}
  - ENTRY
"""


@pytest.mark.slow("measures suites")
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('{name: "FILE:Wrong", more: 1, capacity: 16}', ("add up to", "make")),
        ('{name: "FILE:Wrong", layers: 1, capacity: 16}', ("table of budgets is for layers with",)),
        ("{name: headkv, file: TABLE, capacity: 32}", ("expected {'importance': 4 lists of 2",)),
        ('{name: "FILE:Floor", capacity: 16}', ("at least 17", "16 on average")),
        ("{name: window, capacity: 16, evict: prompt}", ("prompt",)),
        ("{name: d2o, capacity: 16}", ("D2O merges keys", "positions must be stream")),
    ],
)
def test_one_line_names_file_and_line_and_nothing_is_measured(entry, words, tmp_path: Path, capsys):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "heads.json").write_text(json.dumps({"importance": [[1.0, 2.0, 3.0]]}))
    suite = tmp_path / "mine.yaml"
    suite.write_text(
        SUITE.replace("ENTRY", entry.replace("FILE", str(tmp_path / "mine.py")).replace("TABLE", str(tmp_path / "heads.json")))
    )
    code, out, err = bench(capsys, "run", str(suite), "--results", str(tmp_path / "results"))
    lines = [line for line in err.splitlines() if line]
    assert code == 2, err
    assert len(lines) == 1, err
    assert f"{suite}:8: " in lines[0]
    assert all(word in lines[0] for word in words), lines[0]
    assert not list((tmp_path / "results").glob("**/*.json"))
    assert out == ""


def module_of(folder: Path, text: str) -> ModuleType:
    """Import a user's file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "mine.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("mine", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("def go(x):\n    return 1 / 0\n", "mine.py:2, in go"),
        ("def go(x):\n    y = x + 1\n    return y.view(7)\n", "mine.py:3, in go"),
        ("import torch\n\ndef go(x):\n    return torch.nn.functional.softmax(x, 9)\n", "mine.py:4, in go"),
        ("import statistics\n\ndef go(x):\n    return statistics.mean([])\n", "mine.py:4, in go"),
        ("def inner():\n    return {}['a']\n\ndef go(x):\n    return inner()\n", "mine.py:2, in inner"),
    ],
)
@pytest.mark.parametrize("folder", ["home", "site-packages"])
def test_it_is_the_innermost_line_of_the_users_own_code(tmp_path, text, place, folder):
    """This holds for errors that a library raises, and for installed plug-ins, too."""
    module = module_of(tmp_path / folder, text)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any kind
        torch.vmap(module.go)(torch.ones(2, 3))  # torch calls the user's function
    with pytest.raises(Exception) as direct:  # noqa: PT011 - likewise
        module.go(torch.ones(2, 3))
    if folder == "site-packages":  # the test itself is not a library, either
        caught.value.__traceback__ = caught.tb.tb_next
        direct.value.__traceback__ = direct.tb.tb_next
    assert location_of(caught.value) == place
    assert location_of(direct.value) == place


def test_what_our_code_raises_on_its_own_is_told_by_its_innermost_line():
    with pytest.raises(UserError) as caught:
        plugins.task_class("no such task")
    caught.value.__traceback__ = caught.tb.tb_next  # without the test's own frame
    assert location_of(caught.value).startswith("plugins.py:")
    assert location_of(caught.value).endswith(", in _find")


@pytest.mark.slow("measures suites")
def test_a_crash_of_ours_has_its_own_code_and_its_traceback(monkeypatch, capsys):
    from kvbench.harness.report import leaderboard

    def broken(*_):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(leaderboard, "render", broken)
    records = Path(__file__).parents[1] / "leaderboard/baselines/quickstart"
    code, _, err = bench(capsys, "leaderboard", "--results", records, "--out", "-")
    assert code == 70
    assert "ZeroDivisionError: division by zero" in err
    assert err.splitlines()[-1].startswith("bench: this is a bug in KV Bench (kv-bench ")


def test_debug_shows_where_a_mistake_was_noticed(capsys):
    plain, debug = bench(capsys, "run", "nowhere.yaml"), bench(capsys, "--debug", "run", "nowhere.yaml")
    assert (plain[0], debug[0]) == (2, 2)
    assert "Traceback" not in plain[2]
    assert "Traceback" in debug[2]
    assert plain[2] == debug[2].splitlines(keepends=True)[-1]


def test_a_folder_that_only_seems_writable_is_a_mistake(tmp_path, capsys):
    """Root may write anywhere, but nobody can make a file in /proc."""
    code, _, err = bench(capsys, "baseline", "update", "/proc/baseline", "--suite", "quickstart", "--why", "x")
    assert code == 2
    assert err.count("\n") == 1


def test_a_capacity_that_would_take_all_memory_is_refused(capsys):
    code, _, err = bench(capsys, "policy", "check", "window", "--capacity", 100_000_000)
    assert (code, "8192" in err) == (2, True)


def told(capsys, *args):
    code, out, _ = bench(capsys, "doctor", "--quick", *args)
    return code, dict(line.split(maxsplit=1) for line in out.splitlines())


def test_one_screen_with_what_a_bug_report_needs(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("Once upon a time. " * 50)
    code, found = told(capsys, "--data", tmp_path, "--model", "builtin:sink_1")
    assert code == 0
    assert f"torch {torch.__version__}" in found["packages"]
    assert "threads" in found["device"]
    assert "'book', 900 characters" in found["data"]
    assert "found in" in found["model"]
    assert len(found) <= 24


def test_what_is_missing_is_said_and_the_rest_goes_on(tmp_path, capsys):
    code, found = told(capsys, "--data", tmp_path, "--model", "nope")
    assert code == 1
    assert found["model"].startswith("FAILED: UserError: nope")
    assert found["data"].startswith("FAILED: UserError")
    assert "cache" in found["hub"]
