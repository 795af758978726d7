"""Policies that score by the queries seen or by projected values: what they keep equals plain references."""

import math
from functools import cache

import pytest
import torch
from helpers import H2O, model_of
from plain_heads import Case, Head, Vector, best, dot, keeps, keeps_later, mean, norm, read, shuffled, softmax, transposed
from prompt_views import dense_pass, kept, prompt_views

from kvbench.policies import Attention, HeadSizes, Written
from kvbench.policies.criticalkv import CriticalKV, OutputNorm
from kvbench.policies.expected_attention import ExpectedAttention
from kvbench.policies.keydiff import KeyDiff
from kvbench.policies.knorm import Knorm
from kvbench.policies.triattention import TriAttention

pytestmark = pytest.mark.fast


SEEDS = pytest.mark.parametrize("seed", [0, 1])


def mean_rotation(first: int, number: int, frequencies: Vector) -> list[Vector]:
    """The rows of the average of the matrices of RoPE at consecutive positions."""
    size = 2 * len(frequencies)
    out = [[0.0] * size for _ in range(size)]
    for i, frequency in enumerate(frequencies):
        cosine = mean([math.cos((first + p) * frequency) for p in range(number)])
        sine = mean([math.sin((first + p) * frequency) for p in range(number)])
        out[2 * i][2 * i] = out[2 * i + 1][2 * i + 1] = cosine
        out[2 * i][2 * i + 1], out[2 * i + 1][2 * i] = -sine, sine
    return out


def expected_attention(sinks=4, horizon=512, epsilon=0.0, value_norm=True):
    @cache
    def forecast(head: Head) -> list[tuple[Vector, list[Vector]]]:
        """Mean and covariance of each query head's queries, turned to the positions to come."""
        turn = mean_rotation(len(head.keys), horizon, head.frequencies)
        out = []
        for queries in head.queries:
            counted = queries[sinks:]
            middle = [mean(column) for column in transposed(counted)]
            centred = [[a - m for a, m in zip(q, middle, strict=True)] for q in counted]
            columns = transposed(centred)
            covariance = [[dot(a, b) / len(counted) for b in columns] for a in columns]
            half = [[dot(row, column) for column in transposed(covariance)] for row in turn]
            out.append(([dot(row, middle) for row in turn], [[dot(row, other) for other in turn] for row in half]))
        return out

    def score(head: Head, held: list[int]) -> Vector:
        dim, rest = len(head.keys[0]), [p for p in held if p >= sinks]
        keys = [head.rotated_key(p) for p in rest]
        weights = []
        for middle, covariance in forecast(head):
            logits = [dot(k, middle) / math.sqrt(dim) + dot(k, [dot(row, k) for row in covariance]) / dim / 2 for k in keys]
            weights.append(softmax(logits))
        worth = [mean(column) + epsilon for column in transposed(weights)]
        if value_norm:
            worth = [x * norm(head.values[p]) for x, p in zip(worth, rest, strict=True)]
        return [math.inf] * (len(held) - len(rest)) + worth

    return score


@SEEDS
@pytest.mark.parametrize(
    "settings",
    [{}, {"epsilon": 0.02}, {"sinks": 0, "horizon": 9}, {"sinks": 2, "horizon": 64, "epsilon": 0.01}, {"value_norm": False}],
    ids=str,
)
def test_expected_attention_keeps_what_queries_to_come_would_attend_to(seed, settings):
    keeps(ExpectedAttention(**settings), read(41, seed), expected_attention(**settings), [8, 17, 30])


@cache
def projected(head: Head, position: int) -> float:
    """The mean over the query group of |W_o v|_1."""
    return mean([sum(abs(dot(row, head.values[position])) for row in output) for output in head.output])


def critical(base, first, epsilon=1e-4):
    def score(head: Head, held: list[int]) -> Vector:
        scores = base(head, held)
        chosen = best(scores, held, first)
        return [
            math.inf if p in chosen or s == math.inf else (s + epsilon) * projected(head, p)
            for p, s in zip(held, scores, strict=True)
        ]

    return score


def small_norm(head: Head, held: list[int]) -> Vector:
    return [-norm(head.keys[p]) for p in held]


@SEEDS
def test_criticalkv_gives_half_to_the_score_and_the_rest_to_projected_values(seed):
    base = expected_attention(value_norm=False)
    for budget in (8, 17, 30):
        keeps(CriticalKV(), read(41, seed), critical(base, budget // 2), [budget])


@SEEDS
@pytest.mark.parametrize(("first", "epsilon"), [(0, 1e-4), (5, 1e-4), (None, 20.0)])
def test_criticalkv_takes_any_score(seed, first, epsilon):
    """Norms of keys are negated; an epsilon above them turns the product around."""
    for budget in (8, 17, 30):
        score = critical(small_norm, budget // 2 if first is None else first, epsilon)
        keeps(CriticalKV(Knorm(), first, epsilon), read(41, seed), score, [budget])


def test_criticalkv_never_evicts_what_its_score_never_evicts():
    policy = CriticalKV(H2O(window=12), first=3).bind(16)
    for view in read(41, 0).views(policy):
        assert all(set(range(29, 41)) <= set(head) for heads in kept(policy, view, 16) for head in heads)
        view.states[OutputNorm()] = torch.zeros_like(view.states[OutputNorm()])  # infinity times nothing is not a number
        assert (policy.importance(view)[..., 29:] == math.inf).all()


def test_criticalkv_answers_for_the_policy_inside():
    policy = CriticalKV(KeyDiff("unrotated")).bind(9)
    assert policy.first == 4
    assert policy.scope == "head"
    assert policy.statistics == (*KeyDiff("unrotated").statistics, OutputNorm())
    with pytest.raises(ValueError, match="window 9"):
        CriticalKV(KeyDiff(window=9)).bind(9)


def test_criticalkv_refuses_a_model_without_an_output_projection():
    (view, _) = read(41, 0).views(Knorm())
    with pytest.raises(ValueError, match="output projection"):
        OutputNorm().written(Written(view.keys, view.values, view.position, view.position, view.rotate))


def test_the_norm_of_a_token_is_that_of_the_prompts_tokens():
    """A decode step writes one token a head, without an axis of tokens."""
    (view, _) = read(41, 0).views(Knorm())
    output = torch.randn(2, 2, 64, 16, generator=torch.Generator().manual_seed(0))
    together = OutputNorm().written(Written(view.keys, view.values, view.position, view.position, view.rotate, output))
    one = Written(view.keys[:, :, 7], view.values[:, :, 7], view.position[:, :, 7], view.position[:, :, 7], view.rotate, output)
    torch.testing.assert_close(together[:, :, 7], OutputNorm().written(one))


def series(prompt_length, keep_prompt=None, group="max", normalise=True, horizon=65536, centres=None):
    """The published trigonometric series, with the statistics of the first `prompt_length` queries or those given."""
    offsets = [2**i for i in range(17) if 2**i <= horizon]

    def scores(head: Head, held: list[int], query_head: int) -> Vector:
        counted = head.queries[query_head][:prompt_length]
        now, out = len(head.keys), []
        for p in held:
            total = 0.0
            for i, frequency in enumerate(head.frequencies):
                if centres is None:
                    pairs = [complex(q[2 * i], q[2 * i + 1]) for q in counted]
                    center, length = sum(pairs) / len(pairs), mean([abs(c) for c in pairs])
                else:
                    center, length = centres(head, query_head, i)
                key = complex(head.keys[p][2 * i], head.keys[p][2 * i + 1])
                product = center * key.conjugate()
                angle = math.atan2(product.imag, product.real)
                waves = [math.cos((now - p + offset) * frequency + angle) for offset in offsets]
                total += abs(center) * abs(key) * mean(waves) + (length - abs(center)) * abs(key)
            out.append(total)
        return out

    def score(head: Head, held: list[int]) -> Vector:
        safe = prompt_length if keep_prompt is not None and prompt_length <= keep_prompt else 0
        rest = [p for p in held if p >= safe]
        by_head = [scores(head, rest, g) for g in range(len(head.queries))]
        if normalise:
            deviations = [math.sqrt(mean([(x - mean(row)) ** 2 for x in row])) for row in by_head]
            by_head = [[(x - mean(row)) / d for x in row] for row, d in zip(by_head, deviations, strict=True)]
        worth = [max(column) if group == "max" else mean(column) for column in transposed(by_head)]
        return [math.inf] * (len(held) - len(rest)) + worth

    return score


@SEEDS
@pytest.mark.parametrize(
    "settings", [{}, {"group": "mean"}, {"normalise": False}, {"horizon": 100, "group": "mean", "normalise": False}], ids=str
)
def test_triattention_is_the_published_series(seed, settings):
    keeps(TriAttention(**settings), read(31, seed), series(31, **settings), [8, 17, 25])


def in_the_middle(prompt: Case, policy, length: int):
    """Views some steps after a prompt of `length` tokens, with the statistic of queries updated at every step."""
    model = model_of(prompt.family)
    dense = dense_pass(model, prompt.tokens)
    for layer, view in enumerate(prompt_views(model, prompt.tokens, policy)):
        view.prompt, end = torch.full_like(view.step, length), view.step
        (statistic,) = policy.statistics
        queries = dense[layer].queries
        view.states = {}
        sizes = HeadSizes(queries.shape[2], queries.shape[-1], queries.shape[-1])
        state = torch.zeros(*view.rank.shape[:2], *statistic.shape(sizes), dtype=torch.float64)
        for t in range(queries.shape[3]):
            view.step = torch.full_like(end, t)
            state = statistic.update(state, Attention(queries=queries[:, :, :, t]), view)
        view.states[statistic] = state
        yield view


@SEEDS
@pytest.mark.parametrize(("length", "keep_prompt"), [(9, 9), (9, None), (12, 11), (0, None)])
def test_triattention_keeps_a_prompt_that_is_not_too_long(seed, length, keep_prompt):
    """A prompt of 12 is longer than the 11 it may keep; a stream without a prompt counts every query."""
    prompt, policy = read(31, seed), TriAttention(keep_prompt=keep_prompt).bind(16)
    score = series(length or 31, policy.keep_prompt if length else None)
    for layer, view in enumerate(in_the_middle(prompt, policy, length)):
        new, held = shuffled(view, policy, seed=layer, sinks=length)
        keeps_later(policy, new, held, prompt.heads[layer], score)


def test_triattention_takes_the_queries_of_another_text(tmp_path):
    """A file has, for each layer, KV head, query head and pair of dims, the means of its parts and of its length."""
    other, prompt = read(41, 5), read(31, 0)
    table, place = torch.zeros(2, 2, 2, 8, 3), {}
    for layer, heads in enumerate(other.heads):
        for h, head in enumerate(heads[0]):
            for g, queries in enumerate(head.queries):
                for i in range(8):
                    pairs = [(q[2 * i], q[2 * i + 1], math.hypot(q[2 * i], q[2 * i + 1])) for q in queries]
                    table[layer, h, g, i] = torch.tensor([mean(column) for column in transposed(pairs)])
    torch.save(table, tmp_path / "queries.pt")
    for layer, streams in enumerate(prompt.heads):
        place |= {head: (layer, h) for heads in streams for h, head in enumerate(heads)}

    def centres(head: Head, g: int, i: int) -> tuple[complex, float]:
        first, second, length = table[place[head]][g, i].tolist()
        return complex(first, second), length

    policy = TriAttention(file=str(tmp_path / "queries.pt"))
    assert policy.statistics == ()
    keeps(policy, prompt, series(31, centres=centres), [8, 17, 25])


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "text.pt").write_text("none")
    torch.save(torch.zeros(2, 2, 8, 3), tmp_path / "small.pt")
    for name, message in (("missing.pt", " can't be read"), ("text.pt", ": can't be read"), ("small.pt", ": expected a tensor")):
        with pytest.raises(ValueError, match=f"{name}{message}"):
            TriAttention(file=str(tmp_path / name)).bind(8)
    with pytest.raises(ValueError, match="can't be read"):
        TriAttention(file="~nobody-of-this-name/queries.pt").bind(8)


@pytest.mark.parametrize("sizes", [(3, 2, 2, 8), (2, 1, 2, 8), (2, 2, 2, 7)])
def test_statistics_of_another_model_are_refused(tmp_path, sizes):
    torch.save(torch.zeros(*sizes, 3), tmp_path / "queries.pt")
    policy = TriAttention(file=str(tmp_path / "queries.pt")).bind(8)
    with pytest.raises(ValueError, match=r"queries.pt is of .*; the model has 2 layers of 2 KV heads of 16 dims"):
        policy.importance(read(31, 0).views(policy)[0])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (ExpectedAttention(sinks=8), "capacity 8 can't hold sinks 8 \\+ at least 1 other token"),
        (ExpectedAttention(horizon=0), "horizon 0 is below 1"),
        (CriticalKV(first=8), "capacity 8 can't hold first 8 \\+ at least 1 other token"),
        (TriAttention(keep_prompt=8), "capacity 8 can't hold keep_prompt 8 \\+ at least 1 other token"),
        (TriAttention(horizon=0), "horizon 0 is below 1"),
    ],
    ids=str,
)
def test_what_a_capacity_can_not_hold_is_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        policy.bind(8)
