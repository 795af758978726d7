"""The kernels for CUDA, in Triton: a decode step's attention, the bookkeeping after it, and the walk of a block.

They compute the same as their counterparts in C (`step.c`, `release.c`, `walk.c`), directly on the slots: in no order, with
unrotated keys that are rotated when they are read. A decode step is split over slots, so that a few streams fill the chip, and
its parts are joined afterwards. A walk has one program per stream and KV head. Sums and weights are float32.

Axis letters: B streams, H KV heads, N = B * H rows, G query heads of a KV head, T tokens, S slots, P pairs of dims, D key dim,
E value dim.
"""

# Triton parses the source of its functions: it allows no type annotations but tl.constexpr. Constants are in capitals.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform(position, head, layer, seed):
    """`CacheView.uniform`."""
    x = position * -7046029254386353131 + tl.cast(head, tl.int64) * -4658895280553007687
    x += tl.cast(layer, tl.int64) * 6364136223846793005 + seed
    x = (x ^ (x >> 29)) * -7046029254386353131
    x = (x ^ (x >> 29)) * -4658895280553007687
    return tl.cast((x >> 40) & 0xFFFFFF, tl.float32) / 16777216.0


@triton.jit
def rotated(
    re, im, rank, position, step, low, high, limit, MODE: tl.constexpr, LEVEL: tl.constexpr, D: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Rotate vectors by RoPE. re, im: [M, P]; rank, position: [M].

    MODE: 0 no RoPE, 1 by rank, 2 by position, 3 by distance up to `limit`. LEVEL: rows of a table and the stride of `high`;
    if it is 0, `high` is not used.
    """
    if MODE > 0:
        at = rank
        if MODE == 2:
            at = position
        elif MODE == 3:
            at = limit - tl.minimum(tl.maximum(step - position, 0), limit)
        pair = tl.arange(0, P)[None, :]
        known = pair < D // 2
        row = at
        if LEVEL > 0:
            row = at % LEVEL
        place = row[:, None] * (D // 2) * 2 + pair * 2
        c = tl.load(low + place, mask=known, other=1.0)
        s = tl.load(low + place + 1, mask=known, other=0.0)
        if LEVEL > 0:
            place = (at // LEVEL)[:, None] * (D // 2) * 2 + pair * 2
            c_far = tl.load(high + place, mask=known, other=1.0)
            s_far = tl.load(high + place + 1, mask=known, other=0.0)
            c, s = c * c_far - s * s_far, c * s_far + s * c_far
        re, im = re * c - im * s, re * s + im * c
    return re, im


@triton.jit
def _pairs(base, row, seen, D: tl.constexpr, P: tl.constexpr, M: tl.constexpr):
    """Load the vectors of some rows as pairs: re, im [M, P] float32."""
    d = tl.arange(0, 2 * P)[None, :]
    x = tl.load(base + row[:, None] * D + d, mask=seen[:, None] & (d < D), other=0.0)
    return tl.split(tl.reshape(x.to(tl.float32), (M, P, 2)))


@triton.jit
def _take_in(
    s, at, new_re, new_im, new_value, q_re, q_im, keys, values, rank, position, row, slots, attended, now, low, high, limit, most,
    sums, weighted, NEW: tl.constexpr, MODE: tl.constexpr, LEVEL: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    E: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a block of slots to an online softmax. -> scores [GROUP, BLOCK], and the running `most`, `sums` and `weighted`.

    s: [BLOCK]. q_re, q_im: [GROUP, P], rotated and scaled. most, sums: [GROUP]. weighted: [GROUP, WIDE]. If NEW, slot `at`
    holds new_re, new_im [P] and new_value [WIDE], which may not be visible in memory yet.
    """
    e = tl.arange(0, WIDE)
    ranks = tl.load(rank + row + s, mask=s < attended, other=slots)
    positions = tl.load(position + row + s, mask=s < attended, other=0)
    held = ranks < slots
    re, im = _pairs(keys, row + s, held, D, P, BLOCK)
    v = tl.load(values + (row + s)[:, None] * E + e[None, :], mask=held[:, None] & (e < E)[None, :], other=0.0).to(tl.float32)
    if NEW:
        new = (s == at)[:, None]
        re, im, v = tl.where(new, new_re[None, :], re), tl.where(new, new_im[None, :], im), tl.where(new, new_value[None, :], v)
    ranks, positions = tl.where(held, ranks, 0), tl.where(held, positions, 0)
    re, im = rotated(re, im, ranks, positions, now, low, high, limit, MODE, LEVEL, D, P)
    score = tl.sum(q_re[:, None, :] * re[None, :, :] + q_im[:, None, :] * im[None, :, :], 2)
    score = tl.where(held[None, :], score, float("-inf"))
    higher = tl.maximum(most, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight, kept = tl.exp(score - base[:, None]), tl.exp(most - base)
    weighted = weighted * kept[:, None] + tl.sum(weight[:, :, None] * v[None, :, :], 1)
    return score, higher, sums * kept + tl.sum(weight, 1), weighted


@triton.jit
def attend(
    query, key, value, order, keys, values, rank, position, free, low, high, out, most, total, scores, first, slots, attended,
    part, limit, scaling, MODE: tl.constexpr, LEVEL: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ASKED: tl.constexpr,
):  # fmt: skip
    """A part of the slots of a row: one token's scores, their maximum and sum of exponentials, and the values so weighted.

    query: [N, G, D], key: [N, D], in the model's order, unrotated; value: [N, E]; order: [D]. keys: [N, slots, D]; values:
    [N, slots, E]; rank, position: [N, slots]; free: [N], the new token's slot, counted from `first`. out: [N, parts, G, E]; most,
    total: [N, parts, G]; scores: [N, G, attended], if ASKED. Grid: (N, parts).
    """
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = n * slots
    at = tl.load(free + n) - first - row
    now = tl.load(position + row + at)
    g, pair, e = tl.arange(0, GROUP), tl.arange(0, P), tl.arange(0, WIDE)
    one, other = 2 * pair < D, 2 * pair + 1 < D
    d_re, d_im = tl.load(order + 2 * pair, mask=one, other=0), tl.load(order + 2 * pair + 1, mask=other, other=0)
    asks, is_query = query + (n * G + g[:, None]) * D, (g < G)[:, None]
    q_re = tl.load(asks + d_re[None, :], mask=is_query & one[None, :], other=0.0).to(tl.float32) * scaling
    q_im = tl.load(asks + d_im[None, :], mask=is_query & other[None, :], other=0.0).to(tl.float32) * scaling
    same = tl.zeros((GROUP,), tl.int64)
    q_re, q_im = rotated(q_re, q_im, same + tl.load(rank + row + at), same + now, now, low, high, limit, MODE, LEVEL, D, P)
    k_re, k_im = tl.load(key + n * D + d_re, mask=one, other=0.0), tl.load(key + n * D + d_im, mask=other, other=0.0)
    v = tl.load(value + n * E + e, mask=e < E, other=0.0)
    if (at >= split * part) & (at < (split + 1) * part):
        tl.store(keys + (row + at) * D + 2 * pair, k_re, mask=one)
        tl.store(keys + (row + at) * D + 2 * pair + 1, k_im, mask=other)
        tl.store(values + (row + at) * E + e, v, mask=e < E)
    k_re, k_im, v = k_re.to(tl.float32), k_im.to(tl.float32), v.to(tl.float32)
    highest = tl.full((GROUP,), float("-inf"), tl.float32)
    sums, weighted = tl.zeros((GROUP,), tl.float32), tl.zeros((GROUP, WIDE), tl.float32)
    for begin in range(split * part, tl.minimum((split + 1) * part, attended), BLOCK):
        s = begin + tl.arange(0, BLOCK)
        score, highest, sums, weighted = _take_in(
            s, at, k_re, k_im, v, q_re, q_im, keys, values, rank, position, row, slots, attended, now, low, high, limit, highest,
            sums, weighted, True, MODE, LEVEL, D, P, E, WIDE, BLOCK,
        )  # fmt: skip
        if ASKED:
            cells = scores + (n * G + g[:, None]) * attended + s[None, :]
            tl.store(cells, score, mask=is_query & (s < attended)[None, :])
    place = (n * tl.num_programs(1) + split) * G + g
    tl.store(most + place, highest, mask=g < G)
    tl.store(total + place, sums, mask=g < G)
    tl.store(out + place[:, None] * E + e[None, :], weighted, mask=is_query & (e < E)[None, :])


@triton.jit
def join(
    parted, most, total, scores, out, attended, PARTS: tl.constexpr, POWER: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, ASKED: tl.constexpr,
):  # fmt: skip
    """Join the parts of `attend`: write out [N * G, E] and turn scores into softmax weights. Grid: (N * G, 1 or blocks)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, g = row // G, row % G
    i, e = tl.arange(0, POWER), tl.arange(0, WIDE)
    place = (n * PARTS + i) * G + g
    highs = tl.load(most + place, mask=i < PARTS, other=float("-inf"))
    high = tl.max(highs, 0)
    share = tl.exp(highs - high)
    sums = tl.sum(share * tl.load(total + place, mask=i < PARTS, other=0.0), 0)
    if block == 0:
        x = tl.load(parted + place[:, None] * E + e[None, :], mask=(i < PARTS)[:, None] & (e < E)[None, :], other=0.0)
        tl.store(out + row * E + e, (tl.sum(share[:, None] * x, 0) / sums).to(out.dtype.element_ty), mask=e < E)
    if ASKED:
        s = block * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(scores + row * attended + s, mask=s < attended, other=float("-inf"))
        tl.store(scores + row * attended + s, tl.exp(score - high) / sums, mask=s < attended)


@triton.jit
def settle(
    mass, state, rank, position, at, mass_row, row, slots, attended, full, step, layer, head, seed, window, most, sums,
    update: tl.constexpr, importance: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    STATE: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """The bookkeeping of a row after a token: update its statistic and choose the slot for the next token. -> that slot.

    mass: softmax weights [.., G, attended], or if SCORES, scores with maximum `most` and sum of exponentials `sums`.
    """
    g = tl.arange(0, GROUP)
    least = tl.full((), float("inf"), tl.float32)
    worst = tl.full((), 2**62, tl.int64)
    victim = tl.full((), 0, tl.int64)
    for begin in range(0, attended, BLOCK):
        s = begin + tl.arange(0, BLOCK)
        there = s < attended
        ranks = tl.load(rank + row + s, mask=there, other=slots)
        positions = tl.load(position + row + s, mask=there, other=0)
        states = tl.zeros((BLOCK,), tl.float32)
        if STATE:
            states = tl.load(state + row + s, mask=there, other=0.0)
            cells = mass + (mass_row * G + g[:, None]) * attended + s[None, :]
            weights = tl.load(cells, mask=(g[:, None] < G) & there[None, :], other=float("-inf") if SCORES else 0.0)
            if SCORES:
                weights = tl.exp(weights - most[:, None]) / sums[:, None]
                weights = tl.where(g[:, None] < G, weights, 0.0)
            states = update(states, tl.sum(weights, 0), ranks, positions, step, layer, head, seed)
            tl.store(state + row + s, states, mask=there)
        worth = importance(states, ranks, positions, step, layer, head, seed)
        worth = tl.where((window > 0) & (step - positions >= window - 1), float("-inf"), worth)
        worth = tl.where(there, worth, float("inf"))
        lowest = tl.min(worth, 0)
        oldest = tl.min(tl.where(there & (worth == lowest), ranks, 2**62), 0)
        slot = tl.min(tl.where(there & (worth == lowest) & (ranks == oldest), s, 2**30), 0).to(tl.int64)
        better = (lowest < least) | ((lowest == least) & (oldest < worst))
        least, worst, victim = tl.where(better, lowest, least), tl.where(better, oldest, worst), tl.where(better, slot, victim)
    if full:
        for begin in range(0, attended, BLOCK):
            s = begin + tl.arange(0, BLOCK)
            ranks = tl.load(rank + row + s, mask=s < attended, other=0)
            ranks = tl.where(s == victim, slots, ranks - (ranks > worst).to(tl.int64))
            tl.store(rank + row + s, ranks, mask=s < attended)
    return tl.where(full, victim, at + 1)


@triton.jit
def release(
    mass, state, rank, position, layers, step, free, rows_of_layer, heads, slots, attended, full, window, seed,
    update: tl.constexpr, importance: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    STATE: tl.constexpr,
):  # fmt: skip
    """The bookkeeping after a token (`release.c`), one program per row. Grid: (R,)."""
    r = tl.program_id(0).to(tl.int64)
    row = r * slots
    nothing = tl.zeros((GROUP,), tl.float32)
    at = settle(
        mass, state, rank, position, tl.load(free + r) - row, r, row, slots, attended, full != 0, tl.load(step + r),
        tl.load(layers + r // rows_of_layer), r % heads, seed, window, nothing, nothing, update, importance, G, GROUP, BLOCK,
        STATE, False,
    )  # fmt: skip
    tl.store(free + r, row + at)


@triton.jit
def walk(
    query, key, value, keys, values, rank, position, state, free, low, high, scores, out, first, slots, attended, capacity, seen,
    tokens, limit, window, layer, heads, seed, initial, update: tl.constexpr, importance: tl.constexpr, MODE: tl.constexpr,
    LEVEL: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, P: tl.constexpr, E: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Walk a block through one layer (`walk.c`). Grid: (N,).

    query: rotated and scaled, interleaved pairs [N, G, T, D]. key: [N, T, D]. value: [N, T, E]. scores: scratch
    [N, G, attended]. out: [N, G, T, E]. The other arguments are those of `attend`.
    """
    n = tl.program_id(0).to(tl.int64)
    row, head = n * slots, n % heads
    at = tl.load(free + n) - first - row
    g, e, d, pair = tl.arange(0, GROUP), tl.arange(0, WIDE), tl.arange(0, 2 * P), tl.arange(0, P)
    for t in range(tokens):
        step = tl.cast(seen + t, tl.int64)
        tl.store(keys + (row + at) * D + d, tl.load(key + (n * tokens + t) * D + d, mask=d < D, other=0.0), mask=d < D)
        tl.store(values + (row + at) * E + e, tl.load(value + (n * tokens + t) * E + e, mask=e < E, other=0.0), mask=e < E)
        tl.store(rank + row + at, tl.minimum(step, capacity))
        tl.store(position + row + at, step)
        if STATE:
            tl.store(state + row + at, initial)
        tl.debug_barrier()
        asks = query + ((n * G + g[:, None]) * tokens + t) * D + 2 * pair[None, :]
        q_re = tl.load(asks, mask=(g[:, None] < G) & (2 * pair < D)[None, :], other=0.0).to(tl.float32)
        q_im = tl.load(asks + 1, mask=(g[:, None] < G) & (2 * pair + 1 < D)[None, :], other=0.0).to(tl.float32)
        most = tl.full((GROUP,), float("-inf"), tl.float32)
        sums = tl.zeros((GROUP,), tl.float32)
        weighted = tl.zeros((GROUP, WIDE), tl.float32)
        for begin in range(0, attended, BLOCK):
            s = begin + tl.arange(0, BLOCK)
            score, most, sums, weighted = _take_in(
                s, at, q_re, q_im, weighted, q_re, q_im, keys, values, rank, position, row, slots, attended, step, low, high,
                limit, most, sums, weighted, False, MODE, LEVEL, D, P, E, WIDE, BLOCK,
            )  # fmt: skip
            if STATE:
                cells = scores + (n * G + g[:, None]) * attended + s[None, :]
                tl.store(cells, score, mask=(g < G)[:, None] & (s < attended)[None, :])
        answers = out + ((n * G + g[:, None]) * tokens + t) * E + e[None, :]
        tl.store(answers, (weighted / sums[:, None]).to(out.dtype.element_ty), mask=(g[:, None] < G) & (e < E)[None, :])
        tl.debug_barrier()
        at = settle(
            scores, state, rank, position, at, n, row, slots, attended, step >= capacity, step, layer, head, seed, window, most,
            sums, update, importance, G, GROUP, BLOCK, STATE, True,
        )  # fmt: skip
        tl.debug_barrier()
    tl.store(free + n, first + row + at)
