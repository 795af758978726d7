"""How many independent streams are read at once: it changes no figure, obeys the memory, and is in the record."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import model_of
from test_suite import GOOD, load

from kvbench.harness.core.errors import UserError
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.method import EAGER
from kvbench.harness.run import reading as readings
from kvbench.harness.run.reading import StreamReading, StreamsTrial, choose_side_by_side, search
from kvbench.harness.run.request import RunRequest
from kvbench.harness.tasks.task import Independent
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O
from kvbench.policies.recompute_window import RecomputeWindow

SUITE = """
suite: side
version: 1
model: {id: "builtin:sink_1"}
task: {name: perplexity, data: prose, tokens: 700, streams: 7}
policies: [dense, {name: h2o, capacity: 16}, {name: recompute_window, capacity: 16}]
"""


def measured(tmp_path, name: str, option: str):
    path = tmp_path / f"{name}.yaml"
    path.write_text(SUITE.replace("streams: 7", f"streams: 7{option}"))
    request = RunRequest(str(path), threads=1, device="cpu")
    records = request.measure(tmp_path / name, request.cells(), progress=False)
    traces = [np.load(next((tmp_path / name).rglob(r.trace.file))) for r in records]
    return records, traces


@pytest.fixture(scope="module")
def all_at_once(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("all"), "all", "")


@pytest.mark.slow("measures suites")
@pytest.mark.parametrize("asked", ["1", "2", "auto"])
def test_the_number_at_once_changes_no_figure(asked, all_at_once, tmp_path):
    records, traces = measured(tmp_path, "side", f", side_by_side: {asked}")
    for record, trace, other, theirs in zip(records, traces, *all_at_once, strict=True):
        assert record.status == "ok", record.error
        assert (record.cell_id, record.key) == (other.cell_id, other.key)
        np.testing.assert_allclose(trace, theirs, atol=1e-5)
        ours, wanted = record.metrics.as_json(), other.metrics.as_json()
        assert ours["nll"] == pytest.approx(wanted["nll"], abs=1e-5)
        names = ("kv_bytes", "kv_held_bytes", "state_bytes", "tokens")
        assert [ours[n] for n in names] == [wanted[n] for n in names]
        assert other.facts.side_by_side is None
        if asked != "auto":
            assert (record.facts.side_by_side.streams, record.facts.side_by_side.because) == (int(asked), "as the suite says")
        elif record.cell.policy == "recompute_window":
            assert record.facts.side_by_side.because == "no cache: as many as one pass has windows"
        else:
            found = record.facts.side_by_side
            assert 1 <= found.streams <= 7
            assert found.because in ("all", "more are no faster")
            assert found.trials[0].streams == 1
            assert found.limit_bytes > 0


def steady(count: int) -> StreamsTrial:
    return StreamsTrial(100, 10.0 * count)


@pytest.mark.parametrize(
    ("count", "limit", "expected"),
    [
        (16, 10**6, (16, "all")),
        (20, 10**6, (20, "all")),
        (16, 799, (7, "memory")),
        (16, 100, (1, "memory")),
        (16, 1, (1, "memory")),
        (1, 1000, (1, "all")),
    ],
)
def test_the_search_obeys_the_memory(count, limit, expected):
    tried = {}
    assert search(count, limit, steady, tried) == expected
    assert max(tried) * 100 <= max(limit, 100), "nothing that would not fit is tried, but a single stream"


def test_the_search_ends_where_more_streams_are_no_faster():
    assert search(64, 10**6, lambda n: StreamsTrial(1, 10.0 * min(n, 4)), {}) == (4, "more are no faster")


def test_one_slow_trial_does_not_end_the_search():
    speeds = {1: 10.0, 2: 10.0, 4: 30.0, 8: 31.0, 16: 31.0}
    assert search(64, 10**6, lambda n: StreamsTrial(1, speeds[n]), {}) == (4, "more are no faster")


def test_a_trial_that_runs_out_of_memory_ends_the_search():
    def trial(count):
        if count > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return steady(count)

    assert search(64, 10**6, trial, {}) == (2, "memory")


def test_a_trial_that_fails_otherwise_is_not_hidden():
    def trial(count):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        search(64, 10**6, trial, {})


@pytest.mark.parametrize(("policy", "capacity"), [(H2O(), 12), (Dense(), None)], ids=["h2o", "dense"])
def test_with_next_to_no_memory_streams_are_read_one_at_a_time(policy, capacity, monkeypatch):
    monkeypatch.setattr(readings, "free_bytes", lambda device: 10)
    reading = StreamReading(model_of("llama"), CacheConfig(policy, capacity), EAGER, 16)
    chosen = choose_side_by_side(reading, Independent(8, 64))
    assert chosen.streams == 1
    assert chosen.facts["side_by_side"]["because"] == "memory"


def test_a_limit_between_gives_a_number_between_in_passes_of_equal_size(monkeypatch):
    reading = StreamReading(model_of("llama"), CacheConfig(H2O(), 12), EAGER, 16)
    one = readings._trial(reading, Independent(8, 64), 1).stream_bytes
    monkeypatch.setattr(readings, "free_bytes", lambda device: 2 * 5 * one + 16)
    monkeypatch.setattr(readings, "_speed", lambda decoder, model, streams, tokens: streams)
    chosen = choose_side_by_side(reading, Independent(8, 64))
    assert chosen.streams == 4, "two passes of 4, not one of 5 and one of 3"
    assert chosen.facts["side_by_side"]["streams"] == 4
    assert [t["streams"] for t in chosen.facts["side_by_side"]["trials"]] == [1, 2, 4, 5]


def test_a_stream_counts_with_its_cache_at_its_largest():
    model = model_of("llama")
    trials = [
        readings._trial(StreamReading(model, CacheConfig(Dense()), EAGER, 16), Independent(2, tokens), 1)
        for tokens in (100, 4000)
    ]
    assert trials[1].stream_bytes - trials[0].stream_bytes >= model.kv_bytes(4000) - model.kv_bytes(512)


def test_faster_methods_keep_the_size_of_their_logits():
    reading = StreamReading(model_of("llama"), CacheConfig(Dense()), EAGER, 2048)
    assert [reading.block_for(n) for n in (1, 2, 8, 64)] == [2048, 1024, 256, 256]
    fixed = StreamReading(model_of("llama"), CacheConfig(Dense()), EAGER, 2048, keeps_block=True)
    assert fixed.block_for(64) == 2048


def test_windows_run_afresh_fill_a_pass():
    reading = StreamReading(model_of("llama"), CacheConfig(RecomputeWindow(), 1023), EAGER, 256)
    assert choose_side_by_side(reading, Independent(100, 5000)).streams == 8


def test_a_keep_map_has_all_streams_in_one_decoder():
    reading = StreamReading(model_of("llama"), CacheConfig(H2O(), 12), EAGER, 16)
    assert choose_side_by_side(reading, Independent(8, 64), keep_map=True).streams == 8


@pytest.mark.parametrize("asked", ["auto", "3"])
def test_the_number_at_once_is_no_part_of_the_cell(asked, tmp_path):
    plain = load(tmp_path, GOOD.replace("tokens: 100", "tokens: 100, streams: 4"))
    side = load(tmp_path, GOOD.replace("tokens: 100", f"tokens: 100, streams: 4, side_by_side: {asked}"))
    assert [c.id for c in plain] == [c.id for c in side]
    assert "side_by_side" not in side[0].as_json()["task"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("streams: 4, side_by_side: many", "mine.yaml:4: side_by_side: auto, or a whole number from 1 on, not 'many'"),
        ("streams: 4, side_by_side: 0", "mine.yaml:4: side_by_side: auto, or a whole number from 1 on, not 0"),
        ("streams: 4, side_by_side: true", "mine.yaml:4: side_by_side: auto, or a whole number from 1 on, not True"),
        ("streams: 4, side_by_side: 1.5", "mine.yaml:4: side_by_side: auto, or a whole number from 1 on, not 1.5"),
        ("side_by_side: auto", "mine.yaml:4: side_by_side says how many of the streams are read at once: give streams, too"),
        (
            "streams: auto",
            "mine.yaml:4: streams: a number, as it decides what is read (how many are read at once may be auto: side_by_side), "
            "not 'auto'",
        ),
    ],
)
def test_nonsense_is_refused_in_one_line(options, error, tmp_path):
    with pytest.raises(UserError) as caught:
        load(tmp_path, GOOD.replace("tokens: 100", f"tokens: 100, {options}"))
    assert str(caught.value).endswith(error)
    assert "\n" not in str(caught.value)


@pytest.mark.slow("measures suites")
def test_a_cell_that_does_not_fit_after_all_says_what_to_do(tmp_path, monkeypatch):
    from kvbench.harness.engine import loop

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
    for record in records:
        assert record.error.kind == "out of memory"
        assert record.error.message == "4 streams at once don't fit: give side_by_side: 2"


@pytest.mark.slow("measures suites")
def test_requests_of_a_batch_that_a_trial_chose_are_answered_alike(tmp_path):
    found = {}
    for batch in ("auto", "3"):
        path = tmp_path / f"{batch}.yaml"
        task = f"{{name: lm_eval, tasks: kvbench_once, limit: 6, batch: {batch}}}"
        path.write_text(
            f'suite: side\nversion: 1\nmodel: {{id: "builtin:sink_1"}}\ntask: {task}\npolicies: [{{name: h2o, capacity: 48}}]\n'
        )
        request = RunRequest(str(path), threads=1, device="cpu")
        (found[batch],) = request.measure(tmp_path / batch, request.cells(), progress=False)
    assert found["auto"].status == "ok", found["auto"].error
    assert found["auto"].metrics.outcomes == found["3"].metrics.outcomes
    assert found["auto"].metrics.kv_bytes == found["3"].metrics.kv_bytes
    assert found["auto"].facts.side_by_side.trials
    assert found["auto"].facts.block == found["3"].facts.block
    assert found["3"].facts.side_by_side is None
