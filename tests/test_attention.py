"""The attention task of the harness: what is shown is what the model computes, and figures are those of their definitions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from factories import RECORDS
from watched import IDS, TOKENS, Whole, eager_weights

from kvbench.harness.core import plugins
from kvbench.harness.engine import watch as watching
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.method import Method
from kvbench.harness.engine.watch import check, watch
from kvbench.harness.models.families import tiny_model
from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.load import load_model, load_tokenizer
from kvbench.harness.records import RecordStore
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.task_report import task_of
from kvbench.harness.tasks.attention import AttentionTask
from kvbench.harness.tasks.attention.attention_options import AttentionOptions, figures
from kvbench.harness.tasks.attention.watch_samples import Notes
from kvbench.harness.tasks.common.samples import samples
from kvbench.harness.tasks.task import Job, MeasurementError
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(watching, "_MAX_SCORES", 2 * 4 * 7 * TOKENS)  # 7 queries at once


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma2", "gemma3_text", "mistral", "qwen3", "gpt_oss"])
def test_weights_chunk_by_chunk_are_the_models_own(family):
    hf, seen = tiny_model(family), Whole()
    exact = family != "gpt_oss"  # whose experts take no float64
    check(hf.double() if exact else hf, input_ids=IDS)
    watch(hf, seen, input_ids=IDS)
    assert len(seen.chunks[0]) == -(-TOKENS // 7)
    for layer, expected in enumerate(eager_weights(hf)):
        torch.testing.assert_close(seen.weights(layer), expected, atol=1e-6 if exact else 1e-5, rtol=0, check_dtype=False)


def test_a_built_in_model():
    """In float64 the same weights; in float32 as near to them as the model's own attention, whose rounding differs."""
    hf, single, double = (
        load_model(model_directory("builtin:sink_1", None, False), "float32", torch.device("cpu")).hf,
        Whole(),
        Whole(),
    )
    watch(hf, single, input_ids=IDS)
    assert hf.config._attn_implementation == "kv_bench"
    own = list(eager_weights(hf))
    watch(hf.double(), double, input_ids=IDS)
    for layer, exact in enumerate(eager_weights(hf)):
        torch.testing.assert_close(double.weights(layer), exact, atol=1e-6, rtol=0)
        assert (single.weights(layer) - exact).abs().max() <= 2 * (own[layer] - exact).abs().max()


def test_figures_are_those_of_their_definitions():
    hf, notes = tiny_model("llama").double(), Notes(TOKENS, 8)
    watch(hf, notes, input_ids=IDS)
    own, noted = torch.stack(eager_weights(hf)).transpose(0, 1).numpy(), notes.arrays()  # [N, L, Q, T, T]
    np.testing.assert_allclose(noted["first"], own[..., 0].mean(-1), atol=1e-6)
    np.testing.assert_allclose(noted["late"], own[..., -1, 0], atol=1e-6)
    plogp = np.where(own > 0, own * np.log(np.maximum(own, 1e-300)), 0)
    np.testing.assert_allclose(noted["entropy"], -plogp.sum(-1).mean(-1), atol=1e-5)
    received = notes.mean_received().numpy()  # [L, N, Q, T]
    for k in (0, 7, TOKENS - 1):
        np.testing.assert_allclose(received[..., k].swapaxes(0, 1), own[..., k:, k].mean(-1), atol=1e-6)
    maps = notes.logit_maps()  # differences of logits are those of the weights' logarithms
    expected = np.log(own[:, 1, 2, 6, :7]).mean(0)
    np.testing.assert_allclose(maps[1, 2, 6, :7] - maps[1, 2, 6, 0], expected - expected[0], atol=1e-4)
    assert np.isnan(maps[1, 2, 3, 4])
    found = figures(noted | {"tokens": np.array(TOKENS)}, 0.05)
    assert found["sink_heads"] == pytest.approx((own[..., 0].mean(-1) > 0.05).mean())
    assert found["first"] == pytest.approx(own[..., 0].mean(), abs=1e-6)
    assert "sink_heads_interval" not in found  # two samples


@pytest.fixture
def without_lab(monkeypatch):
    monkeypatch.setattr(plugins, "_lab_entries", tuple)
    plugins._installed_task.cache_clear()
    yield
    plugins._installed_task.cache_clear()


def job(policy, capacity: int | None, folder: Path, **config) -> tuple[AttentionOptions, Job]:
    """A cell of the built-in model on generated prose."""
    options = AttentionOptions(data="prose", samples=24, tokens=48)
    directory = model_directory("builtin:sink_1", None, False)
    model, data = load_model(directory, "float32", torch.device("cpu")), samples(options, lambda: load_tokenizer(directory), None)
    trace, progress = folder / "trace.npz", lambda tokens, text: None
    return options, Job(model, CacheConfig(policy, capacity, **config), data, 8 * options.tokens, Method(), trace, progress)


def test_the_task_needs_no_lab(without_lab, tmp_path):
    task = plugins.task_class("attention")
    assert task is AttentionTask
    options, cell = job(Dense(), None, tmp_path)
    metrics = task.run(options, cell)
    assert metrics.samples == 24
    assert max(map(max, metrics.first_by_head)) > 0.5  # 0.62 at the end of its training
    with cell.trace.open("rb") as trace, np.load(trace) as noted:
        again = figures(noted, options.epsilon)
    assert again.keys() == metrics.as_json().keys()
    assert again["first_interval"] == pytest.approx(metrics.first_interval, rel=1e-6)
    for policy, capacity, config, says in ((H2O(), 16, {}, "must be dense"), (Dense(), None, {"positions": "clamped"}, "clamp")):
        with pytest.raises(MeasurementError, match=says):
            task.run(*job(policy, capacity, tmp_path, **config))


def test_its_page_needs_no_lab(without_lab):
    """A record with the lab's figures is read and shown without them."""
    (record,) = RecordStore(RECORDS / "attention_builtin.jsonl").read_all()[0]
    about, *_ = lines = task_of(record).body([record])
    assert "sink gets more than 0.3" in about
    assert any("| entropy | largest logit | status |" in line for line in lines if isinstance(line, str))
    assert sum(isinstance(line, Chart) for line in lines) == 2
