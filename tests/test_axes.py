"""Times of eviction, policies inside policies, and budgets: valid notations in suites, and messages for mistakes."""

import json
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from kvbench.harness import suite as suites
from kvbench.harness.core import plugins
from kvbench.harness.core.codec import Codec
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.parameters import parameters_of, policy_from
from kvbench.harness.core.source_digests import source_digest
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.model import adopt
from kvbench.harness.models.families import tiny_model
from kvbench.harness.models.shape import readable_shape, shape_of
from kvbench.harness.records.cell import CellSpec
from kvbench.policies import Composed
from kvbench.policies.h2o import H2O
from kvbench.policies.sink_window import SinkWindow

pytestmark = pytest.mark.fast


MODEL = "builtin:sink_2"
GOOD = f"""suite: mine
version: 1
model: {{id: "{MODEL}"}}
task: {{name: perplexity, tokens: 100, prompt: 40}}
capacity: [8, 16]
policies:
  - dense
  - {{name: h2o, window: 2}}
"""

MINE = '''
from dataclasses import dataclass, field, replace
from kvbench.policies import Composed, Policy
from kvbench.policies.h2o import H2O

@dataclass(frozen=True)
class Holds(Composed):
    """Does what the policy inside does."""

    floor: float = 0.2

@dataclass(frozen=True)
class Picky(Composed):
    """Holds H2O unless told otherwise, and no policy with a window."""

    score: Policy = H2O(window=3)

    def bind(self, capacity):
        if getattr(self.score, "window", None) is None:
            raise ValueError("the policy inside needs a window")
        return super().bind(capacity)

@dataclass(frozen=True)
class Outcome(H2O):
    outcome = True
'''


@dataclass(frozen=True)
class Later(SinkWindow):
    """A policy that has got parameters since."""

    floor: float = field(default=0.5, metadata={"added": True})


@pytest.fixture
def mine(tmp_path, monkeypatch) -> str:
    """A user's file of policies, to be named relative to the current directory."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return "mine.py"


def load(tmp_path: Path, text: str = GOOD, **overrides):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return suites.load(file, **overrides)[1]


def with_policy(entry: str, **changes: str) -> str:
    text = GOOD.replace("  - {name: h2o, window: 2}", f"  - {entry}")
    for before, after in changes.items():
        text = text.replace({"capacity": "capacity: [8, 16]", "task": ", prompt: 40"}[before], after)
    return text


def error_of(tmp_path: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{tmp_path}/")


def test_moments_of_eviction_multiply_like_capacities(tmp_path):
    text = GOOD.replace("policies:", "evict: [step, prompt, {every: [4, 64]}]\npolicies:")
    cells = load(tmp_path, text)
    assert [(c.capacity, c.evict) for c in cells if c.name == "dense"] == [(None, 1)], "it has nothing to evict"
    assert {(c.capacity, c.evict) for c in cells if c.name == "h2o"} == {(c, e) for c in (8, 16) for e in (1, "prompt", 4, 64)}
    assert len({c.id for c in cells}) == len(cells) == 9
    assert {c.label for c in cells} >= {"h2o 8", "h2o 8 prompt", "h2o 16 every 64"}


def test_an_entry_has_moments_of_its_own(tmp_path):
    cells = load(tmp_path, with_policy("{name: h2o, evict: [prompt, {every: 3}]}"))
    assert {c.evict for c in cells if c.name == "h2o"} == {"prompt", 3}
    assert [c.evict for c in load(tmp_path, settings=["evict={every: 5}"])] == [1, 5, 5]


@pytest.mark.parametrize("same", ["step", "{every: 1}", "[step, {every: 1}]"])
def test_one_token_at_a_time_is_the_cell_that_it_was(tmp_path, same):
    """Ids of cells that were measured before there was a choice stay."""
    plain = load(tmp_path)
    assert "evict" not in plain[-1].as_json()
    cells = load(tmp_path, with_policy(f"{{name: h2o, window: 2, evict: {same}}}"))
    assert [c.id for c in cells] == [c.id for c in plain]


@pytest.mark.parametrize("evict", ["prompt", "{every: 64}", "{pages: 64, by: per_head, worth: max}"])
def test_a_cell_with_its_moment_is_read_back(tmp_path, evict):
    cell = load(tmp_path, with_policy(f"{{name: h2o, evict: {evict}, capacity: 64}}"))[-1]
    spec = CellSpec.from_json(json.loads(json.dumps(cell.as_json())))
    again = suites.cell_from_spec(spec)
    assert (again.id, again.evict) == (cell.id, cell.evict)
    assert spec.moment == cell.evict
    assert cell.as_json()["evict"] == yaml.safe_load(evict)
    assert spec.most_kept == cell.most_kept == (None if evict == "prompt" else 64 + 63)


BAD = [  # the entry, other changes, the line and the culprit
    ("{name: h2o, evict: {every: 0}}", {}, "8: evict: every is a number of tokens, at least 1"),
    ("{name: h2o, evict: {every: 1.5}}", {}, "8: evict: every is a number of tokens, at least 1"),
    ("{name: h2o, evict: {pages: 0}}", {}, "8: evict: pages is a number of tokens, at least 1"),
    ("{name: h2o, evict: {pages: 4, by: hed}}", {}, "8: evict: pages can't go by 'hed'"),
    ("{name: h2o, evict: {pages: 4, of: 3}}", {}, "8: evict: pages have no 'of'"),
    ("{name: h2o, evict: propmt}", {}, "8: evict: expected step, prompt, {every: TOKENS}"),
    ("{name: h2o, evict: {evry: 4}}", {}, "8: evict: expected step, prompt, {every: TOKENS}"),
    ("{name: h2o, capacity: {share: 0.5, count: al}}", {}, "8: capacity: count is kv (K and V alone) or all"),
    ("{name: h2o, evict: {pages: 12}}", {}, "5: h2o: capacity 8 doesn't make up whole pages of 12"),
    ("{name: dense, evict: prompt}", {}, "8: unknown key 'evict'; there are kv, limit, positions"),
    ("{name: recompute_window, evict: {every: 2}}", {}, "8: unknown key 'evict'; there are capacity"),
    ("{name: h2o, evict: prompt}", {"task": ""}, "8: evict: prompt waits for the end of a prompt"),
    ("h2o", {"task": "", "capacity": "capacity: 8\nevict: prompt"}, "6: evict: prompt waits for the end of a prompt"),
    ("h2o", {"task": ", prompt: 100"}, "4: prompt 100 leaves nothing to score in a stream of 100 tokens"),
    ("h2o", {"task": ", prompt: 25, streams: 4"}, "4: prompt 25 leaves nothing to score in a stream of 25 tokens"),
    ("h2o", {"task": ", prompt: 0"}, "4: prompt: Input should be greater than or equal to 1"),
    ("h2o", {"task": ", prompt: 40, evict: prompt"}, "4: evict: prompt, but the suite's policies evict: step"),
    ("h2o", {"task": ", evict: [every]"}, "4: evict: expected step, prompt, {every: TOKENS}"),
    ("h2o", {"capacity": "capacity: {share: 0}"}, "5: capacity: share is a part of the prompt, above 0 and at most 1"),
    ("h2o", {"capacity": "capacity: {share: 1.5}"}, "5: capacity: share is a part of the prompt, above 0 and at most 1"),
    ("h2o", {"capacity": "capacity: {share: 0.01}"}, "5: capacity: 0.01 of a prompt of 40 tokens is less than one"),
    ("h2o", {"capacity": "capacity: {share: 0.5}", "task": ""}, "5: capacity: a share of the prompt, but this task has no"),
    ("{name: h2o, window: 30}", {"capacity": "capacity: {share: 0.5}"}, "5: h2o: capacity 20 can't hold window 30"),
    ("h2o", {"capacity": "capacity: {bytes: 1XiB}"}, "5: capacity: bytes is a size such as 65536"),
    ("h2o", {"capacity": "capacity: {bytes: 3}"}, "5: capacity: 3 bytes, but the smallest cache of builtin:sink_2 takes"),
    ("h2o", {"capacity": "capacity: {tokens: 3}"}, "5: capacity: expected tokens, {share: OF_PROMPT} or {bytes: SIZE}"),
    ("h2o", {"capacity": "capacity: many"}, "5: capacity: Input should be a valid integer"),
]


@pytest.mark.parametrize(("entry", "changes", "said"), BAD)
def test_a_mistake_in_an_axis_is_one_line_with_its_place(tmp_path, entry, changes, said):
    assert error_of(tmp_path, with_policy(entry, **changes)).startswith(f"mine.yaml:{said}")


def test_a_share_of_the_prompt_is_the_cell_of_as_many_tokens(tmp_path):
    shares = load(tmp_path, GOOD.replace("[8, 16]", "{share: [0.2, 0.4]}"))
    assert [c.id for c in shares] == [c.id for c in load(tmp_path)]


@given(st.integers(1, 100_000), st.integers(1, 1000))
@example(100, 290)
def test_a_share_is_rounded_down_exactly(prompt, thousandths):
    """Not by float: 0.29 x 100 is 28.999999999999996."""
    from kvbench.harness.suite.entries import _of_prompt

    expected = int(Fraction(thousandths, 1000) * prompt)
    if expected:
        assert _of_prompt(thousandths / 1000, prompt) == expected
    else:
        with pytest.raises(ValueError, match="less than one token"):
            _of_prompt(thousandths / 1000, prompt)


@pytest.mark.parametrize(("evict", "spare"), [("step", 1), ("prompt", 1), ("{every: 7}", 7)])
@pytest.mark.parametrize("size", ["64KiB", "65536", "0.1MiB"])
def test_bytes_are_as_many_slots_as_fit(tmp_path, evict, spare, size):
    """The slots of one stream: the tokens kept, and those that come before as many go."""
    entry = f"{{name: h2o, window: 1, capacity: {{bytes: {size}}}, evict: {evict}}}"
    (cell,) = (c for c in load(tmp_path, with_policy(entry)) if c.name == "h2o")
    shape, size_in_bytes = readable_shape(MODEL, None), {"64KiB": 65536, "65536": 65536, "0.1MiB": 104857}[size]
    assert shape.kv_bytes(cell.capacity + spare - 1, 1, 4) <= size_in_bytes < shape.kv_bytes(cell.capacity + spare, 1, 4)


@pytest.mark.parametrize("kv", ["dtype", "int4", "{codec: int2, exempt: {sinks: 4, recent: 8}}"])
@pytest.mark.parametrize("count", ["kv", "all"])
def test_a_share_asks_the_codec_and_is_one_of_the_prompts_bytes(tmp_path, kv, count):
    """In the model's dtype. A quarter of them holds more tokens in fewer bits, and fewer beside their statistics."""
    entry = f"{{name: snapkv, window: 4, capacity: {{share: 0.25, count: {count}}}, kv: {kv}, evict: prompt}}"
    cell = load(tmp_path, with_policy(entry, task=", prompt: 96"))[-1]
    shape = readable_shape(MODEL, None)
    if (kv, count) == ("dtype", "kv"):
        assert cell.capacity == 24
    assert (cell.capacity > 24) == (kv != "dtype")
    state = shape.heads * shape.layers * 8 if count == "all" else 0
    taken = [
        shape.kv_bytes(n - 1, 1, 4, cell.kv) + state + (16 * n * shape.heads * shape.layers if state else 0)
        for n in (cell.capacity, cell.capacity + 1)
    ]
    assert taken[0] <= 24 * shape.heads * shape.layers * shape.head_dim * 2 * 4 < taken[1]


@pytest.mark.parametrize("kv", ["dtype", "{codec: int4, exempt: {recent: 8}}"])
@pytest.mark.parametrize("name", ["window", "h2o", "snapkv", "rkv", "keydiff", "roco", "lagkv"])
def test_bytes_with_all_that_counts_are_those_that_a_decoder_allocates(tmp_path, kv, name):
    """K and V, exempt tokens, ranks, positions and statistics: as many tokens as fit, and one more doesn't."""
    if name == "keydiff" and kv != "dtype":
        pytest.skip("it takes no recent tokens")
    cell = load(tmp_path, with_policy(f"{{name: {name}, capacity: {{bytes: 96KiB, count: all}}, kv: {kv}}}"))[-1]
    model, taken = tiny_model("llama"), []
    shape = shape_of(model.config)
    fits = shape.capacity_within(96 * 2**10, 4, 1, cell.kv, lambda n: shape.state_bytes(cell.policy, n + 1, n, 4, grows=False))
    for capacity in (fits, fits + 1):
        read = CachedDecoder(adopt(model), CacheConfig(cell.policy, capacity, kv=cell.kv))
        taken.append(read.kv_bytes + read.state_bytes)
    assert taken[0] <= 96 * 2**10 < taken[1]
    assert cell.capacity < load(tmp_path, with_policy(f"{{name: {name}, capacity: {{bytes: 96KiB}}, kv: {kv}}}"))[-1].capacity


def test_bytes_buy_twice_the_tokens_in_half_the_precision(tmp_path):
    text = GOOD.replace("[8, 16]", "{bytes: 64KiB}")
    full, half = (load(tmp_path, text, dtype=dtype)[-1].capacity for dtype in ("float32", "bfloat16"))
    assert half + 1 == 2 * (full + 1)


def test_a_policy_whose_budgets_are_an_outcome_takes_no_capacity_and_waits_for_the_prompt(tmp_path, mine):
    cells = load(tmp_path, with_policy(f"{{name: '{mine}:Outcome', window: 2}}"))
    assert [(c.capacity, c.evict) for c in cells if c.name != "dense"] == [(None, "prompt")]
    name = f"name: '{mine}:Outcome'"
    assert error_of(tmp_path, with_policy(f"{{{name}, capacity: 8}}")).startswith("mine.yaml:8: unknown key 'capacity'")
    said = error_of(tmp_path, with_policy(f"{{{name}, evict: step}}"))
    assert said == "mine.yaml:8: evict: its budgets follow from the prompt, so expected prompt, not 'step'"
    said = error_of(tmp_path, with_policy(f"{{{name}}}", task=""))
    assert said.startswith("mine.yaml:8: evict: prompt waits for the end of a prompt, but task perplexity has none")


# Policies inside policies


def test_a_policy_inside_has_its_own_parameters_whose_lists_multiply(tmp_path, mine):
    inside = "[h2o, {name: h2o, window: [2, 3]}, {name: sink_window, sinks: 1}]"
    cells = load(tmp_path, with_policy(f"{{name: '{mine}:Holds', score: {inside}, floor: [0.1, 0.3]}}", capacity="capacity: 8"))
    found = [c.as_json()["parameters"] for c in cells if c.name != "dense"]
    scores = [{"name": "h2o", "window": w} for w in (4, 2, 3)] + [{"name": "sink_window", "sinks": 1, "window": 7}]
    assert sorted(found, key=str) == sorted(({"score": s, "floor": f} for s in scores for f in (0.1, 0.3)), key=str)
    assert len({c.id for c in cells}) == 9
    names = suites.labels(cells).values()
    assert f"{mine}:Holds 8, score h2o, score.window 3, floor 0.1" in names
    assert len(set(names)) == 9


def test_a_window_of_half_the_capacity_is_recorded_as_a_number(tmp_path):
    def recorded(window: str | int, capacity: int) -> dict:
        entry = f"{{name: random, sinks: 4, window: {window}}}"
        return load(tmp_path, with_policy(entry, capacity=f"capacity: {capacity}"))[-1].as_json()

    assert recorded("half", 16) == recorded(8, 16)
    assert recorded("half", 8)["parameters"] == {"sinks": 4, "window": 4}


def test_policies_go_into_policies_at_any_depth(tmp_path, mine):
    deep = f"{{name: '{mine}:Holds', score: {{name: '{mine}:Holds', score: {{name: h2o, window: [2, 3]}}}}}}"
    cells = [c for c in load(tmp_path, with_policy(deep, capacity="capacity: 8")) if c.name != "dense"]
    assert [c.policy.score.score for c in cells] == [H2O(window=2), H2O(window=3)]
    assert [c.as_json()["parameters"]["score"]["score"]["window"] for c in cells] == [2, 3]
    assert cells[0].as_json()["parameters"]["score"]["name"] == "mine.py:Holds", "without the folder, which stays private"


def test_a_policy_inside_may_be_left_to_its_default(tmp_path, mine):
    cell = load(tmp_path, with_policy(f"'{mine}:Picky'"))[-1]
    assert cell.as_json()["parameters"] == {"score": {"name": "h2o", "window": 3}}
    cell = load(tmp_path, policies=[f"{{name: '{mine}:Picky', score: {{name: h2o, window: 5}}}}"])[0]
    assert cell.policy.score == H2O(window=5)
    cell = load(tmp_path, with_policy(f"'{mine}:Picky'"), settings=["score={name: h2o, window: 6}"])[-1]
    assert cell.policy.score == H2O(window=6)


INSIDE = [
    ("score: {name: h2o, windo: 2}", "mine.yaml:8: unknown key 'windo', did you mean 'window'?"),
    ("score: {name: h2o, window: many}", "mine.yaml:8: window: Input should be a valid integer, not 'many'"),
    ("score: {name: h2o, capacity: 2}", "mine.yaml:8: unknown key 'capacity'; there are normalise, window"),
    ("score: h20", "mine.yaml:8: unknown policy 'h20', did you mean 'h2o'?"),
    ("score: {window: 3}", "mine.yaml:8: the policy's 'name' is missing"),
    ("score: 3", "mine.yaml:8: expected a policy's name or a mapping with its name, not 3"),
    ("score: null", "mine.yaml:8: score: expected a policy's name or a mapping with its name, not None"),
    ("score: [h2o, 3]", "mine.yaml:8: expected a policy's name or a mapping with its name, not 3"),
    ("floor: 1.0", "mine.yaml:8: 'score' is missing"),
    ("score: dense", "mine.yaml:8: dense never evicts, so no policy can hold it"),
    ("score: recompute_window", "mine.yaml:8: recompute_window keeps no cache, so no policy can hold it"),
    ("score: {name: 'mine.py:Outcome', window: 2}", "mine.yaml:8: mine.py:Outcome takes no capacity, so no policy can hold it"),
    ("score: {name: h2o, window: 30}", "mine.yaml:5: mine.py:Holds: capacity 8 can't hold window 30 + at least 1 heavy hitter"),
]


@pytest.mark.parametrize(("inside", "said"), INSIDE)
def test_a_mistake_inside_is_one_line_with_its_place(tmp_path, mine, inside, said):
    assert error_of(tmp_path, with_policy(f"{{name: '{mine}:Holds', {inside}}}")) == said


@dataclass(frozen=True)
class Around(Composed):
    """Any policy in a policy."""


def test_parameters_of_policies_are_read_back():
    for policy in (H2O(window=3), SinkWindow(), Later()):
        kept = parameters_of(policy)
        assert type(policy)(**kept) == policy
    nested = parameters_of(Around(SinkWindow(sinks=3)))
    assert nested == {"score": {"name": "sink_window", "sinks": 3, "window": None}}
    name = f"{__name__}:Around"
    assert policy_from(name, json.loads(json.dumps(nested))) == Around(SinkWindow(sinks=3))
    assert policy_from(name, {"score": "h2o"}) == Around(H2O())
    assert policy_from(name, parameters_of(Around(Around(H2O(window=2))))) == Around(Around(H2O(window=2)))


def test_a_recorded_cell_with_a_policy_inside_is_measured_again_unless_a_file_defines_it(tmp_path, mine, monkeypatch):
    from kvbench.harness.core import plugins

    found = plugins.policy_class
    monkeypatch.setattr(plugins, "policy_class", lambda name: Around if name == "around" else found(name))
    cell = replace(load(tmp_path)[-1], name="around", policy=Around(H2O(window=2)), evict="prompt")
    spec = CellSpec.from_json(json.loads(json.dumps(cell.as_json())))
    assert suites.cell_from_spec(spec).policy == Around(H2O(window=2)).bind(16)
    assert suites.cell_from_spec(spec).id == cell.id
    inside = found(f"{mine}:Holds")(H2O())
    spec = CellSpec.from_json(replace(cell, policy=Around(inside)).as_json())
    with pytest.raises(UserError, match="the policy mine.py:Holds is defined in a user's file"):
        suites.cell_from_spec(spec)
    assert suites.cell_from_spec(spec, trusted=["mine.py:Holds"]).policy == Around(inside).bind(16)


def test_a_parameter_added_since_is_left_out_while_it_has_its_default():
    assert parameters_of(Later()) == {"sinks": 4, "window": None}
    assert parameters_of(Later(floor=0.25)) == {"sinks": 4, "window": None, "floor": 0.25}
    assert parameters_of(Around(Later()), recorded=True)["score"].keys() == {"name", "sinks", "window"}


SOURCE = '''"""A policy."""
from kvbench.policies import Policy

class Mine(Policy):
    sinks = 1  # tokens
    label = "# no comment"

    def importance(self, view):
        """Newer tokens are more important."""
        return view.position + self.sinks
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ('"""A policy."""', '"""A policy.\n\nOf mine.\n"""\n# A comment', True),
        ("  # tokens", "", True),
        ('        """Newer tokens are more important."""\n', "", True),
        ("# no comment", "# another text", False),
        ("position + ", "position - ", False),
        ("    label", "    label = ''\n    label", False),
    ],
)
def test_a_digest_changes_with_statements_not_with_what_is_written_about_them(old, new, same, tmp_path):
    assert SOURCE.count(old) == 1
    (tmp_path / "one.py").write_text(SOURCE)
    (tmp_path / "two.py").write_text(SOURCE.replace(old, new))
    one, two = (source_digest(plugins.policy_class(f"{tmp_path / file}:Mine")()) for file in ("one.py", "two.py"))
    assert (one == two) is same


def test_the_source_of_the_policy_inside_is_part_of_the_digest():
    assert len({source_digest(Around(p)) for p in (H2O(), SinkWindow(), Around(H2O()))}) == 3
    assert source_digest(Around(H2O(window=1))) == source_digest(Around(H2O(window=2)))


def test_a_parameter_that_is_a_sequence_takes_a_list_and_a_list_of_lists_several(tmp_path):
    suite = (
        "suite: s\nversion: 1\ndescription: d\nmodel: {id: 'builtin:sink_2'}\ntask: {name: perplexity, data: prose, tokens: 64}\n"
        "capacity: 8\npolicies:\n"
        "  - {name: longformer, global_tokens: [0, 3]}\n  - {name: longformer, global_tokens: [[0], [1, 2]]}\n"
    )
    path = tmp_path / "s.yaml"
    path.write_text(suite)
    cells = suites.load(path)[1]
    assert [cell.as_json()["parameters"]["global_tokens"] for cell in cells] == [[0, 3], [0], [1, 2]]
    again = suites.cell_from_spec(CellSpec.from_json(cells[0].as_json()))
    assert again.as_json() == cells[0].as_json()


def test_codecs_multiply_and_float_cells_stay_what_they_were(tmp_path):
    plain = load(tmp_path)
    many = "[dtype, int8, {codec: [int4, int2], exempt: {sinks: [0, 4], recent: 8}}]"
    cells = load(tmp_path, settings=[f"kv={many}"])
    assert {c.id for c in plain} < {c.id for c in cells}
    assert "kv" not in plain[-1].as_json()
    assert len({c.id for c in cells}) == len(cells) == 6 * len(plain)
    assert {c.label for c in cells} >= {"dense int8", "h2o 8 int4 recent 8", "h2o 16 int2 sinks 4 recent 8"}
    coded = next(c for c in cells if c.label == "h2o 16 int4 sinks 4 recent 8")
    assert coded.as_json()["kv"] == {"codec": "int4", "group": 32, "exempt": {"sinks": 4, "recent": 8}}
    assert coded.as_json() == {**next(c for c in plain if c.label == "h2o 16").as_json(), "kv": coded.as_json()["kv"]}


def test_a_coded_cell_survives_its_record_and_its_order(tmp_path):
    cell = load(tmp_path, settings=["kv={codec: int4, group: 16, exempt: {sinks: 2}, keys: rotated}", "positions=stream"])[-1]
    spec = CellSpec.from_json(cell.as_json())
    assert suites.cell_from_spec(spec) == cell
    assert (spec.codec, spec.stored, spec.is_dense) == (cell.kv, "int4 group 16 sinks 2 rotated", False)
    assert Codec.from_json(json.loads(json.dumps(cell.kv.as_json()))) == cell.kv


def test_a_budget_in_bytes_knows_the_codec(tmp_path):
    """A capacity counts codes, scales and exempt tokens. Four bits hold more than twice as many tokens."""
    shape = readable_shape(MODEL, None)
    cells = load(tmp_path, settings=["capacity={bytes: 256KiB}", "kv=[dtype, {codec: int4, exempt: {sinks: 4, recent: 32}}]"])
    plain, coded = (c for c in cells if c.name == "h2o")
    assert coded.capacity > 2 * plain.capacity
    for cell in (plain, coded):
        taken = [shape.kv_bytes(n, 1, 4, cell.kv) for n in (cell.capacity, cell.capacity + 1)]
        assert taken[0] <= 2**18 < taken[1]
