"""RoPE, and the merge of window and sinks, for CUDA in Triton. Each kernel passes over memory once.

PyTorch would need float32 and complex intermediates, which are several times larger. Both kernels read vectors in the model's
order of dims or with paired dims adjacent, compute in float32, and write paired dims adjacent.

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
    """Load vectors t, which are `step` elements apart, where `here`. t: [BLOCK] int64 -> re, im [BLOCK, P] float32.

    HALVES: 0 if paired dims are adjacent. Otherwise, of the first 2 * HALVES dims, p is paired with p + HALVES.
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
    """Pair the dims of vectors, and rotate the vectors if ROTATES. Grid: (B * N, blocks of T).

    x, out: [B, N, T, D] with the given strides. factors: [T, D / 2, 2], read if ROTATES.
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

    query: unrotated, [B, N, T, D] with the given strides; factors: RoPE of the query, [T, D / 2, 2], read if ROTATES. keys:
    rotated keys of the sinks, paired dims adjacent, and values: values of the sinks, [B * N / group, E, D]. near: attention to
    the window, [B * N, T, D]; log_sum: [B * N, T] float32. out: like near; both may be one tensor. Query t sees sink e, which is
    before its window, if e < t + gap.
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
    total = tl.full((BLOCK,), 1.0, tl.float32)  # sum of exponentials relative to `most`; the window's sum is 1
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
    tl.debug_barrier()  # `near` and `out` may be one tensor
    tl.store(out + cells, (weighted / total[:, None]).to(out.dtype.element_ty), mask=known)
