"""All perplexities of a column are over the same tokens, on every page."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from factories import cell_record, record
from test_tables import table_of

from kvbench.harness.records import Record
from kvbench.harness.records.aggregates import nll_figures, scored_mask
from kvbench.harness.report import export, site
from kvbench.harness.report.feed import feed
from kvbench.harness.report.pairing import Common, common_tokens, on_common
from kvbench.harness.report.sections import headline, section
from kvbench.harness.report.task_charts import over_the_stream

STRIDE, TOKENS = 16, 20_000
WANTED = scored_mask(TOKENS + 1, 1, STRIDE)
NLL = np.random.default_rng(1).gamma(2, 1, TOKENS + 1).astype(np.float32)
ROUNDED = 5e-6  # nats: sums of runs are kept to 5 decimals, a run has one token or more
NLL[WANTED] += 1  # the tokens that recompute scores are harder


def read(policy: str, worse: float, streams: int = 1, stride: int = STRIDE) -> Record:
    """A record of a policy on the same text. With `stride`, it scores every `stride`-th token."""
    nll = NLL + np.float32(worse)
    nll[0] = np.nan
    if policy.startswith("recompute"):
        nll[~scored_mask(len(nll), 1, stride, streams)] = np.nan
    metrics = nll_figures(nll, 1, [1, 9000], stride, streams) | {"bits_per_byte": 1.5}
    metrics["kv_bytes"] = 0 if policy.startswith("recompute") else 640
    return cell_record(metrics, policy=policy, task={"name": "perplexity", "stride": stride})


def three() -> list[Record]:
    return [read("recompute_window", 0.0), read("window", 0.1), read("h2o", -0.1)]


def expected(worse: float, where=WANTED) -> str:
    return f"{math.exp(NLL[where].mean(dtype=np.float64) + worse):.4g}"


def test_all_rows_of_a_question_are_over_the_tokens_that_all_scored():
    (question,) = feed(three())["questions"]
    rows = [*question["budgets"][0]["rows"], *question["references"]]
    assert {row["policy"]: f"{row['perplexity']:.4g}" for row in rows} == {
        "h2o": expected(-0.1), "window": expected(0.1), "recompute_window": expected(0.0),
    }  # fmt: skip


def test_so_are_those_of_the_section_which_says_which_tokens_they_are():
    text = section(three()[0], three()).text
    assert "Perplexity is over the 1,250 tokens that every row scored, one in 16" in text
    shown = table_of(text.split("<picture>")[0].splitlines())
    assert [row["perplexity"].split()[0] for row in shown.values()] == [expected(w) for w in (0.0, -0.1, 0.1)]
    assert [row["bits/byte"] for row in shown.values()] == ["", "1.500", "1.500"]
    everything = np.arange(1, TOKENS + 1)
    on_all = [row["on all tokens"].split()[:1] for row in shown.values()]
    assert on_all == [[], [expected(-0.1, everything)], [expected(0.1, everything)]]
    assert [row["K/V"] for row in shown.values()] == ["–", "640 B", "640 B"]


def test_where_each_scored_every_token_there_is_one_column():
    text = section(three()[1], three()[1:]).text
    shown = table_of(text.split("<picture>")[0].splitlines())
    assert shown["h2o"]["perplexity"].split()[0] == expected(-0.1, np.arange(1, TOKENS + 1))
    assert "on all tokens" not in shown["h2o"]
    assert "over all tokens" not in text


def test_a_summary_of_a_run_compares_on_the_same_tokens():
    other = record("h2o", 8, 2.0)  # another task, whose tokens are its own
    figures = [row["figure"] for row in export.summary_rows([*three(), other])]
    assert figures == [f"perplexity {expected(w)} (1 token in 16)" for w in (0.0, 0.1, -0.1)] + ["perplexity 7.389"]
    assert headline(three()[1]) == f"perplexity {expected(0.1, np.arange(1, TOKENS + 1))}"
    failed = record("x", 8, status="failed", error={"kind": "out of memory", "message": ""}, metrics={})
    assert export.summary_rows([failed])[0]["figure"] == ""


def test_rows_of_the_page_to_sort_are_over_the_same_tokens_and_no_cache_is_no_small_cache():
    page = site.render(three())
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.S)[1])
    rows = [dict(zip(data["columns"], row, strict=True)) for row in data["cells"]]
    assert {r["policy"]: f"{r['perplexity']:.4g}" for r in rows} == {
        "recompute_window": expected(0.0), "window": expected(0.1), "h2o": expected(-0.1),
    }  # fmt: skip
    assert {r["policy"]: r["kib"] for r in rows} == {"recompute_window": None, "window": 0.625, "h2o": 0.625}


def test_pictures_show_only_who_scored_every_token():
    (stream,) = over_the_stream(three())
    *_, lines = stream.spec["layer"]
    assert {v["policy"] for v in lines["data"]["values"]} == {"window", "h2o"}
    assert "Not in the chart: recompute\\_window, which scored one token in 16." in section(three()[0], three()).text


def test_by_position_recompute_is_compared_on_its_tokens_alone():
    page = section(three()[0], three()).text.split("Perplexity by position")
    assert "recompute" not in page[1].split("<details>")[0]
    assert ", over the 1,250 tokens that every row scored" in page[2]
    first = table_of(page[2].split("</details>")[0].splitlines())["recompute\\_window"]["256 to 512"]
    assert first == expected(0.0, np.flatnonzero(WANTED[:512])[WANTED[:256].sum() :])


@pytest.mark.parametrize("streams", [1, 4])
def test_a_record_on_common_tokens_is_what_scoring_only_those_gives(streams):
    sparse, full = read("recompute_window", 0.25, streams), read("window", 0.25, streams)
    seen = on_common(full, common_tokens([sparse, full]))
    assert seen is not None
    for name in ("tokens", "blocks", "texts"):
        assert getattr(seen.metrics, name) == getattr(sparse.metrics, name)
    assert seen.metrics.nll == pytest.approx(sparse.metrics.nll, abs=ROUNDED)
    if streams == 1:
        assert [b.tokens for b in seen.metrics.buckets] == [b.tokens for b in sparse.metrics.buckets]
        ours, theirs = ([b.nll for b in r.metrics.buckets] for r in (seen, sparse))
        assert ours == pytest.approx(theirs, abs=ROUNDED)
    assert on_common(full, Common()) is full
