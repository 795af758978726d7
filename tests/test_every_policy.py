"""Properties of every policy that ships, in the real engine, with eviction after a prompt, at every step, every five."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from every_policy import HEADS, LAYERS, evicting, instances
from factories import CLOSE, needs_compiler
from helpers import CachedDecoder, Dense, Window, in_blocks, model_of, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_views import kept, prompt_views

from kvbench.harness.core.parameters import parameters_of
from kvbench.harness.core.plugins import policy_class
from kvbench.harness.engine.budgets import Table, static_table
from kvbench.harness.engine.decoder import CacheConfig, Evict
from kvbench.harness.engine.method import EAGER, FASTEST, RAN, TOKEN_BY_TOKEN, Method
from kvbench.harness.tasks.memory.meter_stream import _kv_bytes
from kvbench.policies import Policy
from kvbench.policies.merges import positions_for
from kvbench.policies.triattention import TriAttention

pytestmark = pytest.mark.fast


CAPACITY, PROMPT, LENGTH, DOUBLE = 16, 44, 64, torch.float64
NAMES = evicting()
every_policy = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    return instances(tmp_path_factory.mktemp("files"))


def config_of(policy: Policy, evict: Evict, capacity: int = CAPACITY) -> CacheConfig:
    """Budgets that are an outcome need a prompt, and take no capacity."""
    if policy.outcome:
        return CacheConfig(policy, None, evict="prompt")
    return CacheConfig(policy, capacity, positions_for(policy), evict=evict)


def read_all(config: CacheConfig, tokens: torch.Tensor, size: int, method: Method = EAGER, prompt: int = 0):
    """A decoder that has read a stream, and its logits from the prompt's last token on."""
    read = CachedDecoder(model_of("llama", DOUBLE), config, len(tokens), method)
    if not prompt:
        return read, in_blocks(read, tokens, size)
    first = read.read_prompt(tokens[:, :prompt], size, once=True)
    return read, torch.cat([first[:, None], in_blocks(read, tokens[:, prompt:], size)], 1)


def numbers_kept(read: CachedDecoder) -> list[list[list[int]]]:
    """Return the number of tokens that each head holds. [L][B][H]."""
    return [[[len(head) for head in stream] for stream in layer] for layer in read.kept()]


def kept_by_definition(policy: Policy, tokens: torch.Tensor, capacity: int, counts, table: Table | None):
    """Positions that survive a prompt's end, from dense attention. counts: [L][B][H]; table: budgets that judge."""
    model, result = model_of("llama", DOUBLE), []
    budgets = {capacity, *(budget for row in table or () for budget in row)}
    bound = {n: policy if policy.outcome else policy.bind(n) for n in budgets}
    views = {n: prompt_views(model, tokens, p) for n, p in bound.items()}
    for layer in range(LAYERS):
        held = {n: kept(p, views[n][layer], torch.tensor(counts[layer])) for n, p in bound.items()}
        judges = table[layer] if table else [capacity] * HEADS
        result.append([[held[n][stream][head] for head, n in enumerate(judges)] for stream in range(len(tokens))])
    return result


@every_policy
def test_a_prompt_is_cut_to_what_the_definition_keeps(name, policies):
    policy, tokens = policies[name], tokens_of(PROMPT, 2)
    config = config_of(policy, "prompt")
    read = CachedDecoder(model_of("llama", DOUBLE), config, 2)
    read.read_prompt(tokens, 16)
    table, counts = static_table(model_of("llama", DOUBLE), config, PROMPT), numbers_kept(read)
    if not policy.outcome:
        of_stream = [sum(sum(layer[stream]) for layer in counts) for stream in range(2)]
        assert of_stream == [LAYERS * HEADS * CAPACITY] * 2
    assert read.kept() == kept_by_definition(policy, tokens, CAPACITY, counts, table)


@pytest.mark.slow("many drawn cases")
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_prompt_of_any_length_is_cut_at_any_capacity(policies, data):
    name = data.draw(st.sampled_from([n for n in NAMES if not policies[n].outcome]), "policy")
    capacity, length = data.draw(st.integers(12, 40), "capacity"), data.draw(st.integers(2, 60), "prompt")
    policy, tokens = policies[name], tokens_of(length, 2, seed=data.draw(st.integers(0, 3), "seed"))
    config = config_of(policy, "prompt", capacity)
    read = CachedDecoder(model_of("llama", DOUBLE), config, 2)
    read.read_prompt(tokens, data.draw(st.integers(1, 20), "block"))
    table, counts = static_table(model_of("llama", DOUBLE), config, length), numbers_kept(read)
    assert read.kept() == kept_by_definition(policy, tokens, capacity, counts, table)


@pytest.mark.slow("every policy")
@every_policy
def test_blocks_are_the_same_tokens_one_by_one(name, policies):
    """Budgets that are an outcome are blocks of a prompt and after it."""
    policy, tokens = policies[name], tokens_of(LENGTH, 2)
    config, prompt = config_of(policy, 1), PROMPT if policy.outcome else 0
    one_by_one, expected = read_all(config, tokens, 1, TOKEN_BY_TOKEN, prompt)
    for method, size in ((TOKEN_BY_TOKEN, 20), (FASTEST, 20)):
        blocks, logits = read_all(config, tokens, size, method, prompt)
        torch.testing.assert_close(logits[:, -20:], expected[:, -20:], atol=CLOSE[DOUBLE], rtol=0)
        assert blocks.kept() == one_by_one.kept()


@needs_compiler
@every_policy
def test_blocks_by_the_kernel_of_a_step_are_the_same(name, policies):
    """In float32, for which there are kernels; of a policy whose blocks a kernel walks, that kernel."""
    policy, tokens, model = policies[name], tokens_of(LENGTH, 2), model_of("llama")
    if policy.outcome:
        pytest.skip("cuts a prompt once, and walks no block")
    fast, plain = (
        CachedDecoder(model, config_of(policy, 1), 2, method) for method in (replace(FASTEST, closed_form=False), TOKEN_BY_TOKEN)
    )
    before = RAN["compiled steps"]
    ours, theirs = in_blocks(fast, tokens, 20), in_blocks(plain, tokens, 20)
    torch.testing.assert_close(ours, theirs, atol=CLOSE[torch.float32], rtol=0)
    assert fast.kept() == plain.kept()
    is_compiled = all("compiled walk" in walk.offers for walk in fast.walks)
    assert (RAN["compiled steps"] > before) == (not is_compiled)


@pytest.mark.parametrize("capacity", [248, 250, 255, 256])
def test_tokens_one_by_one_are_a_block_also_where_the_slots_attended_grow(capacity):
    """A step attends over whole buckets of 256 slots. The cache goes back and forth between one and two."""
    tokens, config = tokens_of(capacity + 30), CacheConfig(Window(), capacity, evict=8)
    blocks, expected = read_all(config, tokens, capacity + 30)
    for method in (EAGER, TOKEN_BY_TOKEN):
        read = CachedDecoder(model_of("llama", DOUBLE), config, method=method)
        read(tokens[:, :capacity])
        logits = in_blocks(read, tokens[:, capacity:], 1)
        torch.testing.assert_close(logits, expected[:, capacity:], atol=CLOSE[DOUBLE], rtol=0)
        assert read.kept() == blocks.kept()


@every_policy
def test_where_everything_fits_it_is_dense(name, policies):
    """Budgets that differ: at a capacity at which the smallest is the whole text."""
    policy, tokens = policies[name], tokens_of(LENGTH, 2)
    if name == "duo_attention":
        policy = replace(policy, recent=LENGTH)
    if policy.outcome:
        policy = replace(policy, threshold=1.0)  # no head is lazy, and none can do with a part
    capacity = next(c for c in range(LENGTH, 100 * LENGTH, LENGTH) if smallest(policy, c) >= LENGTH)
    _, expected = read_all(CacheConfig(Dense()), tokens, 16, prompt=PROMPT)
    if not policy.outcome:
        _, logits = read_all(config_of(policy, 1, capacity), tokens, 16)
        torch.testing.assert_close(logits[:, PROMPT - 1 :], expected, atol=1e-5, rtol=0)
    _, logits = read_all(config_of(policy, "prompt", capacity), tokens, 16, prompt=PROMPT)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def smallest(policy: Policy, capacity: int) -> int:
    """The smallest budget; 0 if there can be none."""
    if policy.outcome:
        return capacity
    try:
        tables = [policy.bind(capacity).budgets(capacity, LAYERS, HEADS, prompt) for prompt in (PROMPT, None)]
    except ValueError:
        return 0
    return min([capacity, *(budget for table in tables for row in table or () for budget in row)])


@every_policy
def test_steps_after_a_prompt_keep_the_total(name, policies):
    """With budgets that are an outcome, every head grows by one token a step."""
    policy, tokens = policies[name], tokens_of(LENGTH, 2)
    read = CachedDecoder(model_of("llama", DOUBLE), config_of(policy, 5), 2)
    read.read_prompt(tokens[:, :PROMPT], 16, once=True)
    start = numbers_kept(read)
    for step in range(1, 1 + LENGTH - PROMPT):
        assert read(tokens[:, PROMPT + step - 1 : PROMPT + step]).isfinite().all()
        more = step if policy.outcome else step % 5
        for stream in range(2):
            total = sum(sum(layer[stream]) for layer in numbers_kept(read))
            assert total == sum(sum(layer[stream]) for layer in start) + more * LAYERS * HEADS


@every_policy
def test_streams_side_by_side_are_each_alone(name, policies):
    tokens, config = tokens_of(LENGTH, 2), config_of(policies[name], 5)
    both, logits = read_all(config, tokens, 16, prompt=PROMPT)
    for stream in range(2):
        alone, expected = read_all(config, tokens[stream : stream + 1], 16, prompt=PROMPT)
        torch.testing.assert_close(logits[stream : stream + 1], expected, atol=CLOSE[DOUBLE], rtol=0)
        assert [layer[stream] for layer in both.kept()] == [layer[0] for layer in alone.kept()]


def test_what_is_in_a_file_is_part_of_a_cell_and_a_changed_file_is_refused(policies, tmp_path):
    """Covers every policy that needs a file, and TriAttention, which may read one."""
    table = tmp_path / "queries.pt"
    torch.save(torch.rand(LAYERS, HEADS, 2, 8, 3), table)
    readers = {name: p for name, p in policies.items() if getattr(p, "file", None)}
    assert {"replay", "headkv", "duo_attention"} <= set(readers)
    for policy in [*readers.values(), TriAttention(file=str(table))]:
        copied = tmp_path / f"{type(policy).__name__}.copy"
        copied.write_bytes(Path(policy.file).read_bytes())
        unbound = replace(policy, file=str(copied))
        bound = unbound.bind(CAPACITY)
        assert len(parameters_of(bound)["sha256"]) == 64
        assert bound.bind(CAPACITY) == bound
        copied.write_bytes(copied.read_bytes() + b"\n")
        with pytest.raises(ValueError, match=r"\.copy has changed: its sha256 is \w{8}\.\.\., not \w{8}\.\.\.$"):
            bound.bind(CAPACITY)
        assert unbound.bind(CAPACITY).sha256 != bound.sha256


@pytest.mark.parametrize("name", [name for name in NAMES if not policy_class(name).outcome])
def test_the_memory_task_expects_the_bytes_that_are_allocated(name, policies):
    """Whatever the budgets, under layers with a sliding window and without."""
    model, config = model_of("gemma2"), config_of(policies[name], 5)
    read = CachedDecoder(model, config, 3)
    read.reserve(LENGTH)
    assert read.kv_bytes == _kv_bytes(model, config, LENGTH, 3)
