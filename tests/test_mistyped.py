"""Values that users mistype, in options, suites, files and Python calls: one line that says what was expected."""

from __future__ import annotations

import pytest
from conftest import bench

import kvbench
from kvbench.harness.core.errors import UserError
from kvbench.harness.models.families import tiny_model

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
