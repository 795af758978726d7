"""Policies whose point is the budget of every layer and head, held to plain references on Python lists."""

import json
from fractions import Fraction
from functools import cache
from math import ceil, log

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from prompt_views import Seen, dense_pass, kept, prompt_views

from kvbench.harness.core.errors import UserError
from kvbench.harness.engine.model import Model, adopt
from kvbench.harness.models.families import tiny_model
from kvbench.harness.run import policy_check
from kvbench.policies import CacheView, Composed, Policy
from kvbench.policies.adakv import AdaKV
from kvbench.policies.cake import Cake
from kvbench.policies.duo_attention import DuoAttention
from kvbench.policies.fastgen import FastGen
from kvbench.policies.h2o import H2O
from kvbench.policies.headkv import HeadKV
from kvbench.policies.pyramidkv import PyramidKV
from kvbench.policies.random import Random
from kvbench.policies.shares import integer_shares
from kvbench.policies.simlayerkv import SimLayerKV
from kvbench.policies.sink_window import SinkWindow
from kvbench.policies.tables import read_importance

pytestmark = pytest.mark.fast


LAYERS, HEADS, GROUP, LENGTH, STREAMS = 4, 2, 2, 48, 2
SEEDS = [0, 1, 2]


@cache
def model(seed: int) -> Model:
    return adopt(tiny_model("llama", seed, vocab_size=96, num_hidden_layers=LAYERS))


@cache
def tokens(seed: int, length: int) -> torch.Tensor:
    return torch.randint(96, (STREAMS, length), generator=torch.Generator().manual_seed(seed))


@cache
def seen(seed: int, length: int = LENGTH) -> list[Seen]:
    """Dense attention of every layer."""
    return [x for _, x in sorted(dense_pass(model(seed), tokens(seed, length)).items())]


@cache
def weights(seed: int, layer: int, stream: int, head: int, length: int = LENGTH) -> list[list[list[float]]]:
    """Softmax weights of a KV head's query heads: [group][query][key]."""
    return seen(seed, length)[layer].weights[stream, head].tolist()


@cache
def views(policy: Policy, seed: int, length: int = LENGTH) -> list[CacheView]:
    return prompt_views(model(seed), tokens(seed, length), policy, seed)


def heads():
    """(stream, layer, head) of everything."""
    return [(b, layer, h) for b in range(STREAMS) for layer in range(LAYERS) for h in range(HEADS)]


def received(of_head: list[list[list[float]]]) -> list[float]:
    """Attention that every key gets from all queries of a group."""
    return [sum(w[i][j] for w in of_head for i in range(j, len(w))) for j in range(len(of_head[0]))]


def best(scores: list[float], count: int) -> list[int]:
    """Positions of the highest scores, the newest among equals."""
    return sorted(sorted(range(len(scores)), key=lambda i: (scores[i], i))[len(scores) - count :])


def largest_remainders(shares: list[float], total: int) -> list[int]:
    """Rounded down, then one more for the largest fractions, the first among equals."""
    whole = [int(round(s, 9)) for s in shares]
    order = sorted(range(len(shares)), key=lambda i: (-round(round(shares[i], 9) - whole[i], 9), i))
    return [w + (i in order[: total - sum(whole)]) for i, w in enumerate(whole)]


# Shares


@given(st.lists(st.floats(0, 50), min_size=1, max_size=8), st.integers(0, 500), st.integers(0, 4), st.integers(1, 90))
def test_integer_shares_add_up_and_stay_within_their_bounds(shares, total, floor, room):
    count = len(shares)
    if total < count * floor:
        with pytest.raises(ValueError, match=f"{total} tokens can't be divided into {count} budgets of at least {floor}"):
            integer_shares(torch.tensor(shares), total, floor)
        return
    assert sum(integer_shares(torch.tensor(shares), total, floor).tolist()) == total
    made = integer_shares(torch.tensor(shares), total, floor, floor + room).tolist()
    assert sum(made) == min(total, count * (floor + room))
    assert all(floor <= x <= floor + room for x in made)


@example([6, 186, 448, 584], 72)  # two fractions are 6/17, which float64 subtraction would order
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(1, 300))
def test_integer_shares_are_the_largest_remainders_of_exact_fractions(parts, total):
    if not sum(parts):
        parts = [1] * len(parts)
    exact = [Fraction(total * p, sum(parts)) for p in parts]
    order = sorted(range(len(parts)), key=lambda i: (int(exact[i]) - exact[i], i))
    over = total - sum(map(int, exact))
    expected = [int(x) + (i in order[:over]) for i, x in enumerate(exact)]
    assert integer_shares(torch.tensor([float(x) for x in exact], dtype=torch.float64), total).tolist() == expected
    assert integer_shares(torch.tensor(parts), total).tolist() == expected  # scaled to add up


def test_what_exceeds_a_ceiling_goes_in_equal_parts_to_the_others():
    assert integer_shares(torch.tensor([30.0, 8.0, 2.0]), 40, ceiling=20).tolist() == [20, 13, 7]
    assert integer_shares(torch.tensor([30.0, 18.0, 2.0]), 50, ceiling=20).tolist() == [20, 20, 10]
    assert integer_shares(torch.zeros(3), 7).tolist() == [3, 2, 2]


# PyramidKV


def pyramid_paper(layers: int, capacity: int, window: int, beta: float, prompt: int | None) -> list[float]:
    """Real-valued shares, the window included."""
    mean = capacity - window
    least = mean / beta
    most = 2 * mean - least
    if prompt is not None and prompt < 2 * mean:
        return [capacity] * layers
    if prompt is not None and most >= prompt - window:
        most = prompt - window
        least = 2 * mean - most
    return [most - layer * (most - least) / (layers - 1) + window for layer in range(layers)]


def pyramid_official(layers: int, capacity: int, window: int, beta: int, prompt: int) -> list[int]:
    """KVCache-Factory, in integers."""
    base = capacity - window
    least = base // beta
    most = base * 2 - least
    if most >= prompt - window:
        most = prompt - window
        least = base * 2 - most
    step = (most - least) // (layers - 1)
    if prompt < base * 2:
        return [capacity] * layers
    return [most - layer * step + window for layer in range(layers)]


def pyramid_kvpress(layers: int, capacity: int, window: int, beta: float, prompt: int) -> list[int]:
    """kvpress, which rounds every layer by itself."""
    least = capacity / beta
    most = capacity * 2 - least
    if most >= prompt - window:
        most = prompt - window
        least = capacity * 2 - most
    if not prompt >= most >= least >= window:
        return [capacity] * layers
    return [round(most - layer * (most - least) / (layers - 1)) for layer in range(layers)]


PYRAMIDS = [
    (layers, capacity, window, beta, prompt)
    for layers in (2, 5, 12)
    for capacity, window in ((40, 8), (100, 32), (257, 20), (9, 8))
    for beta in (1, 5, 20)
    for prompt in (capacity + 7, 2 * capacity - 5, 10 * capacity)
]


def test_pyramidkv_is_the_papers_shares():
    for layers, capacity, window, beta, known in [case for one in PYRAMIDS for case in (one, (*one[:4], None))] + [
        (10, 62, 8, 20, None)
    ]:
        policy = PyramidKV(H2O(window), beta).bind(capacity)
        table = policy.budgets(capacity, layers, 3, known)
        shares = pyramid_paper(layers, capacity, window, beta, known)
        if min(shares) >= window + 1:
            assert table == [[x] * 3 for x in largest_remainders(shares, layers * capacity)]
        assert sum(map(sum, table)) == layers * 3 * capacity
        assert min(map(min, table)) > window


def test_pyramidkv_official_is_the_official_table_less_its_surplus():
    """The official table never holds less than its capacity. Every layer gives back the same, to within a token."""
    for layers, capacity, window, beta, prompt in PYRAMIDS:
        official = pyramid_official(layers, capacity, window, beta, prompt)
        surplus = sum(official) - layers * capacity
        table = PyramidKV(H2O(window), beta, variant="official").bind(capacity).budgets(capacity, layers, 1, prompt)
        assert surplus >= 0
        assert sum(map(sum, table)) == layers * capacity
        if min(official) - surplus / layers >= window + 1:
            assert [row[0] for row in table] == largest_remainders([x - surplus / layers for x in official], layers * capacity)


def test_pyramidkv_kvpress_is_its_table():
    for layers, capacity, window, beta, prompt in PYRAMIDS:
        expected = pyramid_kvpress(layers, capacity, window, beta, prompt)
        table = PyramidKV(H2O(window), beta, variant="kvpress").bind(capacity).budgets(capacity, layers, 1, prompt)
        assert sum(map(sum, table)) == layers * capacity
        if sum(expected) == layers * capacity and min(expected) > window:
            assert [row[0] for row in table] == expected


def test_these_pyramids_are_pyramids():
    """Most cases above hold a table exactly, and both fallbacks occur."""
    paper = [pyramid_paper(*case) for case in PYRAMIDS]
    assert sum(min(s) >= case[2] + 1 for s, case in zip(paper, PYRAMIDS, strict=True)) > len(PYRAMIDS) * 0.6
    assert sum(min(pyramid_kvpress(*c)) > c[2] and sum(pyramid_kvpress(*c)) == c[0] * c[1] for c in PYRAMIDS) > 70
    assert len({max(s) == min(s) for s in paper}) == 2
    assert len({len(set(pyramid_kvpress(*case))) == 1 for case in PYRAMIDS}) == 2


# AdaKV


def pooled_counts(scores: list[list[float]], capacity: int) -> list[int]:
    """Return each head's number of a layer's best tokens. Ties are won by the newest token, then by the last head."""
    pool = sorted((s, i, h) for h, row in enumerate(scores) for i, s in enumerate(row))
    chosen = pool[len(pool) - capacity * len(scores) :]
    return [sum(h == head for _, _, h in chosen) for head in range(len(scores))]


def h2o_scores(seed: int, layer: int, stream: int, window: int) -> list[list[float]]:
    rows = [received(weights(seed, layer, stream, h)) for h in range(HEADS)]
    return [[float("inf") if LENGTH - 1 - j < window else x for j, x in enumerate(row)] for row in rows]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("capacity", "window", "alpha"), [(16, 4, 0.2), (16, 8, 0.5), (7, 0, 0.0), (30, 10, 1.0), (40, 6, 0.1)])
def test_adakv_counts_the_best_of_a_layer(seed, capacity, window, alpha):
    policy = AdaKV(H2O(window), alpha).bind(capacity)
    made = policy.prompt_budgets(views(policy.score, seed), capacity).tolist()
    official = 0
    for b in range(STREAMS):
        for layer in range(LAYERS):
            scores = h2o_scores(seed, layer, b, window)
            apart = [[s for s in row if s != float("inf")] for row in scores]  # as the official code does
            counts = pooled_counts(apart, capacity - window)
            shares = [(1 - alpha) * c + alpha * (capacity - window) for c in counts]
            expected = [window + x for x in largest_remainders(shares, HEADS * (capacity - window))]
            assert made[b][layer] == expected
            rounded = [window + round((1 - alpha) * c + int(alpha * (capacity - window))) for c in counts]
            official += sum(rounded) == HEADS * capacity and rounded == expected
            keeps = kept(policy, views(policy.score, seed)[layer], torch.tensor(made)[:, layer])[b]
            assert keeps == [best(row, n) for row, n in zip(scores, expected, strict=True)]
    assert official >= STREAMS * LAYERS / 4


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("capacity", "alpha"), [(16, 0.2), (9, 0.5), (30, 0.0), (11, 1.0)])
@pytest.mark.parametrize("score", [H2O(3), Random()])
def test_adakv_kvpress_protects_every_heads_best_and_drops_the_lowest_of_all(seed, capacity, alpha, score):
    policy = AdaKV(score, alpha, "kvpress").bind(capacity)
    seen_by = views(policy.score, seed)
    made = policy.prompt_budgets(seen_by, capacity)
    for layer, view in enumerate(seen_by):
        for b, of_stream in enumerate(policy.importance(view).tolist()):
            safe = {(h, i) for h, row in enumerate(of_stream) for i in best(row, int(capacity * alpha))}
            pool = sorted(((h, i) in safe, s, i, h) for h, row in enumerate(of_stream) for i, s in enumerate(row))
            alive = pool[HEADS * (LENGTH - capacity) :]
            expected = [sorted(i for *_, i, h in alive if h == head) for head in range(HEADS)]
            assert kept(policy, view, made[:, layer])[b] == expected


def test_adakv_has_a_floor_for_every_head_while_decoding():
    assert AdaKV(H2O(2), 0.3).bind(20).pool_floor(20) == 6
    assert AdaKV(H2O(9), 0.3).bind(20).pool_floor(20) == 9
    assert AdaKV(Random(), 0).bind(20).pool_floor(20) == 1
    with pytest.raises(ValueError, match="alpha 2 is not between 0 and 1"):
        AdaKV(alpha=2).bind(20)


# Tables: HeadKV and DuoAttention


@pytest.fixture
def table(tmp_path):
    def write(content) -> str:
        path = tmp_path / "heads.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


IMPORTANCE = [[0.5, 0.1, 0.0], [3.0, 0.3, 0.3]]


@pytest.mark.parametrize(("capacity", "window", "beta"), [(20, 4, 1.01), (64, 8, 2), (33, 0, 5), (100, 32, 1.2)])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_headkv_is_a_base_and_a_pool_shared_by_importance(table, capacity, window, beta, temperature):
    policy = HeadKV(H2O(window), file=table({"importance": IMPORTANCE}), beta=beta, temperature=temperature).bind(capacity)
    flat = [x**temperature for row in IMPORTANCE for x in row]
    base = capacity - window
    pool = base // beta * len(flat)
    shares = [x / sum(flat) * pool + base - base // beta for x in flat]
    made = [x for row in policy.budgets(capacity, 2, 3, None) for x in row]
    assert sum(made) == 6 * capacity
    assert [len(row) for row in policy.budgets(capacity, 2, 3, 1000)] == [3, 3]
    if min(shares) >= 1:
        assert made == [window + x for x in largest_remainders(shares, 6 * base)]
        assert all(abs(x - window - round(s)) <= 1 for x, s in zip(made, shares, strict=True))  # as the codes round
    assert min(made) > window


def test_a_table_per_query_head_is_averaged_over_groups(table):
    file = table({"importance": [[1, 3, 0, 2], [4, 4, 5, 7]]})
    assert read_importance(file, 2, 2).tolist() == [[2, 1], [4, 6]]
    assert read_importance(file, 2, 4).tolist() == [[1, 3, 0, 2], [4, 4, 5, 7]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "not a table of heads; expected {'importance': 2 lists of 3 numbers"),
        ({"importance": [[1, 2, "x"], [1, 2, 3]]}, "not a table of heads"),
        ({"importance": [[1, 2, 3]]}, "found 1 lists of 3 numbers; expected {'importance': 2 lists of 3 numbers"),
        ({"importance": [[1, 2, 3], [1, 2]]}, "found 2 lists of 2 or 3 numbers"),
        ({"importance": [[1, 2, 3], [1, 2, -3]]}, "must be finite and not negative"),
        ({"importance": [[0, 0, 0], [0, 0, 0]]}, "all importances are 0"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(table, content, message):
    policy = HeadKV(Random(), file=table(content)).bind(8)
    with pytest.raises(ValueError, match="heads.json: ") as refused:
        policy.budgets(8, 2, 3, None)
    assert message in str(refused.value)
    with pytest.raises(ValueError, match=r"nowhere.json can.t be read \(No such file"):
        HeadKV(file="nowhere.json").bind(8).budgets(8, 2, 3, None)


@pytest.mark.parametrize(
    ("sparsity", "streaming"), [(0.5, {(0, 2), (0, 1), (1, 1)}), (0.8, {(0, 2), (0, 1), (1, 1), (1, 2), (0, 0)})]
)
def test_duo_attention_gives_retrieval_heads_what_streaming_heads_leave(table, sparsity, streaming):
    """The lowest scores stream; of equal ones the first."""
    policy = DuoAttention(H2O(2), file=table({"importance": IMPORTANCE}), sparsity=sparsity, sinks=2, recent=6).bind(20)
    made = policy.budgets(20, 2, 3, None)
    others = [made[layer][h] for layer in range(2) for h in range(3) if (layer, h) not in streaming]
    assert {(layer, h) for layer in range(2) for h in range(3) if made[layer][h] == 8} == streaming
    assert sum(others) == 6 * 20 - 8 * len(streaming)
    assert max(others) - min(others) <= 1


def test_duo_attention_ranks_streaming_heads_as_sink_window_and_others_as_its_score(table):
    policy = DuoAttention(H2O(2), file=table({"importance": IMPORTANCE}), sinks=2, recent=6)
    assert policy.bind(8).score == SinkWindow(2, 6)
    assert policy.bind(8).statistics == ()
    assert policy.bind(33).score == H2O(2)
    for view in views(H2O(2), 0):
        assert kept(policy.bind(8), view, 8) == [[[0, 1, *range(LENGTH - 6, LENGTH)]] * HEADS] * STREAMS
        assert kept(policy.bind(33), view, 33) == kept(H2O(2).bind(33), view, 33)
    with pytest.raises(ValueError, match=r"capacity 8 does not leave each of 3 retrieval heads more than .* sinks 2 \+ recent 6"):
        policy.bind(8).budgets(8, 2, 3, None)
    with pytest.raises(ValueError, match="sparsity 2"):
        DuoAttention(file="x", sparsity=2).bind(20)


# CAKE


def variance(values: list[float]) -> float:
    """With Bessel's correction."""
    mean = sum(values) / len(values)
    return sum((x - mean) ** 2 for x in values) / (len(values) - 1)


def cake_scores(of_head: list[list[list[float]]], window: int, gamma: float, kernel: int) -> list[float]:
    length = len(of_head[0])
    older = length - window
    pooled = []
    for w in of_head:
        columns = [[w[i][j] for i in range(older, length)] for j in range(older)]
        score = [sum(c) / window + gamma * variance(c) for c in columns]
        pooled.append([sum(score[max(0, j - kernel // 2) : j + kernel // 2 + 1]) / kernel for j in range(older)])
    return [sum(p[j] for p in pooled) / len(pooled) for j in range(older)] + [float("inf")] * window


def cake_preference(seed: int, layer: int, stream: int, window: int, tau1: float, tau2: float) -> float:
    entropy = spread = 0.0
    older = LENGTH - window
    for h in range(HEADS):
        for w in weights(seed, layer, stream, h):
            entropy -= sum(w[i][j] * log(w[i][j] + 1e-10) for i in range(older, LENGTH) for j in range(older))
            spread += sum(variance([w[i][j] for i in range(older, LENGTH)]) for j in range(older))
    return entropy ** (1 / tau1) * spread ** (1 / tau2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("capacity", "window", "gamma", "tau1", "tau2"),
    [(16, 4, 200, 1, 1), (30, 8, 5, 1.6, 0.4), (36, 5, 0, 0.5, 0.4), (9, 8, 200, 1, 1)],
)
def test_cake(seed, capacity, window, gamma, tau1, tau2):
    policy = Cake(window, gamma, tau1=tau1, tau2=tau2).bind(capacity)
    made = policy.prompt_budgets(views(policy, seed), capacity)
    for b in range(STREAMS):
        preferences = [cake_preference(seed, layer, b, window, tau1, tau2) for layer in range(LAYERS)]
        total, most = (capacity - window) * LAYERS, LENGTH - window
        shares = [p / sum(preferences) * total for p in preferences]
        while max(shares) > most:  # what is over goes in equal parts to the layers below
            below = [s < most for s in shares]
            over = sum(max(0, s - most) for s in shares)
            shares = [s + over / sum(below) if low else most for s, low in zip(shares, below, strict=True)]
        expected = [window + x for x in largest_remainders(shares, total)]
        assert made[b].tolist() == [[x] * HEADS for x in expected]
    for b, layer, h in heads():
        scores = cake_scores(weights(seed, layer, b, h), window, gamma, 5)
        keeps = kept(policy, views(policy, seed)[layer], made[:, layer])
        assert keeps[b][h] == best(scores, int(made[b, layer, h]))


# SimLayerKV


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("sinks", "recent", "queries"), [(4, 8, 1), (0, 5, 2), (2, 30, 4), (4, 60, 1)])
@pytest.mark.parametrize("variant", ["paper", "kvpress"])
def test_simlayerkv_cuts_lazy_layers(seed, sinks, recent, queries, variant):
    apart = queries if variant == "kvpress" else 0
    shares = {}
    for b in range(STREAMS):
        for layer in range(LAYERS):
            rows = [w[i] for h in range(HEADS) for w in weights(seed, layer, b, h) for i in range(LENGTH - queries, LENGTH)]
            mean = [sum(r[j] for r in rows) / len(rows) for j in range(LENGTH - apart)]
            shares[b, layer] = sum(x for j, x in enumerate(mean) if j < sinks or j >= len(mean) - recent)
    threshold = sorted(shares.values())[len(shares) // 2] - 1e-6  # half of the layers are lazy
    policy = SimLayerKV(sinks, recent, threshold, queries, variant).bind(64)
    made = policy.prompt_budgets(views(policy, seed), None)
    for b, layer, h in heads():
        lazy = shares[b, layer] > threshold and sinks + recent + apart < LENGTH
        expected = [*range(sinks), *range(LENGTH - recent + apart, LENGTH)] if lazy else list(range(LENGTH))
        assert kept(policy, views(policy, seed)[layer], made[:, layer])[b][h] == expected


def test_simlayerkv_has_layers_of_both_kinds():
    policy = SimLayerKV(4, 8, 0.35)
    assert SimLayerKV.outcome
    assert set(policy.prompt_budgets(views(policy, 0), None).flatten().tolist()) == {12, LENGTH}


# FastGen


def fastgen_kind(of_head, ids, policy: FastGen) -> tuple[int, list[int]]:
    """The number of the first kind that holds enough, and its tokens."""
    length = len(ids)
    special = [j for j in range(length) if j < policy.sinks or ids[j] in policy.special]
    punctuation = [j for j in range(length) if j in special or ids[j] in policy.punctuation]
    mass = received(of_head)
    others = [j for j in range(length) if j not in punctuation]
    hitters = sorted(others, key=lambda j: (-mass[j], -j))[: ceil(policy.heavy_hitters * length)]
    frequent = sorted([*punctuation, *hitters])
    recent = max(1, int(policy.recent * length))
    for kind, tokens_of_kind in enumerate((special, punctuation, frequent)):
        held = sum(mass[j] for j in tokens_of_kind) / (len(of_head) * length)
        if held >= policy.threshold:
            return kind, tokens_of_kind
    kept_pairs = [(i, j) for i in range(length) for j in range(i + 1) if j in frequent or i - j < recent]
    if sum(w[i][j] for w in of_head for i, j in kept_pairs) / (len(of_head) * length) >= policy.threshold:
        return 3, sorted({*frequent, *range(length - recent, length)})
    return 4, list(range(length))


FASTGENS = [
    FastGen(0.9, special=(1, 5, 7, 30), punctuation=tuple(range(40, 60))),
    FastGen(0.5, 0.1, 0.1, 4, punctuation=tuple(range(20, 30))),
    FastGen(0.75, 0.2, 0.5, 1, special=(3,), punctuation=tuple(range(30, 90))),
    FastGen(0.3, 0.1, 0.1, 2, special=tuple(range(10))),
    FastGen(0.97, 0.1, 0.1, 2),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", FASTGENS)
def test_fastgen_keeps_the_first_kind_that_is_enough(seed, policy):
    made = policy.prompt_budgets(views(policy, seed), None)
    for b, layer, h in heads():
        _, expected = fastgen_kind(weights(seed, layer, b, h), tokens(seed, LENGTH)[b].tolist(), policy)
        assert kept(policy, views(policy, seed)[layer], made[:, layer])[b][h] == expected


def test_fastgens_above_take_every_kind():
    kinds = {
        fastgen_kind(weights(seed, layer, b, h), tokens(seed, LENGTH)[b].tolist(), policy)[0]
        for policy in FASTGENS
        for seed in SEEDS
        for b, layer, h in heads()
    }
    assert kinds == {0, 1, 2, 3, 4}


def test_fastgen_takes_lists_as_a_file_has_them():
    assert FastGen(special=[1, 2]) == FastGen(special=(1, 2))


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (FastGen, {"heavy_hitters": 3}, "heavy_hitters 3 "),
        (FastGen, {"threshold": 5.0}, "threshold 5.0 "),
        (FastGen, {"sinks": -1}, "sinks -1 "),
        (SimLayerKV, {"sinks": -3}, "sinks -3 "),
        (SimLayerKV, {"queries": 0}, "queries 0 "),
        (SimLayerKV, {"queries": 5, "recent": 2}, "queries 5 .* recent 2"),
    ],
)
def test_policies_whose_budgets_the_prompt_decides_refuse_options_without_a_capacity(policy, options, message):
    with pytest.raises(ValueError, match=message):
        policy(**options)


# What holds for all


@pytest.mark.slow("takes seconds")
@pytest.mark.parametrize("name", ["headkv", "duo_attention"])
def test_policies_with_a_table_pass_the_checks_and_ask_for_it(name, table):
    settings = [f"file={table({'importance': [row[:2] for row in IMPORTANCE]})}"]
    assert policy_check.check(name, settings, [16, 17]).ok
    with pytest.raises(UserError, match="--set: 'file' is missing"):
        policy_check.check(name)


def test_policies_that_hold_another_delegate_to_it(table):
    file = table({"importance": IMPORTANCE})
    for policy in (PyramidKV(H2O(3)), AdaKV(H2O(3)), HeadKV(H2O(3), file=file), DuoAttention(H2O(3), file=file)):
        assert isinstance(policy, Composed)
        bound = policy.bind(12)
        assert (bound.statistics, bound.scope) == (H2O().statistics, "slot")
        for view in views(H2O(3), 0):
            assert kept(bound, view, 12) == kept(H2O(3).bind(12), view, 12)
        with pytest.raises(ValueError, match="capacity 3 can't hold window 3"):
            policy.bind(3)


def shuffled(policy: Policy, view: CacheView) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance in shuffled slots of which three are empty and hold garbage, and what it should be there."""
    empty = 3
    slots = view.rank.shape[-1] + empty
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(5))

    def spread(x: torch.Tensor, garbage: float) -> torch.Tensor:
        filled = torch.cat([x, torch.full_like(x[:, :, :empty], garbage)], 2)
        return filled[:, :, order]

    moved = CacheView(
        spread(view.rank, slots),
        spread(view.position, -1),
        view.step,
        spread(view.keys, 9),
        spread(view.values, 9),
        {s: spread(x, 0.7) if s.per == "slot" else x for s, x in view.states.items()},
        view.layer,
        view.head,
        view.prompt,
        view.num_layers,
        view.seed,
        view.rotate,
    )
    held = order < slots - empty
    made = policy.importance(moved)
    assert not made.isnan().any()
    return made[:, :, held], policy.importance(view)[:, :, order[held]]


@pytest.mark.parametrize("policy", [Cake(4).bind(16), FASTGENS[1]], ids=["cake", "fastgen"])
def test_slots_in_any_order_and_garbage_in_empty_ones_change_nothing(policy):
    found, expected = shuffled(policy, views(policy, 0)[1])
    torch.testing.assert_close(found, expected)
    assert torch.equal(found >= 2, expected >= 2), "FastGen never evicts what is worth 2"
