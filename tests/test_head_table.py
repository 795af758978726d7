"""The probe for retrieval heads, against the dense attention of the test's own pass."""

from __future__ import annotations

import pytest
import torch
from conftest import model_of
from prompt_views import dense_pass

from kvbench.harness.run.head_table import retrieval_scores


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
