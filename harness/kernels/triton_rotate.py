"""RoPE and the merge with the sinks for CUDA, in Triton: one pass over memory each.

PyTorch would go through float32 and complex intermediates, several times the bytes. Both kernels read vectors as the model makes
them or with paired dims side by side, compute in float32 and write paired dims side by side.

Axis letters: B streams, N heads, T tokens, E sinks, D head dim, P pairs of dims, rounded up to a power of two.
"""

# Triton parses the source of its functions: it allows no type annotations but tl.constexpr. Constants are in capitals.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_pairs(base, t, step, here, HALVES: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Load vectors that are `step` elements apart: re, im [BLOCK, P] float32. t: [BLOCK] int64, loaded where `here`.

    HALVES: 0 if paired dims are neighbours; else dim p of the first 2 * HALVES is paired with dim p + HALVES.
    """
    p = tl.arange(0, P)
    known = here[:, None] & (p < D // 2)[None, :]
    pointer = base + t[:, None] * step
    if 2 * HALVES == D:
        re = tl.load(pointer + p[None, :], mask=known, other=0.0)
        im = tl.load(pointer + p[None, :] + HALVES, mask=known, other=0.0)
    elif HALVES > 0:
        first = tl.where(p < HALVES, p, 2 * p)
        re = tl.load(pointer + first[None, :], mask=known, other=0.0)
        im = tl.load(pointer + (first + tl.where(p < HALVES, HALVES, 1))[None, :], mask=known, other=0.0)
    else:
        d = tl.arange(0, 2 * P)
        x = tl.load(pointer + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)
        re, im = tl.split(tl.reshape(x, (x.shape[0], P, 2)))
    return re.to(tl.float32), im.to(tl.float32)


@triton.jit
def turned(re, im, factors, t, here, D: tl.constexpr, P: tl.constexpr):
    """Rotate the vectors of tokens t. re, im: [BLOCK, P]. factors: cos and sin [T, D / 2, 2] float32."""
    p = tl.arange(0, P)
    known = here[:, None] & (p < D // 2)[None, :]
    pointer = factors + t[:, None] * D + 2 * p[None, :]
    c, s = tl.load(pointer, mask=known, other=1.0), tl.load(pointer + 1, mask=known, other=0.0)
    return re * c - im * s, re * s + im * c


@triton.jit
def rotate(
    x,
    factors,
    out,
    x_stream,
    x_head,
    x_token,
    out_stream,
    out_head,
    out_token,
    heads,
    tokens,
    ROTATES: tl.constexpr,
    HALVES: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pair and rotate: x [B, N, T, D], out [B, N, T, D] with these strides; factors [T, D / 2, 2]. Grid: (B * N, blocks of T).

    If not ROTATES, `factors` is not read and vectors are only paired.
    """
    n, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    t, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 2 * P)
    here = t < tokens
    re, im = load_pairs(x + n // heads * x_stream + n % heads * x_head, t, x_token, here, HALVES, D, P)
    if ROTATES:
        re, im = turned(re, im, factors, t, here, D, P)
    pointer = out + n // heads * out_stream + n % heads * out_head + t[:, None] * out_token + d[None, :]
    tl.store(pointer, tl.interleave(re, im).to(out.dtype.element_ty), mask=here[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["gap"])
def merge(
    query,
    factors,
    keys,
    values,
    near,
    log_sum,
    out,
    query_stream,
    query_head,
    query_token,
    heads,
    group,
    tokens,
    sinks,
    gap,
    scaling,
    ROTATES: tl.constexpr,
    HALVES: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the sinks to the softmax over a window. Grid: (B * N, blocks of T).

    query: unrotated [B, N, T, D], with these strides; factors: of the query, [T, D / 2, 2], read if ROTATES. keys: rotated, pairs
    side by side, and values: of the sinks [B * N / group, E, D]. near: the window's attention [B * N, T, D], and log_sum
    [B * N, T] float32. out: like near, and may be the same. Query t sees sink e apart from its window where e < t + gap.
    """
    n, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    t, p, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, P), tl.arange(0, 2 * P)
    here, cells = t < tokens, (n * tokens + t)[:, None] * D + d[None, :]
    known = here[:, None] & (d < D)[None, :]
    re, im = load_pairs(query + n // heads * query_stream + n % heads * query_head, t, query_token, here, HALVES, D, P)
    if ROTATES:
        re, im = turned(re, im, factors, t, here, D, P)
    most = tl.load(log_sum + n * tokens + t, mask=here, other=0.0)
    weighted = tl.load(near + cells, mask=known, other=0.0).to(tl.float32)
    total = tl.full((BLOCK,), 1.0, tl.float32)  # of exponentials, relative to `most`: the window's own comes to 1
    for e in range(sinks):
        sink = (n // group * sinks + e) * D
        key_re = tl.load(keys + sink + 2 * p, mask=p < D // 2, other=0.0).to(tl.float32)
        key_im = tl.load(keys + sink + 2 * p + 1, mask=p < D // 2, other=0.0).to(tl.float32)
        value = tl.load(values + sink + d, mask=d < D, other=0.0).to(tl.float32)
        score = tl.sum(re * key_re[None, :] + im * key_im[None, :], 1) * scaling
        score = tl.where(e < t + gap, score, float("-inf"))
        highest = tl.maximum(most, score)
        kept, weight = tl.exp(most - highest), tl.exp(score - highest)
        weighted = weighted * kept[:, None] + weight[:, None] * value[None, :]
        total, most = total * kept + weight, highest
    tl.debug_barrier()  # `near` may be `out`
    tl.store(out + cells, (weighted / total[:, None]).to(out.dtype.element_ty), mask=known)
