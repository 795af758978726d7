"""The gate has a rule for every figure of every record."""

import typing

import pytest
from children import in_this_process
from factories import RECORDS, cell_record
from pydantic import BaseModel

from kvbench.harness.core import plugins
from kvbench.harness.records import RecordStore
from kvbench.harness.records.figure_rules import Checked, Elsewhere, Unchecked
from kvbench.harness.records.run_facts import Facts
from kvbench.harness.report.gate_figures import figures, rule_of
from kvbench.harness.report.gate_times import CHECKS
from kvbench.harness.run import child
from kvbench.harness.run.request import RunRequest

SUITE = """
suite: rules
version: 1
model: {id: "builtin:sink_1"}
task:
  - {name: perplexity, data: prose, tokens: 512, stride: 16, policies: [h2o, recompute_window]}
  - {name: perplexity, data: prose, tokens: 512, streams: 2}
  - {name: streameval, lines: 20, query_every: 5, distance: 2}
  - {name: turns, data: keys, streams: 1, turns: 4, facts: 4, told: 2, corrections: 1, filler: 1}
  - {name: latency, tokens: 48, prompt: 16, rounds: 6, sittings: 2, most_sittings: 2, steps: 2, precision: 0.9}
  - {name: lm_eval, tasks: kvbench_cloze_said, limit: 2, temperature: 1.0, samples: 2, policies: [dense]}
  - {name: memory, tokens: 64, points: 4, policies: [h2o]}
  - {name: attention, data: prose, samples: 20, tokens: 64}
capacity: 24
policies: [dense, h2o]
"""
TRACES = """
suite: traces
version: 1
model: {id: MODEL}
task:
  - {name: trace, programs: 20, lines: 2, steps: 1, tell: true, samples: 2, temperature: 1.0}
  - {name: trace, programs: 2, lines: 2, steps: 1, teacher: true}
policies: [dense]
"""


def without_rule(records):
    """Figures that the table does not name, by task."""
    return {
        f"{r.cell.task.name}: {'.'.join('*' if part.isdigit() else part for part in name)}"
        for r in records
        for name, _ in figures(r)
        if rule_of(r, name) is None
    }


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, machine_dir):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "measure", in_this_process)
        return records_of(tmp_path_factory.mktemp("rules"), machine_dir)


def records_of(folder, machine_dir):
    path = folder / "rules.yaml"
    path.write_text(SUITE)
    request = RunRequest(str(path), threads=1, fresh=True)
    records = request.measure(folder / "records", request.cells())
    path.write_text(TRACES.replace("MODEL", str(machine_dir)))
    records += request.measure(folder / "traces", request.cells())
    assert {r.status for r in records} == {"ok"}
    return records


@pytest.mark.slow("measures suites")
def test_of_a_fresh_run_of_every_task(fresh):
    assert not without_rule(fresh)
    assert {"calibration_ms", "tokens_per_second"} <= set(fresh[0].facts.as_json())
    latency = next(r for r in fresh if r.cell.task.name == "latency")
    assert len(latency.metrics.forward_ms) == len(latency.metrics.rounds_ms)


def test_a_figure_that_nobody_thought_of_is_noticed():
    assert without_rule([cell_record({"charm": 1}, task={"name": "perplexity"})]) == {"perplexity: metrics.charm"}
    assert without_rule([cell_record({"curve": [{"peak_bytes": 1}]}, task={"name": "streameval"})])


def test_no_figure_of_a_published_record_lacks_a_rule():
    assert not without_rule(RecordStore(RECORDS).read_all()[0])


def rules(model):
    """Path ("curve.*.position") and own rule of each field, those of nested models included."""
    for name, field in model.model_fields.items():
        own = next((m for m in field.metadata if isinstance(m, (Checked, Elsewhere, Unchecked))), None)
        inner, stars = model_in(field.annotation)
        yield from ((f"{field.alias or name}{stars}.{deeper}", rule) for deeper, rule in (rules(inner) if inner else ()))
        if inner is None or own is not None:
            yield field.alias or name, own


def model_in(annotation):
    """The model inside an annotation, and ".*" for each list or mapping around it."""
    if isinstance(annotation, type):
        return (annotation, "") if issubclass(annotation, BaseModel) else (None, "")
    star = ".*" if typing.get_origin(annotation) in (list, dict) else ""
    for part in typing.get_args(annotation):
        model, stars = model_in(part)
        if model is not None:
            return model, star + stars
    return None, ""


def test_every_field_says_how_it_is_held():
    checks = {"figures", "answers", "bytes", "data", "method", "flags", *CHECKS}
    for task in plugins.working_tasks().values():
        for part, model in (("metrics", task.metrics), ("data", task.data_facts), ("facts", Facts)):
            for name, rule in rules(model):
                field = f"{part}.{name}"
                assert rule is not None, f"{task.__name__}: {field}"
                assert rule.check in checks if isinstance(rule, (Checked, Elsewhere)) else len(rule.because) > 20


def test_tolerances_mean_what_they_say():
    assert Checked().allows(3, 3)
    assert not Checked().allows(3, 4)
    assert not Checked().allows(3, "3")
    assert not Checked().allows(True, 1.5)
    near = Checked(absolute=0.1)
    assert near.allows(1.0, 1.09)
    assert not near.allows(1.0, 0.89), "better is other, too"
    assert not near.allows(1.0, float("nan"))
    assert Checked(absolute=0.1, relative=0.01).allows(100.0, 100.9)
