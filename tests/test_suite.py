"""Suites: their meaning, and the messages for mistakes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from factories import edit, record
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.harness import suite as suites
from kvbench.harness.core.errors import UserError
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.report.rows import short_titles
from kvbench.harness.suite import cells as cells_module

pytestmark = pytest.mark.fast


GOOD = """suite: mine
version: 1
model: {id: a/b}
task: {name: perplexity, tokens: 100}
capacity: [8, 16]
policies:
  - dense
  - {name: sink_window, sinks: [1, 2]}
"""


def load(tmp_path: Path, text: str = GOOD, **overrides):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return suites.load(file, **overrides)[1]


def test_a_policy_named_on_the_command_line_keeps_its_parameters_in_the_suite(tmp_path):
    def sinks(*policies: str) -> set[int]:
        return {cell.policy.sinks for cell in load(tmp_path, policies=policies) if cell.name == "sink_window"}

    assert sinks("sink_window") == {1, 2}
    assert sinks("{name: sink_window, sinks: 3}") == {3}
    assert {cell.name for cell in load(tmp_path, policies=("h2o", "sink_window"))} == {"h2o", "sink_window"}


def test_lists_multiply(tmp_path):
    cells = load(tmp_path)
    assert [(c.name, c.capacity, getattr(c.policy, "sinks", None)) for c in cells] == [
        ("dense", None, None),
        ("sink_window", 8, 1),
        ("sink_window", 8, 2),
        ("sink_window", 16, 1),
        ("sink_window", 16, 2),
    ]
    assert len({c.id for c in cells}) == 5


def test_prose_of_as_many_tokens_as_can_be_made_is_not_refused(tmp_path):
    assert load(tmp_path, GOOD.replace("tokens: 100", f"data: prose, tokens: {2**24}"))


def test_lists_of_models_and_tasks_multiply(tmp_path):
    task = "streameval, distance: [2, 4, 6], lines: [100, 200]"
    text = GOOD.replace("{id: a/b}", "{id: [a/b, a/c]}").replace("perplexity, tokens: 100", task)
    cells = load(tmp_path, text)
    assert len(cells) == 2 * 3 * 2 * 5
    assert len(set(suites.labels(cells).values())) == len(cells), "every label tells its cell from the others"


def test_a_task_can_be_for_some_of_the_policies(tmp_path):
    tasks = "\n  - {name: perplexity, tokens: 100, policies: [dense]}\n  - {name: memory, tokens: [64, 128]}"
    cells = load(tmp_path, GOOD.replace("{name: perplexity, tokens: 100}", tasks))
    assert [c.name for c in cells if c.task.name == "perplexity"] == ["dense"]
    assert len([c for c in cells if c.task.name == "memory"]) == 10
    asked = [c.as_json()["task"] for c in cells]
    assert all("policies" not in task for task in asked), "what a cell asks does not depend on what others ask"


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        ("sinks: [1, 2]", "sink: 1", "mine.yaml:8: unknown key 'sink', did you mean 'sinks'?"),
        ("name: sink_window", "name: sink_windw", "mine.yaml:8: unknown policy 'sink_windw', did you mean 'sink_window'?"),
        ("perplexity", "perplexty", "mine.yaml:4: unknown task 'perplexty', did you mean 'perplexity'?"),
        ("tokens: 100", "token: 100", "mine.yaml:4: unknown key 'token', did you mean 'tokens'?"),
        ("tokens: 100", "tokens: many", "mine.yaml:4: tokens: "),
        ("version: 1", "version: 0", "mine.yaml:2: version: "),
        ("version: 1", "", "mine.yaml:1: 'version' is missing"),
        ("capacity: [8, 16]", "capacity: [8, 2]", "mine.yaml:5: sink_window: capacity 2 can't hold sinks 2"),
        ("capacity: [8, 16]", "capacity: 0", "mine.yaml:5: capacity: "),
        ("capacity: [8, 16]", "", "mine.yaml:8: sink_window needs a capacity"),
        ("  - dense\n", "  - {name: dense, capacity: 4}\n", "mine.yaml:7: unknown key 'capacity'"),
        ("model: {id: a/b}", "model: {id: a/b, dtype: int8}", "mine.yaml:3: dtype: "),
        ("capacity: [8, 16]", "capacity: []", "mine.yaml: 0 cells"),
        ("tokens: 100", "tokens: 100, policies: [denze]", "mine.yaml:4: unknown policy 'denze', did you mean 'dense'?"),
        ("tokens: 100", "tokens: 1.0e+12", "mine.yaml:4: tokens"),
        ("perplexity, tokens: 100", "memory, tokens: 1000000000000", "mine.yaml:4: tokens"),
        ("perplexity, tokens: 100", "latency, tokens: 1000000000000", "mine.yaml:4: tokens"),
        ("tokens: 100", "data: prose, tokens: 16777217", "mine.yaml:4: tokens 16,777,217 is more than the 16,777,216 tokens"),
        ("tokens: 100", "tokens: 1e12", "mine.yaml:4: tokens: Input should be a valid integer"),
        ("tokens: 100", "tokens: 300, streams: 151", "mine.yaml:4: streams 151 are too many for 300 tokens"),
        ("tokens: 100", "tokens: 100, until: {}", "mine.yaml:4: 'until.interval' is missing"),
        ("tokens: 100", "tokens: 40000, until: {interval: true}", "mine.yaml:4: until.interval: expected a number, not true"),
        ("tokens: 100", "tokens: 40000, until: {interval: .inf}", "mine.yaml:4: until: Input should be a finite number, not inf"),
        ("tokens: 100", "tokens: 100, streams: 4, side_by_side: auto", "mine.yaml:4: side_by_side: "),
        ("tokens: 100", "tokens: 100, streams: 4, side_by_side: 0", "mine.yaml:4: side_by_side: "),
        ("tokens: 100", "tokens: 100, streams: 4, side_by_side: true", "mine.yaml:4: side_by_side: "),
        ("tokens: 100", "tokens: 100, streams: 4, side_by_side: 1.5", "mine.yaml:4: side_by_side: "),
        ("version: 1", "version: 1\nresources: {gpus: false}", "mine.yaml:3: gpus: expected a number, not false"),
        ("{id: a/b}", '{id: "a\\0b"}', "mine.yaml:3: model.id: 'a\\x00b' has a null byte"),
        ("version: 1", "version: 1\nseed: [1, true]", "mine.yaml:3: seed.1: expected a number, not true"),
        ("perplexity, tokens: 100", "streameval, lines: 1000000000", "1,000,000 lines together"),
        ("perplexity, tokens: 100", "arc_stream, subset: ARC-Hard", "mine.yaml:4: subset: Input should be 'ARC-Easy' or"),
        ("perplexity, tokens: 100", "streameval, distance: 500, lines: 100", "mine.yaml:4: distance 500 is beyond the stream"),
        ("perplexity, tokens: 100", "latency, prompt: 99, tokens: 50", "mine.yaml:4: prompt 99 is longer than the stream"),
        ("  - dense", "  - [dense", "not YAML"),
        ("version: 1", "version: 1\nversion: 2", "mine.yaml:3: 'version' is given twice"),
    ],
)
def test_a_mistake_names_its_line_and_what_to_do(tmp_path, before, after, error):
    if "0 cells" in error:
        before, after = GOOD[GOOD.index("capacity") :], "capacity: []\npolicies: [sink_window]\n"
    with pytest.raises(UserError) as caught:
        load(tmp_path, GOOD.replace(before, after))
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "just words", "a: &x [*x]", "\x00", "{" * 200, "? [a]\n: b\nsuite: x"])
def test_what_is_no_suite_is_refused_in_one_line(tmp_path, text):
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)


FUZZ = settings(max_examples=int(os.environ.get("FUZZ", 50)), deadline=None)  # FUZZ=10000: the full experiment
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["dense", "window", "perplexity"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


def places(value, at=()):
    """The path of keys to every place in a YAML value."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*at, key))


@pytest.mark.slow("many drawn cases")
@FUZZ
@given(st.data())
def test_suites_with_anything_anywhere_never_end_in_anything_but_a_user_error(tmp_path_factory, data):
    """Put an arbitrary value in one place of a valid suite."""
    suite = yaml.safe_load(GOOD)
    at = data.draw(st.sampled_from(sorted(places(suite), key=repr)))
    value = data.draw(VALUES)
    if at:
        holder = suite
        for key in at[:-1]:
            holder = holder[key]
        holder[at[-1]] = value
    else:
        suite = value
    file = tmp_path_factory.mktemp("fuzz") / "mine.yaml"
    file.write_text(yaml.safe_dump(suite, allow_unicode=True), encoding="utf-8")
    try:
        assert suites.load(file)[1]
    except UserError as error:
        assert "\n" not in str(error)


@FUZZ
@given(st.text(max_size=200) | st.builds(lambda a, b: GOOD[:a] + b + GOOD[a:], st.integers(0, len(GOOD)), st.text(max_size=6)))
def test_malformed_suites_never_end_in_anything_but_a_user_error(tmp_path_factory, text):
    file = tmp_path_factory.mktemp("fuzz") / "mine.yaml"
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        assert suites.load(file)[1]
    except UserError as error:
        assert "\n" not in str(error)


def test_settings_of_the_command_line(tmp_path):
    cells = load(tmp_path, settings=["tokens=50", "capacity=4", "sinks=3", "dtype=bfloat16", "seed=[1,2]"])
    assert {(c.capacity, c.task.tokens, c.model.dtype) for c in cells if c.name != "dense"} == {(4, 50, "bfloat16")}
    assert {c.seed for c in cells} == {1, 2}
    assert all(c.policy.sinks == 3 for c in cells if c.name == "sink_window")


def test_policies_of_the_command_line_replace_the_suites(tmp_path):
    cells = load(tmp_path, policies=["h2o", "{name: h2o, window: 2}"])
    assert [c.as_json()["parameters"]["window"] for c in cells] == [4, 8, 2, 2]


def test_what_never_evicts_has_one_cell_whatever_the_positions(tmp_path):
    """Its tokens stand at their ranks, which are their positions in the stream."""
    text = GOOD.replace("capacity: [8, 16]", "capacity: 8\npositions: [stream, cache]").replace("sinks: [1, 2]", "sinks: 1")
    cells = load(tmp_path, text)
    assert [(c.name, c.positions) for c in cells] == [("dense", "cache"), ("sink_window", "stream"), ("sink_window", "cache")]
    clamped = load(tmp_path, text.replace("- dense", "- {name: dense, positions: clamped, limit: 4}"))
    assert clamped[0].positions == "clamped"


def test_a_policy_may_have_seeds_of_its_own(tmp_path):
    """The others keep the suite's, and so their ids."""
    entry = "{name: random, seed: [0, 3]}"
    cells = load(tmp_path, settings=["capacity=4"])
    more = load(tmp_path, GOOD.rstrip() + f"\n  - {entry}\n", settings=["capacity=4"])
    assert {c.id for c in cells} < {c.id for c in more}
    assert [c.seed for c in more if c.name == "random"] == [0, 3]


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("tokns=3", "--set tokns=3: unknown key 'tokns', did you mean 'tokens'?"),
        ("tokens", "--set tokens: expected KEY=VALUE"),
        ("capacity=[1", "--set capacity=[1: '[1' is not YAML"),
        ("capacity=1", "--set capacity=1: sink_window: capacity 1 can't hold sinks 1"),
        ("window=-3", "--set window=-3: sink_window: capacity 8 can't hold sinks 1 + window -3"),
        ("tokens=0", "--set tokens=0: tokens: Input should be greater than or equal to 2, not 0"),
        ("task=[perplexity]", "--set task=[perplexity]: give --only perplexity to measure"),
        ("tasks=streameval", "--set tasks=streameval: this suite has no task 'streameval', only perplexity"),
    ],
)
def test_a_wrong_setting_is_told_as_one(tmp_path, setting, error):
    """The error names the option, not a line of the suite, which has another value."""
    with pytest.raises(UserError) as caught:
        load(tmp_path, settings=["seed=3", setting])
    assert str(caught.value).startswith(error)


def test_a_local_models_place_is_not_part_of_the_cell(tmp_path, model_dir):
    first = load(tmp_path, model=str(model_dir))[0]
    assert first.as_json()["model"]["id"] == "tiny-llama"
    assert str(model_dir.parent) not in str(first.as_json())


POLICY = """from kvbench import Policy

class Mine(Policy):
    def importance(self, view):
        return view.position.float()
"""


def test_two_files_whose_records_would_be_the_same_are_refused(tmp_path, model_dir):
    """Ids have the bare names of files and folders, so a second one would not be measured."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(POLICY)
    names = [f"{tmp_path}/{folder}/mine.py:Mine" for folder in ("a", "b")]
    with pytest.raises(UserError, match=r"a/mine.py:Mine and .*b/mine.py:Mine would have the same records"):
        load(tmp_path, policies=names, settings=["capacity=8"])
    again = f"{tmp_path}/b/../a/mine.py:Mine"
    assert [c.name for c in load(tmp_path, policies=[names[0], again], settings=["capacity=8"])] == names[:1]
    copies = tmp_path / "c" / model_dir.name, tmp_path / "d" / model_dir.name
    for copy in copies:
        copy.mkdir(parents=True)
    with pytest.raises(UserError, match="would have the same records"):
        load(tmp_path, GOOD.replace("{id: a/b}", f"[{{id: {copies[0]}}}, {{id: {copies[1]}}}]"))


@pytest.fixture(scope="module")
def fits() -> Callable[[Any], None]:
    """Raises if a suite does not fit the exported schema, which takes seconds to make."""
    schema = suites.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).validate


@pytest.mark.parametrize("path", suites.shipped_suites(), ids=lambda p: p.stem)
def test_shipped_suites_load_and_fit_the_exported_schema(path, fits):
    suite, cells = suites.load(path)
    assert suite.suite == path.stem
    assert cells
    text = yaml.safe_load(path.read_text())
    fits(text)
    with pytest.raises(jsonschema.ValidationError):
        fits({**text, "polices": []})


def test_an_option_that_was_not_there_before_leaves_cell_ids_alone(tmp_path):
    """Unset options are not in the cell, so older records still match it."""
    file = tmp_path / "s.yaml"
    file.write_text("suite: s\nversion: 1\nmodel: {id: a/b}\ntask: {name: perplexity}\npolicies: [dense]\n")
    (cell,) = suites.load(file)[1]
    assert set(cell.as_json()["task"]) == {"name", "data", "split", "tokens", "stride"}


@pytest.mark.parametrize("index", range(5))
def test_the_cell_of_a_record_can_be_asked_for_again(tmp_path, index):
    cell = load(tmp_path)[index]
    assert suites.cell_from_spec(CellSpec.from_json(json.loads(json.dumps(cell.as_json())))).id == cell.id
    elsewhere = suites.cell_from_spec(CellSpec.from_json(cell.as_json()), model=str(tmp_path))
    assert elsewhere.model.id == str(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"policy": "mine.py:Mine"}, "add --policy mine.py:Mine"),
        ({"policy": "gone"}, "this version can't run"),
        ({"parameters": {"speed": 3}}, "this version can't run"),
        ({"task": {"name": "perplexity", "colour": 1}}, "can't run"),
        ({"task": {"name": "perplexity"}}, "something else"),
    ],
)
def test_what_can_not_be_asked_for_any_more_says_so(tmp_path, change, says):
    with pytest.raises(UserError, match=says):
        suites.cell_from_spec(CellSpec.from_json(load(tmp_path)[1].as_json() | change))


def test_labels_say_what_differs_among_cells_of_one_policy_and_task(tmp_path):
    tasks = "\n  - {name: perplexity, tokens: [50, 100]}\n  - {name: memory, tokens: 64}"
    cells = load(tmp_path, GOOD.replace("{name: perplexity, tokens: 100}", tasks))
    assert set(suites.labels(cells).values()) >= {
        "perplexity, dense, tokens 50",
        "perplexity, sink_window 8, sinks 1, tokens 100",
        "memory, sink_window 16, sinks 2",
        "memory, dense",
    }


def test_labels_name_an_option_that_only_some_cells_have(tmp_path):
    tasks = "\n  - {name: perplexity, tokens: 100}\n  - {name: perplexity, tokens: 100, prompt: 50}"
    names = set(suites.labels(load(tmp_path, GOOD.replace("{name: perplexity, tokens: 100}", tasks))).values())
    assert names >= {"dense", "dense, prompt 50"}


def test_labels_and_titles_tell_a_policy_without_parameters_from_its_variants(tmp_path):
    variants = [{}, {"sinks": 4}, {"sinks": 4, "window": 16}]
    listed = json.dumps([{"name": "random", "capacity": 32} | one for one in variants])
    cells = load(tmp_path, GOOD.partition("policies:")[0] + f"policies: {listed}")
    assert list(suites.labels(cells).values()) == ["random 32", "random 32, sinks 4", "random 32, sinks 4, window 16"]
    titles = short_titles([edit(record("random", 32), cell={"parameters": one}) for one in variants])
    assert titles == ["random", "random (sinks 4)", "random (sinks 4, window half)"]


def test_labels_take_time_in_proportion_to_the_cells(tmp_path, monkeypatch):
    """Counts instead of timing: each cell's fields and hash are computed once."""
    cells = load(tmp_path, GOOD.replace("version: 1\n", f"version: 1\nseed: {list(range(40))}\n"))
    as_json, counted = suites.Cell.as_json, []
    monkeypatch.setattr(suites.Cell, "as_json", lambda cell: (counted.append(cell), as_json(cell))[1])
    seen = []
    distinguishing_keys = cells_module.distinguishing_keys
    monkeypatch.setattr(cells_module, "distinguishing_keys", lambda given: seen.extend(given) or distinguishing_keys(given))
    names = suites.labels(cells)
    assert len(set(names.values())) == len(cells) == 200
    assert len(counted) == len(cells)
    assert len(seen) == 2 * len(cells)


def test_more_cells_than_anyone_measures_are_refused(tmp_path, monkeypatch):
    """Tried with fewer: multiplying out as many as anyone measures takes seconds."""
    monkeypatch.setattr(cells_module, "MAX_CELLS", 1_000)
    task = f"{{name: perplexity, tokens: {list(range(100, 140))}, data_seed: {list(range(40))}}}"
    for one in (
        GOOD.replace("version: 1\n", f"version: 1\nseed: {list(range(600))}\n"),
        GOOD.replace("{name: perplexity, tokens: 100}", task),
    ):
        with pytest.raises(UserError, match="mine.yaml: more than 1,000 cells, because its lists multiply"):
            load(tmp_path, one)


@pytest.mark.slow("takes seconds")
@pytest.mark.parametrize("opening", ["[", "{", "- ", "[{a: "])
def test_brackets_without_end_are_refused_in_one_line(tmp_path, opening):
    with pytest.raises(UserError, match=r"mine\.yaml.*(nested too deeply|not YAML|not a suite)"):
        load(tmp_path, opening * 2000)
    with pytest.raises(UserError, match="nested too deeply|not YAML"):
        load(tmp_path, settings=["capacity=" + "[" * 2000])
