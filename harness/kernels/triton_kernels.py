"""Kernels for CUDA, in Triton: two kernels for a token's attention, and one kernel for the bookkeeping after a token.

Results agree with the counterparts in C (`step.c`, `release.c`). The kernels work directly on the slots, which have no order.
Keys are rotated when they are read, or when they are written. `attend` splits a row over programs, so that a few rows fill the
chip, and `join` joins the parts. The same three kernels walk a block, token by token inside a layer. Programs never wait for
each other; results pass from one kernel to the next in memory.

Sums, softmax weights and statistics are float32. Products are tensor-core products in the dtype of the cache: rotated queries and
keys are rounded to this dtype, as in plain PyTorch.

Axis letters: B streams, H KV heads, N = B * H, R rows of all layers, G query heads of a KV head, M queries of a program,
T tokens, S slots, P pairs of dims, D key dim, E value dim.
"""

# Triton parses the source of its functions: it allows no type annotations but tl.constexpr. Constants are in capitals.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, N803, RET505, RUF005, SIM102, SIM300

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
def floor_quotient(a, b):
    """Quotient rounded down, as in PyTorch."""
    return a // b - tl.cast((a % b != 0) & ((a < 0) != (b < 0)), tl.int64)


@triton.jit
def floor_remainder(a, b):
    """Remainder matching `floor_quotient`."""
    return a - floor_quotient(a, b) * b


@triton.jit
def factors(angle, cosine, sine, far_cosine, far_sine, LEVEL: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Return cosine and sine of RoPE angles. angle: [M] int32 -> [M, P] twice.

    LEVEL: number of rows of `cosine` and `sine`, and distance of the angles in `far_cosine` and `far_sine`; 0 if the first two
    tables contain every angle.
    """
    pair = tl.arange(0, P)[None, :]
    known = pair < D // 2
    row = angle
    if LEVEL > 0:
        row = angle % LEVEL
    place = row[:, None] * (D // 2) + pair
    if D == 2 * P:
        c, s = tl.load(cosine + place), tl.load(sine + place)
    else:
        c, s = tl.load(cosine + place, mask=known, other=1.0), tl.load(sine + place, mask=known, other=0.0)
    if LEVEL > 0:
        place = (angle // LEVEL)[:, None] * (D // 2) + pair
        far_c, far_s = tl.load(far_cosine + place, mask=known, other=1.0), tl.load(far_sine + place, mask=known, other=0.0)
        c, s = c * far_c - s * far_s, c * far_s + s * far_c
    return c, s


@triton.jit
def unpacked(words, LIKE: tl.constexpr):
    """Return the two numbers packed into an integer of twice their width, as float32. LIKE: dtype of the numbers."""
    if LIKE == tl.float32:
        return words.to(tl.int32).to(tl.float32, bitcast=True), (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    elif LIKE == tl.bfloat16:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    else:
        low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
        return low.to(LIKE, bitcast=True).to(tl.float32), high.to(LIKE, bitcast=True).to(tl.float32)


@triton.jit
def place_token(
    rank, position, states, written, clock, n, row, slot, here, capacity, limit, written_row, written_token, MODE: tl.constexpr,
    PLACE: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """Return the new token's step, the angle of its query, and its index in the block.

    If PLACE, the program with `here` enters the token in `slot`.
    """
    t = 0
    if PLACE:
        now = tl.load(clock)
        t = (now - tl.load(clock + 1)).to(tl.int32)
        angle = tl.minimum(now, capacity)
        if here:
            tl.store(rank + row + slot, angle)
            tl.store(position + row + slot, now)
            for i in tl.static_range(len(WIDTHS)):
                first = tl.load(written + n * written_row + t * written_token + i)
                tl.store(states[i] + (row + slot) * WIDTHS[i], first)
    else:
        now, angle = tl.load(position + row + slot), tl.load(rank + row + slot)
    if MODE == 2 or MODE == 4:
        angle = now
    elif MODE == 3:
        angle = tl.cast(limit, tl.int64)
    return now, angle, t


@triton.jit
def load_query(
    query, key, order, keys, g, n, t, slot, here, angle, scaling, cosine, sine, far_cosine, far_sine, tokens,
    MODE: tl.constexpr, LEVEL: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Load a token's queries g, rotated by `angle` and scaled, [M, P] twice in the dtype of the keys; and own scores, [M].

    Own scores are those for the token's own key, which is written to `slot` if `here`.
    """
    pair = tl.arange(0, P)
    one, other = 2 * pair < D, 2 * pair + 1 < D
    d_re, d_im = tl.load(order + 2 * pair, mask=one, other=0), tl.load(order + 2 * pair + 1, mask=other, other=0)
    asks, is_query = query + ((tl.cast(n, tl.int64) * G + g[:, None]) * tokens + t) * D, (g < G)[:, None]
    re = tl.load(asks + d_re[None, :], mask=is_query & one[None, :], other=0.0).to(tl.float32) * scaling
    im = tl.load(asks + d_im[None, :], mask=is_query & other[None, :], other=0.0).to(tl.float32) * scaling
    token = key + (tl.cast(n, tl.int64) * tokens + t) * D
    k_re, k_im = tl.load(token + d_re, mask=one, other=0.0), tl.load(token + d_im, mask=other, other=0.0)
    k_re, k_im = k_re.to(tl.float32), k_im.to(tl.float32)
    own = tl.sum(re * k_re[None, :] + im * k_im[None, :], 1)  # the same rotation of query and key changes nothing
    if MODE > 0:
        same = tl.zeros((1,), tl.int32) + angle.to(tl.int32)
        c, s = factors(same, cosine, sine, far_cosine, far_sine, LEVEL, D, P)
        re, im = re * c - im * s, re * s + im * c
        if MODE == 4:
            c, s = tl.reshape(c, (P,)), tl.reshape(s, (P,))
            k_re, k_im = k_re * c - k_im * s, k_re * s + k_im * c
    if here:
        tl.store(keys + slot * D + 2 * pair, k_re.to(keys.dtype.element_ty), mask=one)
        tl.store(keys + slot * D + 2 * pair + 1, k_im.to(keys.dtype.element_ty), mask=other)
    return re.to(keys.dtype.element_ty), im.to(keys.dtype.element_ty), own


@triton.jit
def score_slots(
    q_re, q_im, words, position, near, ranks, slots, now, limit, cosine, sine, far_cosine, far_sine, MODE: tl.constexpr,
    LEVEL: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Return scores of some slots of a row, [M, BLOCK] float32. near, ranks: slots and their ranks, [BLOCK]."""
    pair = tl.arange(0, P)[None, :]
    if D == 2 * P:
        re, im = unpacked(tl.load(words + near[:, None] * P + pair), q_re.dtype)
    else:
        re, im = unpacked(tl.load(words + near[:, None] * (D // 2) + pair, mask=pair < D // 2, other=0), q_re.dtype)
    if MODE > 0 and MODE < 4:
        angle = tl.minimum(ranks, slots - 1)
        if MODE == 2:
            angle = tl.maximum(tl.load(position + near), 0).to(tl.int32)
        elif MODE == 3:
            angle = limit - tl.minimum(tl.maximum(now - tl.load(position + near), 0), limit).to(tl.int32)
        c, s = factors(angle, cosine, sine, far_cosine, far_sine, LEVEL, D, P)
        re, im = re * c - im * s, re * s + im * c
    score = tl.dot(q_re, tl.trans(re.to(q_re.dtype)), input_precision="ieee")
    return tl.dot(q_im, tl.trans(im.to(q_im.dtype)), score, input_precision="ieee")


@triton.jit
def add_to_softmax(highest, sums, weighted, score, x):
    """Add slots to an online softmax. highest, sums: [M]; weighted: [M, WIDE]; score: [M, BLOCK]; x: values, [BLOCK, WIDE]."""
    higher = tl.maximum(highest, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # if no slot has held a token so far
    weight, kept = tl.exp(score - base[:, None]), tl.exp(highest - base)
    weighted = tl.dot(weight.to(x.dtype), x, weighted * kept[:, None], input_precision="ieee")
    return higher, sums * kept + tl.sum(weight, 1), weighted


@triton.jit
def attend(
    query, key, value, order, keys, words, values, rank, position, states, written, free, clock, cosine, sine, far_cosine,
    far_sine, out, most, total, scores, first, slots, attended, part, limit, capacity, tokens, scaling, written_row,
    written_token, MODE: tl.constexpr, LEVEL: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    E: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ASKED: tl.constexpr, PLACE: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """Attend to a part of a row's slots with one token: scores, their maximum, sum of exponentials, and weighted values.

    query: [N, G, T, D], key: [N, T, D], in the model's order, unrotated; value: [N, T, E]; order: [D]. keys: [N, slots, D];
    words: keys with a pair of dims per integer; values: [N, slots, E]; rank, position: [N, slots]; free: [N], slot of the new
    token, counted from `first`. out: [N, parts, G, E]; most, total: [N, parts, G]; scores: [N, G, attended], if ASKED.
    PLACE: enter the token's rank, position and first statistics; otherwise T = 1, and the token was entered before. clock: steps
    of the token and of the block's first token, if PLACE. states: one array per number, [N, slots] with the stride of its
    statistic's width (WIDTHS); written: first values of the numbers, [N, T, numbers] with any strides. MODE: 0 no RoPE, 1 by
    rank, 2 by position, 3 by distance up to `limit`, 4 by position, with keys that are rotated when they are written instead of
    when they are read. Grid: (N, parts, chunks of M queries).
    """
    n, split, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, g, e = tl.cast(n, tl.int64) * slots, chunk * M + tl.arange(0, M), tl.arange(0, WIDE)
    slot = tl.load(free + n) - first - row
    owner = (slot >= split * part) & (slot < (split + 1) * part)
    now, angle, t = place_token(
        rank, position, states, written, clock, n, row, slot, owner & (chunk == 0), capacity, limit, written_row, written_token,
        MODE, PLACE, WIDTHS,
    )  # fmt: skip
    q_re, q_im, own = load_query(
        query, key, order, keys, g, n, t, row + slot, owner, angle, scaling, cosine, sine, far_cosine, far_sine, tokens, MODE,
        LEVEL, G, D, P,
    )  # fmt: skip
    v = tl.load(value + (tl.cast(n, tl.int64) * tokens + t) * E + e, mask=e < E, other=0.0)
    if owner:
        tl.store(values + (row + slot) * E + e, v, mask=e < E)
    tl.debug_barrier()
    # No chunk reads K and V of the token's slot, whose rank may still change. Owners add the token from the arguments.
    highest, sums = tl.where(owner, own, float("-inf")), tl.where(owner, 1.0, 0.0) + tl.zeros((M,), tl.float32)
    weighted = tl.where(owner, v.to(tl.float32), 0.0)[None, :] + tl.zeros((M, WIDE), tl.float32)
    scores += tl.cast(n, tl.int64) * G * attended
    for begin in range(split * part, tl.minimum((split + 1) * part, attended), BLOCK):
        s = begin + tl.arange(0, BLOCK)
        near = tl.minimum(s, attended - 1)
        ranks = tl.load(rank + row + near).to(tl.int32)
        score = score_slots(
            q_re, q_im, words + row * (D // 2), position + row, near, ranks, slots, now, limit, cosine, sine, far_cosine,
            far_sine, MODE, LEVEL, D, P,
        )  # fmt: skip
        held = (ranks < slots) & (s < attended) & (s != slot)
        score = tl.where(held[None, :], score, float("-inf"))
        x = tl.load(values + row * E + near[:, None] * E + e[None, :], mask=(e < E)[None, :], other=0.0)
        highest, sums, weighted = add_to_softmax(highest, sums, weighted, score, x)
        if ASKED:
            visible = (g < G)[:, None] & (s < attended)[None, :] & (s != slot)[None, :]
            tl.store(scores + g[:, None] * attended + s[None, :], score, mask=visible)
    if ASKED:
        if owner:
            tl.store(scores + g * attended + slot, own, mask=g < G)
    place = (tl.cast(n, tl.int64) * tl.num_programs(1) + split) * G + g
    tl.store(most + place, highest, mask=g < G)
    tl.store(total + place, sums, mask=g < G)
    tl.store(out + place[:, None] * E + e[None, :], weighted, mask=(g < G)[:, None] & (e < E)[None, :])


@triton.jit
def join(
    parted, most, total, scores, out, clock, attended, parts, tokens, G: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ASKED: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    """Join the parts of `attend`, CHUNK at a time: write out [N, G, T, E], and turn scores into softmax weights.

    Other arguments are those of `attend`. Grid: (N * G, 1 or blocks of slots).
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, e = tl.arange(0, CHUNK), tl.arange(0, WIDE)
    first = (row // G) * parts * G + row % G
    high = tl.full((), float("-inf"), tl.float32)
    for begin in range(0, parts, CHUNK):
        high = tl.maximum(high, tl.max(tl.load(most + first + (begin + i) * G, mask=begin + i < parts, other=float("-inf")), 0))
    sums = tl.full((), 0.0, tl.float32)
    weighted = tl.zeros((WIDE,), tl.float32)
    for begin in range(0, parts, CHUNK):
        there, place = begin + i < parts, first + (begin + i) * G
        share = tl.exp(tl.load(most + place, mask=there, other=float("-inf")) - high)
        sums += tl.sum(share * tl.load(total + place, mask=there, other=0.0), 0)
        if block == 0:
            x = tl.load(parted + place[:, None] * E + e[None, :], mask=there[:, None] & (e < E)[None, :], other=0.0)
            weighted += tl.sum(share[:, None] * x, 0)
    if block == 0:
        t = 0
        if PLACE:
            t = tl.load(clock) - tl.load(clock + 1)
        tl.store(out + (row * tokens + t) * E + e, (weighted / sums).to(out.dtype.element_ty), mask=e < E)
    if ASKED:
        s = block * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(scores + row * attended + s, mask=s < attended, other=float("-inf"))
        tl.store(scores + row * attended + s, tl.exp(score - high) / sums, mask=s < attended)


@triton.jit
def loaded(states, row, s, there, WIDTHS: tl.constexpr):
    """Load the numbers of slots s, one block per number. row: flat index of the row's first slot; states: as in `release`."""
    numbers = ()
    for i in tl.static_range(len(WIDTHS)):
        numbers = numbers + (tl.load(states[i] + row * WIDTHS[i] + s * WIDTHS[i], mask=there, other=0.0),)
    return numbers


@triton.jit
def received(mass, row, s, there, attended, G: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr):
    """Return the attention that slots of a row received: its sum over query heads, and its maximum over them if MOST."""
    total, most = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for g in range(G):
        weight = tl.load(mass + (row * G + g) * attended + s, mask=there, other=0.0)
        total += weight
        if MOST:
            most = tl.maximum(most, weight)
    return total, most


@triton.jit
def release(
    mass, states, rank, position, free, layers, head_indices, prompts, clock, first, slots, attended, rows_of_layer, heads, full,
    window, num_layers, seed, updated: tl.constexpr, importance: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
    WIDTHS: tl.constexpr, ASKED: tl.constexpr, MOST: tl.constexpr, HEAD: tl.constexpr, PROMPT: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    """Bookkeeping after a token (`release.c`): update the statistics, and choose the next token's slot. Grid: (R,).

    mass: softmax weights [R, G, attended], if ASKED; rank, position: [R, slots]; states: one array per number, [R, slots] with
    the stride of its statistic's width (WIDTHS); free: [R], counted from `first`; layers: [L], with `rows_of_layer` rows each;
    head_indices: [R], if HEAD; prompts: [R / heads], if PROMPT. MOST: a statistic reads the maximum over query heads. PLACE:
    advance the clock of `attend`.

    Every thread has its own slots, and barriers separate reads from writes.
    """
    r = tl.program_id(0).to(tl.int64)
    row = r * slots
    newest = tl.load(free + r) - first - row
    step, count = tl.load(position + row + newest), tl.load(rank + row + newest).to(tl.int64) + 1
    layer = tl.load(layers + r // rows_of_layer)
    head, prompt = r, r
    if HEAD:
        head = tl.load(head_indices + r)
    if PROMPT:
        prompt = tl.load(prompts + r // heads)
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    least_rank, least_slot = tl.full((BLOCK,), 2**62, tl.int64), tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, attended, BLOCK):
        s = begin + tl.arange(0, BLOCK)
        there = s < attended
        ranks = tl.load(rank + row + s, mask=there, other=slots).to(tl.int64)
        positions = tl.load(position + row + s, mask=there, other=0)
        numbers = loaded(states, row, s, there, WIDTHS)
        if ASKED:
            total, most = received(mass, r, s, there, attended, G, BLOCK, MOST)
            numbers = updated(numbers, total, most, ranks, positions, step, layer, head, count, prompt, G, num_layers, seed)
            tl.debug_barrier()
            for i in tl.static_range(len(WIDTHS)):
                tl.store(states[i] + row * WIDTHS[i] + s * WIDTHS[i], numbers[i], mask=there)
        worth = importance(numbers, ranks, positions, step, layer, head, count, prompt, G, num_layers, seed)
        worth = tl.where((window > 0) & (step - positions >= window - 1), float("-inf"), worth)
        better = there & ((worth < least) | ((worth == least) & (ranks < least_rank)))
        least, least_rank = tl.where(better, worth, least), tl.where(better, ranks, least_rank)
        least_slot = tl.where(better, s, least_slot)
    slot = newest + 1
    if full:
        lowest = least == tl.min(least, 0)
        oldest = tl.min(tl.where(lowest, least_rank, 2**62), 0)
        victim = tl.min(tl.where(lowest & (least_rank == oldest), least_slot, 2**30), 0)
        for begin in range(0, attended, BLOCK):
            s = begin + tl.arange(0, BLOCK)
            ranks = tl.load(rank + row + s, mask=s < attended, other=0)
            ranks = tl.where(s == victim, slots, ranks - (ranks > oldest).to(ranks.dtype))
            tl.debug_barrier()
            tl.store(rank + row + s, ranks, mask=s < attended)
        slot = victim.to(tl.int64)
    tl.debug_barrier()
    tl.store(free + r, first + row + slot)
    if PLACE:
        if r == 0:
            tl.store(clock, step + 1)
