"""`make peers`: its page is that of its data, and what it compares with is what it says.

The comparison itself needs another environment, so it is not a test: `make peers`.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from conftest import model_of, nll, tokens_of
from peers import masked, page, references
from peers.cases import CONTINUATION, MODELS, cells
from peers.compare import ROOT, difference
from peers.ours import Prompted, kept
from peers.rows import KVPRESS_AT, ROWS

from kvbench.harness.engine.own_attention import own_attention
from kvbench.policies.h2o import H2O

LENGTH = 40
RULES = {row.theirs["rule"]: {k: v for k, v in row.theirs.items() if k != "rule"} for row in ROWS if not row.by_kvpress}
SMALL = {"window": 6, "kernel": 3}  # in place of the published ones, for a prompt of 40 tokens


@pytest.fixture(scope="module")
def data():
    return json.loads(page.DATA.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def prompted():
    return Prompted(model_of("llama"), tokens_of(LENGTH))


@pytest.fixture(scope="module")
def layers(prompted):
    return prompted.layers()


def test_the_page_is_that_of_its_data(data):
    assert page.PAGE.read_text(encoding="utf-8") == page.render(data)


def test_the_data_has_every_row_as_it_is_now(data):
    assert [row["key"] for row in data["rows"]] == [row.key for row in ROWS]
    for facts, row in zip(data["rows"], ROWS, strict=True):
        assert json.loads(json.dumps(row.theirs)) == facts["theirs"], "run `make peers`"
        assert json.loads(json.dumps(row.ours)) == facts["ours"], "run `make peers`"
    assert sum(len(found) for row in data["rows"] for found in row["models"].values()) == len(cells())


def test_no_row_of_the_data_differs_by_more_than_it_may(data):
    for row in data["rows"]:
        assert row["missing"] is None
        for found in (cell for model in MODELS for cell in row["models"][model]):
            assert found["differ"] <= row["may_differ"] * found["kept"], row["key"]


def test_a_row_that_may_differ_says_why():
    assert all(bool(row.why) == (row.may_differ > 0) for row in ROWS)
    assert len({row.key for row in ROWS}) == len(ROWS)


def test_the_environment_has_the_version_that_the_page_names():
    (version,) = re.findall(r"kvpress==(\S+)", (ROOT / "tests/peers/requirements.txt").read_text())
    assert KVPRESS_AT.split()[0] == version


@pytest.mark.parametrize("rule", RULES)
def test_a_plain_rule_keeps_what_its_scores_rank_highest(layers, rule):
    """Every head keeps distinct positions, the newest where there is a window, and none that is worth less than a lost one."""
    arguments = {k: SMALL.get(k, v) for k, v in RULES[rule].items()}
    found = getattr(references, rule)(layers, 16, **arguments)
    assert len(found) == len(layers)
    for layer in found:
        for positions, scores in zip(layer.positions, layer.scores, strict=True):
            lost = set(range(LENGTH)) - set(positions)
            assert sorted(set(positions)) == positions
            assert len(scores) == LENGTH
            assert min(scores[i] for i in positions) >= max(scores[i] for i in lost)
            assert set(range(LENGTH - arguments.get("window", 0), LENGTH)) <= set(positions)
    assert rule in ("pyramidkv", "adakv") or {len(p) for layer in found for p in layer.positions} == {16}


@pytest.mark.parametrize("window", [None, 8])
def test_h2o_keeps_what_the_plain_rule_keeps(prompted, layers, window):
    ours = kept(prompted, H2O(window=window), 16)
    for mask, layer in zip(ours, references.h2o(layers, 16, window), strict=True):
        assert [head.nonzero()[:, 0].tolist() for head in mask] == layer.positions


def test_a_pyramid_has_the_published_budgets():
    """KVCache-Factory at 32 layers, 128 tokens and window 8: 234 tokens fall to 17 by 7, where 6 would be the twentieth."""
    assert references.pyramid_budgets(128, 32, 4096, 8, 20) == [234 - 7 * layer for layer in range(32)]
    assert references.pyramid_budgets(100, 4, 150, 8, 20) == [92] * 4, "a short prompt has no pyramid"


@pytest.mark.parametrize("turned", [False, True])
def test_a_mask_that_hides_nothing_changes_nothing(prompted, turned):
    model, tokens = prompted.model, tokens_of(LENGTH + 10)
    mask = torch.ones(len(model.layers), model.layers[0].heads, LENGTH, dtype=torch.bool)
    with torch.inference_mode(), own_attention(model.hf):
        expected = nll(model.hf(tokens).logits, tokens)[0, LENGTH - 1 :]
    assert masked.nlls(model, tokens, mask, turned) == pytest.approx(expected, abs=1e-4)
    mask[0, 0, 3] = False
    assert masked.nlls(model, tokens, mask, turned) != pytest.approx(expected, abs=1e-4)


def test_positions_differ_unless_their_scores_tie():
    theirs, ours = np.array([[[True, True, False, False]]]), np.array([[[True, False, True, False]]])
    assert difference(theirs, theirs, None, "head") == (0, 0)
    assert difference(theirs, ours, None, "head") == (1, 0)
    assert difference(theirs, ours, np.array([[[3.0, 2.0, 1.0, 0.0]]]), "head") == (1, 0)
    assert difference(theirs, ours, np.array([[[3.0, 2.0, 2.0 - 1e-6, 0.0]]]), "head") == (0, 1)
    assert difference(theirs, ours, np.array([[[3.0, np.inf, 2.0, 0.0]]]), "head") == (1, 0)
    assert difference(theirs, np.ones_like(theirs), np.zeros((1, 1, 4)), "head") == (2, 0), "more tokens are never a tie"


def test_the_continuation_is_that_of_the_page(data):
    assert data["continuation"] == CONTINUATION
