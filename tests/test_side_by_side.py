"""How many streams are read at once: it changes no figure, and is in the record."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_suite import GOOD, load

from kvbench.harness.core.errors import UserError
from kvbench.harness.engine.method import EAGER
from kvbench.harness.run.options import KeepSteps
from kvbench.harness.run.request import RunRequest

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
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_number_at_once_changes_no_figure(count, all_at_once, tmp_path):
    records, traces = measured(tmp_path, "side", f", side_by_side: {count}")
    for record, trace, other, theirs in zip(records, traces, *all_at_once, strict=True):
        assert record.status == "ok", record.error
        assert (record.cell_id, record.key) == (other.cell_id, other.key)
        np.testing.assert_allclose(trace, theirs, atol=1e-5)
        ours, wanted = record.metrics.as_json(), other.metrics.as_json()
        assert ours["nll"] == pytest.approx(wanted["nll"], abs=1e-5)
        names = ("kv_bytes", "kv_held_bytes", "state_bytes", "tokens")
        assert [ours[n] for n in names] == [wanted[n] for n in names]
        assert other.facts.side_by_side is None
        assert record.facts.side_by_side.streams == count


def test_a_keep_map_holds_all_streams(tmp_path):
    path = tmp_path / "kept.yaml"
    path.write_text(SUITE.replace("streams: 7", "streams: 7, side_by_side: 2"))
    request = RunRequest(str(path), threads=1, device="cpu")
    (record,) = request.measure(tmp_path / "kept", request.cells()[1:2], progress=False, keep=KeepSteps())
    assert record.status == "ok", record.error
    assert record.facts.keep_map is not None


def test_the_number_at_once_is_no_part_of_the_cell(tmp_path):
    plain = load(tmp_path, GOOD.replace("tokens: 100", "tokens: 100, streams: 4"))
    side = load(tmp_path, GOOD.replace("tokens: 100", "tokens: 100, streams: 4, side_by_side: 3"))
    assert [c.id for c in plain] == [c.id for c in side]
    assert "side_by_side" not in side[0].as_json()["task"]


@pytest.mark.parametrize("value", ["auto", "0", "true", "1.5"])
def test_anything_but_a_positive_number_is_refused_in_one_line(value, tmp_path):
    with pytest.raises(UserError, match=r"mine\.yaml:4: .*side_by_side") as caught:
        load(tmp_path, GOOD.replace("tokens: 100", f"tokens: 100, streams: 4, side_by_side: {value}"))
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
