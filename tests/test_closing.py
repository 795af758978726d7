"""Summary at the end of a run."""

from __future__ import annotations

import pytest
from factories import cell_record, edit, record

from kvbench.harness.report.closing import closing
from kvbench.harness.report.feed import feed
from kvbench.harness.report.troubles import troubles


def measured(policy: str, nll: float, capacity: int | None = 8, parameters: dict | None = None, tokens: int = 32768, **changes):
    """A record of perplexity whose cell has these parameters."""
    made = record(policy, capacity, nll, **changes)
    runs = tokens // 32
    blocks = {k: v if k == "size" else v[:runs] for k, v in made.metrics.as_json()["blocks"].items()}
    kv_bytes = 40960 if capacity is None else 0 if policy.startswith("recompute") else 640
    return edit(made, cell={"parameters": parameters or {}}, metrics={"blocks": blocks, "kv_bytes": kv_bytes})


def answered(policy: str, outcomes: str, capacity: int | None = 8, **changes):
    """A record of questions, with a digit each."""
    right = outcomes.count("1")
    metrics = {
        "questions": len(outcomes),
        "right": right,
        "accuracy": right / max(1, len(outcomes)),
        "outcomes": outcomes,
        "in_cache": {},
        "kv_bytes": 40960 if capacity is None else 640,
    }
    cell = record(policy, capacity).cell.as_json() | {"task": {"name": "streameval", "distance": 1}}
    streams = {"streams": len(outcomes)}  # a question each
    return record(policy, capacity, **({"cell": cell, "metrics": metrics, "data": record().data.as_json() | streams} | changes))


def test_one_row_a_policy_with_all_its_tasks():
    both = [measured("dense", 1.9, None), measured("h2o", 2.0), answered("dense", "11", None), answered("h2o", "10")]
    (table,) = closing(both)
    assert list(table.head) == ["policy", "perplexity", "right", "K/V", "status"]
    assert list(table.lines) == [("dense", "6.653", "100 %", "40 KiB", "ok"), ("h2o", "7.373", "50 %", "640 B", "ok")]
    assert table.heading == "s, m, 8 tokens cached"


def with_costs(policy: str, capacity: int | None, nlls: dict[str, float], ms: float) -> list:
    """The records of a policy: perplexity of each text, the time of a step and of a prompt, and the peak."""
    axes = {"policy": policy, "capacity": capacity, "model": "m"}
    times = {"step_ms": ms, "first_token_ms": 10 * ms, "tokens_per_second": 1000 / ms}
    peak = {"peak_bytes": 4096 * (capacity or 40), "kv_bytes": 1024 * (capacity or 40)}
    texts = [measured(policy, nll, capacity, data={"ids_sha256": text, "tokens": 32768}) for text, nll in nlls.items()]
    read = [edit(r, cell={"task": {"name": "perplexity", "data": r.data.ids_sha256}}) for r in texts]
    made = [*read, *(cell_record(m, task={"name": task}, **axes) for task, m in (("latency", times), ("memory", peak)))]
    return [edit(r, cell={"model": {"id": "m", "dtype": "float32"}}, facts={"device": "a device"}) for r in made]


def test_several_texts_and_what_they_cost_stand_in_one_table():
    texts = {"wikitext": 2.0, "pg19": 3.0}
    *others, last = closing([*with_costs("dense", None, texts, 2.0), *with_costs("h2o", 8, texts, 4.0)])
    head = ["policy", "perplexity, WikiText-2", "perplexity, books (PG-19)", "K/V", "peak", "TTFT ms", "TPOT ms", "tokens/s"]
    assert list(last.head) == [*head, "status"]
    assert list(last.lines) == [
        ("dense", "7.389", "20.09", "40 KiB", "160 KiB", "20", "2", "500", "ok"),
        ("h2o", "7.389", "20.09", "8 KiB", "32 KiB", "40", "4", "250", "ok"),
    ]
    assert [table.heading.split(", ")[3] for table in others] == ["WikiText-2", "books (PG-19)"]
    assert all("TPOT ms" not in table.head for table in others)


def test_questions_have_tables_of_their_own():
    texts = {"wikitext": 2.0, "pg19": 3.0}
    model = {"id": "m", "dtype": "float32"}
    asked = [
        edit(answered(p, "10", c), cell={"model": model}, facts={"device": "a device"}) for p, c in (("dense", None), ("h2o", 8))
    ]
    tables = closing([*with_costs("dense", None, texts, 2.0), *with_costs("h2o", 8, texts, 4.0), *asked])
    assert [("perplexity" in table.head, "right" in table.head) for table in tables] == [
        (True, False),
        (True, False),
        (False, True),
    ]


def test_bytes_of_a_text_never_stand_beside_those_of_a_peak():
    records = [*with_costs("dense", None, {"pg19": 2.0}, 2.0), *with_costs("h2o", 8, {"pg19": 2.0}, 4.0)[:2]]  # no peak of h2o
    (table,) = closing(records)
    held = dict(zip([line[0] for line in table.lines], [line[table.head.index("K/V")] for line in table.lines], strict=True))
    assert held == {"dense": "40 KiB", "h2o": ""}


@pytest.mark.parametrize("text", [True, False])
def test_its_sentences_are_those_of_the_feed(text):
    outcomes, nlls = {"h2o": "10" * 100, "window": "0" * 200}, {"h2o": 2.0, "window": 2.1}
    made = [measured(*one) for one in nlls.items()] if text else [answered(*one) for one in outcomes.items()]
    (table,), (question,) = closing(made), feed(made)["questions"]
    stated = [note.split(": ")[1] for note in table.notes if note.startswith("At ")]
    assert stated == [budget["finding"] for budget in question["budgets"]]


def test_names_of_others_move_no_cursor():
    evil = record("evil\x1b[2J\n", 8, status="failed", error={"kind": "E\x1b]0;", "message": "\r"}, metrics={})
    edit(evil, cell={"model": {"id": "m\x1b", "dtype": "float32"}})
    tables = closing([evil])
    assert all(text.isprintable() for text in [*troubles([evil]), *(t.heading for t in tables)])
    assert all(cell.isprintable() for t in tables for line in t.lines for cell in line)


def test_cells_without_a_faster_method_share_a_line_with_the_reasons():
    reasons = {"tova": {"plain_because": "no kernel"}, "snapkv": {"plain_because": "no kernel"}, "keydiff": {"refused": "a NaN"}}
    walked = [record(name, facts={"method": "walk"} | reason) for name, reason in reasons.items()]
    by_choice = record("lagkv", facts={"method": "walk"})  # `--walk`
    fast = [record("h2o", facts={"method": "compiled walk"}), record("window", facts={"method": "closed form"})]
    (line,) = troubles([*walked, by_choice, *fast])
    assert line == "3 cells were read token by token: tova, snapkv (no kernel); keydiff (a NaN)"
    refused = record("h2o", facts={"method": "compiled walk", "step": "plain", "refused": "step kernels: a NaN"})
    assert troubles([refused]) == ["1 cell was measured without a faster method: h2o (step kernels: a NaN)"]


def test_the_title_of_bytes_tells_the_number_of_streams():
    task = {"name": "perplexity", "data": "prose", "tokens": 32768}
    one, many = (edit(measured("h2o", 2.0), cell={"task": task | options}) for options in ({}, {"streams": 4}))
    for made, title in ((one, "K/V"), (many, "K/V of 4 streams")):
        (table,) = closing([made])
        assert title in table.head


def test_each_of_a_few_tasks_has_its_own_right_answers():
    opposite = {"h2o": ("1111", "0000"), "random": ("1000", "0100")}  # equal means would hide it
    made = []
    for policy, outcomes in opposite.items():
        for task, of_task, size in zip(("kvbench_popular", "kvbench_once"), outcomes, (1024, 640), strict=True):
            asked = edit(answered(policy, of_task), metrics={"kv_bytes": size})
            made.append(edit(asked, cell={"task": {"name": "lm_eval", "tasks": task}}))
    (table,) = closing(made[:-1])  # random was not asked the last task
    assert list(table.head) == ["policy", "right, popular", "right, once", "K/V", "status"]
    assert list(table.lines) == [("h2o", "100 %", "0 %", "1 KiB", "ok"), ("random", "25 %", "", "1 KiB", "ok")]
    assert table.notes[-1] == "K/V is the largest of the tasks'."
