"""A text cut into streams that are read together: each gives the same results as alone."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import model_of
from factories import edit, record

from kvbench.harness.data.stream import TokenStream
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.method import EAGER
from kvbench.harness.records.aggregates import scored_mask
from kvbench.harness.report.pairing import paired
from kvbench.harness.tasks.perplexity import Perplexity, PerplexityOptions
from kvbench.harness.tasks.task import Job
from kvbench.policies.h2o import H2O
from kvbench.policies.recompute_window import RecomputeWindow
from kvbench.policies.sink_window import SinkWindow


def text_of(length: int, prefix: int) -> TokenStream:
    ids = np.concatenate([np.full(prefix, 7), np.random.default_rng(0).integers(0, 96, length)])
    return TokenStream(ids, prefix, np.ones(len(ids), np.int64), (("a", prefix),), "random", "0")


def measured(text: TokenStream, policy, tmp_path, streams=None, stride=1):
    trace = tmp_path / f"{len(text.ids)}-{streams}.npy"
    options = PerplexityOptions(tokens=text.tokens, streams=streams, stride=stride)
    job = Job(model_of("llama"), CacheConfig(policy, 12), text, 20, EAGER, trace, lambda *a: None)
    return Perplexity.run(options, job).as_json(), np.load(trace)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("policy", [H2O(), SinkWindow(2), RecomputeWindow()], ids=lambda p: type(p).__name__)
def test_each_stream_is_read_as_it_would_be_alone(policy, prefix, tmp_path):
    text = text_of(200, prefix)  # 66 per stream, two left over
    metrics, nll = measured(text, policy, tmp_path, streams=3)
    assert metrics["tokens"] == 3 * 66 - (0 if prefix else 3)
    assert metrics["stream_tokens"] == 66
    assert metrics["buckets"] == [
        {"from": 0, "to": prefix + 66, "tokens": metrics["tokens"], "nll": pytest.approx(metrics["nll"])}
    ]
    assert np.isnan(nll[:prefix]).all()
    assert np.isnan(nll[prefix + 198 :]).all()
    for b in range(3):
        ids = np.concatenate([text.ids[:prefix], text.ids[prefix + 66 * b : prefix + 66 * (b + 1)]])
        part = TokenStream(ids, prefix, np.ones(len(ids), np.int64), (("a", prefix),), "random", "0")
        _, alone = measured(part, policy, tmp_path)
        np.testing.assert_allclose(nll[prefix + 66 * b : prefix + 66 * (b + 1)], alone[prefix:], atol=1e-4)


def test_recompute_scores_the_same_tokens_of_every_stream(tmp_path):
    text = text_of(200, 1)
    sparse, nll = measured(text, RecomputeWindow(), tmp_path, streams=4, stride=7)
    full, _ = measured(text, H2O(), tmp_path, streams=4, stride=7)
    assert np.flatnonzero(np.isfinite(nll)).tolist() == np.flatnonzero(scored_mask(201, 1, 7, 4)).tolist()
    assert full["on_stride"]["tokens"] == sparse["blocks"]["tokens"]


def test_pairs_leave_out_where_caches_fill_in_every_stream(tmp_path):
    text = text_of(4096, 1)
    a, _ = measured(text, H2O(), tmp_path, streams=8)
    b, _ = measured(text, SinkWindow(2), tmp_path, streams=8)
    records = [
        edit(record(p, 12, data={"prefix": [7], "ids_sha256": "x"}), metrics=m) for p, m in (("h2o", a), ("sink_window", b))
    ]
    size = a["blocks"]["size"]
    found = paired(*records)
    # Of 512 positions in a stream, whole runs of 32 after the 13th; those that hold the next stream's start are left out.
    starts = [s for s in range(0, 4097, size) if (s - 1) % 512 >= 13 and (s - 1) % 512 + size <= 512]
    assert found.blocks > 0
    assert size == 32
    expected = [(a["blocks"]["nll_sum"][s // size] - b["blocks"]["nll_sum"][s // size]) for s in starts]
    assert found.mean == pytest.approx(sum(expected) / (size * len(starts)), abs=1e-6)
