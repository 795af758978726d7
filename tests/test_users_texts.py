"""Texts as users bring them: empty ones, other encodings, names of files, and tokenizers of other families."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factories import cell_record, edit

from kvbench.harness.core.intervals import MIN_BLOCKS
from kvbench.harness.data import pg19
from kvbench.harness.records.aggregates import nll_figures
from kvbench.harness.records.metrics import StrideBlocks
from kvbench.harness.report.pairing import units
from kvbench.harness.report.verify import problems

LENGTH, PREFIX = 5001, 1


def scored_by_hand(nll, starts, stride, prompt):
    """Scored tokens of each text, all and on the stride."""
    texts = [range(*span) for span in pairwise([*starts, LENGTH])]
    return [
        [sum(np.isfinite(nll[i]) and (i - PREFIX - prompt) % step == 0 for i in text) for text in texts] for step in (1, stride)
    ]


@pytest.mark.parametrize(
    ("starts", "prompt"),
    [([1, 1, 2000], 0), ([1, 2000, 2000, 2000, 4000], 0), ([1, 50, 90, 2000], 100), ([1, 2, 3, 4, 5, 3001, 3002, 5000], 0)],
    ids=["first", "between", "inside the prompt", "between two strides"],
)
def test_a_text_without_scored_tokens_counts_none(starts, prompt, tmp_path):
    nll = np.random.default_rng(0).gamma(2, 1, LENGTH).astype(np.float32)
    nll[: PREFIX + prompt] = np.nan
    figures = nll_figures(nll, PREFIX, starts, 4, prompt=prompt)
    everything, on_stride = scored_by_hand(nll, starts, 4, prompt)
    assert figures["texts"]["tokens"] == everything
    assert figures["on_stride"]["texts"]["tokens"] == on_stride
    assert [s == 0 for s in figures["texts"]["nll_sum"]] == [n == 0 for n in everything]
    task = {"name": "perplexity", "tokens": LENGTH - PREFIX, "stride": 4} | ({"prompt": prompt} if prompt else {})
    made = edit(cell_record(figures | {"bits_per_byte": 1.5}, task=task), data={"prefix": [0]})
    np.save(tmp_path / "x.nll.npy", nll)
    digest = hashlib.sha256((tmp_path / "x.nll.npy").read_bytes()).hexdigest()
    assert problems(edit(made, trace={"file": "x.nll.npy", "sha256": digest}), tmp_path) == []


def test_texts_without_scored_tokens_are_no_units_of_an_interval():
    """The first text that is scored is the one in which the caches fill."""
    counts = [0, 7, 0, *range(1, MIN_BLOCKS + 1)]
    texts = {"nll_sum": [2.0 * n for n in counts], "tokens": counts}
    blocks = StrideBlocks.model_validate({"nll_sum": [1.0], "tokens": [1], "size": 32, "texts": texts})
    assert units(blocks, 8, None, 0).tokens.tolist() == list(range(1, MIN_BLOCKS + 1))


def test_untitled_rows_have_titles_of_their_own(tmp_path):
    pq.write_table(pa.table({"title": ["Emma", None], "text": ["a", "b"]}), tmp_path / "named.parquet")
    pq.write_table(pa.table({"text": ["c", "d", ""]}), tmp_path / "plain.parquet")
    titles = [book.title for book in pg19.books("test", tmp_path)[1]]
    assert titles == ["Emma", "named 2", "plain 1", "plain 2", "plain 3"]
