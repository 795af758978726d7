"""Two processes that share a model compute what one does: NLLs to 1e-5, the same kept positions, the same figures.

They run on the CPU over gloo, in float64, where no rounding decides who is evicted. A script (tensor_leader.py) leads once for
the whole module, and prints what the tests look at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import bench, bench_in
from every_policy import evicting

from kvbench.harness.core.errors import UserError
from kvbench.harness.models.families import tiny_model
from kvbench.harness.models.load import load_model
from kvbench.harness.suite.file import ModelSpec

TESTS = Path(__file__).parent
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def led(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the leading process found: 8 query heads share 4 KV heads, 2 in each process."""
    folder = tmp_path_factory.mktemp("models") / "gqa"
    model = tiny_model("llama", vocab_size=97, hidden_size=64, num_attention_heads=8, num_key_value_heads=4)
    model.save_pretrained(folder)
    env = os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
    lead = f"from pathlib import Path; from tensor_leader import main; main(Path({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", lead], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict = json.loads(done.stdout.splitlines()[-1])
    return found


def of_policy(led: dict, name: str) -> dict:
    return {case: result for case, result in led.items() if case.split(" ")[0] == name and isinstance(result, dict)}


@pytest.mark.parametrize("name", [*evicting(), "Dense", "RecomputeWindow", "RecomputeSinkWindow", "AdaKV"])
def test_two_processes_compute_what_one_does(led, name):
    """At a prompt's end, at every step, every five, and for some policies in streams of unequal length; and in a fork."""
    cases = of_policy(led, name)
    assert cases
    for case, result in cases.items():
        assert result["difference"] < 1e-5, case
        assert result["kept"], case
        one, two = result["figures"]
        assert one == two, case


def test_each_process_has_its_own_heads_and_figures_are_of_all(led):
    one, two = led["heads"]
    assert two == one / 2
    for name in ("kv_bytes", "facts"):
        one, two = led[name]
        assert one == two, name


def test_the_model_was_checked_in_both(led):
    assert all(0 < check < 1 for check in led["self checks"])


def test_other_families_pass_the_check_or_are_refused_in_one_line(led):
    """phi3 has one projection for queries, keys and values, which transformers computes whole in every process."""
    refused = {"phi3": "phi3: transformers' plan does not split its 2 KV heads: use parallel: layers"}
    assert led["families"] == dict.fromkeys(("gemma2", "mixtral", "phi3", "qwen3", "qwen3_shared_kv"), "checked") | refused


def test_a_policy_that_fails_fails_in_both_and_the_next_one_runs(led):
    assert led["broken"] == ["a bug", "a bug"]
    assert led["after"]["kept"]


def test_heads_with_budgets_of_their_own_are_not_compared_across_processes(led):
    says = "it compares heads that have budgets of their own, which parallel: tensor can't: use parallel: layers"
    assert led["refused"] == says


def test_fewer_kv_heads_than_processes_are_refused_in_one_line(tmp_path):
    tiny_model("llama", vocab_size=96).config.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"^model: its 2 KV heads can't be shared by 4 processes: use parallel: layers$"):
        load_model(tmp_path / "model", "float32", CPU, devices=4, parallel="tensor")


def test_a_family_without_a_plan_is_refused_in_one_line(tmp_path):
    tiny_model("stablelm", vocab_size=96).config.save_pretrained(tmp_path / "model")
    with pytest.raises(
        UserError, match=r"^model: transformers has no tensor-parallel plan for 'stablelm': use parallel: layers$"
    ):
        load_model(tmp_path / "model", "float32", CPU, devices=2, parallel="tensor")


def test_random_weights_are_not_split(tmp_path):
    tiny_model("llama", vocab_size=96).config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"random weights are not split over processes: use parallel: layers$"):
        load_model(tmp_path / "config.json", "float32", CPU, devices=2, parallel="tensor", random=True)


SPREAD = ", devices: 2, parallel: tensor"
SUITE = """
suite: spread
version: 1
model: {{id: {model}{spread}}}
task: {{name: perplexity, data: pg19, tokens: 120}}
capacity: 16
policies: [dense, h2o, tova]
"""


def suite(folder: Path, model: Path, spread: str = "") -> Path:
    file = folder / f"suite{len(list(folder.iterdir()))}.yaml"
    file.write_text(SUITE.format(model=model, spread=spread))
    return file


def measured(results: Path) -> dict[str, dict]:
    """Records by policy."""
    records = [json.loads(file.read_text()) for file in results.rglob("*.json")]
    return {r["cell"]["policy"]: r for r in records if "cell_id" in r}


@pytest.fixture(scope="module")
def by_one_process(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, text_dir: Path) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("one")
    done = bench_in("run", suite(folder, model_dir), "--data", text_dir, "--results", "r", "--device", "cpu", cwd=folder)
    assert done.returncode == 0, done.stderr
    return measured(folder / "r")


@pytest.mark.parametrize("start", [[], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]], ids=["bench run", "torchrun"])
def test_bench_run_gives_the_numbers_of_one_process(start, tmp_path, model_dir, text_dir, by_one_process):
    """It starts the other process itself, or finds it there. One process writes, and both end."""
    file, env = suite(tmp_path, model_dir, SPREAD), os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    arguments = ["-m", "kvbench", "run", file, "--data", text_dir, "--results", tmp_path / "r", "--device", "cpu"]
    command = [sys.executable, *start, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    by_two = measured(tmp_path / "r")
    assert set(by_two) == set(by_one_process) == {"dense", "h2o", "tova"}
    for policy, one in by_one_process.items():
        two = by_two[policy]
        assert two["metrics"]["nll"] == pytest.approx(one["metrics"]["nll"], abs=1e-5)
        assert two["metrics"]["kv_bytes"] == one["metrics"]["kv_bytes"]
        assert two["cell"]["model"] == one["cell"]["model"] | {"devices": 2, "parallel": "tensor"}


@pytest.mark.parametrize(
    ("spread", "says"),
    [
        (", devices: 2", "devices: 2 needs parallel: layers or parallel: tensor"),
        (", devices: 2, parallel: layers", "needs 2 CUDA devices, and --device cpu is one"),
        (", devices: 2, parallel: rows", "'layers' or 'tensor'"),
    ],
)
def test_a_suite_that_spreads_a_model_wrongly_is_refused(capsys, spread, says, tmp_path, model_dir, text_dir):
    code, _, err = bench(capsys, "run", suite(tmp_path, model_dir, spread), "--data", text_dir, "--device", "cpu")
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_one_device_is_the_cell_without_the_key():
    """So that `devices: [1, 2, 4]` with one `parallel` is an axis, and the first of them has its old id."""
    assert ModelSpec(id="a/b", devices=1, parallel="tensor").as_json() == ModelSpec(id="a/b").as_json()


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("{name: memory, tokens: 64}", "task memory sees the memory of one process only: use parallel: layers"),
        (
            "{name: attention, data: prose, samples: 2, tokens: 16}",
            "task attention looks inside the model, which must be on one device",
        ),
    ],
    ids=["memory", "attention"],
)
def test_tasks_that_one_process_cannot_measure_are_refused(capsys, task, says, tmp_path, model_dir, text_dir):
    file = tmp_path / "suite.yaml"
    policies = "policies: [dense]"
    file.write_text(f"suite: s\nversion: 1\nmodel: {{id: {model_dir}, devices: 2, parallel: tensor}}\ntask: {task}\n{policies}\n")
    code, _, err = bench(capsys, "run", file, "--data", text_dir, "--device", "cpu")
    assert (code, says in err) == (2, True), err
