"""The feed: one question has one text, its sentences say what its rows say, and it is what its schema says."""

import itertools
import json
import re
from pathlib import Path

import jsonschema
import pytest
from factories import cell_record, changed, edit, record

from kvbench.harness.report import feed as feeds
from kvbench.harness.report.chart import draw
from kvbench.harness.report.closing import closing
from kvbench.harness.report.feed.question import questions
from kvbench.harness.report.leaderboard import render
from kvbench.harness.report.loss_charts import over_budgets, over_bytes
from kvbench.harness.report.sections import section

SCHEMA = json.loads((Path(feeds.__file__).parent / "schema.json").read_text(encoding="utf-8"))


def noisy(policy, capacity, nll, seed=0, **changes):
    """A record whose blocks have noise of their own, so that paired differences have an interval."""
    made = record(policy, capacity, nll, **changes)
    blocks = made.metrics.as_json()["blocks"]
    shifted = [x + ((i * 7919 + seed * 104729) % 97 - 48) / 200 for i, x in enumerate(blocks["nll_sum"])]
    return edit(made, metrics={"blocks": blocks | {"nll_sum": shifted}})


def of_budgets(capacities=(8, 16)):
    """Two policies and a control at each budget, recompute at one of 16, dense past its training length."""
    dense = edit(noisy("dense", None, 1.7, facts={"training_length": 64}), metrics={"kv_bytes": 65536})
    rows = [dense, edit(noisy("recompute_window", 16, 1.9, 1), metrics={"kv_bytes": 0})]
    for capacity in capacities:
        caches = (("window", 2.2, 2), ("h2o", 2.25, 3), ("random", 4.0, 4))
        made = [noisy(policy, capacity, nll - capacity / 100, seed) for policy, nll, seed in caches]
        rows += [edit(r, metrics={"kv_bytes": 80 * (capacity + 1)}) for r in made]
    return rows


def answered(policy, outcomes, capacity=64, **changes):
    right = outcomes.count("1")
    figures = {"right": right, "questions": len(outcomes), "accuracy": right / len(outcomes), "outcomes": outcomes}
    task = {"name": "streameval", "distance": 4, "lines": 60}
    data = record().data.as_json() | {"streams": len(outcomes)}  # a question each
    return cell_record(figures, task=task, policy=policy, capacity=capacity, **({"data": data} | changes))


def everything():
    failed = record("broken", 8, status="failed", error={"kind": "out of memory", "message": ""}, metrics={})
    other = cell_record({"x": 1}, suite="other", model="another", task={"name": "unheard_of"})
    tasks = [answered("dense", "1" * 40, None), answered("h2o", "10" * 20), answered("window", "1000" * 10)]
    return [*of_budgets(), failed, other, *(changed(r, cell={"suite": "asks"}) for r in tasks)]


def test_the_feed_is_what_its_schema_says():
    made = feeds.feed(everything())
    jsonschema.validate(made, SCHEMA)
    assert json.loads(feeds.text(made)) == made
    jsonschema.validate(feeds.feed([]), SCHEMA)


def test_a_policy_beats_another_exactly_if_the_interval_of_the_two_excludes_0():
    asks = [r for r in everything() if r.cell.suite == "asks"]
    in_streams = [changed(r, cell={"suite": f"asks {n}"}, data={"streams": n}) for n in (4, 20) for r in asks]
    made = feeds.feed([*everything(), *in_streams])
    assert sum(map(ranks_follow_from_pairs, made["questions"])) >= 9


def ranks_follow_from_pairs(question):
    """Check every rank against the intervals of the budget's pairs, and return the number of pairs."""
    checked = 0
    for budget in question["budgets"]:
        rows, places = budget["rows"], range(len(budget["rows"]))
        signs = {}
        for (i, j), pair in zip(itertools.combinations(places, 2), budget["pairs"], strict=True):
            _, low, high = [*(pair or [0]), 0, 0][:3]
            signs[i, j], signs[j, i] = (low > 0) - (high < 0), (high < 0) - (low > 0)
            checked += 1
        for i in places:
            if rows[i]["rank"]:
                judged = [signs[i, j] for j in places if j != i and rows[j][question["measure"]]]
                assert rows[i]["rank"] == [1 + judged.count(-1), len(judged) + 1 - judged.count(1)]
    return checked


@pytest.mark.parametrize(("evict", "modes"), [("step", ["cache", "stream"]), ("prompt", ["stream", "cache"])])
def test_a_question_has_one_mode_of_positions_and_the_usual_one_comes_first(evict, modes):
    rows = [r if r.cell.capacity is None else changed(r, cell={"evict": evict}) for r in of_budgets()]
    both = [*rows, *(changed(r, cell={"positions": "stream"}) for r in rows if r.cell.policy in ("window", "h2o"))]
    asked = questions(both)
    assert [{row.cell.positions for row in question.caches} for question in asked] == [{mode} for mode in modes]
    assert all(question.dense is not None for question in asked)
    made = feeds.feed(both)["questions"]
    assert [q["subject"].split(", ")[-1] for q in made] == [f"{mode} positions" for mode in modes]
    assert len({q["id"] for q in made}) == 2
    assert "positions" not in feeds.feed(rows)["questions"][0]["subject"], "those that are usual and alone"


def test_a_question_never_has_two_texts_or_times_of_evicting():
    records = of_budgets()
    records += [changed(r, data={"ids_sha256": "another text"}, cell={"seed": 7}) for r in of_budgets()]
    records += [changed(r, cell={"evict": "prompt"}) for r in of_budgets() if r.cell.policy == "h2o"]
    asked = questions(records)
    assert len(asked) == 3
    for question in asked:
        assert len({r.data.ids_sha256 for r in question.records}) == 1
        assert len({row.cell.evicts for row in question.caches}) == 1
    made = feeds.feed(records)
    assert len({q["id"] for q in made["questions"]}) == 3
    for question in made["questions"]:
        rows = [row["id"] for budget in question["budgets"] for row in budget["rows"]]
        assert len(rows) == len(set(rows))


def test_losses_are_to_recompute_and_never_to_a_dense_with_a_trend():
    (question,) = feeds.feed(of_budgets())["questions"]
    assert [budget["capacity"] for budget in question["budgets"]] == [8, 16]
    for budget in question["budgets"]:
        for row in budget["rows"]:
            assert row["loss"]["to_name"] == ("recompute_window at 16" if budget["capacity"] == 8 else "recompute_window")
            assert row["loss_to_dense"] is None
            assert row["loss"]["low"] < row["loss"]["value"] < row["loss"]["high"]
    assert [row["rank"] for row in question["references"]] == [None, None]
    assert question["dense_measured"]


def test_the_bytes_of_a_dense_cache_that_was_not_measured_are_those_of_its_tokens():
    shape = {"layers": 2, "heads": 1, "key_dim": 4, "value_dim": 4, "sliding_window": None}
    (question,) = questions([edit(record("h2o"), facts={"kv_shapes": [shape]}, data={"tokens": 600})])
    assert question.dense_bytes == 2 * (4 + 4) * 4 * 599, "the last token is not read; slots are allocated by 256"


def test_without_a_reference_the_control_is_the_yardstick():
    (question,) = feeds.feed([r for r in of_budgets() if r.cell.policy in ("window", "random")])["questions"]
    losses = {row["policy"]: row["loss"] for row in question["budgets"][0]["rows"]}
    assert losses["random"] is None
    assert losses["window"]["to_name"] == "random"
    assert losses["window"]["verdict"] == "better"


@pytest.mark.parametrize("made", [of_budgets(), everything()])
def test_every_figure_of_a_sentence_is_in_its_row(made):
    for question in feeds.feed(made)["questions"]:
        for budget in question["budgets"]:
            best = budget["rows"][0]
            shown = json.dumps([best["loss"], best["loss_to_dense"], best["answers"], best["kv_share"], best["times_dense"]])
            stated = {f"{float(x):.2g}" for x in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", shown)}
            said = budget["answer"].split(" has the lowest ")[-1].split("]")[0].replace("−", "-").replace("+", "")
            for number in re.findall(r"(?<![\w.])-?\d+\.\d+", said.split(question["subject"])[-1]):
                assert f"{float(number):.2g}" in stated, budget["answer"]


def test_a_sentence_says_that_a_difference_may_be_chance():
    records = [noisy("window", 8, 2.0, 1), noisy("h2o", 8, 2.0, 2), noisy("recompute_window", 8, 2.0, 3)]
    (question,) = feeds.feed(records)["questions"]
    said = question["budgets"][0]["answer"]
    assert "is within the noise" in said
    assert "is within the noise of recompute_window (" in said
    sure = feeds.feed([noisy("window", 8, 2.5, 1), *records[1:]])["questions"][0]["budgets"][0]
    assert "is the best of 2 policies (95 % confidence)" in sure["answer"]
    assert [row["rank"] for row in sure["rows"]] == [[1, 1], [2, 2]]


def test_draws_of_the_control_count_once_and_widen_no_interval():
    draws = [edit(noisy("random", 8, 2.0, seed), cell={"seed": seed}) for seed in range(4)]
    records = [noisy("h2o", 8, 1.5, 5), noisy("window", 8, 2.2, 6), *draws]
    (budget,) = feeds.feed(records)["questions"][0]["budgets"]
    assert budget["finding"].startswith("h2o is the best of 3 policies (95 % confidence)")
    alone, beside = (questions(made)[0].changes for made in (records[:3], records))
    pairs = {frozenset(pair) for pair in beside}
    assert len(pairs) == 1 + 2 * len(draws), "h2o and window, and either beside each draw"
    assert set(alone) < set(beside)


def test_a_task_without_a_text_is_judged_by_its_right_answers():
    made = feeds.feed([r for r in everything() if r.cell.suite == "asks"])
    (question,) = made["questions"]
    assert question["measure"] == "answers"
    first, second = question["budgets"][0]["rows"]
    assert (first["policy"], first["loss"]["value"], first["loss"]["to_name"]) == ("h2o", 50, "dense")
    assert second["answers"][0]["share"] == 0.25
    assert "answers 50 % [35, 65] right" in question["budgets"][0]["answer"]


def test_the_markdown_page_begins_with_the_same_answer():
    made = feeds.feed(of_budgets())
    text = render(made).text
    question = made["questions"][0]
    assert all(budget["answer"].split(": ")[1][:20] in text.replace("\\", "") for budget in question["budgets"])
    assert "| policy |" in text
    chart = over_budgets(question, "answer")
    assert "random" not in json.dumps(chart.spec), "it would flatten the others"
    assert "<svg" in chart.svg("light")


def test_a_chart_of_lines_leaves_out_policies_of_one_budget():
    rows = [*of_budgets(), edit(noisy("lagkv", 16, 2.3, 5), metrics={"kv_bytes": 1360})]
    (question,) = feeds.feed(rows)["questions"]
    assert "lagkv" not in json.dumps(over_budgets(question, "answer").spec)
    (question,) = feeds.feed([row for row in rows if row.cell.capacity in (None, 16)])["questions"]
    assert "lagkv" in json.dumps(over_budgets(question, "answer").spec)


def test_the_markdown_page_of_many_questions_answers_one_at_three_budgets_and_links_to_its_model():
    first = of_budgets((8, 12, 16, 24))
    cells = [{"suite": f"suite {n}", "model": {"id": f"model {n % 2}", "dtype": "float32"}} for n in range(24)]
    many = [changed(r, cell=cell) for cell in cells for r in first]
    text = render(feeds.feed(many), site="page.html").text
    assert re.findall(r"^- (\d+) tokens:", text, re.MULTILINE) == ["8", "16", "24"]
    linked = re.findall(r"^- \[suite (\d+)\]\(page.html#q=suite-\d+-", text, re.MULTILINE)
    (model,) = re.findall(r"^More on model (\d):", text, re.MULTILINE)
    assert sorted(map(int, linked)) == list(range(int(model), 24, 2))
    assert "[The page](page.html) has 24 questions of 24 suites" in text


def test_of_caches_that_grow_the_bytes_of_their_tokens_count():
    """Dense has room for 512 tokens and holds 400; of a bounded cache all slots count, and of a cut prompt its tokens."""
    dense = edit(noisy("dense", None, 1.7), metrics={"kv_bytes": 51200, "kv_held_bytes": 40000})
    h2o = edit(noisy("h2o", 8, 2.25, 3), metrics={"kv_bytes": 6500, "kv_held_bytes": 6400})
    for evict, share in (("step", 6500 / 40000), ("prompt", 6400 / 40000)):
        (question,) = feeds.feed([dense, changed(h2o, cell={"evict": evict})])["questions"]
        ((row,),) = (budget["rows"] for budget in question["budgets"])
        assert row["kv_share"] == pytest.approx(share, rel=1e-3)
        assert f"holds {100 * share:.0f} % of dense's bytes" in question["budgets"][0]["finding"]
    for shown in (section(dense, [h2o]).text, *(str(table.lines) for table in closing([dense, h2o]))):
        assert "39.1 KiB" in shown
        assert "6.35 KiB" in shown


def test_too_few_streams_are_named_and_have_no_interval():
    made = feeds.feed([changed(r, data={"streams": 4}) for r in everything() if r.cell.suite == "asks"])
    jsonschema.validate(made, SCHEMA)
    (question,) = made["questions"]
    (budget,) = question["budgets"]
    assert "there are too few streams to rank policies" in budget["answer"]
    assert "answers 50 % right (too few streams for an interval: 4 of 20)" in budget["answer"]
    for row in budget["rows"]:
        assert (row["rank"], row["loss"]["low"], row["answers"][0]["high"]) == (None, None, None)


# At equal bytes, caches of any format are ranked together, and nothing larger than the size takes part.
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
    (equal,) = feeds.feed(records)["equal_bytes"]
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
    assert feeds.feed(kept)["equal_bytes"] == []


def test_the_front_is_the_best_of_all_smaller_caches_and_what_lost_too_much_is_not_drawn():
    (equal,) = feeds.feed(of_text())["equal_bytes"]
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


def test_the_leader_is_not_said_to_lead_whom_only_another_policy_beats():
    # h2o and sink_window have equal noise, so that h2o surely beats sink_window; random has other noise
    records = [noisy("random", 8, 2.0, 1), noisy("h2o", 8, 2.00003, 2), noisy("sink_window", 8, 2.00006, 2)]
    (budget,) = feeds.feed(records)["questions"][0]["budgets"]
    assert [row["rank"] for row in budget["rows"]] == [[1, 3], [1, 2], [2, 3]]
    assert "its lead over all others is within the noise" in budget["answer"]


def test_a_third_party_cache_is_no_reference_of_policies():
    dense = edit(noisy("dense", None, 1.7, 1), metrics={"kv_bytes": 65536})
    third = edit(noisy("hf:DynamicCache", None, 1.6, 2), facts={"code": "transformers 5.0"})
    (question,) = feeds.feed([dense, third, noisy("window", 8, 2.0, 3)])["questions"]
    assert question["budgets"][0]["reference"] == question["references"][0]["id"]
    assert question["budgets"][0]["rows"][0]["loss"]["to_name"] == "dense"
