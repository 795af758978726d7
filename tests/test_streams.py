"""Streams of a text that are read together, all or some at once: each gives the same results as alone."""

import numpy as np
import pytest
import torch
from factories import chooser, edit, record
from helpers import EAGER, H2O, CacheConfig, Dense, RecomputeWindow, SinkWindow, model_of
from reference import ListBackend
from test_suite import GOOD, load

from kvbench.harness.data.stream import TokenStream
from kvbench.harness.engine import loop
from kvbench.harness.records.aggregates import scored_mask
from kvbench.harness.report.pairing import paired
from kvbench.harness.run.request import KeepSteps, RunRequest
from kvbench.harness.tasks.perplexity import Perplexity, PerplexityOptions
from kvbench.harness.tasks.task import Job


def text_of(length: int, prefix: int) -> TokenStream:
    ids = np.concatenate([np.full(prefix, 7), np.random.default_rng(0).integers(0, 96, length)])
    return TokenStream(ids, prefix, np.ones(len(ids), np.int64), (("a", prefix),), "random", "0")


def measured(text: TokenStream, policy, tmp_path, streams=None, stride=1, prompt=None, evict=1, block=20, **more):
    trace = tmp_path / f"{len(text.ids)}-{streams}.npy"
    options = PerplexityOptions(tokens=text.tokens, streams=streams, stride=stride, prompt=prompt, **more)
    config = CacheConfig(policy, 12 if policy.evicts else None, evict=evict)
    job = Job(model_of("llama"), config, text, block, EAGER, trace, lambda *a: None)
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


@pytest.mark.parametrize("streams", [None, 4])
def test_what_a_fact_costs_is_not_counted_across_streams(streams, tmp_path):
    metrics, _ = measured(text_of(2000, 1), SinkWindow(2), tmp_path, streams=streams, data="prose")
    assert bool(metrics.get("facts")) == (streams is None)


def test_recompute_scores_the_same_tokens_of_every_stream(tmp_path):
    text = text_of(200, 1)
    sparse, nll = measured(text, RecomputeWindow(), tmp_path, streams=4, stride=7)
    full, _ = measured(text, H2O(), tmp_path, streams=4, stride=7)
    assert np.flatnonzero(np.isfinite(nll)).tolist() == np.flatnonzero(scored_mask(201, 1, 7, 4)).tolist()
    assert full["on_stride"]["tokens"] == sparse["blocks"]["tokens"]


def test_strides_begin_after_the_prompt(tmp_path):
    text = text_of(200, 1)
    sparse, nll = measured(text, RecomputeWindow(), tmp_path, streams=4, stride=7, prompt=20)
    full, _ = measured(text, H2O(), tmp_path, streams=4, stride=7, prompt=20)
    assert np.flatnonzero(np.isfinite(nll)).tolist() == [1 + 50 * b + t for b in range(4) for t in range(20, 50, 7)]
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


CADENCES = [
    (H2O(), 1),
    (H2O(), 5),
    (H2O(), "prompt"),
    (SinkWindow(2), 1),
    (SinkWindow(2), "prompt"),
    (Dense(), 1),
    (RecomputeWindow(), 1),
]


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize(("policy", "evict"), CADENCES, ids=str)
def test_all_moments_of_eviction_score_what_follows_the_prompt_and_nothing_else(policy, evict, prefix, tmp_path):
    text = text_of(200, prefix)  # 66 per stream
    metrics, nll = measured(text, policy, tmp_path, streams=3, prompt=30, evict=evict)
    place = (np.arange(len(nll)) - prefix) % 66
    expected = (np.arange(len(nll)) >= prefix) & (np.arange(len(nll)) < prefix + 198) & (place >= 30)
    assert np.isfinite(nll).tolist() == expected.tolist()
    assert metrics["tokens"] == 3 * 36
    assert measured(text, policy, tmp_path, streams=3, prompt=30, evict=evict, block=7)[0]["nll"] == pytest.approx(
        metrics["nll"], abs=1e-4
    )


def test_a_prompt_cut_at_its_end_is_scored_as_if_what_went_were_masked(tmp_path):
    """The first token after the prompt is scored under full attention; the others see what was kept, and all that came since."""
    text, model = text_of(60, 1), model_of("llama")
    _, nll = measured(text, H2O(), tmp_path, prompt=40, evict="prompt")
    tokens = torch.from_numpy(text.ids)[None]
    lists = ListBackend(model, chooser(H2O(), 12, 0), 12, "cache", first_eviction=40)
    lists.run(tokens[:, :41])
    for held in lists.held.values():
        assert len(held) == 12
    lists.capacity = 1000
    theirs = torch.cat([lists.model(tokens[:, t : t + 1], at(lists, t)) for t in range(41, 60)], 1).double().log_softmax(-1)
    expected = [-float(theirs[0, t - 41, tokens[0, t + 1]]) for t in range(41, 60)]
    np.testing.assert_allclose(nll[42:], expected, atol=1e-3)
    _, dense = measured(text, Dense(), tmp_path)
    np.testing.assert_allclose(nll[41], dense[41], atol=1e-4)
    assert np.abs(nll[42:] - dense[42:]).max() > 1e-2


def at(lists: ListBackend, step: int) -> ListBackend:
    lists.step = step
    return lists


def test_bytes_held_are_those_of_the_tokens_and_bytes_allocated_those_of_the_slots(tmp_path):
    text, per_token = text_of(200, 1), model_of("llama").kv_bytes(0)
    for policy, evict, held, slots in [(H2O(), 1, 12, 13), (H2O(), 5, 12 + (200 - 12) % 5, 17), (RecomputeWindow(), 1, 0, 0)]:
        metrics, _ = measured(text, policy, tmp_path, evict=evict)
        assert (metrics["kv_held_bytes"], metrics["kv_bytes"]) == (held * per_token, slots * per_token), (policy, evict)
    grown, _ = measured(text, H2O(), tmp_path, evict="prompt", prompt=40)
    assert grown["kv_held_bytes"] == (12 + 200 - 41) * per_token <= grown["kv_bytes"]
    dense, _ = measured(text, Dense(), tmp_path)
    assert dense["kv_held_bytes"] == 200 * per_token < dense["kv_bytes"] == 256 * per_token


@pytest.mark.parametrize("policy", [H2O(), RecomputeWindow()], ids=lambda p: type(p).__name__)
def test_a_prompt_changes_no_nll_where_every_step_evicts(policy, tmp_path):
    text = text_of(200, 1)
    _, whole = measured(text, policy, tmp_path)
    metrics, nll = measured(text, policy, tmp_path, prompt=31)
    np.testing.assert_allclose(nll[32:], whole[32:], atol=1e-4)
    assert metrics["tokens"] == 200 - 31


SUITE = """
suite: side
version: 1
model: {id: "builtin:sink_1"}
task: {name: perplexity, data: prose, tokens: 700, streams: 7}
policies: [dense, {name: h2o, capacity: 16}, {name: recompute_window, capacity: 16}]
"""


def suite_at_once(tmp_path, name: str, option: str):
    path = tmp_path / f"{name}.yaml"
    path.write_text(SUITE.replace("streams: 7", f"streams: 7{option}"))
    request = RunRequest(str(path), threads=1, device="cpu")
    records = request.measure(tmp_path / name, request.cells(), progress=False)
    traces = [np.load(next((tmp_path / name).rglob(r.trace.file))) for r in records]
    return records, traces


@pytest.fixture(scope="module")
def all_at_once(tmp_path_factory):
    return suite_at_once(tmp_path_factory.mktemp("all"), "all", "")


@pytest.mark.slow("measures suites")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_number_at_once_changes_no_figure(count, all_at_once, tmp_path):
    records, traces = suite_at_once(tmp_path, "side", f", side_by_side: {count}")
    for made, trace, other, theirs in zip(records, traces, *all_at_once, strict=True):
        assert made.status == "ok", made.error
        assert (made.cell_id, made.key) == (other.cell_id, other.key)
        np.testing.assert_allclose(trace, theirs, atol=1e-5)
        ours, wanted = made.metrics.as_json(), other.metrics.as_json()
        assert ours["nll"] == pytest.approx(wanted["nll"], abs=1e-5)
        names = ("kv_bytes", "kv_held_bytes", "state_bytes", "tokens")
        assert [ours[n] for n in names] == [wanted[n] for n in names]
        assert other.facts.side_by_side is None
        assert made.facts.side_by_side.streams == count


@pytest.mark.slow("measures suites")
def test_a_cell_that_does_not_fit_after_all_says_what_to_do(tmp_path, monkeypatch):
    plain = loop.decoder

    def full(model, config, streams=1, method=EAGER):
        if streams > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(model, config, streams, method)

    monkeypatch.setattr(loop, "decoder", full)
    path = tmp_path / "full.yaml"
    path.write_text(SUITE.replace("streams: 7", "streams: 7, side_by_side: 4"))
    request = RunRequest(str(path), threads=1, device="cpu")
    records = request.measure(tmp_path / "full", request.cells(), progress=False)
    for made in records:
        assert made.error.kind == "out of memory"
        assert made.error.message == "4 streams at once don't fit: give side_by_side: 2"


def test_a_keep_map_holds_all_streams(tmp_path):
    path = tmp_path / "kept.yaml"
    path.write_text(SUITE.replace("streams: 7", "streams: 7, side_by_side: 2"))
    request = RunRequest(str(path), threads=1, device="cpu", keep=KeepSteps())
    (made,) = request.measure(tmp_path / "kept", request.cells()[1:2], progress=False)
    assert made.status == "ok", made.error
    assert made.facts.keep_map is not None


def test_the_number_at_once_is_no_part_of_the_cell(tmp_path):
    plain = load(tmp_path, GOOD.replace("tokens: 100", "tokens: 100, streams: 4"))
    side = load(tmp_path, GOOD.replace("tokens: 100", "tokens: 100, streams: 4, side_by_side: 3"))
    assert [c.id for c in plain] == [c.id for c in side]
    assert "side_by_side" not in side[0].as_json()["task"]
