"""The gate: an unchanged run is green, and every regression is red for its own reason (in full: tests/gate_experiment.py)."""

from pathlib import Path

import injected
import numpy as np
import pytest
from factories import cell_record, changed, edit, record
from tampered import TAMPERED, copied

from kvbench.harness.core.errors import Exit
from kvbench.harness.records import RecordStore
from kvbench.harness.report import gate, gate_times
from kvbench.harness.report.gate_times import learn_bands
from kvbench.harness.run.request import RunRequest

pytestmark = pytest.mark.fast


SUITE = """
suite: gate
version: 1
model: {id: "builtin:sink_1"}
task:
  - {name: perplexity, data: prose, tokens: 1024, stride: 32}
  - {name: streameval, lines: 30, query_every: 5, distance: 2}
capacity: 24
policies: [dense, window, h2o]
"""
QUALITY = {"perplexity", "streameval"}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    path = tmp_path_factory.mktemp("suite") / "gate.yaml"
    path.write_text(SUITE)
    return RunRequest(str(path), threads=1, fresh=True, walk=True)


def measured(suite, folder, tasks, policies=("dense", "window", "h2o")):
    cells = [c for c in suite.cells() if c.task.name in tasks and c.name in policies]
    return suite.measure(folder, cells)


@pytest.fixture(scope="module")
def before(suite, tmp_path_factory):
    folder = tmp_path_factory.mktemp("before")
    return measured(suite, folder, QUALITY), folder


def judged(before, records, folder):
    """All findings except about times, because other tests run at the same time."""
    held = [r for r in before[0] if r.cell_id in {x.cell_id for x in records}]
    return [f for f in gate.check((held, before[1]), (records, folder), {}) if f.check not in gate_times.CHECKS]


def states(before, records, folder, check):
    findings = judged(before, records, folder)
    return {f.state for f in findings if f.check == check}, gate.exit_code(findings)


@pytest.mark.slow("measures suites")
def test_nothing_changed_is_green(before, suite, tmp_path):
    records = measured(suite, tmp_path, QUALITY)
    findings = judged(before, records, tmp_path)
    assert {f.state for f in findings} == {"ok"}
    assert {f.check for f in findings} == {"method", "trace", "exactness", "figures", "answers", "quality", "bytes"}
    assert gate.exit_code(findings) == 0


NEEDS_MORE = ("peak", "right answers", "all answers wrong")  # memory cells; a model that is sometimes right


@pytest.mark.slow("measures suites")
@pytest.mark.parametrize("name", [n for n, t in TAMPERED.items() if t.side == "now" and not any(x in n for x in NEEDS_MORE)])
def test_a_record_that_was_changed_is_red(name, before, tmp_path):
    """This holds for every figure on a page, and for traces."""
    tampering, folder = TAMPERED[name], copied(before[1], tmp_path / "copy")
    tampering.change(folder)
    findings = judged(before, RecordStore(folder).read_all()[0], folder)
    assert tampering.caught in {f.check for f in findings if f.state in gate.CODES}


@pytest.mark.slow("measures suites")
def test_a_trace_that_is_the_baselines_own_may_be_missing(before, tmp_path):
    """Large traces stay out of git; the record names its trace by its hash."""
    folder = copied(before[1], tmp_path / "copy")
    TAMPERED["baseline: a trace deleted"].change(folder)
    assert gate.exit_code(judged(before, RecordStore(folder).read_all()[0], folder)) == 0


@pytest.mark.slow("measures suites")
@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (lambda: injected.worse(0.0009), "figures"),
        (lambda: injected.worse(0.005), "quality"),
        (injected.wrong_rank, "exactness"),
        (injected.other_capacity, "bytes"),
    ],
    ids=["every token a little worse", "every token worse", "a neighbour's rank", "a slot too many"],
)
def test_broken_code_is_red(broken, check, before, suite, tmp_path):
    with broken():
        records = measured(suite, tmp_path, {"perplexity"}, {"h2o"})
    found, code = states(before, records, tmp_path, check)
    assert ("regression" in found, code) == (True, 1)


@pytest.mark.slow("measures suites")
def test_a_mean_that_is_computed_wrongly_now_is_red_even_elsewhere(before, suite, tmp_path):
    """The baseline's own figures no longer follow from its traces."""
    with injected.wrong_mean():
        records = measured(suite, tmp_path, {"perplexity"}, {"h2o"})
        records = [changed(r, facts={"device": "another"}) for r in records]
        assert "regression" in states(before, records, tmp_path, "trace")[0]


@pytest.mark.slow("measures suites")
def test_answers_are_held_one_by_one(before, suite, tmp_path):
    """The number of right answers is the same, but for other questions."""
    with injected.other_gold(shifted=True):
        records = measured(suite, tmp_path, {"streameval"})
    found, code = states(before, records, tmp_path, "answers")
    assert ("regression" in found, code) == (True, 1)
    elsewhere = [changed(r, facts={"device": "another"}) for r in records]
    assert states(before, elsewhere, tmp_path, "answers")[0] == {"regression"}, "the right answers are the same on any device"


@pytest.mark.slow("measures suites")
def test_a_silent_fall_back_to_the_plain_walk_is_red(before, tmp_path):
    base = [changed(r, facts={"method": "closed form", "step": "compiled"}) for r in before[0]]
    now = [changed(r, facts={"refused": "its logits differ"}) for r in before[0]]
    findings = [f for f in judged((base, before[1]), now, before[1]) if f.check == "method"]
    assert {f.state for f in findings} == {"regression"}
    assert (
        "falls back to the plain walk: method closed form -> walk, step compiled -> plain; its logits differ" in findings[0].says
    )
    for changes, state in (
        ({"refused": "a step takes 2 ms, and 1 ms plainly"}, "not compared"),
        ({"refused": "a block takes 9 ms, and 8 ms plainly; a step takes 2 ms, and 1 ms plainly"}, "not compared"),
        ({"refused": "compiled walk: it died; a step takes 2 ms, and 1 ms plainly"}, "regression"),
        ({"device": "x"}, "not compared"),
    ):
        now = [changed(r, facts=changes) for r in before[0]]
        assert states((base, before[1]), now, before[1], "method")[0] == {state}


@pytest.mark.slow("measures suites")
def test_a_figure_that_is_gone_is_red_and_one_without_a_rule_is_not_passed_over(before):
    records, folder = before
    lost = [changed(r, without=["bits_per_byte"]) for r in records]
    assert "regression" in states(before, lost, folder, "figures")[0]
    new = [changed(r, metrics={"charm": 3}) for r in records]
    assert "could not compare" in states((new, folder), new, folder, "figures")[0]
    assert states(before, new, folder, "figures")[0] == {"ok"}, "a figure that the baseline did not have yet"


@pytest.mark.slow("measures suites")
def test_other_weights_can_not_be_compared(before):
    records, folder = before
    other = [changed(r, facts={"weights_sha256": "f" * 64}) for r in records]
    assert states(before, other, folder, "data") == ({"could not compare"}, Exit.NOT_COMPARABLE)


WRONG = [None, "x", -1, float("nan"), float("inf"), [], {}, True, 10**400]


@pytest.mark.slow("measures suites")
def test_a_figure_of_another_kind_is_neither_green_nor_a_crash(before):
    """Replace any metric of a record by any value."""
    records, folder = before
    for record_ in (r for r in records if r.cell.policy == "h2o"):
        for name in record_.metrics.as_json():
            for wrong in WRONG:
                now = changed(record_, metrics={name: wrong})
                assert gate.exit_code(judged(before, [now], folder)) != Exit.OK, (name, wrong)


def memory(**metrics):
    plain = {"peak_bytes": 300_000, "growth_bytes": 4096, "allocated_bytes": 280_000, "how": "VmHWM", "flags": []}
    return cell_record(plain | metrics, task={"name": "memory"})


@pytest.mark.parametrize(
    ("metrics", "check", "state"),
    [
        ({"peak_bytes": 7_000_000}, "memory", "regression"),
        ({"growth_bytes": 2_000_000}, "memory", "regression"),
        ({"allocated_bytes": 400_000}, "memory", "regression"),
        ({"allocated_bytes": 200_000}, "memory", "better"),
        ({"peak_bytes": 270_000, "kv_held_bytes": 280_000}, "trace", "regression"),  # less than K and V at the end
        ({"peak_bytes": 700_000}, "memory", "ok"),
        ({"growth_bytes": 0}, "memory", "ok"),
        ({"flags": ["its peak rose by 9 bytes"]}, "flags", "regression"),
        ({"flags": ["unsettled: medians"]}, "flags", "ok"),
        ({"how": "psutil"}, "memory", "not compared"),
    ],
)
def test_memory_is_held(metrics, check, state):
    """Pages and allocators vary by some hundred KiB. A leak is larger."""
    findings = gate.check(([memory()], Path()), ([memory(**metrics)], Path()), {})
    assert [f.state for f in findings if f.check == check] == [state]


@pytest.mark.parametrize(
    ("flag", "state"),
    [("its peak rose by 12 bytes", "ok"), ("cliff at token 256", "regression")],
    ids=["the same with another number", "of another kind"],
)
def test_a_flag_beside_one_that_the_baseline_has(flag, state):
    before = memory(flags=["its peak rose by 9 bytes"])
    findings = gate.check(([before], Path()), ([memory(flags=["its peak rose by 9 bytes", flag])], Path()), {})
    assert [f.state for f in findings if f.check == "flags"] == [state]


def test_a_fifth_of_the_peak_is_too_good():
    base, fifth = memory(peak_bytes=2_500_000), memory(peak_bytes=500_000)
    assert [f.state for f in gate.check(([base], Path()), ([fifth], Path()), {}) if f.check == "memory"] == ["better"]


def test_times_and_bytes_of_another_kind_are_no_crash():
    for base, name in ((memory(), "peak_bytes"), (latency_run(1.5)[0], "rounds_ms"), (latency_run(1.5)[0], "forward_ms")):
        for wrong in (None, "x", [], [None], {}, ["x"] * 6):
            now = changed(base, metrics={name: wrong})
            assert gate.exit_code(gate.check(([base], Path()), ([now], Path()), learn_bands([[base]]))) != Exit.OK, (name, wrong)


@pytest.mark.parametrize(("factor", "state"), [(4.0, "regression"), (2.0, "ok"), (0.5, "ok"), (0.25, "better")])
@pytest.mark.parametrize("machine", [1.0, 3.0])
def test_the_first_token_is_held_coarsely_and_beside_the_machine(factor, state, machine):
    base = latency_run(1.5)[0]
    times = {"first_token_ms": factor * machine * base.metrics.first_token_ms}
    now = changed(base, metrics=times | {"forward_ms": [machine * ms for ms in base.metrics.forward_ms]})
    findings = gate.check(([base], Path()), ([now], Path()), learn_bands([[base]]))
    assert [f.state for f in findings if f.check == "prompt"] == [state]


@pytest.mark.parametrize(
    ("seconds", "calibration", "state"),
    [
        (5, 1, "regression"),
        (5, 4, "ok"),
        (3, 1, "ok"),
        (0.3, 1, "ok"),
        (0.2, 1, "better"),
        (0.2, 0.3, "ok"),
        (1, None, "not compared"),
    ],
)
def test_evaluation_is_held_coarsely_and_beside_the_machine(seconds, calibration, state):
    """Five times as long or as fast is red, unless the calibration step changes likewise."""
    task = {"name": "perplexity"}
    base, now = cell_record({}, task=task), cell_record({}, task=task)
    edit(base, facts={"tokens_per_second": 1000.0, "calibration_ms": 1.0} if calibration else {"tokens_per_second": 1000.0})
    edit(now, facts={"tokens_per_second": 1000.0 / seconds, "calibration_ms": calibration or 1.0})
    (found,) = [f for f in gate.check(([base], Path()), ([now], Path()), {}) if f.check == "speed"]
    assert found.state == state


@pytest.mark.parametrize(
    ("before", "after", "state"),
    [
        (0.3, 2.1, "ok"),  # 7 times as long, beside other work
        (0.3, 2.3, "regression"),
        (20.0, 80.0, "ok"),
        (20.0, 82.0, "regression"),
        (2.1, 0.3, "ok"),
        (2.3, 0.3, "better"),
    ],
)
@pytest.mark.parametrize("machine", [1.0, 3.0])
def test_an_evaluation_may_be_interrupted_for_a_second(before, after, state, machine):
    """Seconds of an evaluation. What the calibration step takes now, as a multiple, explains as much of the difference."""
    task = {"name": "perplexity"}
    base, now = cell_record({}, task=task), cell_record({}, task=task)
    edit(base, facts={"tokens_per_second": machine * 1000 / before, "calibration_ms": 1 / machine})
    edit(now, facts={"tokens_per_second": 1000 / after, "measured_seconds": after, "calibration_ms": 1.0})
    (speed,) = (f for f in gate.check(([base], Path()), ([now], Path()), {}) if f.check == "speed")
    assert speed.state == state


def test_everything_slower_is_red_by_the_forward_pass():
    base = latency_run(1.5)
    slow = [changed(r, metrics={"rounds_ms": [2 * ms for ms in r.metrics.rounds_ms]}) for r in base]
    findings = [f for f in gate.check((base, Path()), (slow, Path()), learn_bands([base] * 4)) if f.check == "latency"]
    assert {f.cell.split(", ")[2].split()[0]: f.state for f in findings} == {"dense": "regression", "h2o": "ok"}
    busy = [changed(r, metrics={"forward_ms": [1.0] * 6}) for r in slow]
    assert {f.state for f in gate.check((base, Path()), (busy, Path()), learn_bands([base] * 4)) if f.check == "latency"} == {
        "ok"
    }


def test_faster_than_before_is_red_until_it_is_allowed_or_the_baseline_is_updated():
    """H2O's times halved: a clock that stops too soon, or good work, which whoever did it says."""
    base, fast = latency_run(1.5), latency_run(0.75)
    findings = gate.check((base, Path()), (fast, Path()), learn_bands([base] * 4))
    assert {f.cell.split(", ")[2].split()[0]: f.state for f in findings if f.check == "latency"} == {
        "dense": "ok",
        "h2o": "better",
    }
    assert (gate.exit_code(findings), gate.exit_code(findings, allow_better=True)) == (Exit.NO, Exit.OK)
    assert gate.verdict(findings).startswith("BETTER than the baseline: update it, or allow it (--allow-better): ")
    assert gate.verdict(findings).endswith("; 1 better")
    again = gate.remeasure(findings, base, learn_bands([base] * 4), lambda _: latency_run(1.5))
    assert gate.exit_code(again) == Exit.OK, "two of three decide, in this direction too"


@pytest.mark.slow("measures suites")
def test_half_a_percent_of_perplexity_is_red_where_tokens_alone_would_not_show_it(before, suite, tmp_path):
    """On a GPU tokens may differ slightly, so the paired mean must show it."""
    with injected.worse():
        records = measured(suite, tmp_path, {"perplexity"}, {"h2o"})
    records = [changed(r, facts={"device": "another", "instructions": "sm_90"}) for r in records]
    found, code = states(before, records, tmp_path, "quality")
    assert found == {"regression"}
    assert code == 1
    assert states(before, records, tmp_path, "exactness")[0] == {"not compared"}


def test_without_an_interval_the_margin_decides_and_rounding_is_no_regression():
    for change, expected in ((1e-7, "ok"), (0.0005, "ok"), (-0.1, "better"), (0.005, "regression")):
        base, now = record("h2o", 1000, 2.0), record("h2o", 1000, 2.0 + change)  # the cache is too large for this text
        edit(now, facts={"device": "another"})
        (found,) = [f for f in gate.check(([base], Path()), ([now], Path()), {}) if f.check == "quality"]
        assert "too short" in found.says
        assert found.state == expected, change


@pytest.mark.parametrize(
    ("higher", "change", "expected"),
    [
        (True, -0.05, "regression"),
        (True, 0.05, "better"),
        (False, 0.05, "regression"),
        (False, -0.05, "better"),
        (True, -0.005, "ok"),
    ],
)
def test_of_a_score_of_few_questions_the_margin_decides_in_its_own_direction(higher, change, expected):
    def scored(by):
        scores = [0.25 + by, 0.5 + by, 0.75 + by]
        metrics = {"metric": "f1", "higher_is_better": higher, "questions": 3, "score": 0.5 + by, "stderr": 0.1, "scores": scores}
        return cell_record(metrics, task={"name": "lm_eval", "tasks": "x"})

    (found,) = [f for f in gate.check(([scored(0.0)], Path()), ([scored(change)], Path()), {}) if f.check == "quality"]
    assert "too few" in found.says
    assert found.state == expected


def latency_run(ratio):
    """Records of dense and of h2o, with steps that take `ratio` times as long as dense's."""
    rounds = {"dense": 1.0, "h2o": ratio}
    return [
        cell_record(
            {"step_ms": ms, "rounds_ms": [ms] * 6, "forward_ms": [0.5] * 6, "together": "x"},
            policy=name,
            task={"name": "latency"},
        )
        for name, ms in rounds.items()
    ]


def test_what_looks_slower_is_measured_again_and_two_of_three_decide():
    base, fast, slow = latency_run(1.5), latency_run(1.52), latency_run(2.0)
    learnt = learn_bands([base] * 4)
    first = gate.check((base, Path()), (slow, Path()), learnt)
    assert gate.exit_code(first) == 1
    for runs, expected in (([slow], 1), ([fast, fast], 0), ([fast, slow], 1)):
        measured_again = iter(runs)
        found = gate.remeasure(first, base, learnt, lambda cells, left=measured_again: next(left))
        assert gate.exit_code(found) == expected
        assert len(found) == len(first)
        assert next(measured_again, None) is None, "no more often than needed"


@pytest.mark.parametrize("what", [{"threads": 7}, {"device": "another"}, {"instructions": "AVX2"}, {"tf32": True}])
def test_latency_of_elsewhere_is_not_compared(what):
    base, slow = latency_run(1.5), latency_run(3.0)
    for r in base:
        edit(r, facts={"threads": 2, "device": "one", "instructions": "AVX512", "tf32": False})
    for r in slow:
        edit(r, facts=base[0].facts.as_json() | what)
    found = [f for f in gate.check((base, Path()), (slow, Path()), learn_bands([base] * 4)) if f.check == "latency"]
    assert ([f.state for f in found], gate.exit_code(found)) == (["not compared"] * 2, Exit.TOO_FEW_COMPARED)
    assert " -> " in found[0].says


def test_a_band_is_as_wide_as_what_was_seen_and_never_narrow():
    dense, narrow = learn_bands([latency_run(1.5)] * 4).values()
    assert dense.high / dense.ratio == pytest.approx(np.exp(0.4), rel=1e-4), "its yardstick runs other code"
    assert narrow.ratio == 1.5
    assert narrow.high / narrow.ratio == pytest.approx(np.exp(0.1), rel=1e-4)
    _, wide = learn_bands([latency_run(x) for x in (1.4, 1.5, 1.6, 1.7)]).values()
    assert wide.high / wide.ratio == pytest.approx(np.exp(4 * np.std(np.log([1.4, 1.5, 1.6, 1.7]), ddof=1)), rel=1e-4)
    dense = latency_run(2.0)[0]
    assert gate_times.ratio(dense, [dense]) == 2.0
    edit(dense, without=["forward_ms"])
    assert gate_times.ratio(dense, [dense]) is None, "of a record that is older than the forward pass"


@pytest.mark.slow("measures suites")
def test_what_is_missing_or_of_another_text_can_not_be_compared(before):
    records, folder = before
    assert gate.exit_code(gate.check((records, folder), (records[1:], folder), {})) == Exit.NOT_COMPARABLE
    other = changed(records[0], data={"ids_sha256": "other"})
    findings = gate.check((records, folder), ([other, *records[1:]], folder), {})
    assert findings[0].check == "data"
    assert gate.exit_code(findings) == Exit.NOT_COMPARABLE
    failed = changed(records[0], status="failed", error={"kind": "NaN", "message": ""}, without=records[0].metrics.as_json())
    findings = gate.check((records, folder), ([failed, *records[1:]], folder), {})
    assert (findings[0].check, findings[0].state, findings[0].says) == ("status", "regression", "ok -> NaN")
    assert gate.exit_code([]) == Exit.NOT_COMPARABLE, "a baseline of nothing holds nobody to anything"


@pytest.mark.slow("measures suites")
def test_the_traces_of_a_baseline_belong_to_it(before, tmp_path):
    """Without traces the tokens can't be compared. The gate says so and does not pass."""
    findings = gate.check(([before[0][0]], tmp_path), ([before[0][0]], tmp_path), {})
    assert {f.check: f.state for f in findings}["exactness"] == "could not compare"
