"""Policies that select: what each query reads, by gathering, under masks and by plain lists."""

from dataclasses import dataclass

import pytest
import torch
from factories import CLOSE, edit, record, uniform_number
from helpers import CacheConfig, Dense, in_blocks, model_of, tokens_of
from pydantic import ValidationError
from reference import ListBackend, oldest
from torch import Tensor

from kvbench.harness.core.codec import BITS
from kvbench.harness.core.errors import UserError
from kvbench.harness.engine.fastcheck import fast_method
from kvbench.harness.engine.loop import CachedDecoder, read_bytes
from kvbench.harness.engine.method import EAGER, PLAIN_WALK, TOKEN_BY_TOKEN
from kvbench.harness.report.feed import feed
from kvbench.harness.suite import load
from kvbench.harness.suite.entries import entry_schema
from kvbench.policies import Queries, Selecting
from kvbench.policies.bigbird import BigBird
from kvbench.policies.longformer_dilated import LongformerDilated
from kvbench.policies.quest import Quest
from kvbench.policies.sparse_strided import SparseStrided
from kvbench.policies.statistics import AttentionSum

pytestmark = pytest.mark.fast

DOUBLE, LENGTH, SEED = torch.float64, 60, 3  # lists rotate in float32, which adds up to 1e-5 in dense over 75 tokens
BIGBIRD = BigBird(block=4, first=1, window=2, random=2)


@dataclass(frozen=True)
class Everything(Selecting):
    """Select every token, in an order of its own."""

    def select(self, queries: Queries) -> Tensor:
        return queries.range(queries.keys.shape[2]).flip(0).expand(1, 1, 1, queries.step.shape[1], -1)


def quest_of(pages: int, size: int):
    """The rule over plain keys: pages whose channels' extremes allow the largest dot products."""

    def reads(query: Tensor, keys: Tensor, step: int, layer: int, head: int) -> list[int]:
        if layer < 1:
            return list(range(step + 1))
        bounds = [
            float(sum(max(q * k.min(), q * k.max()) for q, k in zip(query, keys[page : page + size].T, strict=True)))
            for page in range(0, step + 1, size)
        ]
        best = sorted(range(len(bounds)), key=lambda page: -bounds[page])[:pages]
        return [p for page in best for p in range(page * size, min(page * size + size, step + 1))]

    return reads


def strided(query: Tensor, keys: Tensor, step: int, layer: int, head: int) -> list[int]:
    return [p for p in range(step + 1) if step - p < 8 or (step - p) % 8 == 0]


def dilated(query: Tensor, keys: Tensor, step: int, layer: int, head: int) -> list[int]:
    gap = 3 if head < 1 and layer >= 1 else 1
    return [p for p in range(step + 1) if p < 2 or ((step - p) % gap == 0 and (step - p) // gap < 6)]


def bigbird(query: Tensor, keys: Tensor, step: int, layer: int, head: int) -> list[int]:
    own = step // 4
    between = list(range(1, own - 1))
    chance = {b: uniform_number(layer, head, own * 2**20 + b, SEED) for b in between}
    blocks = {0, own, max(own - 1, 0), *sorted(between, key=lambda b: -chance[b])[:2]}
    return [p for p in range(step + 1) if p // 4 in blocks]


RULES = {
    "quest": (Quest(budget=24, page=4, dense_layers=1), quest_of(6, 4)),
    "quest of at least 3 pages": (Quest(budget=4, page=4, dense_layers=1), quest_of(3, 4)),
    "strided": (SparseStrided(8), strided),
    "dilated": (LongformerDilated(window=6, dilation=3, sinks=2, heads=1, from_layer=1), dilated),
    "bigbird": (BIGBIRD, bigbird),
}


def decoder_of(policy, streams: int = 1, method=EAGER, dtype=DOUBLE, family: str = "llama", **settings) -> CachedDecoder:
    return CachedDecoder(model_of(family, dtype), CacheConfig(policy, seed=SEED, **settings), streams, method)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("size", [1, 7, LENGTH])
def test_a_rule_reads_what_plain_lists_read(name: str, size: int) -> None:
    policy, reads = RULES[name]
    tokens = tokens_of(LENGTH)
    expected = ListBackend(model_of("llama", DOUBLE), oldest, LENGTH, "stream", reads=reads).run(tokens)
    logits = in_blocks(decoder_of(policy), tokens, size)
    assert (logits - expected).abs().max() < CLOSE[DOUBLE]
    dense = in_blocks(decoder_of(Dense()), tokens, LENGTH)
    assert (dense - expected).abs().max() > 1e-3  # the rule leaves something out


# with softcap and sliding windows, and with sink logits
@pytest.mark.parametrize(("family", "dtype"), [("llama", DOUBLE), ("gemma2", DOUBLE), ("gpt_oss", torch.float32)])
def test_selecting_all_is_dense_and_gathering_equals_masking(family: str, dtype) -> None:
    tokens, policy = tokens_of(LENGTH, 2), BigBird(block=4, first=0, window=1, random=2)

    def read(policy, method) -> Tensor:
        return in_blocks(decoder_of(policy, 2, method, dtype, family), tokens, 9)

    for method in (PLAIN_WALK, TOKEN_BY_TOKEN):
        assert (read(Everything(), method) - read(Dense(), method)).abs().max() < CLOSE[dtype]
    assert (read(policy, PLAIN_WALK) - read(policy, TOKEN_BY_TOKEN)).abs().max() < CLOSE[dtype]
    assert (read(policy, PLAIN_WALK) - read(Dense(), PLAIN_WALK)).abs().max() > 1e-3


def test_a_stream_is_read_alike_alone_padded_and_forked() -> None:
    policy, tokens = RULES["quest"][0], tokens_of(LENGTH, 2)
    alone = [in_blocks(decoder_of(policy), tokens[i : i + 1], 1) for i in range(2)]
    read = decoder_of(policy, 2)
    valid = torch.ones(2, 30, dtype=torch.bool)
    valid[1, 20:] = False  # the second stream is ten tokens shorter
    read(tokens[:, :30], valid)
    assert read_bytes(read.fork([0])) + read_bytes(read.fork([1])) == read_bytes(read)
    fork = read.fork([1, 0])
    for each, order in ((read, [0, 1]), (fork, [1, 0])):
        for t in range(4):
            now = torch.stack([tokens[i, (30, 20)[i] + t] for i in order])[:, None]
            logits = each(now)
            for row, i in enumerate(order):
                assert (logits[row, 0] - alone[i][0, (30, 20)[i] + t]).abs().max() < CLOSE[DOUBLE]


@pytest.mark.parametrize("once", [True, False])
def test_a_prompt_is_read_under_full_attention_if_eviction_waits_for_its_end(once: bool) -> None:
    tokens, policy = tokens_of(LENGTH), RULES["strided"][0]
    read = decoder_of(policy) if once else decoder_of(policy, evict="prompt")
    first = read.read_prompt(tokens[:, :50], 16, once=once)
    dense = decoder_of(Dense())
    assert (first - dense.read_prompt(tokens[:, :50], 16)).abs().max() < CLOSE[DOUBLE]

    def reads(query, keys, step, layer, head):
        return strided(query, keys, step, layer, head) if step >= 50 else list(range(step + 1))

    expected = ListBackend(model_of("llama", DOUBLE), oldest, LENGTH, "stream", reads=reads).run(tokens)
    assert (in_blocks(read, tokens[:, 50:], 5) - expected[:, 50:]).abs().max() < CLOSE[DOUBLE]


@pytest.mark.parametrize("size", [1, LENGTH])
def test_bytes_read_are_those_of_the_newest_querys_tokens(size: int) -> None:
    read, tokens = decoder_of(SparseStrided(8)), tokens_of(LENGTH)
    in_blocks(read, tokens, size)
    selected = len(strided(tokens, tokens, LENGTH - 1, 0, 0))
    assert read_bytes(read) * LENGTH == read.held_bytes * selected

    quest = decoder_of(Quest(budget=24, page=4, dense_layers=2))  # the model's two layers
    in_blocks(quest, tokens, size)
    assert read_bytes(quest) == quest.held_bytes
    assert read_bytes(decoder_of(Dense())) is None


@pytest.mark.parametrize("size", [1, 62])
def test_extremes_of_pages_are_read_and_held(size: int) -> None:
    read, tokens = decoder_of(Quest(budget=64, page=4, dense_layers=1)), tokens_of(62)
    before = read.state_bytes
    in_blocks(read, tokens, size)
    second = read.model.layers[1]
    extremes = 16 * 2 * second.heads * second.key_dim * 8  # 16 pages, the last of two tokens
    assert read_bytes(read) == read.held_bytes + extremes
    assert read.state_bytes - before >= extremes  # in steps, with the pages of empty slots


def test_random_numbers_of_a_query_are_those_of_the_view_in_deep_models() -> None:
    query, layer = torch.zeros(1, 2, 1, 1, 4), 29
    queries = Queries(query, torch.zeros(1, 1), query, layer, 30, SEED, lambda _: (query, query))
    drawn = queries.uniform(torch.arange(5).view(1, 1, 1, 1, -1))[0, :, 0, 0]
    expected = [[uniform_number(layer, head, position, SEED) for position in range(5)] for head in range(2)]
    assert drawn.tolist() == expected


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv": BITS["int8"]}, "leave kv out"),
        ({"positions": "clamped", "limit": 8}, "cache or stream"),
        ({"evict": 4}, "step or prompt"),
        ({"capacity": 8}, "takes no capacity"),
    ],
)
def test_what_can_not_be_selected_from_is_refused(settings, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CacheConfig(SparseStrided(8), **settings)


def test_a_suite_offers_the_axes_that_apply() -> None:
    schema = entry_schema("quest", Quest)
    assert {"evict", "positions"} <= schema.model_fields.keys()
    assert schema.model_fields.keys().isdisjoint({"capacity", "kv", "limit"})
    for wrong in ({"positions": "clamped"}, {"evict": {"every": 8}}):
        with pytest.raises(ValidationError):
            schema.model_validate(wrong)


def test_a_suites_bursts_mean_nothing_to_what_selects_and_a_tasks_moments_do(tmp_path) -> None:
    suite = tmp_path / "s.yaml"
    tasks = "[{name: perplexity, tokens: 64, prompt: 32, evict: prompt}, {name: perplexity, tokens: 64, evict: step}]"
    head = f"suite: s\nversion: 1\nmodel: {{id: 'builtin:sink_2'}}\ntask: {tasks}\n"
    suite.write_text(f"{head}evict: [step, {{every: 16}}, prompt]\npolicies: [{{name: quest, budget: 32}}]\n")
    cells = [(cell.task.prompt, cell.evict) for cell in load(suite)[1]]
    assert cells == [(32, "prompt"), (None, 1)]
    alone = load(suite, policies=["{name: h2o, capacity: 8, evict: step}"])[1]  # leaves the other task idle
    assert [cell.task.prompt for cell in alone] == [None]
    with pytest.raises(UserError, match="add it to the suite's evict"):
        load(suite, policies=["{name: h2o, capacity: 8, evict: {every: 2}}"])  # leaves both idle


def test_the_answer_says_what_is_held_and_what_of_it_is_read() -> None:
    held = {"kv_bytes": 2000, "kv_held_bytes": 1000}
    dense, quest = (edit(record(policy, None), metrics=held) for policy in ("dense", "quest"))
    (question,) = feed([dense, edit(quest, metrics={"kv_read_bytes": 250})])["questions"]
    (budget,) = question["budgets"]
    assert budget["answer"].startswith("At no fixed capacity, ")
    assert "holds 100 % of dense's bytes and reads 25 % of them in a step." in budget["answer"]


def test_a_policy_with_statistics_or_another_shape_is_refused() -> None:
    class Counting(Everything):
        statistics = (AttentionSum(),)

    class Flat(Everything):
        def select(self, queries: Queries) -> Tensor:
            return queries.range(3)

    with pytest.raises(ValueError, match="no statistics"):
        CacheConfig(Counting())
    with pytest.raises(ValueError, match=r"shape \[3\], expected \[1, 2, 2, 5, 'n'\]"):
        decoder_of(Flat())(tokens_of(5))


def test_the_check_before_a_run_compares_masks_with_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = model_of("llama", torch.float32), CacheConfig(Quest(budget=64, dense_layers=0))
    chosen = fast_method(model, config)
    assert (chosen.method, chosen.blocks, chosen.refused) == (PLAIN_WALK, "masks", "")
    short = fast_method(model_of("gpt2", torch.float32), config)  # of 128 positions
    assert (short.blocks, short.refused) == ("masks", "")
    monkeypatch.setattr("kvbench.harness.engine.selection.attend_where", lambda visible, q, *_: q * 0)
    chosen = fast_method(model, config)
    assert chosen.method == TOKEN_BY_TOKEN
    assert "masks" in chosen.refused
