"""Perplexity that is read until its interval is narrow stops where a plain computation says, and says no more than it knows."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from factories import cell_record

from kvbench.harness.core import intervals
from kvbench.harness.core.intervals import interval, look_lengths
from kvbench.harness.data.stream import TokenStream
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.method import EAGER
from kvbench.harness.records import RecordStore
from kvbench.harness.records.beside import TraceFile
from kvbench.harness.report.export import summary_rows
from kvbench.harness.report.pairing import common_tokens, paired
from kvbench.harness.report.verify import problems
from kvbench.harness.run.request import RunRequest
from kvbench.harness.tasks.perplexity import Perplexity, PerplexityOptions, perplexity_options
from kvbench.harness.tasks.task import Job, MeasurementError
from kvbench.lab.studies.interval_coverage import PROCESSES, RUN, coverage_of_looks
from kvbench.policies.recompute_window import RecomputeWindow
from kvbench.policies.window import Window

TOKENS, CAPACITY = 262_144, 128
SPAN = 128  # positions of a run of so long a text
LOOKS = [32_768, 65_536, 131_072, 262_144]
DRAW = np.random.default_rng(0)
IDS = DRAW.integers(0, 2, TOKENS + 1)
BASE = (DRAW.gamma(2, 1, TOKENS + 1) + 0.3).astype(np.float32)
WORSE = BASE + np.float32(0.1) + DRAW.normal(size=TOKENS + 1).astype(np.float32) * np.float32(0.05)
TEXT = TokenStream(IDS, 1, np.ones(TOKENS + 1, np.int64), (("a", 1), ("b", 90_001)), "random", "0")


class Reader:
    """A decoder over two tokens that gives the token that comes the NLL that it is told."""

    kv_bytes = held_bytes = state_bytes = 0

    def __init__(self, nll):
        self.nll, self.at = nll, 0

    def __call__(self, tokens, keep=None):
        self.at += tokens.shape[1]
        after = slice(self.at - tokens.shape[1] + 1, self.at + 1)
        right = torch.from_numpy(-self.nll[after].astype(np.float64))
        logits = torch.stack([right, torch.log(-torch.expm1(right))], -1)
        logits = torch.where(torch.from_numpy(IDS[after] == 0)[:, None], logits, logits.flip(-1))[None]
        return logits if keep is None else logits[:, keep]


def options_of(half_width: float, reference="recompute_window", tokens=TOKENS, stride=1):
    return PerplexityOptions(data="pg19", tokens=tokens, stride=stride, until={"interval": half_width, "reference": reference})


def measured(nll, options, folder, policy=None, reference=None, block=5000, training_length=None):
    """The record and the trace of a cell whose NLLs are these."""
    policy = policy or Window()
    name = "recompute_window" if reference is None else "window"
    trace, model = folder / f"{name}.nll.npy", SimpleNamespace(device=torch.device("cpu"), training_length=training_length)
    job = Job(model, CacheConfig(policy, CAPACITY), TEXT, block, EAGER, trace, lambda *_: None, lambda *_: Reader(nll), reference)
    metrics = Perplexity.run(options, job).as_json()
    made = cell_record(
        metrics,
        policy=name,
        capacity=CAPACITY,
        task=options.model_dump(exclude_none=True),
        data={"ids_sha256": "x", "tokens": TOKENS, "prefix": [7]},
    )
    return made, np.load(trace)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return measured(BASE, options_of(1), tmp_path_factory.mktemp("base"), RecomputeWindow())[0]


def plain(difference, tokens: int, looks: int):
    """The interval after so many tokens of text, from the differences of all tokens, prefix included."""
    after_filling = 2 * SPAN  # the first run that begins after the first 129 tokens
    runs = difference[after_filling : (tokens + 1) // SPAN * SPAN].astype(np.float64).reshape(-1, SPAN).sum(1)
    return interval(runs, np.full(len(runs), float(SPAN)), SPAN, CAPACITY, looks)


def rounded(x):
    return pytest.approx(x, abs=2e-6)  # sums of runs are kept to 5 decimals


@pytest.mark.parametrize("place", range(5))
def test_it_stops_where_the_whole_trace_says_it_must(place, base, tmp_path):
    expected = [plain(WORSE - BASE, n, len(LOOKS)) for n in LOOKS]
    widths = [e.half_width for e in expected]
    assert sorted(widths, reverse=True) == widths
    half_width = 1.001 * widths[place] if place < 4 else 0.5 * widths[-1]  # reached at this look and not before; or never
    made, trace = measured(WORSE, options_of(half_width), tmp_path, reference=base)
    read = LOOKS[min(place, 3)]
    assert len(trace) == read + 1
    np.testing.assert_allclose(trace[1:], WORSE[1 : read + 1], atol=1e-5)
    m = made.metrics
    assert (m.tokens_read, m.tokens, m.looks.planned) == (read, read, 4)
    assert m.looks.reason == ("interval reached" if place < 4 else "limit reached")
    assert [look.tokens for look in m.looks.taken] == [n for n in LOOKS if n <= read]
    for look, plainly in zip(m.looks.taken, expected, strict=False):
        assert (look.low, look.mean, look.high) == tuple(rounded(x) for x in (plainly.low, plainly.mean, plainly.high))
    shown = paired(made, cell_record(base.metrics.as_json(), capacity=CAPACITY, task=made.cell.options, data=made.data.as_json()))
    assert (shown.low, shown.mean, shown.high) == tuple(rounded(x) for x in (look.low, look.mean, look.high))
    assert sum(m.texts.tokens) == sum(m.blocks.tokens) == read


def test_where_it_stops_does_not_depend_on_blocks(base, tmp_path):
    made = [measured(WORSE, options_of(0.0011), tmp_path, reference=base, block=b)[0].metrics for b in (777, 40_000, TOKENS)]
    assert made[0].looks == made[1].looks == made[2].looks
    assert made[0].tokens_read in LOOKS[:3]


def test_intervals_of_several_planned_looks_are_bonferronis():
    """Each at 1 - 0.05 / k; the p-value is k times as large, so that both still agree."""
    sums, tokens = DRAW.normal(size=2000) + 0.1, np.full(2000, 32.0)
    one, four = (interval(sums, tokens, 32, 128, looks) for looks in (1, 4))
    assert four.mean == one.mean
    assert four.half_width > 1.25 * one.half_width
    assert four.p == pytest.approx(min(1, 4 * one.p))
    shift = four.low * 32
    assert interval(sums - shift, tokens, 32, 128, 4).p == pytest.approx(0.05)


@pytest.mark.parametrize("process", ["white", "slow component, memory 256"])
def test_corrected_intervals_hold_whenever_reading_stops_and_uncorrected_ones_do_not(process):
    """A reader who stops when it suits is wrong wherever any of the looks is."""
    looks = look_lengths(131_072, 128)
    series = PROCESSES[process](np.random.default_rng(1), 500, 131_072 // RUN)
    when_narrow, whenever = coverage_of_looks(series, looks, len(looks))
    assert when_narrow >= 94
    assert whenever >= 94
    assert coverage_of_looks(series, looks, 1)[1] < 92


SUITE = """
suite: until
version: 1
model: {id: "builtin:recall"}
task: {name: perplexity, data: prose, tokens: 4096, stride: 4, until: {interval: HALF}}
capacity: 8
policies: [h2o, POLICIES]
"""


@pytest.fixture
def short_blocks(monkeypatch):
    """Intervals over texts of a hundredth of the length."""
    for module in (intervals, perplexity_options):
        monkeypatch.setattr(module, "MIN_BLOCK_TOKENS", 32)


def run(folder, half_width, policies="window", **options):
    path = folder / "until.yaml"
    path.write_text(SUITE.replace("HALF", str(half_width)).replace("POLICIES", policies))
    request = RunRequest(str(path), threads=1, device="cpu", **options)
    return request.measure(folder / "results", request.cells())


@pytest.mark.slow("measures suites")
def test_a_suite_measures_the_reference_first_and_stops_at_the_same_place_every_time(short_blocks, tmp_path):
    reference, *others = run(tmp_path, 0.1)
    assert [r.status for r in (reference, *others)] == ["ok"] * 3
    assert (reference.cell.policy, reference.cell.capacity, reference.metrics.looks) == ("recompute_window", 8, None)
    assert [r.cell.policy for r in others] == ["h2o", "window"]
    again = run(tmp_path, 0.1)
    assert [r.finished for r in again] == [r.finished for r in (reference, *others)], "finished cells are not measured again"
    fresh = run(tmp_path, 0.1, fresh=True, block=64)
    for old, new in zip(others, fresh[1:], strict=True):
        assert new.key == old.key
        assert new.metrics.tokens_read == old.metrics.tokens_read
        assert new.metrics.looks.reason == old.metrics.looks.reason
    lone = RunRequest(others[0].cell_id[:8], threads=1, device="cpu").cells(tmp_path / "results")
    assert [c.id for c in lone] == [reference.cell_id, others[0].cell_id]


@pytest.mark.slow("all published records")
def test_looks_are_verified_from_the_traces_and_the_reference(short_blocks, tmp_path):
    _, record, _ = run(tmp_path, 0.1)
    store = RecordStore(tmp_path / "results")
    folder = store.path(record).parent
    assert problems(record, folder) == []
    value = json.loads(store.path(record).read_text())
    value["metrics"]["looks"]["taken"][0]["high"] += 0.01
    forged = type(record).from_json(value)
    assert problems(forged, folder) != []
    value = json.loads(store.path(record).read_text())
    value["metrics"]["tokens_read"] -= 1
    assert problems(type(record).from_json(value), folder) != []


def test_a_look_is_verified_where_the_last_text_has_no_scored_token(tmp_path, monkeypatch):
    texts = (("empty", 1), ("a", 1), ("b", 90_001), ("one token, off the stride", TOKENS))
    monkeypatch.setitem(globals(), "TEXT", replace(TEXT, starts=texts))
    options = options_of(1e-9, stride=4)
    reference, _ = measured(BASE, options, tmp_path, RecomputeWindow())
    (tmp_path / f"{reference.stem}.json").write_text(json.dumps(reference.as_json()))
    made, _ = measured(WORSE, options, tmp_path, RecomputeWindow(), reference)
    made.cell = made.cell.model_copy(update={"policy": "recompute_window"})
    figures = Perplexity.from_trace(made, TraceFile((tmp_path / "window.nll.npy").read_bytes(), tmp_path, tmp_path))
    assert made.metrics.texts.tokens[::3] == [0, 0]
    assert figures["looks"] == made.metrics.looks.model_dump()


def test_looks_are_at_doubling_lengths_from_the_shortest_that_has_an_interval_to_the_limit():
    assert look_lengths(TOKENS, CAPACITY) == LOOKS
    assert look_lengths(100_000, 128) == [50_000, 100_000]
    assert look_lengths(100_000, 1_024) == [50_000, 100_000]
    assert look_lengths(100_000, 1_500) == [100_000]
    assert look_lengths(1_000, 128) == [1_000]
    assert interval(np.zeros(2000) + DRAW.normal(size=2000), np.full(2000, 32.0), 32, 128).low is not None


def test_dense_is_no_reference_past_the_training_length(tmp_path):
    with pytest.raises(MeasurementError, match="trend past its training length of 512"):
        measured(WORSE, options_of(0.1, "dense"), tmp_path, training_length=512)


def test_cells_of_unequal_length_are_compared_on_what_both_read(base, tmp_path):
    (tmp_path / "a").mkdir()
    short, _ = measured(WORSE, options_of(0.1), tmp_path, reference=base)
    long, _ = measured(WORSE + np.float32(0.2), options_of(1e-9), tmp_path / "a", reference=base)
    assert (short.metrics.tokens_read, long.metrics.tokens_read) == (LOOKS[0], TOKENS)
    common = {"policy": "window", "capacity": CAPACITY, "task": short.cell.options, "data": short.data.as_json()}
    same = [cell_record(r.metrics.as_json(), **common) for r in (short, long)]
    found = paired(*same)
    assert found.mean == pytest.approx(-0.2, abs=1e-5)
    assert found.block * found.blocks < LOOKS[0] == common_tokens(same).read
    assert [row["figure"].split()[0] for row in summary_rows(same)] == ["perplexity"] * 2
