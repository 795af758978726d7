"""What a worker sends back is what this process would have measured. Workers here are objects, and everything passes as JSON."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from kvbench.harness.records import RecordStore
from kvbench.harness.report.feed import feed
from kvbench.harness.run import runner
from kvbench.harness.run.executor import RunWatcher
from kvbench.harness.run.messages import GroupAnswer, RunOrder, pack
from kvbench.harness.run.options import KeepSteps, RunOptions
from kvbench.harness.run.prepare import prepare
from kvbench.harness.run.request import RunRequest
from kvbench.harness.run.worker import Worker
from kvbench.harness.suite import Resources

SUITE = """
suite: spread
version: 1
model: [{id: "builtin:sink_1"}, {id: "builtin:sink_2"}]
task:
  - {name: perplexity, data: prose, tokens: 300}
  - {name: streameval, lines: 12, query_every: 4, distance: [2], policies: [h2o]}
capacity: 16
policies:
  - dense
  - {name: sink_window, sinks: [1, 2]}
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


def worker_of(order, texts):
    return Worker(order, texts.__getitem__, lambda *_: None, Path(tempfile.mkdtemp(dir=".")))


class ByMessages:
    """An `Executor` of two workers whose every message is a line of JSON."""

    def __init__(self, options, broken=()):
        self.options, self.groups_of, self.broken = options, [], list(broken)

    def measure(self, groups, cells, ledger):
        numbers = {cell.id: number for number, cell in enumerate(cells)}
        prepared = {item.cell.id: item for group in groups for item in group}
        order, texts = pack(cells, prepared, self.options, "cpu", 1)
        assert len(texts) == len({id(item.data) for item in prepared.values()}), "all data are sent"
        workers = []
        for _ in range(2):
            workers.append(worker_of(RunOrder.from_json(order.to_json()), texts))
            assert workers[-1].check([numbers[cell] for cell in prepared]) == ""
        for number, group in enumerate(groups):
            references = [None if r is None else r.as_json() for r in ledger.references(group)]
            answer = workers[number % 2].measure([numbers[item.cell.id] for item in group], references)
            received = GroupAnswer.from_json(answer.to_json())
            for item in group:
                received.cells[numbers[item.cell.id]].deliver(item, ledger.store, ledger.done)


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
def test_what_comes_back_as_messages_makes_the_same_records_and_the_same_page(request_, tmp_path):
    cells = request_.cells()
    options = request_._options(None, False, False, KeepSteps.from_option("kept=100,end"))
    here = runner.run(cells, RecordStore(tmp_path / "here"), options, RunWatcher())
    there = runner.run(cells, RecordStore(tmp_path / "there"), options, RunWatcher(), ByMessages(options))
    same(here, there)
    assert sum(record.facts.keep_map is not None for record in there) == 14
    for folder in ("here", "there"):
        assert not list((tmp_path / folder).rglob("*.partial"))
    files = [sorted(p.relative_to(tmp_path / f) for p in (tmp_path / f).rglob("*")) for f in ("here", "there")]
    assert files[0] == files[1]


def test_a_worker_without_the_model_or_with_other_code_says_so(request_, tmp_path, monkeypatch):
    from kvbench.harness.models.hub import _BUILTIN

    shutil.copytree(_BUILTIN / "sink_1", tmp_path / "mine")
    request = RunRequest("spread.yaml", model="mine", threads=1, device="cpu", policies=["window", "own.py:Own"])
    cells = request.cells()
    options = RunOptions(request._options(None, False, False, None).device)
    prepared = {item.cell.id: item for item in prepare(cells, options.device, None)}
    order, texts = pack(cells, prepared, options, "cpu", 1)
    worker = worker_of(order, texts)
    everything = list(range(len(cells)))
    assert worker.check(everything) == ""
    order.files["own.py"] += b"\n# changed\n"
    assert "own.py:Own differs" in worker_of(order, texts).check(everything)
    (tmp_path / "mine" / "config.json").write_text((tmp_path / "mine" / "config.json").read_text() + " ")
    assert "its files differ" in worker.check(everything)
    shutil.rmtree(tmp_path / "mine")
    assert "no such directory" in worker.check(everything)


def test_a_task_whose_data_cannot_be_sent_has_the_worker_read_them(request_, tmp_path):
    cells = [cell for cell in request_.cells() if cell.task.name == "perplexity"][:1]
    options = request_._options(None, False, False, None)
    item = prepare(cells, options.device, None)[0]
    object.__setattr__(item.data, "source", lambda: "can't be pickled")
    order, texts = pack(cells, {item.cell.id: item}, options, "cpu", 1)
    assert texts == []
    worker = worker_of(order, texts)
    assert worker.check([0]) == ""
    object.__setattr__(order.cells[0], "data_sha256", "another")
    assert "its data differ" in worker.check([0])


def test_resources_change_no_cell_id(request_):
    before = [cell.id for cell in request_.cells()]
    with open("spread.yaml", "a") as file:
        file.write("resources: {gpus: 0.5, memory: 8GiB, cpus: 2}\n")
    cells = request_.cells()
    assert [cell.id for cell in cells] == before
    assert cells[0].resources == Resources(gpus=0.5, memory=2**33, cpus=2)
