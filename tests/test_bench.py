"""The command, as its user meets it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import bench_in as bench

from kvbench.harness.records import LOCK, RecordStore

POLICY = """
from dataclasses import dataclass

from kvbench.policies import CacheView, Policy


@dataclass(frozen=True)
class Newest(Policy):
    '''Keep the newest tokens.'''

    bonus: int = 0

    def importance(self, view: CacheView):
        return view.position.float() + self.bonus
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory, model_dir, text_dir):
    """A folder with the results of one run of the smoke suite."""
    folder = tmp_path_factory.mktemp("ran")
    done = bench("run", "smoke", "--model", model_dir, "--data", text_dir, "--threads", 1, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.mark.slow("processes of its own")
def test_a_run_leaves_one_record_a_cell_and_a_page(ran):
    folder, done = ran
    records, problems = RecordStore(folder / "results").read_all()
    assert not problems
    assert sorted(r.cell.policy for r in records) == sorted(
        ["dense", "recompute_window", "window", "sink_window", "h2o", "random"]
    )
    assert len(done.stdout.splitlines()) == 7, "a header and a line per cell, nothing else"
    assert str(folder) not in str(records), "no path of the machine is in a record"
    first = bench("leaderboard", cwd=folder)
    page = (folder / "results/README.md").read_bytes()
    assert first.returncode == 0
    bench("leaderboard", cwd=folder)
    assert page == (folder / "results/README.md").read_bytes()
    assert b"sink\\_window" in page


@pytest.mark.slow("measures suites")
def test_the_record_agrees_with_its_trace(ran):
    folder, _ = ran
    store = RecordStore(folder / "results")
    for record in store.read_all()[0]:
        trace = np.load(store.trace_path(record)).astype(np.float64)
        scored = trace[np.isfinite(trace)]
        assert record.metrics.nll == pytest.approx(scored.mean(), abs=1e-9)
        assert len(scored) == record.metrics.tokens == sum(record.metrics.blocks.tokens)
        assert sum(record.metrics.blocks.nll_sum) == pytest.approx(scored.sum(), abs=1e-2)
        assert len(scored) == 20 * (16 if record.cell.policy == "recompute_window" else 255)
        assert record.metrics.kv_bytes == 20 * {"dense": 256, "recompute_window": 0}.get(record.cell.policy, 33) * 256 * 2


@pytest.mark.slow("measures suites")
def test_blocks_and_token_by_token_give_the_same_trace(ran, model_dir, text_dir, tmp_path):
    folder, _ = ran
    done = bench("run", "smoke", "--model", model_dir, "--data", text_dir, "--block", 1, "--policy", "h2o", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (one,) = (np.load(p) for p in tmp_path.rglob("*h2o*.npy"))
    (many,) = (np.load(p) for p in folder.rglob("*h2o*.npy"))
    np.testing.assert_allclose(one, many, atol=1e-4)


@pytest.mark.slow("measures suites")
def test_a_second_run_skips_what_is_done_and_fresh_does_not(ran, model_dir, text_dir):
    folder, _ = ran
    args = ("run", "smoke", "--model", model_dir, "--data", text_dir, "--policy", "window")
    again = bench(*args, cwd=folder)
    assert "finished before and skipped" in again.stderr
    assert "skipped" not in bench(*args, "--fresh", cwd=folder).stderr
    assert "skipped" not in bench(*args, "--set", "tokens=400", cwd=folder).stderr, "another question"


@pytest.mark.slow("measures suites")
def test_a_policy_of_the_users_own_runs_from_its_file(tmp_path, model_dir, text_dir):
    (tmp_path / "mine.py").write_text(POLICY)
    policies = ["--policy", "mine.py:Newest", "--policy", "window"]
    done = bench("run", "smoke", "--model", model_dir, "--data", text_dir, *policies, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    mine, window = json.loads(done.stdout)
    assert mine["cell"]["policy"] == "mine.py:Newest"
    assert mine["metrics"]["nll"] == pytest.approx(window["metrics"]["nll"], abs=1e-6)
    assert bench("policy", "check", "mine.py:Newest", "--capacity", 17, cwd=tmp_path).returncode == 0


@pytest.mark.slow("measures suites")
def test_a_changed_policy_file_is_measured_again(tmp_path, model_dir, text_dir):
    args = ("run", "smoke", "--model", model_dir, "--data", text_dir, "--policy", "mine.py:Newest", "--set", "tokens=100")
    (tmp_path / "mine.py").write_text(POLICY)
    bench(*args, cwd=tmp_path)
    assert "skipped" in bench(*args, cwd=tmp_path).stderr
    (tmp_path / "mine.py").write_text(POLICY + "\n# a comment\n")
    assert "skipped" in bench(*args, cwd=tmp_path).stderr
    (tmp_path / "mine.py").write_text(POLICY + "\nCHANGED = True\n")
    assert "skipped" not in bench(*args, cwd=tmp_path).stderr


@pytest.mark.slow("measures suites")
def test_a_failing_cell_becomes_a_record_and_the_rest_go_on(tmp_path, model_dir, text_dir):
    (tmp_path / "bad.py").write_text(
        POLICY.replace("return view", "raise RuntimeError('broken on purpose')\n        return view")
    )
    args = ("run", "smoke", "--model", model_dir, "--data", text_dir, "--policy", "bad.py:Newest", "--policy", "window")
    done = bench(*args, cwd=tmp_path)
    assert done.returncode == 4
    assert "FAILED, RuntimeError: broken on purpose" in done.stderr
    records, _ = RecordStore(tmp_path / "results").read_all()
    assert {r.cell.policy: r.status for r in records} == {"bad.py:Newest": "failed", "window": "ok"}
    assert not list(tmp_path.rglob("*.partial"))


def test_a_directory_that_is_no_model_says_what_is_missing(tmp_path, model_dir, text_dir):
    empty = tmp_path / "empty-model"
    empty.mkdir()
    assert "has no config.json" in bench("run", "smoke", "--model", empty, "--data", text_dir, cwd=tmp_path).stderr
    (empty / "config.json").write_text((model_dir / "config.json").read_text())
    assert "no safetensors weights" in bench("run", "smoke", "--model", empty, "--data", text_dir, cwd=tmp_path).stderr


def test_a_model_that_gives_no_numbers_is_refused(tmp_path, model_dir, text_dir):
    import shutil

    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    weights = load_file(broken / "model.safetensors")
    weights["lm_head.weight"][5] = float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    done = bench("run", "smoke", "--model", broken, "--data", text_dir, "--policy", "window", cwd=tmp_path)
    assert done.returncode == 2
    assert "logits are not finite in float32: its weights are damaged" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["run", "smok"], "did you mean 'smoke'?"),
        (["run", "smoke", "--polcy", "h2o"], "--policy"),
        (["run", "smoke", "--policy", "h20"], "did you mean 'h2o'?"),
        (["run", "smoke", "--policy", "nowhere.py:P"], "no such file"),
        (["run", "smoke", "--set", "capacity=2", "--policy", "sink_window"], "sinks 4"),
        (["run", "smoke", "--set", "capacity=4000000000"], "GiB"),
        (["run", "smoke", "--data", "nowhere"], "no such directory"),
        (["run", "smoke", "--model", "./nowhere"], "no such directory"),
        (["run", "smoke", "--model", "EleutherAI/pythia-70m"], "hub is out of reach"),
        (["run", "smoke", "--set", "tokens=99999999"], "set tokens lower"),
        (["run", "smoke", "--device", "toaster"], "--device toaster: expected auto, cpu, cuda, or cuda:1 and so on"),
        (["run", "smoke", "--model", "gpt2"], "gpt2: no such directory or file; a hub id includes its owner"),
        (["policy", "check", "h20"], "did you mean 'h2o'?"),
        (["policy", "check", "h2o", "--set", "windw=3"], "did you mean 'window'?"),
        (["nonsense"], "nonsense"),
    ],
)
def test_a_users_mistake_is_one_line_and_writes_nothing(tmp_path, model_dir, text_dir, args, word):
    if "run" in args and "--model" not in args:
        args = [*args, "--model", str(model_dir)]
    if "run" in args and "--data" not in args:
        args = [*args, "--data", str(text_dir)]
    done = bench(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert word in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.name != LOCK]


@pytest.mark.slow("processes of its own")
def test_ctrl_c_loses_only_the_cell_in_flight(tmp_path, model_dir, text_dir):
    command = [sys.executable, "-m", "kvbench", "run", "smoke", "--model", str(model_dir), "--data", str(text_dir)]
    command += ["--policy", "window", "--policy", "{name: sink_window, capacity: [32, 33, 34, 35, 36, 37, 38, 39, 40]}"]
    command += ["--block", "1", "--threads", "1", "--set", "tokens=2000"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    heard = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731  # jobs in the background don't
    running = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, preexec_fn=heard
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.rglob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=300)
    assert running.returncode == 130, errors
    assert "Traceback" not in errors
    records, problems = RecordStore(tmp_path / "results").read_all()
    assert records
    assert not problems
    assert len(records) < 10
    assert not list(tmp_path.rglob("*.partial"))


def test_a_dry_run_lists_cells_and_measures_nothing(tmp_path, model_dir, text_dir):
    done = bench("run", "smoke", "--model", model_dir, "--data", text_dir, "--dry-run", "--json", cwd=tmp_path)
    rows = json.loads(done.stdout)
    assert len(rows) == 6
    assert {r["kv_peak_bytes"] for r in rows if r["label"].startswith("h2o ")} == {20 * 33 * 256 * 2}
    assert not list(tmp_path.iterdir())


@pytest.mark.slow("processes of its own")
@pytest.mark.parametrize(("args", "code", "closed"), [("list tasks", 0, ">&-"), ("run nonsense", 2, "2>&-")])
def test_a_closed_stream_is_no_error(tmp_path, args, code, closed):
    """A reader that closes the pipe gets no error message."""
    done = subprocess.run(
        f"{sys.executable} -m kvbench {args} {closed}",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.returncode == code
    assert "Traceback" not in done.stdout + done.stderr
