"""What the gate holds every figure of a record to. One table: a figure without a rule is an error, and a test looks for one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from kvbench.harness.records import Record

Where = Literal["everywhere", "same machine", "bounded"]
Name = tuple[str, ...]  # of a figure in a record: ("metrics", "buckets", "3", "nll")

# Tolerances of figures that are computed the same way twice. On one machine nothing else than rounding may differ, and there
# unchanged runs gave the same bits (docs/gate.md); this leaves room for blocks of another size.
MEAN_NATS = 2e-5  # of a mean over all tokens
PART_NATS = 1e-4  # of a mean over some of them
RUN_NATS = 4e-3  # of a sum over a run of at least 32 tokens
SUM = 2e-5  # relative, of long sums and of what is computed from means


@dataclass(frozen=True)
class Held:
    """A figure that must be as it was.

    Attributes:
        check: what a difference is called.
        absolute: by how much it may differ; 0 for equality.
        relative: likewise, as a share of the baseline's.
        where: "everywhere"; on the "same machine" (device, instructions, threads, torch) in float32, where sums are rounded
            alike; or where the cache is "bounded", because a dense cache grows by as many steps as time allowed.
    """

    check: str = "figures"
    absolute: float = 0.0
    relative: float = 0.0
    where: Where = "everywhere"

    def allows(self, base: Any, now: Any) -> bool:
        """Whether the judged record may have `now` where the baseline has `base`."""
        numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (base, now))
        if not numbers:
            return bool(base == now)
        return math.isclose(base, now, rel_tol=0.0, abs_tol=max(self.absolute, self.relative * abs(base)))


@dataclass(frozen=True)
class Elsewhere:
    """A figure that another check judges.

    Attributes:
        check: which.
    """

    check: str


@dataclass(frozen=True)
class NotHeld:
    """A figure that may be anything.

    Attributes:
        because: why.
    """

    because: str


Rule = Held | Elsewhere | NotHeld


def near(absolute: float = 0.0, relative: float = 0.0) -> Held:
    """Equal on the same machine, but for rounding."""
    return Held(absolute=absolute, relative=relative, where="same machine")


EXACT = Held()
ANSWERED = Held(check="answers", where="same machine")
_MACHINE = NotHeld("a fact of the machine: where it differs, figures that depend on it are not compared")
_TIME = NotHeld("a time of one moment: the step at the end of the stream, as a ratio, decides")
_CHANGE = NotHeld("says that code changed; the figures say whether it matters")

RULES: Mapping[str, Rule] = {
    # perplexity
    "metrics.tokens": EXACT,
    "metrics.nll": near(MEAN_NATS),
    "metrics.perplexity": near(relative=SUM),
    "metrics.bits_per_byte": near(relative=SUM),
    "metrics.bytes": EXACT,
    "metrics.stream_tokens": EXACT,
    "metrics.buckets.*.nll": near(PART_NATS),
    "metrics.buckets.*.*": EXACT,
    "metrics.blocks.nll_sum.*": near(RUN_NATS, SUM),
    "metrics.blocks.tokens.*": EXACT,
    "metrics.blocks.size": EXACT,
    "metrics.texts.nll_sum.*": near(RUN_NATS, SUM),
    "metrics.texts.tokens.*": EXACT,
    "metrics.on_stride.nll_sum.*": near(RUN_NATS, SUM),
    "metrics.on_stride.tokens.*": EXACT,
    "metrics.on_stride.size": EXACT,
    "metrics.on_stride.texts.nll_sum.*": near(RUN_NATS, SUM),
    "metrics.on_stride.texts.tokens.*": EXACT,
    "metrics.facts": EXACT,  # none was told
    "metrics.facts.*.nats": near(RUN_NATS),
    "metrics.facts.*.drawn_nats": near(relative=SUM),
    "metrics.facts.*.tellings": EXACT,
    "metrics.facts.*.words_back": EXACT,
    "metrics.facts.*.words_back.*": EXACT,
    # streameval, arc_stream, lm_eval
    "metrics.questions": EXACT,
    "metrics.outcomes": ANSWERED,
    "metrics.right": ANSWERED,
    "metrics.accuracy": ANSWERED,
    "metrics.in_cache.*.questions": EXACT,
    "metrics.in_cache.*.right": ANSWERED,
    "metrics.reach": near(),
    "metrics.metric": EXACT,
    "metrics.higher_is_better": EXACT,
    "metrics.score": near(PART_NATS, SUM),
    "metrics.scores.*": near(RUN_NATS, SUM),
    "metrics.stderr": near(PART_NATS, SUM),
    "metrics.weights.*": EXACT,
    "metrics.lm_eval.*": near(PART_NATS, 1e-3),
    "metrics.requests": EXACT,
    "metrics.over_capacity": EXACT,
    "metrics.truncated": EXACT,
    # latency
    "metrics.rounds_ms.*": Elsewhere("latency"),
    "metrics.step_ms": Elsewhere("latency"),
    "metrics.calibration_ms.*": Elsewhere("latency"),
    "metrics.first_token_ms": Elsewhere("prompt"),
    "metrics.first_token_error": _TIME,
    "metrics.error": _TIME,
    "metrics.settled": _TIME,
    "metrics.sittings": _TIME,
    "metrics.steps": NotHeld("as many as the time of a turn allowed"),
    "metrics.percentiles_ms.*": _TIME,
    "metrics.spread_ms.*": _TIME,
    "latency:metrics.tokens_per_second": _TIME,
    "metrics.bookkeeping_share": _TIME,
    "metrics.position": EXACT,
    "latency:metrics.curve.*.position": EXACT,
    "metrics.curve.*.used_slots": Held(where="bounded"),
    "metrics.curve.*.attended_slots": Held(where="bounded"),
    "metrics.curve.*.step_ms": _TIME,
    "metrics.curve.*.error": _TIME,
    "metrics.curve.*.steps": NotHeld("as many as the time of a turn allowed"),
    "metrics.roofline.bytes": Held(where="bounded"),
    "metrics.roofline.operations": Held(where="bounded"),
    "metrics.roofline.ms": _MACHINE,
    "metrics.over_roofline": _TIME,
    "metrics.device.*": _MACHINE,
    "metrics.together": NotHeld("a name that is new in every run"),
    # bytes
    "latency:metrics.kv_bytes": Held(check="bytes", where="bounded"),
    "latency:metrics.state_bytes": Held(check="bytes", where="bounded"),
    "metrics.kv_bytes": Held(check="bytes"),
    "metrics.state_bytes": Held(check="bytes"),
    "metrics.expected_kv_bytes": Held(check="bytes"),
    "metrics.weight_bytes": Held(check="bytes"),
    # memory
    "metrics.allocated_bytes": Elsewhere("memory"),
    "metrics.peak_bytes": Elsewhere("memory"),
    "metrics.growth_bytes": Elsewhere("memory"),
    "metrics.flags": Elsewhere("flags"),
    "metrics.flags.*": Elsewhere("flags"),
    "metrics.how": NotHeld("what the system lets us read; peaks are compared where it is the same"),
    "memory:metrics.curve.*.position": EXACT,
    "memory:metrics.curve.*.peak_bytes": NotHeld("on the way to the peak, which is held"),
    "memory:metrics.curve.*.token_ms": _TIME,
    # what was read
    "data.ids_sha256": Elsewhere("data"),
    "data.line_tokens": EXACT,
    "data.lm_eval": NotHeld("a version: the token ids say whether it asked something else"),
    "data.*": EXACT,
    "data.prefix.*": EXACT,
    "data.texts.*": EXACT,
    # how and where
    "facts.weights_sha256": Elsewhere("data"),
    "facts.method": Elsewhere("method"),
    "facts.step": Elsewhere("method"),
    "facts.refused": Elsewhere("method"),
    "facts.plain_because": Elsewhere("method"),
    "facts.differs_from_walk": NotHeld("the check at load has its own bound, and a method beyond it is refused"),
    "facts.self_check": NotHeld("the check at load has its own bound, and a model beyond it is refused"),
    "facts.block": NotHeld("what fits into memory; it changes rounding only"),
    "facts.policy_sha256": _CHANGE,
    "facts.kv_shapes.*.*": EXACT,
    "facts.model_type": EXACT,
    "facts.training_length": EXACT,
    "facts.tokens_per_second": Elsewhere("speed"),
    "facts.calibration_ms": Elsewhere("speed"),
    "facts.seconds": _TIME,
    "facts.measured_seconds": Elsewhere("speed"),
    "facts.device": _MACHINE,
    "facts.instructions": _MACHINE,
    "facts.threads": _MACHINE,
    "facts.platform": _MACHINE,
    "facts.versions.*": _CHANGE,
}


def figures(record: Record) -> Iterator[tuple[Name, Any]]:
    """Every plain value of a record's metrics, data and facts, with its name; an empty list or mapping is a value too."""
    for part in ("metrics", "data", "facts"):
        yield from _leaves((part,), getattr(record, part))


def rule_of(record: Record, name: Name) -> Rule | None:
    """What a figure is held to; None if the table has nothing of it."""
    return _rule(str(record.cell["task"].get("name")), tuple("*" if part.isdigit() else part for part in name))


def _leaves(name: Name, value: Any) -> Iterator[tuple[Name, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves((*name, str(key)), inner)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves((*name, str(index)), inner)
    else:
        yield name, value


@cache
def _rule(task: str, name: Name) -> Rule | None:
    """The first row that fits, a task's own before those of all tasks."""
    own = {k.partition(":")[2]: rule for k, rule in RULES.items() if k.startswith(f"{task}:")}
    common = {k: rule for k, rule in RULES.items() if ":" not in k}
    return next((rule for table in (own, common) for pattern, rule in table.items() if _fits(pattern.split("."), name)), None)


def _fits(pattern: list[str], name: Name) -> bool:
    return len(pattern) == len(name) and all(p in ("*", part) for p, part in zip(pattern, name, strict=True))
