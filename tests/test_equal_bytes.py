"""At equal bytes, caches of any format are ranked together, and nothing larger than the size takes part."""

from __future__ import annotations

import pytest
from factories import changed
from test_feed import answered, noisy

from kvbench.harness.report import feed
from kvbench.harness.report.chart import draw
from kvbench.harness.report.loss_charts import over_bytes

DENSE = 65536


def coded(made, codec, held, **parameters):
    """The record, of a cache that holds so many bytes."""
    kv = None if codec is None else {"codec": codec, "group": 32, "exempt": {"sinks": 0, "recent": 0}}
    return changed(made, cell={"kv": kv, "parameters": parameters}, metrics={"kv_bytes": held, "kv_held_bytes": held})


def of_text():
    """Int8 halves the bytes; at a quarter, twice the tokens are better than exact ones."""
    return [
        coded(noisy("dense", None, 1.7), None, DENSE),
        coded(noisy("dense", None, 1.71, 1), "int8", DENSE // 2),
        coded(noisy("h2o", 16, 1.9, 2), None, DENSE // 4, window=8),
        coded(noisy("h2o", 8, 2.3, 3), None, DENSE // 8, window=4),
        coded(noisy("h2o", 16, 1.92, 4), "int8", DENSE // 8),
        coded(noisy("h2o", 32, 1.75, 5), "int8", DENSE // 4),
    ]


def sizes(records):
    (equal,) = feed.feed(records)["equal_bytes"]
    names = {row["id"]: row["name"] for row in equal["rows"]}
    return {size["share"]: ([names[place["id"]] for place in size["ranks"]], size) for size in equal["sizes"]}


def test_of_every_policy_and_format_the_largest_cache_that_fits_is_ranked():
    found = sizes(of_text())
    assert list(found) == [1 / 2, 1 / 4, 1 / 8]  # at 1/16 nothing was measured
    assert found[1 / 2][0] == ["dense as int8", "h2o of 32 tokens as int8", "h2o of 16 tokens"]
    assert found[1 / 4][0] == ["h2o of 32 tokens as int8", "h2o of 16 tokens"]
    assert found[1 / 8][0] == ["h2o of 16 tokens as int8", "h2o of 8 tokens"]
    assert [place["rank"] for place in found[1 / 4][1]["ranks"]] == [[1, 1], [2, 2]]
    assert found[1 / 4][1]["bytes"] == DENSE // 4


def test_two_variants_of_a_policy_are_two():
    other = coded(noisy("h2o", 16, 1.8, 6), None, DENSE // 4, window=2)
    assert len(sizes([*of_text(), other])[1 / 4][0]) == 4  # and the smaller one of a window of 4, which fits as well


def test_answers_are_ranked_by_their_share():
    asks = [
        coded(answered("dense", "1" * 40, None), None, DENSE),
        coded(answered("dense", "1" * 30 + "0" * 10, None), "int2", DENSE // 8),
        coded(answered("window", "10" * 20), "int8", DENSE // 8),
        coded(answered("window", "0" * 40), None, DENSE // 8),
    ]
    names, size = sizes(asks)[1 / 8]
    assert names == ["dense as int2", "window of 64 tokens as int8", "window of 64 tokens"]
    assert "dense as int2" in size["finding"]


@pytest.mark.parametrize("left_out", [0, 1, 4])
def test_one_format_is_no_choice_and_without_dense_there_is_no_size(left_out):
    records = of_text()
    kept = [r for r in records if r.cell.kv is None] if left_out else records[1:]
    assert feed.feed(kept)["equal_bytes"] == []


def test_the_front_is_the_best_of_all_smaller_caches_and_what_lost_too_much_is_not_drawn():
    (equal,) = feed.feed(of_text())["equal_bytes"]
    front, points = (layer["data"]["values"] for layer in over_bytes(equal, "name").spec["layer"])
    assert [point["share"] for point in points] == sorted(point["share"] for point in points)
    assert {(p["policy"], p["format"]) for p in points} == {
        ("dense", "float32"),
        ("dense", "int8"),
        ("h2o", "float32"),
        ("h2o", "int8"),
    }
    assert 1 / 8 not in {p["share"] for p in points if p["format"] == "float32"}  # 82 % are lost there
    assert [point["share"] for point in front] == [1 / 8, 1 / 4, 1 / 2, 1]
    assert set(draw([over_bytes(equal, "name")])) == {"name.svg", "name-dark.svg"}
