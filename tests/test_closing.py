"""What a run says at its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from factories import cell_record, edit, record

from kvbench.harness.cli import closing as terminal
from kvbench.harness.core.intervals import long_enough
from kvbench.harness.records import RecordStore
from kvbench.harness.report.closing import closing
from kvbench.harness.report.feed import feed
from kvbench.harness.report.sections import groups

PUBLISHED = Path(__file__).parents[1] / "leaderboard" / "results"
NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e-\d+)?")


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
        "questions": len(outcomes), "right": right, "accuracy": right / max(1, len(outcomes)), "outcomes": outcomes,
        "in_cache": {}, "kv_bytes": 40960 if capacity is None else 640,
    }  # fmt: skip
    cell = record(policy, capacity).cell.as_json() | {"task": {"name": "streameval", "distance": 1}}
    streams = {"streams": len(outcomes)}  # a question each
    return record(policy, capacity, **({"cell": cell, "metrics": metrics, "data": record().data.as_json() | streams} | changes))


def sentences(*records) -> list[str]:
    """Without numbers, which `test_compare.py` and `test_intervals.py` hold, and without what they are about."""
    (table,) = closing(records).tables
    return [NUMBER.sub("N", note).replace("At N tokens: ", "") for note in table.notes]


def test_one_row_a_policy_with_all_its_tasks():
    both = [measured("dense", 1.9, None), measured("h2o", 2.0), answered("dense", "11", None), answered("h2o", "10")]
    (table,) = closing(both).tables
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
    *others, last = closing([*with_costs("dense", None, texts, 2.0), *with_costs("h2o", 8, texts, 4.0)]).tables
    head = ["policy", "perplexity, WikiText-2", "perplexity, books (PG-19)", "K/V", "peak", "TTFT ms", "TPOT ms", "tokens/s"]
    assert list(last.head) == [*head, "status"]
    assert list(last.lines) == [
        ("dense", "7.389", "20.09", "40 KiB", "160 KiB", "20", "2", "500", "ok"),
        ("h2o", "7.389", "20.09", "8 KiB", "32 KiB", "40", "4", "250", "ok"),
    ]
    assert [table.heading.split(", ")[3] for table in others] == ["WikiText-2", "books (PG-19)"]
    assert all("TPOT ms" not in table.head for table in others)


def test_the_winner_and_its_price():
    assert sentences(measured("dense", 1.9, None), measured("h2o", 2.0), measured("window", 2.1)) == [
        "hNo is best of N (N % confidence). It loses N % of perplexity [N, N] to dense and holds N/N of dense's bytes."
    ]


@pytest.mark.parametrize("text", [True, False])
def test_its_sentences_are_those_of_the_feed(text):
    outcomes, nlls = {"h2o": "10" * 100, "window": "0" * 200}, {"h2o": 2.0, "window": 2.1}
    made = [measured(*one) for one in nlls.items()] if text else [answered(*one) for one in outcomes.items()]
    (table,), (question,) = closing(made).tables, feed(made)["questions"]
    assert [note.split(": ")[1] for note in table.notes] == [budget["finding"] for budget in question["budgets"]]


def test_a_table_has_one_mode_of_positions():
    """Where a policy was measured in several: two rows of it are no two policies. Dense, which has one mode, is in all."""
    stream = [edit(r, cell={"positions": "stream"}) for r in (measured("h2o", 2.2), measured("window", 2.1))]
    both = closing([measured("dense", 1.9, None), measured("h2o", 2.0), measured("window", 2.1), *stream]).tables
    assert [table.heading for table in both] == [f"s, m, 8 tokens cached, positions {mode}" for mode in ("cache", "stream")]
    assert [[line[0] for line in table.lines] for table in both] == [["dense", "h2o", "window"]] * 2
    assert ["is best of 2 (95 % confidence)" in table.notes[0] for table in both] == [True, True]
    (one,) = closing([measured("h2o", 2.0), stream[1]]).tables
    assert one.heading == "s, m, 8 tokens cached", "each policy in a mode of its own"


def test_equal_policies_are_not_told_apart():
    """Also where one has the lower figure."""
    sinks = [measured("sink_window", 2.0, 8, {"sinks": n, "window": 8 - n}) for n in (1, 2)]
    assert sentences(*sinks, measured("random", 3.0)) == [
        "sink_window (sinks N) has the lowest perplexity of N; its lead over sink_window (sinks N) is within the noise. "
        "It gains N % of perplexity [N, N] on random."
    ]


def test_a_difference_to_dense_that_may_be_none_is_no_loss():
    (line,) = sentences(measured("dense", 2.0, None), measured("window", 2.0))
    assert "It is within the noise of dense (N % of perplexity [−N, N])" in line


def test_without_intervals_nothing_is_claimed():
    short = [
        measured("dense", 1.9, None, tokens=1024),
        *(measured(p, n, tokens=1024) for p, n in (("h2o", 2.0), ("window", 3.0))),
    ]
    assert sentences(*short)[:1] == [
        "hNo has the lowest perplexity, but the text is too short to tell it from the others. It can't be told from dense "
        "(N % of perplexity, too short for an interval) and holds N/N of dense's bytes."
    ]
    assert sentences(*short[:2])[0].startswith("hNo is the only policy measured. It can't be told from dense")


@pytest.mark.parametrize("capacity", [8, 64, 1024])
def test_a_text_that_is_too_short_is_told_what_would_do(capacity):
    """That much has an interval, and half of it has none; the time is that of all rows, per token."""
    data, facts = record().data.as_json() | {"tokens": 1024}, {"seconds": 15.0}
    short = [measured(p, n, capacity, tokens=1024, data=data, facts=facts) for p, n in (("h2o", 2.0), ("window", 3.0))]
    (table,) = closing(short).tables
    said = re.fullmatch(r"Long enough for an interval: --set tokens=(\d+), about (\d+) min.", table.notes[-1])
    tokens = int(said[1])
    assert int(said[2]) == round(30 * tokens / 1024 / 60)
    assert long_enough((tokens - capacity - 1) // 32, 32, capacity)
    assert not long_enough(tokens // 2 // 32, 32, capacity)


def test_streams_that_are_too_few_or_too_short_are_told_so():
    def notes(streams: int, each: int):
        data = record().data.as_json() | {"tokens": streams * each}
        rows = [measured(p, 2.0, 64, tokens=streams * each, data=data, facts={"seconds": 1.0}) for p in ("h2o", "window")]
        return closing([edit(r, metrics={"stream_tokens": each}) for r in rows]).tables[0].notes

    assert notes(10, 256)[-1] == "Long enough for an interval: --set streams=20 --set tokens=5120, about 4 s."
    assert notes(32, 64)[-1] == "Long enough for an interval: --set streams=32 --set tokens=8192, about 8 s."
    assert not any("Long enough" in note for note in notes(20, 256))


def test_dense_past_its_training_length_is_no_yardstick():
    dense = measured("dense", 3.0, None, facts={"training_length": 512})
    why = "–: read past the training length, so its perplexity depends on where reading stopped."
    assert sentences(dense, measured("recompute_window", 1.9), measured("h2o", 2.0)) == [
        "hNo is the only policy measured. It loses N % of perplexity [N, N] to recompute_window and holds N/N of dense's bytes.",
        why,
    ]
    alone = "hNo is the only policy measured. It has perplexity N and holds N/N of dense's bytes."
    assert sentences(dense, measured("h2o", 2.0)) == [alone, why]


def test_right_answers_decide_where_there_is_no_perplexity():
    half = "10" * 100
    assert sentences(answered("dense", "1" * 200, None), answered("h2o", half), answered("window", "0" * 200)) == [
        "hNo is best of N (N % confidence). It answers N % [N, N] right, "
        "loses N points of right answers [N, N] to dense and holds N/N of dense's bytes."
    ]
    assert "is within the noise" in sentences(answered("h2o", half), answered("window", half[::-1]))[0]


def test_a_policy_that_did_not_answer_everything_has_no_share_of_right_answers():
    task = {"name": "streameval", "distance": 2}
    further = edit(answered("h2o", "11"), cell={"task": task})
    failed = edit(answered("window", "", status="failed", error={"kind": "E", "message": ""}, metrics={}), cell={"task": task})
    (table,) = closing([answered("h2o", "11"), further, answered("window", "11"), failed]).tables
    assert list(table.lines) == [("h2o", "100 %", "640 B", "ok"), ("window", "", "640 B", "1 of 2 failed")]


def test_texts_and_models_have_a_table_each():
    other = edit(measured("h2o", 2.5), cell={"task": {"name": "perplexity", "stride": 1, "book": 7}})
    elsewhere = edit(measured("h2o", 2.5), cell={"model": {"id": "n", "dtype": "float32"}})
    tables = closing([measured("h2o", 2.0), other, elsewhere]).tables
    assert [t.heading for t in tables] == [
        "s, m, 8 tokens cached, perplexity, 32,768 tokens",
        "s, m, 8 tokens cached, perplexity, 32,768 tokens, book 7",
        "s, n, 8 tokens cached, perplexity, 32,768 tokens",
    ]


def test_a_heading_speaks_of_tasks_and_not_of_keys():
    """Where the run has several tables, each says what was read or asked, and not which options differ."""
    once, popular = ({"name": "lm_eval", "tasks": f"kvbench_{kind}", "limit": 100, "batch": 32} for kind in ("once", "popular"))
    asked = [edit(answered("h2o", "1"), cell={"task": task | question})
             for question in ({}, {"question": "unseen"}) for task in (once, popular)]  # fmt: skip
    tables = closing([measured("h2o", 2.0), *asked]).tables
    assert [t.heading.removeprefix("s, m, 8 tokens cached, ") for t in tables] == [
        "perplexity, 32,768 tokens", "once and popular", "once and popular, question unseen",
    ]  # fmt: skip


def test_dense_past_its_training_length_has_no_perplexity():
    """Its mean depends on where reading stopped, and stood beside those of caches as if it were one of them."""
    dense = measured("dense", 9.0, None, facts={"training_length": 512})
    (table,) = closing([dense, measured("h2o", 2.0)]).tables
    assert [line[list(table.head).index("perplexity")] for line in table.lines] == ["–", "7.373"]
    assert any("past the training length" in note for note in table.notes)


def test_two_machines_never_share_a_row():
    """A copied folder of records has figures of quality that were measured elsewhere; they are finished, and skipped."""
    here, there = answered("h2o", "11", facts={"device": "here"}), measured("h2o", 2.0, facts={"device": "there"})
    tables = closing([here, there]).tables
    assert [t.heading.removeprefix("s, m, 8 tokens cached, ") for t in tables] == [
        "StreamEval, on here",
        "perplexity, 32,768 tokens, on there",
    ]
    assert [t.lines[0][1] for t in tables] == ["100 %", "7.373"]


def test_failures_and_flags_are_a_line_a_reason():
    error = {"kind": "ZeroDivisionError", "message": "division by zero", "where": "mine.py:17, in importance"}
    failed = [record("folder/mine.py:Mine", n, status="failed", error=error, metrics={}) for n in (8, 16)]
    flagged = [measured(p, 2.0) for p in ("h2o", "random", "window", "lambda")]
    for n, one in enumerate(flagged):
        edit(one, metrics={"flags": [f"unsettled: medians lie between 1.{n} and 2 ms"]})
    assert closing([*failed, *flagged]).troubles == [
        "failed, 2 cells of mine.py:Mine: ZeroDivisionError: division by zero (mine.py:17, in importance)",
        "flagged, perplexity of h2o, random, window and 1 more: unsettled: medians lie between 1.0 and 2 ms",
    ]


def test_names_of_others_move_no_cursor():
    evil = record("evil\x1b[2J\n", 8, status="failed", error={"kind": "E\x1b]0;", "message": "\r"}, metrics={})
    edit(evil, cell={"model": {"id": "m\x1b", "dtype": "float32"}})
    said = closing([evil])
    assert all(text.isprintable() for text in [*said.troubles, *(t.heading for t in said.tables)])
    assert all(cell.isprintable() for t in said.tables for line in t.lines for cell in line)


@pytest.mark.slow("all published records")
@pytest.mark.parametrize("width", [40, 80, 100])
def test_no_line_is_wider_than_the_terminal(width, monkeypatch, capsys):
    """Of any published suite, and of a policy with a very long name; only paths may be."""
    monkeypatch.setattr(terminal, "line_width", lambda: width)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    long = measured("some/folder/my_policy.py:MyPolicyWithAVeryLongName", 2.0, 8, {"heavy_hitters": 4, "window": 4})
    for records in [[long, measured("h2o", 2.0)], *groups(RecordStore(PUBLISHED).read_all()[0])]:
        terminal.show_closing(records, "results", to_stdout=True)
        *lines, _ = capsys.readouterr().out.splitlines()
        assert max(len(line) for line in lines if "\x1b]8;;" not in line) <= width
        assert not [line for line in lines if "…" in line], "nothing is cut off"
        tables = closing(records).tables
        about = sum(len(t.lines) + 10 + 4 * max(1, len(t.notes)) for t in tables)
        assert len(lines) < 8 + about or width < 80, "a row a policy, four lines a budget, two a heading"


def test_paths_can_be_clicked_on_a_terminal_and_are_plain_elsewhere(tmp_path):
    assert terminal.link(tmp_path / "index.html", False) == str(tmp_path / "index.html")
    assert f"file://{tmp_path}/index.html\x1b\\" in terminal.link(tmp_path / "index.html", True)
