"""Free memory decides whether caches fit and how many tokens a forward pass takes."""

from __future__ import annotations

import pytest
from conftest import bench, model_of

from kvbench.harness.run import reading_plan

pytestmark = pytest.mark.fast


def test_a_cache_that_can_not_fit_is_refused_before_anything_is_measured(capsys, tmp_path, monkeypatch, model_dir, text_dir):
    monkeypatch.chdir(tmp_path)
    where = ["--model", model_dir, "--data", text_dir]
    code, out, err = bench(capsys, "run", "smoke", *where, "--policy", "window", "--set", "capacity=[8,1000000000000]")
    assert code == 2
    assert out == ""
    *_, last = err.splitlines()
    assert "window" in last
    assert "its K/V slots take 9,536,743.2 GiB" in last  # 20 streams, 2 layers, 2 heads, 16 dims, K and V
    assert "lower the capacity" in last
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("*.json")), "the cell of 8 tokens was not measured either"


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
