"""Regressions injected on purpose. Each is a context in which the code is broken, with the verdict that the gate must give.

Injections that change records, traces or baselines after they were measured are in tests/tampered.py.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import children
import torch

from kvbench.harness.core import plugins
from kvbench.harness.core.device import Marks
from kvbench.harness.data import lookups
from kvbench.harness.data import quiz as quiz_module
from kvbench.harness.data.prose import Prose
from kvbench.harness.data.register_machine import Program
from kvbench.harness.engine import closed_form, kivi, slot_stores, walk
from kvbench.harness.engine.budgets import Layout
from kvbench.harness.engine.loop import BlockInLayers, CachedDecoder
from kvbench.harness.engine.recompute import RecomputeDecoder
from kvbench.harness.engine.rotary import Placement, Rotation
from kvbench.harness.engine.slot_tensors import SlotTensors
from kvbench.harness.engine.slots import BUCKET, Slots
from kvbench.harness.run import child
from kvbench.harness.suite import Cell
from kvbench.harness.tasks import lm_eval, perplexity
from kvbench.harness.tasks.common import answering
from kvbench.harness.tasks.common.answers import AnsweringTask
from kvbench.harness.tasks.latency.lane import Lane
from kvbench.harness.tasks.perplexity import score_text
from kvbench.harness.tasks.trace import programs
from kvbench.policies.h2o import H2O
from kvbench.policies.sink_window import SinkWindow
from kvbench.policies.statistics import AttentionSum

Broken = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Injection:
    """A regression, and the check of the gate that detects it.

    Attributes:
        broken: context that breaks the code.
        tasks: tasks whose cells show the regression.
        caught: check that must fail or be "not comparable"; None if the gate does not detect the regression.
        because: reason that the gate does not detect the regression.
        walk: whether the regression is in the plain walk, which must then be used.
        hides: policy whose steps are slower, and by which share. A wider band hides the regression.
        shows: returns whether a cell of these tasks shows the regression. Baselines without such cells leave it out.
    """

    broken: Broken
    tasks: frozenset[str]
    caught: str | None
    because: str = ""
    walk: bool = False
    hides: tuple[str, float] | None = None
    shows: Callable[[Cell], bool] = lambda cell: True


@contextmanager
def changed(owner: object, name: str, change: Callable[..., object]) -> Iterator[None]:
    """Let `change` answer in place of a function or method, which is its first argument."""
    plain = getattr(owner, name)

    def answer(*args, **named):
        return change(plain, *args, **named)

    with patch.object(owner, name, answer):
        yield


@contextmanager
def slowdown(share: float = 0.3, only: type | None = H2O, single: bool = True, blocks: bool = True) -> Iterator[None]:
    """Steps take longer: those of one policy or all, of single tokens, blocks, or both. Never latency's yardstick."""

    def slowed(plain):
        def slower(self, tokens, valid=None, keep=None):
            started = time.perf_counter()
            result = plain(self, tokens, valid, keep)
            concerns = single if tokens.shape[1] == 1 else blocks
            if concerns and self.config.capacity != 1 and (only is None or isinstance(self.config.policy, only)):
                until = time.perf_counter() + share * (time.perf_counter() - started)
                while time.perf_counter() < until:
                    pass
            return result

        return slower

    with ExitStack() as patches:
        for decoder in (CachedDecoder, RecomputeDecoder):
            patches.enter_context(patch.object(decoder, "__call__", slowed(decoder.__call__)))
        yield


def wrong_rank() -> AbstractContextManager[None]:
    """Keys of a full cache are rotated by their neighbour's rank. Not under dense: the self-check would refuse the model."""

    def factors(plain, self, ranks, positions, steps, slots):
        right = plain(self, ranks, positions, steps, slots)
        return right if right is None or slots % BUCKET == 0 else right.roll(1, -2)  # whole buckets: nothing bounds it

    return changed(Placement, "of_keys", factors)


def other_capacity(more: int = 1) -> AbstractContextManager[None]:
    """A bounded cache has extra slots."""

    def other(plain, self, model, config, streams, dtype=None):
        asked = config if config.capacity is None else replace(config, capacity=config.capacity + more)
        plain(self, model, asked, streams, dtype)

    return changed(Layout, "__init__", other)


def wrong_head() -> AbstractContextManager[None]:
    """In the first layer, H2O evicts by the attention mass of the neighbouring head."""

    def importance(plain, self, view):
        right = plain(self, view)
        return right.roll(1, 1) if 0 in _layers(view) else right

    return changed(H2O, "importance", importance)


def _layers(view) -> set[int]:
    layer = view.layer
    return set(layer.flatten().tolist()) if isinstance(layer, torch.Tensor) else {int(layer)}


@contextmanager
def group_not_summed() -> Iterator[None]:
    """H2O counts only the first query head of a group."""
    with patch.object(AttentionSum, "update", lambda self, state, attention, view: state + attention.weights[:, :, 0]):
        yield


@contextmanager
def group_largest() -> Iterator[None]:
    """H2O counts the largest of a group's weights, not their sum."""
    with patch.object(AttentionSum, "update", lambda self, state, attention, view: state + attention.weights.amax(2)):
        yield


def softer() -> AbstractContextManager[None]:
    """Logits of bounded caches are multiplied by 0.99."""

    def attend(plain, self, layer, query, *rest):
        bounded = self.walks[0].slots.capacity is not None
        return plain(self, layer, 0.99 * query if bounded else query, *rest)

    return changed(BlockInLayers, "attend", attend)


@contextmanager
def fewer_sinks() -> Iterator[None]:
    """Sink+window keeps a sink less, and one more of the newest."""

    def band(self, capacity):
        return max(0, self.sinks - 1), capacity - max(0, self.sinks - 1)

    def importance(self, view):
        return view.position.float().masked_fill(view.position < self.sinks - 1, torch.inf)

    with patch.object(SinkWindow, "band", band), patch.object(SinkWindow, "importance", importance):
        yield


def shorter_window() -> AbstractContextManager[None]:
    """H2O protects one token fewer."""
    return changed(H2O, "importance", lambda plain, self, view: plain(replace(self, window=max(0, self.window - 1)), view))


def shared_statistics() -> AbstractContextManager[None]:
    """Make forks share statistics: additions to a fork's statistic also change the statistic of the cache."""

    def fork(plain, self, streams):
        other, tensors = plain(self, streams), self.tensors
        if len(streams) == self.streams:
            stores = (x.mapped(torch.clone) for x in (tensors.keys, tensors.values))
            copies = (x.clone() for x in (tensors.rank, tensors.position))
            other._replace(SlotTensors(*stores, *copies, tensors.states, tensors.free - tensors.row_base))
        return other

    return changed(Slots, "fork", fork)


def close_enough(digits: int) -> AbstractContextManager[None]:
    """StreamEval accepts an answer whose first digits are right."""

    def answer(plain, stream, question, gold, said, right, *rest):
        return plain(stream, question, gold, said, said[:digits] == gold[:digits], *rest)

    return changed(answering, "Answer", answer)


@contextmanager
def lenient(accepts: Callable[[str, str], bool]) -> Iterator[None]:
    """Another rule for right answers to generated questions."""

    def is_exact(said, target):
        return accepts(said.strip(), target.strip())

    with patch.object(lookups, "is_exact", is_exact), patch.object(lm_eval, "is_exact", is_exact):
        yield


@contextmanager
def anywhere() -> Iterator[None]:
    """StreamEval accepts an answer that has the right one in it."""

    def is_right(completion, gold):
        return gold in completion

    judge = classmethod(lambda cls, options, completion, gold: is_right(completion, gold))
    lenient = partial(answering.answer_questions, is_right=is_right)
    with patch.object(AnsweringTask, "is_right", judge), patch.object(answering, "answer_questions", lenient):
        yield


def all_but_the_last_word() -> AbstractContextManager[None]:
    """An answer is right if the words of a trace are, whatever its last one is."""

    def judged(plain, prompt, answer, options):
        steps = itertools.islice(Program.from_prompt(prompt.split()).steps(), 2 * options.steps)
        trace = [word for step in steps for word in step.words]
        return replace(plain(prompt, answer, options), right=answer.split()[:-1] == trace[:-1])

    return changed(programs, "judged", judged)


@contextmanager
def larger_scale(times: float = 1.1) -> Iterator[None]:
    """Scales of coded K and V are stored too large."""
    plain = slot_stores.encoded

    def encoded(x, codec):
        codes, scale, zero = plain(x, codec)
        return codes, times * scale, zero

    with patch.object(slot_stores, "encoded", encoded), patch.object(kivi, "encoded", encoded):
        yield


def farther_in_the_stream() -> AbstractContextManager[None]:
    """In positions of the stream, a token counts one too many before it once any has been evicted."""

    def of_queries(plain, self, ranks, steps, slots):
        return plain(self, ranks, steps + (steps > ranks) if self.mode == "stream" else steps, slots)

    return changed(Placement, "of_queries", of_queries)


@contextmanager
def untimed_forward() -> Iterator[None]:
    """The clock of a step stands still while the model reads the token."""

    def time_round(self):
        for _ in range(self._steps_per_round):
            self.step()
        marks = Marks(self.job.model.device)
        for _ in range(self._steps_per_round + 1):
            marks.mark()
        self.round_ms.append(marks.milliseconds())

    with patch.object(Lane, "time_round", time_round):
        yield


def half_of_the_time(only: str = "h2o") -> AbstractContextManager[None]:
    """A policy's steps are reported as taking half as long."""

    def time_round(plain, self):
        plain(self)
        if isinstance(self.job.config.policy, plugins.policy_class(only)):
            self.round_ms[-1] = [ms / 2 for ms in self.round_ms[-1]]

    return changed(Lane, "time_round", time_round)


def narrower_band(longer_than: int = 1) -> AbstractContextManager[None]:
    """The closed form's window is one token short in longer blocks."""

    def banded(plain, query, keys, values, window, *rest, **more):
        return plain(query, keys, values, window - (query.shape[3] > longer_than), *rest, **more)

    return changed(closed_form, "banded", banded)


def late_rope(first: int) -> AbstractContextManager[None]:
    """RoPE is off by one position from some position on."""

    def factors(plain, self, positions, dtype, longest):
        return plain(self, positions + (positions >= first), dtype, longest + 1)

    return changed(Rotation, "factors", factors)


def late_attention(first: int) -> AbstractContextManager[None]:
    """Attention outputs of H2O's blocks are 2 % too small, late in the stream."""

    def attend(plain, self, layer, *given):
        out = plain(self, layer, *given)
        late = (self._blocks[0].tokens_before or 0) >= first and isinstance(self.walks[0].slots.policy, H2O)
        return out * 0.98 if late else out

    return changed(BlockInLayers, "attend", attend)


def worse(nats: float = 0.005) -> AbstractContextManager[None]:
    """Every token's NLL is higher: half a percent of perplexity."""
    return changed(score_text, "cross_entropy", lambda plain, *args, **kwargs: plain(*args, **kwargs) + nats)


def worse_last(share: float = 0.01) -> AbstractContextManager[None]:
    """The last NLL of every block is higher."""

    def losses(plain, *args, **kwargs):
        right = plain(*args, **kwargs)
        right[-1] *= 1 + share
        return right

    return changed(score_text, "cross_entropy", losses)


@contextmanager
def wrong_mean(times: float = 0.8) -> Iterator[None]:
    """The mean NLL is multiplied by a factor wherever it is computed."""
    plain = perplexity.nll_figures

    def nll_figures(*args, **kwargs):
        found = plain(*args, **kwargs)
        return found | {"nll": times * found["nll"]}

    with patch.object(perplexity, "nll_figures", nll_figures), patch.object(score_text, "nll_figures", nll_figures):
        yield


@contextmanager
def half_the_bits() -> Iterator[None]:
    """Bits per byte are halved."""
    plain = perplexity.Perplexity.run

    def run(options, job):
        found = plain(options, job)
        return type(found).from_json(found.as_json() | {"bits_per_byte": found.bits_per_byte / 2})

    with patch.object(perplexity.Perplexity, "run", staticmethod(run)):
        yield


@contextmanager
def doubled_state() -> Iterator[None]:
    """The policy's state takes twice the bytes."""
    plain = CachedDecoder.state_bytes.fget
    with patch.object(CachedDecoder, "state_bytes", property(lambda self: 2 * plain(self))):
        yield


@contextmanager
def fails(every: int = 7) -> Iterator[None]:
    """Every few blocks, reading fails."""
    plain, calls = CachedDecoder.__call__, iter(range(1, 10**9))

    def call(self, tokens, valid=None, keep=None):
        if tokens.shape[1] > 16 and next(calls) % every == 0:
            raise RuntimeError("injected")
        return plain(self, tokens, valid, keep)

    with patch.object(CachedDecoder, "__call__", call):
        yield


def other_gold(shifted: bool) -> AbstractContextManager[None]:
    """The right answers are those of the next question, or one in nine is wrong. The text does not change."""

    def quiz(plain, script, tokenizer):
        made = plain(script, tokenizer)
        right = [q.answer for q in made.questions]
        other = right[1:] + right[:1] if shifted else ["0" if i % 9 == 0 else answer for i, answer in enumerate(right)]
        return replace(made, questions=tuple(replace(q, answer=a) for q, a in zip(made.questions, other, strict=True)))

    return changed(quiz_module, "quiz", quiz)


def other_text() -> AbstractContextManager[None]:
    """Replace a word of the generated text."""
    return changed(Prose, "text", lambda plain, self, length: plain(self, length).replace("river", "brook"))


def broken_kernel() -> AbstractContextManager[None]:
    """The compiled walk is wrong. The fast check refuses it, and the plain walk gives the same numbers."""

    def kernels_for(plain, *args):
        made = plain(*args)
        return made if made.walk is None else made._replace(walk=_Wrong(made.walk))

    return changed(walk, "kernels_for", kernels_for)


class _Wrong:
    """A walk whose outputs are 1.5 times too large."""

    def __init__(self, right) -> None:
        self._right = right

    def __getattr__(self, name):
        return getattr(self._right, name)

    def __call__(self, *args):
        return 1.5 * self._right(*args)


def refused_model() -> AbstractContextManager[None]:
    """RoPE is off by one position everywhere. The self-check at load refuses every model."""
    return changed(Rotation, "factors", lambda plain, self, at, *rest: plain(self, at // 2, *rest))


@contextmanager
def leak() -> Iterator[None]:
    """The processes of memory cells keep a copy of what they read."""
    with patch.object(child, "run_child", children.leaking):
        yield


def _of(broken: Broken, tasks: str, caught: str | None, **more) -> Injection:
    return Injection(broken, frozenset(tasks.split()), caught, **more)


def _coded(codec: str) -> Callable[[Cell], bool]:
    return lambda cell: cell.kv is not None and cell.kv.name == codec


NATS, ASKED, TASKS = "perplexity", "streameval", "lm_eval"
LATE = 10_000  # tokens into the stream where late injections begin
INJECTIONS: dict[str, Injection] = {
    "H2O: the wrong head in one layer": _of(wrong_head, NATS, "exactness", walk=True),
    "keys turned to a neighbour's rank": _of(wrong_rank, NATS, "exactness", walk=True),
    "capacity c + 1": _of(other_capacity, f"{NATS} {ASKED}", "bytes", walk=True),
    "capacity c - 1": _of(lambda: other_capacity(-1), f"{NATS} {ASKED}", "bytes", walk=True),
    "group's largest weight, not its sum": _of(group_largest, NATS, "exactness", walk=True),
    "logits x0.99 in bounded caches": _of(softer, NATS, "exactness"),
    "a sink less, one more of the newest": _of(fewer_sinks, NATS, "exactness"),
    "H2O's window is a token shorter": _of(shorter_window, NATS, "exactness", walk=True),
    "a fork shares its cache's statistics": _of(shared_statistics, ASKED, "answers", walk=True),
    "three digits of five are enough": _of(lambda: close_enough(3), ASKED, "answers"),
    "the last digit is ignored": _of(lambda: lenient(lambda said, target: said[:-1] == target[:-1]), TASKS, "trace"),
    "any number is right": _of(lambda: lenient(lambda said, target: said.isdigit()), TASKS, "answers"),
    "the forward pass is not timed": _of(untimed_forward, "latency", "status"),
    "H2O's times halved": _of(half_of_the_time, "latency", "latency"),
    "closed form c - 1": _of(narrower_band, NATS, "method"),
    "closed form c - 1 in blocks > 256": _of(lambda: narrower_band(256), NATS, "exactness"),
    "group not summed": _of(group_not_summed, NATS, "exactness", walk=True),
    "RoPE +1 from 300": _of(lambda: late_rope(300), NATS, "exactness"),  # dense reads streams of 512 tokens
    "attention x0.98 after 10,000": _of(lambda: late_attention(LATE), NATS, "exactness"),
    "last NLL of each block +1 %": _of(worse_last, NATS, "exactness"),
    "every token +0.005 nats": _of(worse, NATS, "quality"),
    "every token +0.0009 nats": _of(lambda: worse(0.0009), NATS, "figures"),
    "mean NLL x0.8": _of(wrong_mean, NATS, "figures"),
    "bits per byte halved": _of(half_the_bits, NATS, "figures"),
    "state bytes doubled": _of(doubled_state, f"{NATS} {ASKED}", "bytes"),
    "fails at random": _of(fails, NATS, "status"),
    "gold answers shifted one line": _of(lambda: other_gold(shifted=True), ASKED, "answers"),
    "one gold answer in nine wrong": _of(lambda: other_gold(shifted=False), ASKED, "answers"),
    "generated text changed": _of(other_text, NATS, "data"),
    "walk kernel broken": _of(broken_kernel, NATS, "method"),
    "RoPE broken: the model is refused": _of(refused_model, NATS, "status"),
    "leak: peak memory many times as large": _of(leak, "memory", "memory"),
    "H2O's steps 30 % slower": _of(lambda: slowdown(blocks=False), "latency", "latency", hides=("h2o", 0.3)),
    "everything 2x slower": _of(lambda: slowdown(1.0, only=None), "latency", "latency", hides=("dense", 1.0)),
    "int4's scale x1.1 (formats)": _of(larger_scale, NATS, "exactness", shows=_coded("int4")),
    "KIVI-2's scale x1.1 (formats)": _of(larger_scale, NATS, "exactness", shows=_coded("kivi2")),
    "one too far in the stream (formats)": _of(
        farther_in_the_stream, NATS, "exactness", walk=True, shows=lambda cell: cell.positions == "stream" and cell.kv is None
    ),
    "the answer is anywhere (formats)": _of(anywhere, ASKED, "trace", shows=lambda cell: cell.task.highest < 100),
    "the last word is ignored (traces)": _of(all_but_the_last_word, "trace", "trace"),
    "evaluation blocks 5x slower": _of(lambda: slowdown(4.0, only=None, single=False), NATS, "speed"),
}
