"""The Triton kernels over shapes of heads, groups, caches and dtypes, one layer at a time, against the plain code.

On a CPU they run in Triton's interpreter, where every program takes milliseconds: slots are filled here instead of read in.

In float32 the results are the plain ones. In 16 bits two ways of computing round differently: both are compared with the plain
code in float64, and the kernels' error may be no more than twice the plain one.
"""

import itertools
from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import pytest
import torch
from factories import Odd, needs_triton, slots_for
from helpers import DEVICE, H2O, CacheConfig, Dense, Random, SinkWindow
from torch import Tensor

from kvbench.harness.engine import rotary
from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.method import TOKEN_BY_TOKEN, Method
from kvbench.harness.engine.plan import Block, Step
from kvbench.harness.engine.rotary import LONGEST_STREAM, Rotation
from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import LayerShape, Slots
from kvbench.harness.engine.walk import Walk
from kvbench.harness.kernels import choose, cuda, cuda_attention
from kvbench.policies import Policy

pytestmark = [needs_triton, pytest.mark.usefixtures("bfloat16_as_on_a_gpu"), pytest.mark.slow("Triton's interpreter")]

BY_KERNELS = Method(fill=False, closed_form=False, walk_kernel=True, step_kernel=True)
LIMIT = 45  # tokens; the largest distance of mode `clamped`
LONGEST = 1024  # tokens of a stream here, so that tables of angles are small


class Case(NamedTuple):
    """A layer and its cache; or, of every field, the values it may have."""

    group: Any  # int
    dims: Any  # (int, int): of a key and a value
    dtype: Any
    mode: Any  # a position mode, or "none" for a layer without RoPE
    cache: Any  # (int or None, int): capacity, and tokens seen before
    rows: Any  # (int, int, int): layers, streams, KV heads
    parts: Any  # int: of a row, if it has so many blocks
    tables: Any  # int: levels of the tables of angles
    policy: Any
    partial: Any  # bool: RoPE of half the dims


STEPS = Case(
    group=[1, 4, 7, 17],
    dims=[(8, 8), (80, 80), (24, 16)],
    dtype=[torch.bfloat16, torch.float16, torch.float32],
    mode=["cache", "stream", "clamped", "none"],
    cache=[(21, 900), (37, 20), (37, 37), (300, 100), (None, 40)],
    rows=[(1, 2, 1), (2, 1, 1), (1, 1, 2)],
    parts=[3, 1],
    tables=[2, 1],
    policy=[H2O(), Random(), Odd()],
    partial=[False, True],
)
BLOCKS = STEPS._replace(
    group=[3, 1, 17],
    dims=[(24, 16), (80, 80)],
    dtype=[torch.bfloat16, torch.float32],
    mode=["cache", "clamped"],
    cache=[(21, 900), (37, 35), (70, 20)],
    rows=[(1, 2, 1), (2, 1, 2)],
    parts=[2, 1],
)
FURTHER = [  # what these leave out, once each
    Case(3, (64, 64), torch.bfloat16, "cache", (70, 400), (1, 1, 1), 3, 2, SinkWindow(2), False),
    Case(8, (96, 96), torch.float16, "stream", (131, 131), (1, 1, 1), 1, 1, SinkWindow(2), True),
    Case(71, (128, 128), torch.float32, "clamped", (70, 400), (1, 1, 1), 3, 1, H2O(), False),
    Case(3, (256, 256), torch.float32, "stream", (21, 900), (1, 1, 1), 1, 2, SinkWindow(2), False),
    Case(8, (192, 128), torch.bfloat16, "clamped", (37, 20), (1, 1, 1), 3, 1, SinkWindow(2), False),
]


def covering(choices: Case) -> list[Case]:
    """Cases in which every two values of different fields occur together."""
    fields = range(len(choices))
    pairs = {((i, a), (j, b)) for i, j in itertools.combinations(fields, 2) for a, b in indexed(choices[i], choices[j])}
    cases = []
    while pairs:
        chosen = dict(min(pairs))
        for i in (i for i in fields if i not in chosen):
            new = [sum(tuple(sorted([(i, a), other])) in pairs for other in chosen.items()) for a in range(len(choices[i]))]
            chosen[i] = new.index(max(new))
        pairs -= set(itertools.combinations(sorted(chosen.items()), 2))
        cases.append(Case(*(choices[i][chosen[i]] for i in fields)))
    return cases


def indexed(a: Sequence[Any], b: Sequence[Any]):
    return itertools.product(range(len(a)), range(len(b)))


@pytest.fixture
def in_triton(monkeypatch):
    monkeypatch.setitem(choose._MODULES, DEVICE.type, cuda)


def rotation_of(case: Case) -> Rotation | None:
    """RoPE of pairs of a dim in the first half and one in the second, of all dims or of the first half of them."""
    if case.mode == "none":
        return None
    dims = case.dims[0]
    pairs = dims // 4 if case.partial else dims // 2
    frequencies = torch.zeros(dims // 2, dtype=torch.float64)
    frequencies[:pairs] = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    order = torch.cat([torch.arange(2 * pairs).view(2, pairs).T.reshape(-1), torch.arange(2 * pairs, dims)])
    return Rotation(frequencies, order.to(DEVICE), pairs)


def slots_of(case: Case, dtype: torch.dtype, window: int | None = None, seed: int = 0) -> Slots:
    """Slots filled at random. Their numbers are of the case's dtype, and then of `dtype`.

    The slot of the next token holds what must not count: a key that is no number, a large value, which a kernel may multiply by
    0, and the account of a token.
    """
    (capacity, seen), (layers, streams, heads) = case.cache, case.rows
    shape = LayerShape(heads, case.group, *case.dims, rotation_of(case), window)
    config = CacheConfig(Dense() if capacity is None else case.policy, capacity, seed=2**40 + 5)
    indices = list(range(1, 2 * layers, 2))
    slots = slots_for(shape, config, indices, 4, streams, dtype)
    tensors, generator = slots.tensors, torch.Generator().manual_seed(seed)
    tensors.keys.tensor.copy_(torch.randn(tensors.keys.tensor.shape, generator=generator).to(case.dtype))
    tensors.values.tensor.copy_(torch.randn(tensors.values.tensor.shape, generator=generator).to(case.dtype))
    held = seen if slots.capacity is None else min(seen, slots.capacity)
    full = slots.capacity is not None and seen >= slots.capacity
    for r in range(len(tensors.rank)):
        places = torch.randperm(held + 1, generator=generator) if full else torch.arange(held + 1)
        taken, free = places[:held], places[held]
        ranks = torch.randperm(held, generator=generator).to(DEVICE)
        positions = torch.arange(held, device=DEVICE) * seen // held
        tensors.rank[r, taken], tensors.position[r, taken] = ranks, positions[ranks]
        tensors.free[r] = tensors.row_base[r] + free
        for state in tensors.states.values():
            state[r, taken] = torch.randperm(held, generator=generator).to(DEVICE, state.dtype) / 2
            state[r, free] = 1e9
        tensors.keys.tensor[r, free], tensors.values.tensor[r, free] = float("nan"), float("nan")
        tensors.rank[r, free], tensors.position[r, free] = 1, seen // 2
    return slots


class Read(NamedTuple):
    """Result of reading a block."""

    out: Tensor  # [L, B, H * G, T, E]
    mass: Tensor | None  # of a step. [R, G, S]
    slots: Slots


def read(case: Case, dtype: torch.dtype, method: Method, tokens: int = 1, valid: Tensor | None = None) -> Read:
    """Take a block in."""
    slots, (layers, streams, heads), seen = slots_of(case, dtype), case.rows, case.cache[1]
    walk = Walk(slots, "cache" if case.mode == "none" else case.mode, LIMIT, method)
    assert method == TOKEN_BY_TOKEN or "step kernel" in walk.offers
    assert tokens == 1 or ("compiled walk" in walk.offers) == method.walk_kernel
    generator = torch.Generator().manual_seed(1)
    sizes = [(heads * case.group, case.dims[0]), (heads, case.dims[0]), (heads, case.dims[1])]
    qkv = [torch.randn(layers, streams, n, tokens, d, generator=generator) for n, d in sizes]
    by_layer = zip(slots.layers, *(x.to(DEVICE, case.dtype).to(dtype) for x in qkv), strict=True)
    steps = torch.arange(seen, seen + tokens, device=DEVICE).expand(streams, -1)
    block = Block(steps, valid, seen if valid is None else None, torch.zeros_like(steps))
    plan = walk.begin(block)
    out = torch.stack([walk.attend(plan, layer, *x, Terms(0.7 * case.dims[0] ** -0.5)) for layer, *x in by_layer])
    walk.end(plan, block)
    return Read(out, plan.observed.get("weights") if isinstance(plan, Step) else None, slots)


def check_close(ours: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    else:
        assert (ours.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max()


def check(case: Case, **block) -> None:
    """The kernels' outputs, softmax weights, statistics, and what is kept where, are the plain ones."""
    ours, plain = (read(case, case.dtype, method, **block) for method in (BY_KERNELS, TOKEN_BY_TOKEN))
    exact = read(case, torch.float64, TOKEN_BY_TOKEN, **block)
    valid = block.get("valid")
    counted = slice(None) if valid is None else valid[:, 0]
    check_close(*(x.out[:, counted] for x in (ours, plain, exact)), case.dtype)
    if valid is None and ours.mass is not None:
        check_close(ours.mass, plain.mass, exact.mass, case.dtype)
        assert ours.mass.dtype == torch.float32
    check_kept(ours.slots, plain.slots, exact.slots, case.dtype)


def check_kept(ours: Slots, plain: Slots, exact: Slots, dtype: torch.dtype) -> None:
    for name in ("free", "rank", "position"):
        assert torch.equal(getattr(ours.tensors, name), getattr(plain.tensors, name)), name
    for name in ("keys", "values"):
        mine, plainly = (getattr(x.tensors, name).tensor for x in (ours, plain))
        torch.testing.assert_close(mine, plainly, atol=0, rtol=0, equal_nan=True)
    for state in ours.tensors.states:
        check_close(*(x.tensors.states[state] for x in (ours, plain, exact)), dtype)


@pytest.fixture
def small_tables(monkeypatch):
    def small(case: Case) -> None:
        """Tables of one level or two, and as many parts."""
        monkeypatch.setattr(rotary, "LONGEST_STREAM", LONGEST)
        monkeypatch.setattr(cuda_attention, "LONGEST_STREAM", LONGEST)
        monkeypatch.setattr(cuda_attention, "_TABLE_ROWS", LONGEST if case.tables == 1 else 16)
        size = case.rows[1] * case.rows[2]
        monkeypatch.setattr(cuda_attention, "_PROGRAMS_TO_FILL_CHIP", case.parts * size * ceil(case.group / 16))
        if case.parts > 1:
            monkeypatch.setattr(cuda_attention, "_MAX_TILE_BYTES", 16)  # 16 slots

    return small


@pytest.mark.parametrize("case", [*covering(STEPS), *FURTHER], ids=str)
def test_a_step_is_the_plain_one(in_triton, small_tables, case):
    small_tables(case)
    check(case)


@pytest.mark.parametrize("case", covering(BLOCKS), ids=str)
def test_a_walk_is_the_plain_one(in_triton, small_tables, case):
    small_tables(case)
    check(case, tokens=4)


@pytest.mark.parametrize("group", [4, 17])
def test_more_parts_than_are_joined_at_once(in_triton, monkeypatch, group):
    """19 parts of 16 slots."""
    monkeypatch.setattr(cuda_attention, "_MAX_TILE_BYTES", 16)
    case = Case(group, (8, 8), torch.float32, "cache", (300, 900), (1, 1, 1), 19, 1, H2O(), False)
    assert ceil(301 / 16) > cuda_attention._JOINED_PARTS
    check(case)


def test_softmax_weights_of_more_slots_than_a_program_takes(in_triton):
    case = Case(2, (8, 8), torch.float32, "cache", (1100, 1300), (1, 1, 1), 1, 1, H2O(), False)
    assert case.cache[0] + 1 > cuda_attention.BOOKKEEPING_BLOCK
    check(case)


def test_parts_whose_scores_are_far_apart_are_joined():
    """The highest score is in the last part but one, by more than an exponential in float32 can bridge."""
    rows, group, parts, dims = 2, 3, 37, 24
    generator = torch.Generator().manual_seed(1)
    most = torch.randn(rows, parts, group, generator=generator).to(DEVICE)
    most[:, -2:] += 200
    most[:, 3] = float("-inf")  # a part without a token
    total = torch.rand(rows, parts, group, generator=generator).to(DEVICE)
    parted = torch.randn(rows, parts, group, dims, generator=generator).to(DEVICE)
    out, unread = torch.zeros(rows, group, 1, dims, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    sizes = {"G": group, "E": dims, "WIDE": 32, "CHUNK": cuda_attention._JOINED_PARTS, "BLOCK": cuda_attention.BOOKKEEPING_BLOCK}
    join = cuda_attention.kernels().join[(rows * group, 1)]
    join(parted, most, total, most, out, unread, 1, parts, 1, **sizes, ASKED=False, PLACE=False)
    share = (most - most.amax(1, keepdim=True)).exp()
    expected = (share[..., None] * parted).sum(1) / (share * total).sum(1)[..., None]
    torch.testing.assert_close(out[:, :, 0], expected)


@pytest.mark.parametrize(("mode", "limit"), [("stream", LIMIT), ("clamped", 2**17)])
def test_angles_of_a_very_long_stream(in_triton, monkeypatch, mode, limit):
    """The tables are of the size that they have outside of tests; the last token is the last one that a stream may have."""
    monkeypatch.setitem(globals(), "LIMIT", limit)
    rows = cuda_attention._TABLE_ROWS
    assert LONGEST_STREAM > limit > rows or mode == "stream"
    check(Case(2, (8, 8), torch.float32, mode, (21, LONGEST_STREAM - 1), (1, 1, 1), 1, 2, H2O(), False))


@pytest.mark.parametrize("seen", [400, 20])
def test_streams_of_unequal_length(in_triton, small_tables, seen):
    """A token that does not count leaves everything as it was, where a stream is full and where it fills."""
    case = covering(BLOCKS)[0]._replace(rows=(1, 3, 1), cache=(37, seen))
    small_tables(case)
    check(case, valid=torch.tensor([[True], [False], [True]], device=DEVICE))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="only the interpreter lets the order of programs be chosen")
@pytest.mark.parametrize("tokens", [1, 4])
def test_programs_may_run_in_any_order(in_triton, small_tables, monkeypatch, tokens):
    """No program counts on what another one of the same launch writes: not even the new token's slot."""
    from triton.runtime.interpreter import InterpreterBuilder

    case = Case(17, (24, 16), torch.float32, "stream", (21, 300), (1, 1, 1), 2, 2, H2O(), False)
    small_tables(case)
    first = read(case, case.dtype, BY_KERNELS, tokens)
    set_place = InterpreterBuilder.set_grid_idx

    def set_from_the_end(self, *place):
        set_place(self, *(n - 1 - i for n, i in zip(self.grid_dim, place, strict=True)))

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", set_from_the_end)
    last = read(case, case.dtype, BY_KERNELS, tokens)
    assert torch.equal(first.out, last.out)
    check_kept(last.slots, first.slots, first.slots, case.dtype)
    assert torch.equal(last.slots.tensors.position, first.slots.tensors.position)


class Bookkeeping(NamedTuple):
    """A cache of which only the bookkeeping is looked at."""

    capacity: int
    seen: int
    policy: Policy = H2O()
    group: int = 2
    window: int | None = None  # a sliding window, in tokens
    ties: bool = False  # every statistic is 0 or 1


BOOKKEEPING = {
    "one slot": Bookkeeping(1, 9, Random()),
    "a slot more than a block": Bookkeeping(1024, 1800),
    "two blocks": Bookkeeping(1500, 5000, Odd()),
    "ties between blocks": Bookkeeping(1500, 5000, H2O(9), ties=True),
    "a group of 71, just full": Bookkeeping(60, 60, group=71),
    "a window that has passed some": Bookkeeping(100, 500, window=300),
    "a window that has just passed the oldest": Bookkeeping(100, 500, window=501),
    "not full, over some of the slots": Bookkeeping(600, 300, Odd(), group=3),
    "not full, over two blocks": Bookkeeping(1500, 1200),
}


@pytest.mark.parametrize("of", BOOKKEEPING.values(), ids=list(BOOKKEEPING))
def test_bookkeeping_is_the_plain_one(of):
    """Statistics, ranks and the next free slot, for the rows of two layers, two streams and two heads."""
    case = Case(of.group, (8, 8), torch.float32, "cache", (of.capacity, of.seen), (2, 2, 2), 1, 1, of.policy, False)
    generator = torch.Generator().manual_seed(1)
    full, after = of.seen >= of.capacity, []
    for by_kernel in (True, False):
        slots = slots_of(case, torch.float32, of.window)
        attended = slots.attended(None if full else of.seen + 1)
        rows, step = Rows(slots, attended), torch.full((8,), of.seen, device=DEVICE)
        if of.ties:
            for state in slots.tensors.states.values():
                state.remainder_(2).floor_()
        rows.place(step.clamp(max=of.capacity), step, step[:4, None, None])
        if not after:
            scores = torch.randn(8, of.group, attended, generator=generator).to(DEVICE)
            mass = (scores * (0 if of.ties else 1)).masked_fill(~rows.used(), float("-inf")).softmax(-1)
        if by_kernel:
            cuda.CudaReleaseKernel.from_slots(slots)(slots, rows, mass if slots.tensors.states else None, step, full)
        else:
            rows.update({"weights": mass}, None)
            rows.release(None, full, False)
        after.append(slots)
    check_kept(after[0], after[1], after[1], torch.float32)


@pytest.mark.parametrize("group", [1, 4, 17, 71])
@pytest.mark.parametrize("capacity", [1, 20, 131, 1000, 4097, 100_003])
def test_parts_cover_the_slots_once(group, capacity):
    """No part is empty, and there are no more programs than fill the chip unless rows alone are more."""
    layers = LayerShape(1, group, 8, 8, None, None)
    slots = slots_for(layers, CacheConfig(Random(), capacity), [0], 1, dtype=torch.float16)
    attention, chunks = cuda_attention.AttentionKernels(slots, "cache", LIMIT, None), ceil(group / 16)
    for size, attended in itertools.product([1, 3, 8, 64, 263, 264, 1000], {1, min(256, capacity + 1), capacity + 1}):
        parts, part = attention.parts(size, attended)
        covered = [range(i * part, min((i + 1) * part, attended)) for i in range(parts)]
        assert list(itertools.chain(*covered)) == list(range(attended))
        assert all(covered)
        assert parts == 1 or size * chunks * parts <= cuda_attention._PROGRAMS_TO_FILL_CHIP
        assert parts == 1 or part % attention._sizes["BLOCK"] == 0
