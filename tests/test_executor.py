"""A worker answers what this process would have measured, and the schedule gives no worker much to wait for.

Workers here are objects, and everything is pickled.
"""

import heapq
import itertools
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.harness.core import plugins, user_files
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.parameters import policy_from
from kvbench.harness.records import RecordStore
from kvbench.harness.report.feed import feed
from kvbench.harness.run import runner
from kvbench.harness.run.ledger import RunWatcher
from kvbench.harness.run.order import Order, UnsentData
from kvbench.harness.run.prepare import prepare
from kvbench.harness.run.request import KeepSteps, RunOptions, RunRequest
from kvbench.harness.run.schedule import Schedule, Work
from kvbench.harness.run.worker import Worker
from kvbench.harness.suite import Resources

SUITE = """
suite: spread
version: 1
model: [{id: "builtin:sink_1"}, {id: "builtin:sink_2"}]
task:
  - {name: perplexity, data: prose, tokens: 100}
  - {name: streameval, lines: 8, query_every: 4, distance: [2], policies: [h2o]}
capacity: 16
policies:
  - dense
  - {name: sink_window, sinks: 1}
  - h2o
  - own.py:Own
  - {name: h2o, kv: {codec: int4, exempt: {recent: 4}}, evict: {pages: 8}}
  - {name: dense, kv: {codec: kivi2, group: 8, residual: 8}}
"""
OWN = """
from dataclasses import dataclass
from math import inf

from kvbench.policies import Policy


@dataclass(frozen=True)
class Own(Policy):
    '''Keeps the newest.'''

    def importance(self, view):
        return view.position.float().masked_fill(view.age < 1, inf)
"""


class Pickled:
    """Two workers that get an order as bytes, and answer with bytes."""

    def __init__(self, options):
        self.options = options

    def measure(self, groups, cells, ledger):
        order = pickle.dumps(Order.from_groups(groups, cells, self.options, 1))
        workers = [Worker(pickle.loads(order), lambda *_: None) for _ in range(2)]
        for worker in workers:
            worker.check()
        for number, group in enumerate(groups):
            references = pickle.loads(pickle.dumps([item.reference for item in ledger.begin(group)]))
            with tempfile.TemporaryDirectory() as scratch:
                answer = pickle.dumps(workers[number % 2].measure(number, references, Path(scratch)))
            for item, outcome in zip(group, pickle.loads(answer).outcomes, strict=True):
                ledger.done(item, outcome)


@pytest.fixture
def request_(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "spread.yaml").write_text(SUITE)
    return RunRequest("spread.yaml", threads=1, device="cpu")


def same(records, others):
    """Assert that two runs of a suite gave the same."""
    assert [r.cell_id for r in records] == [r.cell_id for r in others]
    assert [r.key for r in records] == [r.key for r in others]
    for record, other in zip(records, others, strict=True):
        assert record.status == other.status == "ok", (record.error, other.error)
        assert record.metrics == other.metrics, record.cell.policy
        assert record.trace == other.trace
        assert record.facts.as_json().keys() == other.facts.as_json().keys()
        for name in ("threads", "method", "block", "weights_sha256", "policy_sha256", "keep_map"):
            assert getattr(record.facts, name) == getattr(other.facts, name), name
        other.facts, other.finished = record.facts, record.finished
    assert feed(records) == feed(others)


@pytest.mark.slow("measures suites")
def test_pickled_answers_make_the_same_records_and_the_same_page(request_, tmp_path):
    cells = [cell for cell in request_.cells() if cell.model.id == "builtin:sink_1" or cell.name == "h2o"]
    options = replace(request_, keep=KeepSteps.from_option("kept=90,end"))._options()
    here = runner.run(cells, RecordStore(tmp_path / "here"), options, RunWatcher())
    there = runner.run(cells, RecordStore(tmp_path / "there"), options, RunWatcher(), Pickled(options).measure)
    same(here, there)
    assert sum(record.facts.keep_map is not None for record in there) == 8
    for folder in ("here", "there"):
        assert not list((tmp_path / folder).rglob("*.partial"))
    files = [sorted(p.relative_to(tmp_path / f) for p in (tmp_path / f).rglob("*")) for f in ("here", "there")]
    assert files[0] == files[1]


def test_a_worker_without_the_model_or_with_other_code_says_so(request_, tmp_path):
    from kvbench.harness.models.hub import _BUILTIN

    shutil.copytree(_BUILTIN / "sink_1", tmp_path / "mine")
    request = RunRequest("spread.yaml", model="mine", threads=1, device="cpu", policies=["window", "own.py:Own"])
    cells = request.cells()
    options = RunOptions(request._options().device)
    order = Order.from_groups([prepare(cells, options.device, None)], cells, options, 1)

    def check(order=order):
        Worker(order, lambda *_: None).check()

    check()
    other = [replace(item, facts=item.facts | {"policy_sha256": "another"}) for item in order.groups[0]]
    with pytest.raises(UserError, match="the code of the policy .* differs"):
        check(replace(order, groups=[other]))
    (tmp_path / "mine" / "config.json").write_text((tmp_path / "mine" / "config.json").read_text() + " ")
    with pytest.raises(UserError, match="its files differ"):
        check()
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(UserError, match="no such directory"):
        check()


def test_a_task_whose_data_cannot_be_sent_has_the_worker_read_them(request_):
    cells = [cell for cell in request_.cells() if cell.task.name == "perplexity"][:1]
    options = request_._options()
    item = prepare(cells, options.device, None)[0]
    object.__setattr__(item.data, "source", lambda: "can't be pickled")
    order = pickle.loads(pickle.dumps(Order.from_groups([[item]], cells, options, 1)))
    assert isinstance(order.groups[0][0].data, UnsentData)
    Worker(order, lambda *_: None).check()
    other = replace(order.groups[0][0], data=UnsentData("another", 300))
    with pytest.raises(UserError, match="its data differ"):
        Worker(replace(order, groups=[[other]]), lambda *_: None).check()


ELSEWHERE = """
import inspect, pickle, sys
from kvbench.harness.core import user_files

with open(sys.argv[1], "rb") as file:
    user_files.receive(pickle.load(file))
    policy, task, cache = pickle.load(file)
assert policy.kind == 3 and task.__name__ == "Hits" and cache.backend == "quanto"
from kvbench.harness.core import plugins
assert plugins.policy_class("own.py:Own") is type(policy)
assert "Keeps the newest" in inspect.getsource(type(policy))
policy.importance(None)
"""


def test_a_users_classes_are_pickled_for_a_process_without_the_files(tmp_path, monkeypatch):
    """A class of transformers, of which a contestant is made, too. An error names the line of the file that is not there."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN + "    kind: int = 3\n\n\nclass Hits(Policy):\n    pass\n")
    own, hits = plugins.policy_class("own.py:Own"), plugins.policy_class("own.py:Hits")
    cache = policy_from("hf:QuantizedCache", {"backend": "quanto"})
    files = [file for file in user_files.loaded_files() if file.path == str(tmp_path / "own.py")]
    Path("sent").write_bytes(pickle.dumps(files) + pickle.dumps((own(), hits, cache)))
    Path("own.py").unlink()
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, "-c", ELSEWHERE, tmp_path / "sent"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=env, cwd=tmp_path / "elsewhere", capture_output=True, text=True, check=False)
    assert 'own.py", line 13, in importance\nAttributeError' in done.stderr


def test_resources_change_no_cell_id(request_):
    before = [cell.id for cell in request_.cells()]
    with open("spread.yaml", "a") as file:
        file.write("resources: {gpus: 0.5, memory: 8GiB, cpus: 2}\n")
    cells = request_.cells()
    assert [cell.id for cell in cells] == before
    assert cells[0].resources == Resources(gpus=0.5, memory=2**33, cpus=2)


LOAD_S = 20.0  # that a worker takes to load another model


def simulated(works, real, workers):
    """Run a schedule with a clock of its own; `real` are the seconds of the groups.

    Returns:
        The end, the number of loads, and (start, end, worker, work) of every measurement.
    """
    schedule, free, now, loads = Schedule(works), [f"w{i}" for i in range(workers)], 0.0, 0
    loaded, running, spans = {}, [], []
    while schedule.left:
        for name in sorted(free):
            work = schedule.next(name)
            if work is None:
                continue
            free.remove(name)
            load = LOAD_S * (loaded.get(name) != work.model)
            loads, loaded[name] = loads + bool(load), work.model
            spans.append((now, now + load + real[work.number], name, work))
            heapq.heappush(running, (now + load + real[work.number], name, work))
        assert running, "groups are left, but nothing runs"
        now, name, work = heapq.heappop(running)
        schedule.free(name)
        schedule.recorded(work.number)
        free.append(name)
    return now, loads, spans


def test_no_worker_is_idle_for_long_and_few_models_are_loaded():
    """Six models, groups whose lengths differ by a factor of a thousand, and estimates that are off by a factor of two."""
    draw = random.Random(0)
    real = [draw.lognormvariate(3, 1.2) for _ in range(1000)]
    works = [Work(i, f"model {draw.randrange(6)}", s * draw.uniform(0.5, 2)) for i, s in enumerate(real)]
    end, loads, spans = simulated(works, real, 16)
    assert len({work.number for *_, work in spans}) == len(spans) == 1000
    assert end < 1.1 * (sum(real) + loads * LOAD_S) / 16
    assert loads <= 3 * 16


def test_a_group_comes_after_those_whose_records_it_needs_and_those_come_early():
    works = [Work(0, "m", 1.0)] + [Work(i, "m", 5.0) for i in range(1, 20)]
    works += [Work(i, "m", 50.0, after=frozenset({0})) for i in range(20, 24)]
    _, _, spans = simulated(works, [w.seconds for w in works], 2)
    start, end = {s[3].number: s[0] for s in spans}, {s[3].number: s[1] for s in spans}
    assert start[0] == 0
    assert all(start[i] >= end[0] for i in range(20, 24))
    assert len(spans) == 24


def test_a_worker_keeps_its_model_and_takes_the_longest_first():
    schedule = Schedule([Work(0, "a", 1), Work(1, "b", 2), Work(2, "a", 3), Work(3, "b", 9)])
    order = []
    while schedule.left:
        order.append(schedule.next("w").number)
        schedule.free("w")
        schedule.recorded(order[-1])
    assert order == [3, 1, 2, 0]


def test_groups_that_must_be_alone_come_last_one_after_the_other():
    works = [Work(i, "m", 1.0 + i, alone=i % 2 == 0, after=frozenset({9} if i == 4 else ())) for i in range(10)]
    _, _, spans = simulated(works, [w.seconds for w in works], 3)
    shared, alone = ([s for s in spans if s[3].alone == kind] for kind in (False, True))
    assert max(end for _, end, *_ in shared) <= min(start for start, *_ in alone)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(alone))
    assert len(spans) == 10


def test_a_group_that_was_not_measured_is_given_out_again():
    schedule = Schedule([Work(0, "a", 2.0), Work(1, "b", 1.0)])
    assert schedule.next("w").number == 0
    schedule.free("w", again=True)
    assert schedule.next("other").number == 0
