"""Perplexities, ranks, losses and sentences of a table are over the same tokens, and a strided reference thins none of them."""

import math

import numpy as np
import pytest
from factories import cell_record, record
from test_tables import table_of

from kvbench.harness.records import Record
from kvbench.harness.records.aggregates import nll_figures, scored_mask
from kvbench.harness.report import export
from kvbench.harness.report.feed import feed
from kvbench.harness.report.leaderboard import render
from kvbench.harness.report.pairing import Common, on_common, strided_tokens
from kvbench.harness.report.sections import headline, section
from kvbench.harness.report.task_charts import over_the_stream

pytestmark = pytest.mark.fast


STRIDE, TOKENS = 16, 20_000
WANTED = scored_mask(TOKENS + 1, 1, STRIDE)
NLL = np.random.default_rng(1).gamma(2, 1, TOKENS + 1).astype(np.float32)
ROUNDED = 5e-6  # nats: sums of runs are kept to 5 decimals, a run has one token or more
NLL[WANTED] += 1  # the tokens that recompute scores are harder


CAPACITY = 64
FILLED = np.arange(TOKENS + 1) >= 96  # a cache of 64 fills in the run of 32 tokens that ends there
ALL = np.arange(1, TOKENS + 1)


def read(policy: str, worse: float | np.ndarray, streams: int = 1, stride: int = STRIDE, **cell) -> Record:
    """A record of a policy on the same text. With `stride`, a recomputed window scores every `stride`-th token."""
    nll = NLL + np.float32(worse)
    nll[0] = np.nan
    if policy.startswith("recompute"):
        nll[~scored_mask(len(nll), 1, stride, streams)] = np.nan
    metrics = nll_figures(nll, 1, [1, 9000], stride, streams) | {"bits_per_byte": 1.5}
    metrics["kv_bytes"] = 0 if policy.startswith("recompute") else 640
    return cell_record(metrics, policy=policy, task={"name": "perplexity", "stride": stride}, **cell)


def three() -> list[Record]:
    return [read("recompute_window", 0.0), read("window", 0.1), read("h2o", -0.1)]


def expected(worse: float, where=WANTED) -> str:
    return f"{math.exp(NLL[where].mean(dtype=np.float64) + worse):.4g}"


def of_row(row: dict) -> str:
    return f"{row['perplexity']:.4g}"


def test_rows_of_a_question_are_over_the_tokens_after_filling_and_a_strided_one_over_its_own():
    records = [read(r.cell.policy, worse, capacity=CAPACITY) for r, worse in zip(three(), (0.0, 0.1, -0.1), strict=True)]
    (question,) = feed(records)["questions"]
    (recompute,) = question["references"]
    assert {row["policy"]: of_row(row) for row in question["budgets"][0]["rows"]} == {
        "h2o": expected(-0.1, FILLED),
        "window": expected(0.1, FILLED),
    }
    thinned = expected(0.0, WANTED & FILLED)
    assert (of_row(recompute), recompute["stride"]) == (thinned, STRIDE)


def test_a_strided_reference_changes_no_rank_no_perplexity_and_no_loss_to_dense():
    noise = np.random.default_rng(2).normal(0, 1, (2, TOKENS + 1)) * FILLED * 20  # two rows that a sixteenth can't tell apart
    noise -= noise[:, ALL].mean(1, keepdims=True) * FILLED
    caches = [
        read(name, (worse + off) * FILLED, capacity=CAPACITY, streams=25)
        for name, worse, off in zip(("lambda", "sink_window"), (1.0, 1.5), noise, strict=True)
    ]
    dense, strided = read("dense", 0.0, 25, capacity=None), read("recompute_window", 0.0, 25, capacity=CAPACITY)
    without, beside = (feed([dense, *caches, *more])["questions"][0] for more in ([], [strided]))
    assert beside["budgets"][0]["finding"] == without["budgets"][0]["finding"]
    for row, alone in zip(beside["budgets"][0]["rows"], without["budgets"][0]["rows"], strict=True):
        assert {name: row[name] for name in ("rank", "loss", "perplexity")} == {
            n: alone[n] for n in ("rank", "loss", "perplexity")
        }
        of_dense = beside["budgets"][0]["references"][row["loss"]["to"]]
        assert row["loss"]["to_name"] == "dense"
        assert row["loss"]["stride"] == 1
        assert row["loss"]["value"] == pytest.approx(100 * (row["perplexity"] / of_dense - 1), rel=1e-4)
    assert [row["loss"]["stride"] for row in beside["references"] if row["policy"] == "recompute_window"] == [STRIDE]


def test_where_dense_has_a_trend_losses_are_to_the_strided_reference_and_say_so():
    (question,) = feed(three())["questions"]
    (budget,) = question["budgets"]
    assert {(row["loss"]["to_name"], row["loss"]["stride"]) for row in budget["rows"]} == {("recompute_window", STRIDE)}
    assert "recompute_window (on one token in 16)" in budget["finding"]
    page = render(feed(three())).text
    assert "perplexity lost to recompute\\_window (1 token in 16)" in page
    assert "(1 token in 16) |" in next(line for line in page.splitlines() if line.startswith("| – | recompute"))


def test_the_section_has_all_tokens_of_each_and_says_who_scored_some():
    shown = table_of(section(three()[0], three()).text.split("<picture>")[0].splitlines())
    figures = [row["perplexity"].split()[0] for row in shown.values()]
    assert figures == [expected(0.0), expected(-0.1, ALL), expected(0.1, ALL)]
    assert [row["perplexity"].endswith("(1 token in 16)") for row in shown.values()] == [True, False, False]
    assert [row["bits/byte"] for row in shown.values()] == ["", "1.500", "1.500"]
    assert [row["K/V"] for row in shown.values()] == ["–", "640 B", "640 B"]


def test_where_each_scored_every_token_there_is_one_column():
    text = section(three()[1], three()[1:]).text
    shown = table_of(text.split("<picture>")[0].splitlines())
    assert shown["h2o"]["perplexity"].split()[0] == expected(-0.1, np.arange(1, TOKENS + 1))
    assert "on all tokens" not in shown["h2o"]
    assert "over all tokens" not in text


def test_a_summary_of_a_run_says_who_scored_some_tokens():
    other = record("h2o", 8, 2.0)  # another task, whose tokens are its own
    figures = [row["figure"] for row in export.summary_rows([*three(), other])]
    all_tokens = [f"perplexity {expected(worse, ALL)}" for worse in (0.1, -0.1)]
    assert figures == [f"perplexity {expected(0.0)} (1 token in 16)", *all_tokens, "perplexity 7.389"]
    assert headline(three()[1]) == all_tokens[0]
    failed = record("x", 8, status="failed", error={"kind": "out of memory", "message": ""}, metrics={})
    assert export.summary_rows([failed])[0]["figure"] == ""


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
    seen = on_common(full, strided_tokens([sparse, full]))
    assert seen is not None
    for name in ("tokens", "blocks", "texts"):
        assert getattr(seen.metrics, name) == getattr(sparse.metrics, name)
    assert seen.metrics.nll == pytest.approx(sparse.metrics.nll, abs=ROUNDED)
    if streams == 1:
        assert [b.tokens for b in seen.metrics.buckets] == [b.tokens for b in sparse.metrics.buckets]
        ours, theirs = ([b.nll for b in r.metrics.buckets] for r in (seen, sparse))
        assert ours == pytest.approx(theirs, abs=ROUNDED)
    assert on_common(full, Common()) is full
