"""The size of a cell's cache is known before the run, by one rule for every task, and free memory decides what fits."""

import pytest
from children import in_this_process
from helpers import adopt, bench, model_of, tiny_model

from kvbench.harness.core import plugins
from kvbench.harness.models.shape import shape_of
from kvbench.harness.run import child, reading_plan
from kvbench.harness.run.estimate import estimates
from kvbench.harness.run.request import RunRequest
from kvbench.harness.run.speeds import Rates, Speeds
from kvbench.harness.suite import find, load

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


@pytest.mark.slow("measures suites")
@pytest.mark.filterwarnings("ignore")  # lm-eval and its packages have opinions of their own
def test_what_is_estimated_is_what_is_measured(suite, tmp_path, monkeypatch):
    """A record of lm_eval gives the bytes of one stream; all others give those of the whole cell."""
    monkeypatch.setattr(child, "measure", in_this_process)
    request = RunRequest(str(suite), threads=1, device="cpu")
    cells = request.cells()
    assert {c.task.name for c in cells} == set(plugins.task_names()) - {"arc_stream", "trace"}, "data, words of their own"
    expected = {e.cell.id: e.kv_bytes for e in estimates(cells, "cpu")}
    for record in request.measure(tmp_path / "results", cells):
        assert record.status == "ok", record.error
        task = record.cell.task
        streams = task.batch if task.name == "lm_eval" else 1
        assert expected[record.cell_id] == streams * record.metrics.kv_bytes, task


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


WINDOWS = {"sliding_window": 9}


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("llama", {}),
        ("gpt_neox", {"num_key_value_heads": None}),
        ("mistral", WINDOWS),
        ("gemma2", WINDOWS),
        ("qwen2", {}),
        ("qwen2", WINDOWS | {"use_sliding_window": True, "max_window_layers": 1}),
        ("gpt_oss", WINDOWS),
    ],
)
def test_a_config_tells_the_bytes_that_the_model_takes(family, given):
    hf = tiny_model(family, **given)
    shape = shape_of(hf.config)
    for capacity in (5, 8, 30):
        assert shape.kv_bytes(capacity, 2, 4) == adopt(hf).kv_bytes(capacity, 2)


@pytest.mark.parametrize("task", ["latency", "memory", "perplexity", "lm_eval"])
def test_caches_that_can_not_fit_are_refused_before_anything_is_measured(tmp_path, capsys, suite, monkeypatch, task):
    """33 slots fit and a million times 33 do not, whichever option sets the number of streams."""
    names = {"perplexity": "streams", "lm_eval": "batch", "memory": "batch", "latency": "batch"}
    text = suite.read_text()
    kept = [line for line in text.splitlines() if "{name: " not in line or f"name: {task}" in line or "window" in line]
    suite.write_text("\n".join(kept))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    more = ["--set", "tokens=4000000"] if task == "perplexity" else []  # of which every stream needs some
    code, _, err = bench(
        capsys, "run", suite, "--results", tmp_path / "r", "--device", "cpu", "--set", f"{names[task]}=1000000", *more
    )
    assert code == 2
    assert "for 1,000,000 streams side by side" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("free", "streams", "tokens"),
    [
        (2**40, 1, 2048),  # the maximum
        (16 * 1152 * 2048, 1, 2048),  # a sixteenth for logits: 96 words x 4 bytes x 3 copies a token
        (16 * 1152 * 2048 - 1, 1, 1024),  # the power of two below
        (16 * 1152 * 2048, 2, 1024),
        (16 * 1152 * 512, 1, 512),
        (2**20, 1, 256),  # the minimum
        (0, 1, 256),
    ],
)
def test_as_many_tokens_pass_a_layer_at_once_as_their_logits_leave_room_for(monkeypatch, free, streams, tokens):
    monkeypatch.setattr(reading_plan, "free_bytes", lambda device: free)
    assert reading_plan._block_that_fits(model_of("llama"), streams) == tokens


def test_a_cache_that_does_not_fit_is_not_tried_for_an_estimate(monkeypatch):
    cell = next(cell for cell in load(find("quickstart"))[1] if cell.name == "dense")
    speeds = Speeds(adopt(tiny_model("llama")))
    monkeypatch.setattr(Speeds, "_adds", lambda *_: Rates(0.0, 0.0))
    monkeypatch.setattr(Speeds, "_block", lambda *_: 0.0)
    assert speeds.rates(cell, 1, 1000) == Rates(0.0, 0.0)
    assert speeds.rates(cell, 1, 10**15) is None
