"""The size of a cell's cache is known before the run, by one rule for every task."""

from __future__ import annotations

import shutil

import pytest
import torch
from conftest import bench, model_of

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError
from kvbench.harness.engine.model import adopt
from kvbench.harness.models.families import tiny_model
from kvbench.harness.models.shape import shape_of
from kvbench.harness.run.estimate import estimates
from kvbench.harness.run.prepare import prepare
from kvbench.harness.run.request import RunRequest
from kvbench.harness.run.speeds import Rates, Speeds
from kvbench.harness.tasks.lm_eval import LmEval

SUITE = """
suite: estimate
version: 1
model: {id: "builtin:sink_1"}
task:
  - {name: perplexity, data: prose, tokens: 90}
  - {name: perplexity, data: prose, tokens: 90, streams: 3}
  - {name: streameval, lines: 20, distance: 2, streams: 2}
  - {name: turns, data: keys, streams: 2, turns: 2, facts: 4, filler: 1}
  - {name: latency, tokens: 40, prompt: 16, rounds: 6, sittings: 2, most_sittings: 2, steps: 1, batch: 3}
  - {name: memory, tokens: 64, points: 4, batch: 3}
  - {name: lm_eval, tasks: kvbench_registers, limit: 4, batch: 4}
  - {name: attention, data: prose, samples: 3, tokens: 40}
  - {name: divergence, data: prose, samples: 3, tokens: 40}
policies: [{name: window, capacity: 32}]
"""


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "estimate.yaml"
    path.write_text(SUITE)
    return path


@pytest.mark.slow("processes of bench")
@pytest.mark.filterwarnings("ignore")  # lm-eval and its packages have opinions of their own
def test_what_is_estimated_is_what_is_measured(suite, tmp_path):
    """A record of lm_eval gives the bytes of one stream; all others give those of the whole cell."""
    request = RunRequest(str(suite), threads=1, device="cpu")
    cells = request.cells()
    assert {c.task.name for c in cells} == set(plugins.task_names()) - {"arc_stream", "trace"}, "data, words of their own"
    expected = {e.cell.id: e.kv_bytes for e in estimates(cells, "cpu")}
    for record in request.measure(tmp_path / "results", cells):
        assert record.status == "ok", record.error
        task = record.cell.task
        streams = task.batch if task.name == "lm_eval" else 1
        assert expected[record.cell_id] == streams * record.metrics.kv_bytes, task


def test_the_streams_of_a_cell_are_what_its_task_holds_side_by_side(suite):
    cells = RunRequest(str(suite)).cells()
    assert [plugins.task_class(c.task.name).streams(c.task) for c in cells] == [1, 3, 1, 1, 3, 3, 4, 1, 1]
    assert LmEval.streams(LmEval.options(tasks="x")) == 16


def test_tokens_cost_more_once_the_cache_is_full_and_a_check_counts_once(suite, monkeypatch):
    """A token takes 1 ms under full attention, and 4 ms more under a policy with a full cache; see `Speeds.rates`."""
    monkeypatch.setattr(Speeds, "_block", lambda self, cached: 0.001)
    monkeypatch.setattr(Speeds, "_adds", lambda self, config, streams, held: Rates(0.004, 0.05))
    monkeypatch.setattr(Speeds, "check_seconds", lambda self, rates: 100.0)
    request = RunRequest(str(suite), policies=("{name: sink_window, capacity: 32}", "dense"))
    chosen = {"perplexity", "streameval"}
    cells = [c for c in request.cells() if c.task.name in chosen]
    seconds = {(e.cell.name, e.cell.task.name, e.cell.task.streams): e.seconds for e in estimates(cells, "cpu", tried=True)}
    full = 0.001 + 0.004 * (90 - 32) / 90
    assert seconds["sink_window", "perplexity", None] == pytest.approx(100 + 90 * full)
    assert seconds["sink_window", "perplexity", 3] == pytest.approx(90 * 0.001), "streams of 30 tokens fill no cache of 32"
    assert seconds["dense", "perplexity", None] == pytest.approx(100 + 90 * 0.001)
    assert seconds["dense", "streameval", 2] == pytest.approx(2 * 20 * 25 * 0.001 + 2 * 20 * 0.05), "answers are decoded in steps"


@pytest.mark.parametrize("policy", ["sink_window", "snapkv", "h2o"])
def test_short_reads_give_seconds_for_every_kind_of_loop(suite, policy):
    cells = RunRequest(str(suite), policies=(f"{{name: {policy}, capacity: 32}}",)).cells()
    rates = Speeds.of(cells[0].model, torch.device("cpu")).rates(cells[0], 1, 90)
    assert rates is not None
    assert min(rates) > 0


WINDOWS = {"sliding_window": 9}


@pytest.mark.parametrize(
    ("family", "given"),
    [("llama", {}), ("gpt_neox", {"num_key_value_heads": None}), ("mistral", WINDOWS), ("gemma2", WINDOWS),
     ("qwen2", {}), ("qwen2", WINDOWS | {"use_sliding_window": True, "max_window_layers": 1}), ("gpt_oss", WINDOWS)],
)  # fmt: skip
def test_a_config_tells_the_bytes_that_the_model_takes(family, given):
    hf = tiny_model(family, **given)
    shape = shape_of(hf.config)
    for capacity in (5, 8, 30):
        assert shape.kv_bytes(capacity, 2, 4) == adopt(hf).kv_bytes(capacity, 2)


def test_a_config_of_something_else_has_no_shape():
    class Config:
        hidden_size = 8

        def get_text_config(self):
            return self

    assert shape_of(Config()) is None
    assert shape_of(model_of("llama").hf.config) is not None


@pytest.mark.parametrize("task", ["latency", "memory", "perplexity", "lm_eval"])
def test_caches_that_can_not_fit_are_refused_before_anything_is_measured(tmp_path, capsys, suite, monkeypatch, task):
    """33 slots fit and a million times 33 do not, whichever option sets the number of streams."""
    names = {"perplexity": "streams", "lm_eval": "batch", "memory": "batch", "latency": "batch"}
    text = suite.read_text()
    kept = [line for line in text.splitlines() if "{name: " not in line or f"name: {task}" in line or "window" in line]
    suite.write_text("\n".join(kept))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _, err = bench(capsys, "run", suite, "--results", tmp_path / "r", "--device", "cpu", "--set", f"{names[task]}=1000000")
    assert code == 2
    assert "for 1,000,000 streams side by side" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("*.json"))


def test_recomputed_windows_and_dense_are_not_refused(suite):
    cells = RunRequest(str(suite), policies=("recompute_window", "dense"), settings=("capacity=30",)).cells()[:2]
    assert [p.cell.name for p in prepare(cells, torch.device("cpu"), None)] == ["recompute_window", "dense"]


def test_a_local_directory_needs_no_weights_for_an_estimate(tmp_path, model_dir, suite):
    folder = tmp_path / "shape"
    folder.mkdir()
    shutil.copy(model_dir / "config.json", folder)
    (cell, *_) = RunRequest(str(suite), model=str(folder)).cells()
    assert estimates([cell], "cpu")[0].kv_bytes == 33 * 256 * 2
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json: not JSON"):
        estimates([cell], "cpu")
