"""Attention of a token over K and V stored as packed integers, in Triton: `attend` with decoding in registers.

It is the counterpart of `coded_step.c`, and writes no decoded K or V to memory. A number is code * scale + zero. The first
`SINKS` tokens of a stream and the `RECENT` newest tokens are exempt, and read from the exact vectors beside the codes. Codes of
a new token equal those of `slot_stores.encoded` exactly. `join` of `triton_kernels.py` joins the parts.

Axis letters: N rows (stream, KV head), G query heads of a KV head, M queries of a program, S slots, P pairs of dims, D key dim,
E value dim, X exempt tokens, g groups of channels.
"""

# Triton parses the source of its functions: it allows no type annotations but tl.constexpr. Constants are in capitals.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, N803, SIM102

from __future__ import annotations

import triton
import triton.language as tl

from kvbench.harness.kernels.triton_kernels import add_to_softmax, factors


@triton.jit
def encoded(x, low, high, LIKE: tl.constexpr, BITS: tl.constexpr):
    """Encode groups. x: [g, n]; low, high: smallest and largest numbers, [g] -> codes [g, n] int32, scales, zeros [g] float32."""
    levels: tl.constexpr = 2.0**BITS - 1
    zero = low.to(LIKE).to(tl.float32)
    scale = tl.math.div_rn(high - low, levels).to(LIKE).to(tl.float32)
    code = tl.math.div_rn(x - zero[:, None], tl.maximum(scale, 1.1754943508222875e-38)[:, None])
    code = (code + 12582912.0) - 12582912.0  # rounds, half to even
    return tl.minimum(tl.maximum(code, 0.0), levels).to(tl.int32), scale, zero


@triton.jit
def placed(position, now, SINKS: tl.constexpr, RECENT: tl.constexpr):
    """Return the place of each exempt token among the exact vectors; negative for coded tokens. position: any shape, int32."""
    place = tl.where(position < SINKS, position, -1)
    if RECENT > 0:
        place = tl.where((position >= SINKS) & (now - position < RECENT), SINKS + position % RECENT, place)
    return place


@triton.jit
def scaled(code, scale, zero, near, DIMS: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr):
    """Decode the codes of some slots. code: [BLOCK, n], in GROUPS groups, of which DIMS / CHANNELS are used."""
    group = tl.arange(0, GROUPS)[None, :]
    place, there = near[:, None] * (DIMS // CHANNELS) + group, group < DIMS // CHANNELS
    width = tl.load(scale + place, mask=there, other=0.0).to(tl.float32)
    least = tl.load(zero + place, mask=there, other=0.0).to(tl.float32)
    by_group = tl.reshape(code.to(tl.float32), (code.shape[0], GROUPS, code.shape[1] // GROUPS))
    return tl.reshape(by_group * width[:, :, None] + least[:, :, None], code.shape)


@triton.jit
def decoded_pairs(codes, scale, zero, near, D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr, CHANNELS: tl.constexpr):
    """Decode keys to pairs of dims, [BLOCK, P] float32 twice. codes: an integer per pair, or a byte per two pairs of 2 bits."""
    pair = tl.arange(0, P)[None, :]
    known = pair < D // 2
    if BITS == 2:
        word = tl.load(codes + near[:, None] * (D // 4) + pair // 2, mask=known, other=0).to(tl.int32) >> pair % 2 * 4
    else:
        word = tl.load(codes + near[:, None] * (D // 2) + pair, mask=known, other=0).to(tl.int32)
    most: tl.constexpr = 2**BITS - 1
    re = scaled(word & most, scale, zero, near, D, CHANNELS, 2 * P // CHANNELS)
    return re, scaled(word >> BITS & most, scale, zero, near, D, CHANNELS, 2 * P // CHANNELS)


@triton.jit
def decoded_values(codes, scale, zero, near, E: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr, CHANNELS: tl.constexpr):
    """Decode values, [BLOCK, WIDE] float32."""
    e = tl.arange(0, WIDE)[None, :]
    word = tl.load(codes + near[:, None] * (E * BITS // 8) + e * BITS // 8, mask=e < E, other=0).to(tl.int32) >> e * BITS % 8
    return scaled(word & 2**BITS - 1, scale, zero, near, E, CHANNELS, WIDE // CHANNELS)


@triton.jit
def enter_key(
    re, im, codes, scale, zero, exact, slot, own, here, D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr,
    CHANNELS: tl.constexpr, EXEMPT: tl.constexpr,
):  # fmt: skip
    """Store a key in `slot` if `here`, and at `exact` if also `own` (the key is exempt). Returns the key as read, [P] twice."""
    shape: tl.constexpr = (2 * P // CHANNELS, CHANNELS // 2)
    pair, group = tl.arange(0, P), tl.arange(0, 2 * P // CHANNELS)
    re, im = tl.reshape(re, shape), tl.reshape(im, shape)
    low, high = tl.minimum(tl.min(re, 1), tl.min(im, 1)), tl.maximum(tl.max(re, 1), tl.max(im, 1))
    re_code, width, least = encoded(re, low, high, scale.dtype.element_ty, BITS)
    im_code, _, _ = encoded(im, low, high, scale.dtype.element_ty, BITS)
    word, known = tl.reshape(re_code | im_code << BITS, (P,)), pair < D // 2
    if here:
        if BITS == 2:
            two, both = tl.arange(0, 2), tl.reshape(tl.where(known, word, 0), (P // 2, 2))
            byte = tl.arange(0, P // 2)
            tl.store(codes + slot * (D // 4) + byte, tl.sum(both << two[None, :] * 4, 1).to(tl.uint8), mask=byte < D // 4)
        else:
            tl.store(codes + slot * (D // 2) + pair, word.to(codes.dtype.element_ty), mask=known)
        entry = slot * (D // CHANNELS) + group
        tl.store(scale + entry, width.to(scale.dtype.element_ty), mask=group < D // CHANNELS)
        tl.store(zero + entry, least.to(zero.dtype.element_ty), mask=group < D // CHANNELS)
    read_re = tl.where(own, re, re_code.to(tl.float32) * width[:, None] + least[:, None])
    read_im = tl.where(own, im, im_code.to(tl.float32) * width[:, None] + least[:, None])
    if EXEMPT:
        if here & own:
            tl.store(exact + 2 * pair, tl.reshape(re, (P,)).to(exact.dtype.element_ty), mask=known)
            tl.store(exact + 2 * pair + 1, tl.reshape(im, (P,)).to(exact.dtype.element_ty), mask=known)
    return tl.reshape(read_re, (P,)), tl.reshape(read_im, (P,))


@triton.jit
def enter_value(
    x, codes, scale, zero, exact, slot, own, here, E: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr,
    CHANNELS: tl.constexpr, EXEMPT: tl.constexpr,
):  # fmt: skip
    """Store a value as `enter_key` stores a key. Returns the value as read, [WIDE]."""
    e, group = tl.arange(0, WIDE), tl.arange(0, WIDE // CHANNELS)
    x = tl.reshape(x, (WIDE // CHANNELS, CHANNELS))
    code, width, least = encoded(x, tl.min(x, 1), tl.max(x, 1), scale.dtype.element_ty, BITS)
    if here:
        several: tl.constexpr = 8 // BITS
        shift, byte = tl.arange(0, several)[None, :] * BITS, tl.arange(0, WIDE // several)
        word = tl.sum(tl.reshape(tl.where(e < E, tl.reshape(code, (WIDE,)), 0), (WIDE // several, several)) << shift, 1)
        tl.store(codes + slot * (E // several) + byte, word.to(tl.uint8), mask=byte < E // several)
        entry = slot * (E // CHANNELS) + group
        tl.store(scale + entry, width.to(scale.dtype.element_ty), mask=group < E // CHANNELS)
        tl.store(zero + entry, least.to(zero.dtype.element_ty), mask=group < E // CHANNELS)
    read = tl.where(own, x, code.to(tl.float32) * width[:, None] + least[:, None])
    if EXEMPT:
        if here & own:
            tl.store(exact + e, tl.reshape(x, (WIDE,)).to(exact.dtype.element_ty), mask=e < E)
    return tl.reshape(read, (WIDE,))


@triton.jit
def enter_token(
    k_re, k_im, v, key_codes, key_scale, key_zero, key_exact, value_codes, value_scale, value_zero, value_exact, slot, now, here,
    D: tl.constexpr, P: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr, KEY_CHANNELS: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr, SINKS: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    """Store the new token if `here`. Returns key and value as read: exact if the token is exempt, otherwise decoded.

    Every chunk of the token's part stores the token, so that no chunk reads the slot's old content.
    """
    exempt: tl.constexpr = SINKS + RECENT > 0
    place = placed(now, now, SINKS, RECENT)
    k_re, k_im = enter_key(
        k_re,
        k_im,
        key_codes,
        key_scale,
        key_zero,
        key_exact + place * D,
        slot,
        place >= 0,
        here,
        D,
        P,
        BITS,
        KEY_CHANNELS,
        exempt,
    )
    v = enter_value(
        v, value_codes, value_scale, value_zero, value_exact + place * E, slot, place >= 0, here, E, WIDE, BITS, VALUE_CHANNELS,
        exempt,
    )  # fmt: skip
    return k_re, k_im, v


@triton.jit
def read_slots(
    q_re, q_im, key_codes, key_scale, key_zero, key_exact, value_codes, value_scale, value_zero, value_exact, near, ranks,
    position, slots, now, limit, cosine, sine, far_cosine, far_sine, MODE: tl.constexpr, LEVEL: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr, KEY_CHANNELS: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr, SINKS: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    """Return scores of some slots of a row, [M, BLOCK] float32, and their values, [BLOCK, WIDE] in the dtype of the queries.

    near, ranks: slots and their ranks, [BLOCK] int32. position: positions in all slots of the row.
    """
    positions = ranks
    if SINKS + RECENT > 0 or MODE == 2 or MODE == 3:
        positions = tl.load(position + near).to(tl.int32)
    re, im = decoded_pairs(key_codes, key_scale, key_zero, near, D, P, BITS, KEY_CHANNELS)
    x = decoded_values(value_codes, value_scale, value_zero, near, E, WIDE, BITS, VALUE_CHANNELS)
    if SINKS + RECENT > 0:
        place = placed(positions, now, SINKS, RECENT)
        if tl.max(place, 0) >= 0:  # most blocks hold no exempt token
            pair, e, exempt, lies = tl.arange(0, P)[None, :], tl.arange(0, WIDE)[None, :], (place >= 0)[:, None], place[:, None]
            of_key, of_value = key_exact + lies * D + 2 * pair, value_exact + lies * E + e
            re = tl.where(exempt, tl.load(of_key, mask=exempt & (pair < D // 2), other=0.0).to(tl.float32), re)
            im = tl.where(exempt, tl.load(of_key + 1, mask=exempt & (pair < D // 2), other=0.0).to(tl.float32), im)
            x = tl.where(exempt, tl.load(of_value, mask=exempt & (e < E), other=0.0).to(tl.float32), x)
    if MODE > 0 and MODE < 4:
        angle = tl.minimum(ranks, slots - 1)
        if MODE == 2:
            angle = tl.maximum(positions, 0)
        elif MODE == 3:
            angle = limit - tl.minimum(tl.maximum(now - positions, 0), limit)
        c, s = factors(angle, cosine, sine, far_cosine, far_sine, LEVEL, D, P)
        re, im = re * c - im * s, re * s + im * c
    score = tl.dot(q_re, tl.trans(re.to(q_re.dtype)), input_precision="ieee")
    return tl.dot(q_im, tl.trans(im.to(q_im.dtype)), score, input_precision="ieee"), x.to(q_re.dtype)


@triton.jit
def load_token(
    query, key, order, n, g, now, angle, limit, scaling, cosine, sine, far_cosine, far_sine, STORED: tl.constexpr,
    MODE: tl.constexpr, LEVEL: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Load a token's queries g for cached keys, the queries for the token's own key, and the key as stored.

    All queries are scaled; queries for cached keys are rotated. [M, P] twice each; the key [P] twice. All float32.
    """
    pair = tl.arange(0, P)
    known, is_query = pair < D // 2, (g < G)[:, None]
    d_re, d_im = tl.load(order + 2 * pair, mask=known, other=0), tl.load(order + 2 * pair + 1, mask=known, other=0)
    asks = query + (n * G + g[:, None]) * D
    re = tl.load(asks + d_re[None, :], mask=is_query & known[None, :], other=0.0).to(tl.float32) * scaling
    im = tl.load(asks + d_im[None, :], mask=is_query & known[None, :], other=0.0).to(tl.float32) * scaling
    k_re = tl.load(key + n * D + d_re, mask=known, other=0.0).to(tl.float32)
    k_im = tl.load(key + n * D + d_im, mask=known, other=0.0).to(tl.float32)
    q_re, q_im = re, im
    if MODE > 0:
        if MODE == 2 or MODE == 4:
            angle = now
        elif MODE == 3:
            angle = tl.cast(limit, tl.int32)
        same = tl.zeros((1,), tl.int32) + angle
        c, sine_of = factors(same, cosine, sine, far_cosine, far_sine, LEVEL, D, P)
        q_re, q_im = re * c - im * sine_of, re * sine_of + im * c
        if MODE == 4:
            re, im, c, sine_of = q_re, q_im, tl.reshape(c, (P,)), tl.reshape(sine_of, (P,))
            k_re, k_im = k_re * c - k_im * sine_of, k_re * sine_of + k_im * c
            k_re, k_im = k_re.to(STORED).to(tl.float32), k_im.to(STORED).to(tl.float32)
    return q_re, q_im, re, im, k_re, k_im


@triton.jit
def attend_coded(
    query, key, value, order, key_codes, key_scale, key_zero, key_exact, value_codes, value_scale, value_zero, value_exact, rank,
    position, free, cosine, sine, far_cosine, far_sine, out, most, total, scores, first, slots, attended, part, limit, scaling,
    MODE: tl.constexpr, LEVEL: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, P: tl.constexpr, E: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, KEY_CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
    SINKS: tl.constexpr, RECENT: tl.constexpr, ASKED: tl.constexpr,
):  # fmt: skip
    """Attend to a part of the slots of a row, as `attend` does for a single token that was entered before.

    key_codes: [N, slots, D * BITS / 8] bytes, in integers of a pair of dims if BITS is 8; key_scale, key_zero: [N, slots, g];
    key_exact: [N, X, D]. Arguments for values have the same shapes with E, and codes in bytes. Other arguments are those of
    `attend`. Grid: (N, parts, chunks of M).
    """
    n, split, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    stored: tl.constexpr = key_scale.dtype.element_ty
    row, g, e = n * slots, chunk * M + tl.arange(0, M), tl.arange(0, WIDE)
    slot = tl.load(free + n) - first - row
    owner = (slot >= split * part) & (slot < (split + 1) * part)
    now, angle = tl.load(position + row + slot).to(tl.int32), tl.load(rank + row + slot).to(tl.int32)
    key_codes, value_codes = key_codes + row * (D * BITS // (16 if BITS == 8 else 8)), value_codes + row * (E * BITS // 8)
    key_scale, key_zero = key_scale + row * (D // KEY_CHANNELS), key_zero + row * (D // KEY_CHANNELS)
    value_scale, value_zero = value_scale + row * (E // VALUE_CHANNELS), value_zero + row * (E // VALUE_CHANNELS)
    key_exact, value_exact = key_exact + n * (SINKS + RECENT) * D, value_exact + n * (SINKS + RECENT) * E
    is_query = (g < G)[:, None]
    q_re, q_im, re, im, k_re, k_im = load_token(
        query, key, order, n, g, now, angle, limit, scaling, cosine, sine, far_cosine, far_sine, stored, MODE, LEVEL, G, D, P
    )
    v = tl.load(value + n * E + e, mask=e < E, other=0.0).to(tl.float32)
    k_re, k_im, v = enter_token(
        k_re, k_im, v, key_codes, key_scale, key_zero, key_exact, value_codes, value_scale, value_zero, value_exact, slot, now,
        owner, D, P, E, WIDE, BITS, KEY_CHANNELS, VALUE_CHANNELS, SINKS, RECENT,
    )  # fmt: skip
    own = tl.sum(re * k_re[None, :] + im * k_im[None, :], 1)  # the same rotation of query and key changes nothing
    tl.debug_barrier()
    q_re, q_im = q_re.to(stored), q_im.to(stored)
    highest, sums = tl.where(owner, own, float("-inf")), tl.where(owner, 1.0, 0.0) + tl.zeros((M,), tl.float32)
    weighted = tl.where(owner, v, 0.0)[None, :] + tl.zeros((M, WIDE), tl.float32)
    scores += n * G * attended
    for begin in range(split * part, tl.minimum((split + 1) * part, attended), BLOCK):
        s = begin + tl.arange(0, BLOCK)
        near = tl.minimum(s, attended - 1)
        ranks = tl.load(rank + row + near).to(tl.int32)
        score, x = read_slots(
            q_re, q_im, key_codes, key_scale, key_zero, key_exact, value_codes, value_scale, value_zero, value_exact, near, ranks,
            position + row, slots, now, limit, cosine, sine, far_cosine, far_sine, MODE, LEVEL, D, P, E, WIDE, BITS, KEY_CHANNELS,
            VALUE_CHANNELS, SINKS, RECENT,
        )  # fmt: skip
        held = (ranks < slots) & (s < attended) & (s != slot)
        score = tl.where(held[None, :], score, float("-inf"))
        highest, sums, weighted = add_to_softmax(highest, sums, weighted, score, x)
        if ASKED:
            visible = is_query & (s < attended)[None, :] & (s != slot)[None, :]
            tl.store(scores + g[:, None] * attended + s[None, :], score, mask=visible)
    if ASKED:
        if owner:
            tl.store(scores + g * attended + slot, own, mask=g < G)
    place_of_part = (n * tl.num_programs(1) + split) * G + g
    tl.store(most + place_of_part, highest, mask=g < G)
    tl.store(total + place_of_part, sums, mask=g < G)
    tl.store(out + place_of_part[:, None] * E + e[None, :], weighted, mask=is_query & (e < E)[None, :])
