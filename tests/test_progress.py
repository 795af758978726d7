"""Display of a run, live and in plain lines, the places of its records and pages, and the summary at its end."""

import io
import re

import pytest
from factories import cell_record, edit, record
from helpers import bench_in as bench
from rich.console import Console

from kvbench.harness.cli.output import link
from kvbench.harness.report.closing import closing
from kvbench.harness.report.doubts import troubles
from kvbench.harness.report.feed import feed
from kvbench.harness.run import progress
from kvbench.harness.run.progress import ProgressView, steps_view


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=160, color_system=None, legacy_windows=False)


def finished(**changes):
    return record(facts={"seconds": 2.0, "tokens_per_second": 6400.0}, **changes)


def test_on_a_terminal_a_live_line_shows_the_cell_and_its_speed(clock):
    screen = console(terminal=True)
    with ProgressView(screen) as view:
        view.begin("h2o 8", 1, 3, 12800)
        cells, task = view._rows.tasks
        assert (cells.total, cells.completed) == (3, 0)
        assert (task.description, task.total, task.fields["text"]) == ("h2o 8", 12800, "")
        clock[0] += 2
        view.advance(6400, "nll 2.0")
        assert (task.completed, task.fields["text"]) == (6400, "3,200 tokens/s, nll 2.0")
        view._rows.refresh()
        live = screen.file.getvalue()
        assert "h2o 8" in live
        assert "3,200 tokens/s, nll 2.0" in live
        clock[0] += 60
        view.advance(12800, "nll 2.0")
        assert "left" not in screen.file.getvalue(), "no plain lines beside the live one"
        view.end("h2o 8", finished(), False)
        view.end("window 8", finished(status="failed", error={"kind": "MemoryError", "message": "no room"}), False)
        assert (cells.completed, cells.fields["text"]) == (2, "2 of 3 cells, 1 failed, about 31 s left")
    left = screen.file.getvalue()
    assert "FAILED, MemoryError: no room" in left, "which is worth a look before the end of a long run"
    assert "[1/3]" not in left, "finished cells leave no line behind"


def test_elsewhere_a_line_is_written_now_and_then(clock):
    screen = console(terminal=False)
    with ProgressView(screen) as view:
        view.begin("h2o 8", 1, 2, 1000)
        clock[0] += 50
        view.advance(100, "nll 2.0")
        assert screen.file.getvalue() == ""
        clock[0] += 50
        view.advance(250, "nll 2.0")
        assert screen.file.getvalue() == "[1/2] h2o 8: 250 of 1,000 tokens, 2 tokens/s, nll 2.0, 300 s left\n"
        view.end("h2o 8", finished(), True)
        view.end("random 8", finished(status="failed", error={"kind": "MemoryError", "message": "no room"}), False)
    lines = screen.file.getvalue().splitlines()
    assert lines[1] == "[2/2] random 8: FAILED, MemoryError: no room"
    assert lines[2] == "1 cell was finished before and skipped (--fresh measures it again)"


@pytest.mark.parametrize(("until", "left"), [(None, "about 2 min left"), (90.0, "about 40 s left"), (10.0, "about 1 s left")])
def test_the_time_left_ends_with_the_runs_time(until, left, clock):
    screen = console(terminal=False)
    clock[0] = 0.0
    with ProgressView(screen, **({} if until is None else {"until": until})) as view:
        view.begin("h2o 8", 1, 3, 1000)
        clock[0] += 50
        view.end("h2o 8", finished(), False)
    assert screen.file.getvalue().splitlines()[0].endswith(left)


@pytest.fixture(scope="module")
def asked(model_dir, text_dir):
    """A run of two cells, and one that fails if a `bad.py` is there."""
    options = ["--model", model_dir, "--data", text_dir, "--threads", 1, "--set", "tokens=100", "--set", "streams=1"]
    return ["run", "smoke", *options, "--policy", "dense", "--policy", "window"]


@pytest.mark.parametrize(
    "command",
    [
        ["run", "smoke", "--model", ""],
        ["run", "smoke", "--data", " "],
        ["leaderboard", "--out", ""],
        ["check", "--baseline", "b", "--results", ""],
        ["compare", "a", ""],
        ["records", "export", ""],
    ],
    ids=" ".join,
)
def test_an_empty_argument_is_a_mistake(command, tmp_path):
    """An unset shell variable, for example, would silently mean the current folder or the default."""
    done = bench(*command, cwd=tmp_path)
    assert done.returncode == 2
    assert "is empty" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow("measures suites")
def test_piped_output_is_a_row_a_cell_and_the_closing_is_on_stderr(tmp_path, asked, monkeypatch):
    first = bench(*asked, cwd=tmp_path)
    head, *rows = (line.split("\t") for line in first.stdout.splitlines())
    assert head == ["policy", "capacity", "figure", "K/V bytes", "tokens/s", "status", "cell"]
    assert len(rows) == 2
    assert re.search(r"^\[1/2\] dense: perplexity", first.stderr, re.M)
    assert re.search(r"^window +\S+ +16.5 KiB  ok$", first.stderr, re.M)
    assert first.stderr.endswith(
        "Records: results\nFor pages (results/index.html and results/README.md), run: bench leaderboard\n"
    )
    again = bench(*asked, cwd=tmp_path)
    assert again.stdout == first.stdout
    assert again.stderr.splitlines()[0] == "2 cells were finished before and skipped (--fresh measures them again)"
    for folder, code in (("results", 0), ("elsewhere", 2)):
        monkeypatch.setenv("BENCH_RESULTS", folder)
        for verb in (["records", "verify"], ["leaderboard"], ["records", "export", "flat.csv"]):
            assert bench(*verb, cwd=tmp_path).returncode == code
    assert bench("leaderboard", "--results", "results", cwd=tmp_path).returncode == 0, "the option has the last word"
    assert {p.name for p in tmp_path.iterdir()} == {"results", "flat.csv"}


def test_a_dumb_terminal_gets_no_links(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    assert link(tmp_path, True).startswith("\x1b]8;;file://")
    monkeypatch.setenv("TERM", "dumb")
    assert link(tmp_path, True) == str(tmp_path)


def test_no_policy_leads_without_a_right_answer():
    leaders = progress._Leaders()
    for right, text in ((0, ""), (1, "best so far: h2o")):
        figures = {"questions": 40, "right": right, "accuracy": right / 40}
        leaders.add("h2o", cell_record(figures, task={"name": "streameval", "distance": 5}, capacity=128))
        assert leaders.text().startswith(text)
        assert bool(leaders.text()) == bool(text)


def test_steps_are_shown_on_a_terminal_and_nowhere_else():
    screen, pipe = console(terminal=True), console(terminal=False)
    for made in (screen, pipe):
        with steps_view(made) as begin:
            begin("rules", 1, 2)
            begin("speed", 2, 2)
    assert re.search(r"speed.* 2 of 2", screen.file.getvalue())
    assert pipe.file.getvalue() == ""


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
    assert table.heading == "s, m, 8 tokens cached, evicting at every step, perplexity, 32,768 tokens"


def test_times_of_eviction_are_named_once_per_table_or_in_each_sentence():
    made = [edit(measured("h2o", nll), cell=when) for nll, when in ((2.0, {}), (2.1, {"evict": "prompt"}))]
    (alone,), (both,) = closing(made[1:]), closing([measured("dense", 1.9, None), *made])
    assert alone.heading == "s, m, 8 tokens cached, evicting once after the prompt, perplexity, 32,768 tokens"
    assert both.heading == "s, m, 8 tokens cached, perplexity, 32,768 tokens"
    assert [line[0] for line in both.lines] == ["dense", "h2o (evict step)", "h2o (evict prompt)"]
    said = [note.partition(":")[0] for note in both.notes if note.startswith("At ")]
    assert said == ["At 8 tokens, evicting once after the prompt", "At 8 tokens, evicting at every step"]


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
    assert [table.heading.split(", ")[4] for table in others] == ["WikiText-2", "books (PG-19)"]
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


def test_policies_with_equal_figures_share_the_lead():
    (table,) = closing([answered("h2o", "1" * 40), answered("tova", "1" * 40), answered("window", "0" * 40)])
    assert table.notes[0].startswith("At 8 tokens: h2o and tova have the most right answers of 3 policies: they are equal.")
    behind = answered("rkv", "1" * 39 + "0")
    (table,) = closing([answered("h2o", "1" * 40), answered("tova", "1" * 40), behind, answered("window", "0" * 40)])
    lead = "h2o has the most right answers of 4 policies, as has tova; its lead over rkv is within the noise."
    assert table.notes[0].startswith(f"At 8 tokens: {lead}")


def test_a_prompt_that_is_cut_has_the_question_in_it_unless_told_otherwise():
    task = {"name": "lm_eval", "tasks": "kvbench_popular"}
    seen, unseen = (
        edit(answered("h2o", "1" * 40), cell={"evict": "prompt", "task": task | asked}) for asked in ({}, {"question": "unseen"})
    )
    subjects = [question["subject"] for question in feed([seen, unseen])["questions"]]
    assert subjects == ["popular, question seen", "popular, question unseen"]


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
    assert table.notes[-1] == "K/V is the largest of the tasks'; a share of dense's bytes is that of one task."
