"""Policies that score keys and values: what they keep equals plain references, after a prompt and while decoding."""

import math

import pytest
import torch
from plain_heads import Head, Vector, dot, keeps, mean, norm, read, softmax, transposed

from kvbench.policies.cur import CUR
from kvbench.policies.keydiff import KeyDiff
from kvbench.policies.knorm import Knorm
from kvbench.policies.lagkv import LagKV
from kvbench.policies.leverage import Leverage, gaussian_sketch

pytestmark = pytest.mark.fast


SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])


def protecting(score, sinks=0, window=0):
    """A score that never lets the first and the newest tokens of a stream go."""

    def protected(head: Head, held: list[int]) -> Vector:
        safe = [p < sinks or held[-1] - p < window for p in held]
        return [math.inf if s else x for s, x in zip(safe, score(head, held), strict=True)]

    return protected


def small_norm(head: Head, held: list[int]) -> Vector:
    return [-norm(head.keys[p]) for p in held]


@SEEDS
@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (4, 0), (2, 5)])
def test_knorm_keeps_the_smallest_keys(seed, sinks, window):
    keeps(Knorm(sinks, window), read(41, seed), protecting(small_norm, sinks, window), [8, 17, 30])


def unlike_the_mean(rotate):
    def score(head: Head, held: list[int]) -> Vector:
        keys = [head.rotated_key(p) if rotate else head.keys[p] for p in held]
        units = [[x / norm(k) for x in k] for k in keys]
        anchor = [mean(column) for column in transposed(units)]
        return [-dot(k, anchor) / (norm(k) * norm(anchor)) for k in keys]

    return score


@SEEDS
@pytest.mark.parametrize("keys", ["rotated", "unrotated"])
@pytest.mark.parametrize("window", [0, 6])
def test_keydiff_keeps_the_keys_least_like_the_mean_unit_key(seed, keys, window):
    keeps(KeyDiff(keys, window), read(41, seed), protecting(unlike_the_mean(keys == "rotated"), window=window), [8, 17, 30])


def lagged(sinks, lag, rotate=True):
    """The first tokens (2); ranks in each partition that has another after it (0 to 1); the others (1)."""

    def spread(rows: list[Vector], following: list[Vector]) -> Vector:
        columns = transposed(following)
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        out = []
        for row in rows:
            scaled = [(x - a) / (b - a) for x, a, b in zip(row, low, high, strict=True)]
            out.append(math.sqrt(sum((x - mean(scaled)) ** 2 for x in scaled) / (len(scaled) - 1)))
        return softmax(out)

    def score(head: Head, held: list[int]) -> Vector:
        out = [2.0 if i < sinks else 1.0 for i in range(len(held))]
        for start in range(sinks, len(held) - 2 * lag + 1, lag):
            one, following = held[start : start + lag], held[start + lag : start + 2 * lag]
            key = head.rotated_key if rotate else head.keys.__getitem__
            by_key = spread([key(p) for p in one], [key(p) for p in following])
            by_value = spread([head.values[p] for p in one], [head.values[p] for p in following])
            total = [(a + b) / 2 for a, b in zip(by_key, by_value, strict=True)]
            for place, i in enumerate(sorted(range(lag), key=total.__getitem__)):
                out[start + i] = place / lag
        return out

    return score


@SEEDS
@pytest.mark.parametrize(
    ("length", "sinks", "lag"), [(60, 4, 8), (68, 4, 16), (43, 0, 13), (51, 2, 7), (41, 4, 19), (41, 4, 128)]
)
def test_lagkv_ranks_partitions_by_the_range_of_the_next(seed, length, sinks, lag):
    """43 tokens are two partitions of 13 and two thirds of a third; 41 are too few for two of 19."""
    keeps(LagKV(sinks, lag), read(length, seed), lagged(sinks, lag), [8, 21, 35])


def test_lagkv_can_score_unrotated_keys():
    keeps(LagKV(4, 8, "unrotated"), read(60, 0), lagged(4, 8, rotate=False), [21, 35])


def test_a_channel_that_is_constant_in_the_next_partition_gives_no_nan():
    policy = LagKV(lag=8).bind(20)
    (view, _) = read(60, 0).views(policy)
    view.keys = view.keys.clone()
    view.keys[..., 20:28, :] = 1.0
    view.rotate = lambda x, position: x
    assert policy.importance(view).isfinite().all()


def neighbours(sinks, local, combine):
    def shares(squares: Vector) -> Vector:
        parts = [squares[i : i + local] for i in range(0, len(squares), local)]
        return [x / sum(part) for part in parts for x in part]

    def score(head: Head, held: list[int]) -> Vector:
        key = shares([norm(head.keys[p]) ** 2 for p in held])
        value = shares([norm(head.values[p]) ** 2 for p in held])
        both = {
            "product": [a * b for a, b in zip(key, value, strict=True)],
            "mean": [(a + b) / 2 for a, b in zip(key, value, strict=True)],
            "key": key,
            "value": value,
        }[combine]
        return [math.inf if p < sinks else x for p, x in zip(held, both, strict=True)]

    return score


@SEEDS
@pytest.mark.parametrize(("sinks", "local"), [(4, 16), (0, 7), (4, 64)])
@pytest.mark.parametrize("combine", ["product", "mean", "key", "value"])
def test_cur_keeps_the_largest_share_of_squared_norms(seed, sinks, local, combine):
    keeps(CUR(sinks, local, combine), read(41, seed), neighbours(sinks, local, combine), [8, 17, 30])


def solved(matrix: list[Vector], right: Vector) -> Vector:
    """Gaussian elimination with pivots."""
    rows = [[*row, b] for row, b in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, size):
            factor = rows[r][i] / rows[i][i]
            rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    out = [0.0] * size
    for i in reversed(range(size)):
        out[i] = (rows[i][-1] - dot(rows[i][i + 1 : size], out[i + 1 :])) / rows[i][i]
    return out


def standing_out(sketches):
    """x (X'X + 0.01)^-1 x' of centred keys times the head's sketch."""

    def score(head: Head, held: list[int]) -> Vector:
        keys = [head.keys[p] for p in held]
        middle = [mean(column) for column in transposed(keys)]
        columns = transposed(sketches[head])
        x = [[dot([a - m for a, m in zip(k, middle, strict=True)], c) for c in columns] for k in keys]
        dims = transposed(x)
        gram = [[dot(a, b) + 0.01 * (a is b) for b in dims] for a in dims]
        return [dot(row, solved(gram, row)) for row in x]

    return score


@pytest.mark.parametrize(("seed", "dims"), [(0, 6), (1, 12), (2, 24)])
def test_leverage_keeps_the_keys_that_few_others_resemble(seed, dims):
    """24 is more than the 16 dims of a key: the Gram matrix is singular without its regularisation."""
    prompt, policy = read(41, seed), Leverage(sketch=dims)
    sketches = {}
    for layer, view in enumerate(prompt.views(policy)):
        numbers = gaussian_sketch(view, view.keys.shape[-1], dims).tolist()
        sketches |= {head: numbers[b][h] for b, heads in enumerate(prompt.heads[layer]) for h, head in enumerate(heads)}
    keeps(policy, prompt, standing_out(sketches), [8, 17, 30])


def test_the_sketch_is_normal_and_depends_on_seed_layer_and_head_alone():
    one, two = read(41, 0).views(Leverage())
    numbers = gaussian_sketch(one, 16, 48)
    assert numbers.shape == (2, 2, 16, 48)
    assert torch.equal(numbers[0], numbers[1])
    assert numbers[0].std().item() == pytest.approx(48**-0.5, rel=0.05)
    assert numbers[0].mean().item() == pytest.approx(0, abs=0.01)
    assert (numbers.abs() * 48**0.5 > 2).double().mean().item() == pytest.approx(0.0455, abs=0.015)
    assert torch.equal(numbers, gaussian_sketch(read(60, 1).views(Leverage())[0], 16, 48))
    one.seed = 1
    others = [gaussian_sketch(two, 16, 48), gaussian_sketch(one, 16, 48), numbers.flip(1)]
    assert all((numbers - other).abs().mean() > 0.1 for other in others)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Knorm(4, 4), "capacity 8 can't hold sinks 4 \\+ window 4 \\+ at least 1 other token"),
        (KeyDiff(window=8), "capacity 8 can't hold window 8 \\+ at least 1 other token"),
        (LagKV(lag=0), "lag 0 is below 1"),
        (CUR(sinks=9), "capacity 8 can't hold sinks 9 \\+ at least 1 other token"),
        (Leverage(regularisation=0), "regularisation 0 above 0"),
    ],
    ids=str,
)
def test_what_a_capacity_can_not_hold_is_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        policy.bind(8)
