"""The probe for retrieval heads, against the dense attention of the test's own pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import bench_in, model_of
from prompt_views import dense_pass

from kvbench.harness.run.head_table import retrieval_scores
from kvbench.policies.headkv import HeadKV


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_scores_are_attention_to_the_token_after_the_earlier_copy(family):
    model, copy, streams = model_of(family), 12, 3
    scores = retrieval_scores(model, copy, streams, seed=5)
    first = torch.randint(96, (streams, copy), generator=torch.Generator().manual_seed(5))
    assert [len(row) for row in scores] == [shape.heads for shape in model.layers]
    if family != "llama":  # the plain pass knows no sink logits, soft caps or windows
        assert all(0 <= x <= 1 for row in scores for x in row)
        return
    seen = dense_pass(model, torch.cat([first, first], 1))
    for layer, row in enumerate(scores):
        weights = seen[layer].weights  # [B, H, G, T, T]
        found = torch.stack([weights[:, :, :, copy + i, i + 1] for i in range(copy - 1)]).mean((0, 1)).amax(-1)
        torch.testing.assert_close(torch.tensor(row), found, atol=1e-5, rtol=0)


def test_the_verb_writes_a_table_that_headkv_reads(tmp_path: Path):
    done = bench_in("probe", "builtin:sink_2", "--out", str(tmp_path / "heads.json"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    scores = json.loads((tmp_path / "heads.json").read_text())["importance"]
    layers, heads = len(scores), len(scores[0])
    assert f"{layers} layers of {heads} KV heads" in done.stdout
    table = HeadKV(file=str(tmp_path / "heads.json")).bind(64).budgets(64, layers, heads, None)
    assert sum(map(sum, table)) == 64 * layers * heads
    ranked = sorted((scores[layer][head], table[layer][head]) for layer in range(layers) for head in range(heads))
    assert [n for _, n in ranked] == sorted(n for _, n in ranked)


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path):
    done = bench_in("probe", "builtin:sink_2", "--out", str(tmp_path / "no" / "heads.json"), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "can't be written" in done.stderr
