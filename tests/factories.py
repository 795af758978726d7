"""Records, policies and requirements that several test modules share; and published records to read or to change."""

import dataclasses
import functools
import shutil
import typing
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers import DEVICE, FAMILIES, in_blocks, model_of, tokens_of
from reference import after_sinks, by_number, lightest, oldest
from torch import Tensor

from kvbench.harness.core import plugins
from kvbench.harness.engine import slots as slots_module
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.slots import Budget, Cadence, LayerShape, Slots
from kvbench.harness.records import Record, RecordStore, digest
from kvbench.harness.records.beside import TraceFile, open_trace
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.records.run_facts import DataFacts, Facts, Failure, RecordedTrace
from kvbench.harness.records.types import BadRecordError, Document, Part
from kvbench.harness.report.task_report import TaskReport
from kvbench.policies import CacheView, Policy, Statistic
from kvbench.policies.h2o import H2O
from kvbench.policies.random import Random
from kvbench.policies.sink_window import SinkWindow
from kvbench.policies.window import Window

POLICIES: list[Policy] = [Window(), SinkWindow(sinks=2), H2O(), Random()]
EVIL = '<script>alert("1")</script>'  # a name that must not become markup
MODES = ["cache", "stream", "clamped"]
# The design demands 1e-5. That holds in float64, where no rounding can hide a mistake; float32 gets 1e-4, because
# two orders of the same sums already differ by 1e-5 in logits of size 6.
CLOSE = {torch.float64: 1e-5, torch.float32: 1e-4}
BOTH = pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
needs_compiler = pytest.mark.skipif(
    DEVICE.type != "cpu" or shutil.which("cc") is None, reason="compiled walks are for CPUs and need a C compiler"
)
# Every two of a family, a policy and a position mode occur together.
SETTINGS = pytest.mark.parametrize(
    ("family", "policy", "mode"),
    [(FAMILIES[(i + j) % 3], policy, mode) for i, policy in enumerate(POLICIES) for j, mode in enumerate(MODES)],
    ids=str,
)
needs_triton = pytest.mark.usefixtures("triton")


def default_policies() -> list[str]:
    """Names of the policies that need no parameter, such as a file."""
    return [
        name
        for name in plugins.policy_names()
        if not any(f.default is f.default_factory for f in dataclasses.fields(plugins.policy_class(name)))  # both missing
    ]


def slots_for(
    shape: LayerShape,
    config: CacheConfig,
    layers: list[int],
    num_layers: int,
    streams: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device = DEVICE,
    heads: tuple[int, ...] | None = None,
) -> Slots:
    """Empty slots of layers of one shape, without a model. heads: which of each layer's live here; all when None."""
    kept = shape.kept(config.capacity)
    policy = config.policy if kept is None else config.policy.bind(kept)
    parts = [slots_module.LayerHeads(layer, heads) for layer in layers]
    statistics = () if kept is None else policy.statistics
    return Slots(
        shape,
        parts=parts,
        policy=policy,
        statistics=statistics,
        cadence=Cadence.from_start(kept, config.every),
        budget=Budget(kept),
        num_layers=num_layers,
        streams=streams,
        seed=config.seed,
        device=device,
        dtype=dtype,
        keys_rotated=config.positions == "stream" and shape.rotation is not None,
    )


def check_streams_are_read_alone(config: CacheConfig, valid: Tensor) -> None:
    """Two streams with tokens that don't count, and a fork of the second one, are read as each is alone. valid: [2, T] bool."""
    model, tokens, valid = model_of("llama", torch.float64), tokens_of(valid.shape[1], 2), valid.to(DEVICE)
    together = CachedDecoder(model, config, 2)
    logits = torch.cat([together(t, v) for t, v in zip(tokens.split(7, 1), valid.split(7, 1), strict=True)], 1)
    forked = together.fork([1])
    for stream in range(2):
        alone = CachedDecoder(model, config)
        theirs = in_blocks(alone, tokens[stream : stream + 1, valid[stream]], 1)
        torch.testing.assert_close(logits[stream, valid[stream]], theirs[0], atol=1e-6, rtol=0)
    again = tokens_of(20)[:, 10:]
    torch.testing.assert_close(in_blocks(forked, again, 3), in_blocks(alone, again, 1), atol=1e-6, rtol=0)


PARTS: dict[str, type[Document]] = {
    "cell": CellSpec,
    "error": Failure,
    "metrics": Metrics,
    "data": DataFacts,
    "facts": Facts,
    "trace": RecordedTrace,
}
# Of figures that a test does not care for: what fields that must be there are filled with.
FILLED: dict[str, Any] = {
    "tokens": 32768,
    "nll": 2.0,
    "perplexity": 7.4,
    "bits_per_byte": 1.0,
    "kv_bytes": 640,
    "questions": 1,
    "right": 0,
    "accuracy": 0.0,
    "outcomes": "0",
    "in_cache": {},
    "metric": "acc",
    "score": 0.0,
    "requests": 1,
    "over_capacity": 0,
    "state_bytes": 0,
    "step_ms": 1.0,
    "error": 0.01,
    "rounds_ms": [1.0],
    "together": "x",
    "first_token_ms": 1.0,
    "first_token_error": 0.01,
    "sittings": 1,
    "percentiles_ms": {},
    "tokens_per_second": 1.0,
    "bookkeeping_share": 0.0,
    "over_roofline": 1.0,
    "device": {"bandwidth": 1.0, "multiply_rate": 1.0},
    "peak_bytes": 0,
    "allocated_bytes": 0,
    "growth_bytes": 0,
    "how": "x",
    "weight_bytes": 0,
    "blocks": {"nll_sum": [2.0], "tokens": [1], "size": 32},
    "texts": {"nll_sum": [2.0], "tokens": [1]},
    "curve": [
        {
            "position": 1,
            "step_ms": 1.0,
            "error": 0.0,
            "used_slots": 1,
            "attended_slots": 1,
            "peak_bytes": 0,
            "token_ms": 1.0,
        }
    ],
}


def record(policy: str = "h2o", capacity: int | None = 8, nll: float = 2.0, **changes) -> Record:
    """A finished cell of perplexity; changes: of its fields, whole parts as JSON."""
    cell = {
        "suite": "s",
        "suite_version": 1,
        "model": {"id": "m", "dtype": "float32"},
        "task": {"name": "perplexity", "stride": 1},
        "policy": policy,
        "parameters": {},
        "capacity": capacity,
        "positions": "cache",
        "limit": None,
        "seed": 0,
    }
    noise = np.random.default_rng(capacity or 0).normal(size=1024)
    blocks = {"nll_sum": [float(32 * (nll + 0.1 * x)) for x in noise], "tokens": [32] * 1024, "size": 32}
    metrics = {
        "perplexity": float(np.exp(nll)),
        "nll": nll,
        "bits_per_byte": 1.0,
        "tokens": 32768,
        "blocks": blocks,
        "kv_bytes": 640,
        "texts": {"nll_sum": [sum(blocks["nll_sum"])], "tokens": [32768]},
    }
    parts = {"cell": cell, "metrics": metrics, "data": {"ids_sha256": "x", "tokens": 32768}}
    whole = {"key": "k" * 64, "status": "ok", "finished": "2026-01-01T00:00:00+00:00"} | parts | changes
    return made_of_json(whole)


def made_of_json(whole: dict[str, Any]) -> Record:
    """A record of JSON that may lack, or have wrong, what a test does not care for."""
    whole = {"cell_id": digest(whole["cell"])} | whole
    cell = CellSpec.from_json(whole["cell"])
    task = plugins.known_task(cell.task.name) or TaskReport
    kinds = PARTS | {"data": task.data_facts}
    if whole["status"] == "ok" and whole.get("metrics"):
        kinds["metrics"] = task.metrics
    parts = {
        name: lenient(kind, whole[name]) if isinstance(whole.get(name), dict) else whole[name]
        for name, kind in kinds.items()
        if name in whole
    }
    return Record(**(whole | parts | {"cell": cell}))


def lenient(kind: type[Document], value: dict[str, Any]) -> Document:
    """A part of a record, its missing fields filled, but written back as it was given."""
    try:
        return kind.from_json(value)
    except BadRecordError:
        made = _constructed(kind, value)
        made._json = value
        return made


def _constructed(kind: type[Part], value: dict[str, Any]) -> Any:
    needed = {name: FILLED[name] for name, f in kind.model_fields.items() if f.is_required() and name in FILLED}
    names = {f.alias or name: (name, f) for name, f in kind.model_fields.items()}
    fields = {names[k][0]: _inner(names[k][1].annotation, v) for k, v in (needed | value).items() if k in names}
    return kind.model_construct(**fields)


def _inner(annotation: Any, value: Any) -> Any:
    """The parts in a value."""
    if isinstance(annotation, type) and issubclass(annotation, Part) and isinstance(value, dict):
        return _constructed(annotation, value)
    for part in typing.get_args(annotation):
        if isinstance(value, list) and typing.get_origin(annotation) is list:
            return [_inner(part, v) for v in value]
        if isinstance(value, dict) and typing.get_origin(annotation) is dict:
            return {k: _inner(typing.get_args(annotation)[1], v) for k, v in value.items()}
        if isinstance(part, type) or typing.get_origin(part):
            found = _inner(part, value)
            if found is not value:
                return found
    return value


def changed(was: Record, **parts: Any) -> Record:
    """A record of which some fields are others: parts are merged into its own, except `without`: keys of metrics to leave out."""
    whole = {name: value for name, value in was.as_json().items() if value is not None}
    gone = parts.pop("without", ())
    for name, value in parts.items():
        merged = isinstance(value, dict) and isinstance(whole.get(name), dict) and name != "error"
        whole[name] = whole[name] | value if merged else value
    whole["metrics"] = {k: v for k, v in whole["metrics"].items() if k not in gone}
    if "cell" in parts:
        whole["cell_id"] = digest(whole["cell"])
    return made_of_json(whole)


def edit(made: Record, **parts: Any) -> Record:
    """Change a record in place, as `changed` changes a copy."""
    vars(made).update(vars(changed(made, **parts)))
    return made


def cell_record(metrics, status="ok", **changes):
    """A record of a cell of its own: changes are of the cell, and of data, facts and trace."""
    names = set(CellSpec.model_fields)
    others = {k: v for k, v in changes.items() if k not in names}
    cell = {
        k: {"id": v, "dtype": "bfloat16"} if k == "model" and isinstance(v, str) else v for k, v in changes.items() if k in names
    }
    whole = {"metrics": metrics, "status": status, "facts": {"device": "a device"}} | others
    was = record().as_json()
    parts = {"cell": was["cell"] | cell, "key": was["key"], "data": was["data"], "finished": was["finished"]}
    return made_of_json(parts | whole)


def drawn():
    """Records for a page with charts, one with a name that must not become markup."""
    facts = {"training_length": 512}
    return [record("dense", None, 1.9, facts=facts), record("window", 8, 2.1, facts=facts), record(EVIL, 8, 2.2, facts=facts)]


@functools.cache
def uniform_number(layer: int, head: int, position: int, seed: int) -> float:
    """`CacheView.uniform` for one token."""
    at = torch.full((1, head + 1, 1), position)
    heads = torch.arange(head + 1)[:, None]
    view = CacheView(at, at, at, at, at, {}, torch.tensor([[[layer]]]), heads, at, 2, seed)
    return float(view.uniform()[0, head, 0])


def chooser(policy: Policy, capacity: int, seed: int):
    """The list-based version of a policy's choice."""
    bound = policy.bind(capacity)
    if isinstance(bound, SinkWindow):
        return after_sinks(bound.sinks)
    if isinstance(bound, H2O):
        return lightest(bound.window)
    return oldest if isinstance(bound, Window) else by_number(lambda *at: uniform_number(*at, seed))


@dataclass(frozen=True)
class Odd(Policy):
    """A user's policy: elementwise, with several operations and its own statistic."""

    class Decayed(Statistic):
        initial: ClassVar[float] = 0.25

        def update(self, state, attention, view):
            return state * 0.9 + attention.weights.sum(2) * 2

    statistics = (Decayed(),)
    half: float = 0.5

    def importance(self, view: CacheView):
        recent = (view.age <= 2) | (view.position < 1)
        worth = view.state(self.Decayed()) - self.half * view.uniform() + view.rank.float() * 1e-3
        return torch.where(recent, torch.full_like(worth, inf), worth.clamp(min=-1.0, max=7.5))


RECORDS = Path(__file__).parent / "records"


def working_copy(source: Path, target: Path) -> Path:
    """Write the records of a folder of either form, and their traces, into a working folder."""
    for path, record in RecordStore(source).files():
        assert isinstance(record, Record), record
        written, trace = RecordStore(target).write(record), open_trace(record, path.parent)
        if record.trace is not None and isinstance(trace, TraceFile):
            written.with_name(record.trace.file).write_bytes(trace.getvalue())
    return target
