"""The engine on PyTorch's `meta` device, where code raises that would wait for a GPU or leave a tensor on the CPU.

A meta tensor has a shape but no numbers, so `.item()`, `if tensor:` and indexing by a mask fail. Two modes catch what meta
itself allows: an operation on a CPU tensor, and turning Python data into a tensor (a copy from the host).

Not covered: FlexAttention and Triton's kernels, which refuse `meta` (stand-ins take their calls, so the code around them is
covered); PyTorch's fused attention for CPUs, which CUDA never takes; waits inside an operation's CUDA implementation
(test_exactness.py checks those on a GPU).
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from every_policy import evicting, instances
from factories import default_policies, needs_triton, slots_for
from test_models import REFUSED
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvbench.harness.core.codec import Codec, Kivi
from kvbench.harness.core.plugins import policy_class
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder, decoder
from kvbench.harness.engine.method import EAGER, KERNELS, TOKEN_BY_TOKEN, Method
from kvbench.harness.engine.model import Model, adopt
from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import BUCKET, LayerShape
from kvbench.harness.kernels import choose, cuda, cuda_attention, flex, rope
from kvbench.harness.kernels.captured import CapturedSteps
from kvbench.harness.kernels.compiler import why_untraced
from kvbench.harness.kernels.states import why_unserved
from kvbench.harness.models.families import FAMILIES as FAMILY_SIZES
from kvbench.harness.models.families import tiny_model
from kvbench.policies import Policy
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O
from kvbench.policies.merges import positions_for
from kvbench.policies.recompute_sink_window import RecomputeSinkWindow
from kvbench.policies.sink_window import SinkWindow

pytestmark = pytest.mark.fast


META = torch.device("meta")
VOCABULARY, CAPACITY, LIMIT = 96, 8, 12
MODES = ["cache", "stream", "clamped"]
FAMILIES = ["llama", "gpt_neox", "gemma2", "gemma3_text", "gpt_oss", "phi", "qwen3_moe"]
DECIDED_BY_THE_PROMPT = ["adakv", "cake", "d2o", "fastgen", "simlayerkv"]
STREAMING = [name for name in default_policies() if not policy_class(name).outcome]
CACHED = [name for name in STREAMING if policy_class(name).caches]
# A position mode changes how keys are turned before attention. Of the scores only these are about rotated keys.
IN_EVERY_MODE = ["dense", "window", "sink_window", "h2o", "random", "recompute_window", "keydiff", "lagkv"]
HAS_A_TABLE = ["duo_attention", "headkv", "pyramidkv", "replay"]
# Filling by steps and a block, crossing into eviction, full before and past the limit of mode `clamped`; and more than the
# capacity at once, empty and full.
BLOCKS = [[1, 5, 1, 4, 1, 3, 1], [10, 9]]
WALKED = [[1, 8, 1, 3]]  # token by token, a block's size decides nothing


class OnlyDevice(TorchDispatchMode):
    """Raises if an operation takes or makes a CPU tensor. Scalars are allowed: a kernel takes them as arguments."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        assert not any(x.device.type == "cpu" and x.dim() for x in tensors), f"{func.name()} on a CPU tensor"
        return out


class NoHostData(TorchFunctionMode):
    """Raises if Python numbers become a tensor, which copies them to the device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.tensor, torch.as_tensor), "numbers of the host are copied to the device"
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(i, list) for i in index), "a list of the host is copied to the device as an index"
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_of_the_host() -> Iterator[None]:
    with OnlyDevice(), NoHostData():
        yield


@cache
def meta_model(family: str, dtype: torch.dtype = torch.bfloat16) -> Model:
    """A tiny model, adopted on the CPU, since that reads numbers, then moved to `meta` like `load_model` moves one to CUDA."""
    model = adopt(tiny_model(family, vocab_size=VOCABULARY).to(dtype))
    model.hf.to(META)
    rotations = {id(s.rotation): s.rotation for s in model.layers if s.rotation is not None}
    for rotation in rotations.values():
        rotation.prepare(dtype)  # computed on the host by a model's first decoder; here before watching starts
    moved = {None: None} | {
        key: replace(r, order=r.order.to(META), _tables={k: table.to(META) for k, table in r._tables.items()})
        for key, r in rotations.items()
    }
    model.layers = [replace(s, rotation=s.rotation and moved[id(s.rotation)]) for s in model.layers]
    return model


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    return instances(tmp_path_factory.mktemp("files"))


def tokens_of(length: int, streams: int = 2) -> torch.Tensor:
    return torch.zeros(streams, length, dtype=torch.int64, device=META)


def config_of(policy: Policy | str, mode: str = "cache", capacity: int = CAPACITY) -> CacheConfig:
    if isinstance(policy, str):
        kind = policy_class(policy)
        policy = kind(sinks=2) if issubclass(kind, SinkWindow) else kind()
    return CacheConfig(policy, capacity if policy.evicts else None, positions_for(policy) if mode == "cache" else mode, LIMIT)


def read_in(read, sizes: list[int], ragged: bool = False, streams: int = 2) -> None:
    """Read blocks of these sizes under watch."""
    for size in sizes:
        tokens = tokens_of(size, streams)
        with nothing_of_the_host():
            logits = read(tokens, torch.ones_like(tokens, dtype=torch.bool) if ragged else None)
        assert (logits.device, logits.shape) == (META, (streams, size, VOCABULARY))


@pytest.mark.slow("takes seconds")
@pytest.mark.parametrize(
    ("policy", "mode", "ragged"),
    [(p, m, r) for p in STREAMING for m in MODES for r in (False, True) if p in IN_EVERY_MODE or (m, r) == ("cache", False)],
)
def test_every_policy_position_mode_and_block_size(policy, mode, ragged):
    """Neither steps nor blocks wait for the device, in closed form or walked; nor do `fork` and `reserve`.

    Unequal streams are always walked, and here, without kernels, so is every full cache whose policy is no band.
    """
    kind = policy_class(policy)
    if ragged or (kind.caches and kind.band is Policy.band and policy not in IN_EVERY_MODE):
        reads = {EAGER: WALKED}
    else:
        reads = {EAGER: BLOCKS} | ({TOKEN_BY_TOKEN: WALKED} if mode == "cache" else {})
    for method, sizes in ((method, sizes) for method, blocks in reads.items() for sizes in blocks):
        read = decoder(meta_model("llama"), config_of(policy, mode), 2, method)
        read_in(read, sizes, ragged)
    with OnlyDevice():
        fork = read.fork([1, 0, 1])
        fork.reserve(BUCKET + 1)
    read_in(fork, [1, 2], ragged, streams=3)


@pytest.mark.slow("every family")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", [Dense(), SinkWindow(2), RecomputeSinkWindow(sinks=2)], ids=lambda p: type(p).__name__)
def test_families(family, policy):
    """Covers partial RoPE, softcaps, sink logits, sliding windows and experts; the model's own code runs, too.

    Each in one of the two modes, and with streams alike or not; a walk of every family is below.
    """
    at = FAMILIES.index(family) + (Dense, SinkWindow, RecomputeSinkWindow).index(type(policy))
    model, mode = meta_model(family), MODES[at % 2]
    read = decoder(model, config_of(policy, mode), 2)
    read_in(read, [5, 1, 12, 1, 1], ragged=at % 4 > 1)  # past the sliding windows of 16
    expected = {Dense: 2 * model.kv_bytes(BUCKET - 1), RecomputeSinkWindow: 0}  # a growing cache grows by whole buckets
    assert read.kv_bytes == expected.get(type(policy), model.kv_bytes(CAPACITY, 2))


@pytest.mark.slow("takes seconds")
@pytest.mark.parametrize("family", [name for name in FAMILY_SIZES if name not in {*REFUSED, "phimoe", "gpt2"}])
def test_steps_of_every_family_can_be_captured(family):
    """Filling, and evicting, for every family that passes the self-check. transformers' GPT-2 looks for padding at each step."""
    try:
        model = meta_model(family)
    except KeyError:
        pytest.skip(f"the installed transformers has no {family}")
    mode = "stream" if model.learned_positions else "cache"
    read_in(CachedDecoder(model, config_of("h2o", mode, 2), 2), [1, 1, 1])


@pytest.mark.parametrize("policy", ["dense", "h2o", "sink_window"])
@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_is_evicted_once(policy, mode):
    """Under layers with a sliding window and without; every policy is below."""
    model, config = meta_model("gemma3_text"), config_of(policy, mode)
    with OnlyDevice():
        read = CachedDecoder(model, config, 2)
        logits = read.read_prompt(tokens_of(20), 16, once=True)
    assert logits.shape == (2, VOCABULARY)
    read_in(read, [1, 3, 1])


@pytest.mark.slow("takes seconds")
@pytest.mark.parametrize("name", [name for name in evicting() if name not in DECIDED_BY_THE_PROMPT])
def test_every_cadence_with_a_prompt(name, policies):
    """Tables of budgets are made by the host, which copies them, and waits for nothing."""
    read = CachedDecoder(meta_model("llama"), CacheConfig(policies[name], 12, positions_for(policies[name]), LIMIT, evict=5), 2)
    with nullcontext() if name in HAS_A_TABLE else OnlyDevice():
        read.read_prompt(tokens_of(20), 16, once=True)
        read(tokens_of(1))  # a table that steps need moves to the device once
    read_in(read, [5, 1])


@pytest.mark.slow("takes seconds")
@pytest.mark.parametrize("codec", [Codec("int4", sinks=2, recent=3), Kivi("kivi2", 4, residual=4)], ids=str)
@pytest.mark.parametrize("evict", [1, "prompt"])
def test_coded_caches(codec, evict):
    """Coding what has become too old, or a full group, is decided on the device, and so is growing past a bucket."""
    policy = "dense" if evict == 1 and isinstance(codec, Kivi) else "h2o"
    config = replace(config_of(policy), kv=codec, evict=evict)
    for ragged in (False, True):
        read = CachedDecoder(meta_model("llama"), config, 2)
        with OnlyDevice():
            read.read_prompt(tokens_of(12), 8)
            read.reserve(BUCKET)
        read_in(read, [1, 5], ragged)


def test_a_step_whose_logits_are_chosen_needs_no_index():
    read = decoder(meta_model("llama"), config_of("recompute_window"), 2)
    read_in(read, [5, 1])
    with nothing_of_the_host():
        read(tokens_of(1), keep=tokens_of(1, 1)[0])


@pytest.mark.parametrize("name", DECIDED_BY_THE_PROMPT)
def test_budgets_that_the_data_decide_make_the_host_wait_at_a_prompts_end_and_nowhere_else(name, policies):
    """The number of tokens that each head holds becomes the shape of its tensors. Without a prompt, no step waits."""
    policy = policies[name]
    config = CacheConfig(policy, None if policy.outcome else 12, positions_for(policy), LIMIT, evict="prompt")
    with pytest.raises((RuntimeError, NotImplementedError), match=r"meta tensor"):
        CachedDecoder(meta_model("llama"), config, 2).read_prompt(tokens_of(20), 16)
    if not policy.outcome:
        read_in(CachedDecoder(meta_model("llama"), replace(config, evict=5), 2), [12, 1, 6, 1])


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_that_grows_past_a_table_of_angles(mode):
    """Positions beyond 4,096 need a second table, which no step should compute on the host."""
    read = decoder(meta_model("llama"), replace(config_of("dense", mode), limit=10_000), 2)
    read_in(read, [4095, 1, 1, 1])
    assert read.slots[1] == 4096 + BUCKET
    with OnlyDevice():
        read.reserve(2 * BUCKET)
    read_in(read, [BUCKET, 1])


@pytest.mark.parametrize("policy", ["dense", "h2o", "sink_window"])
def test_captured_steps(policy):
    """Checks the host's work between replays of CUDA graphs. A plain call stands in for the graph."""
    read = CachedDecoder(meta_model("llama"), config_of(policy), 2)
    read.graphs = CapturedSteps(lambda step, tokens: step, after=1)
    read_in(read, [1] * (CAPACITY + 4))
    assert read.graphs.replayed > CAPACITY


class Launched:
    """Stands in for a Triton kernel: checks its arguments and notes that it ran."""

    def __init__(self, name: str, launched: set[str]) -> None:
        self.name, self.launched = name, launched

    def __getitem__(self, grid):
        assert all(isinstance(n, int) and n > 0 for n in grid)
        return self

    def __call__(self, *args, **constants):
        self.launched.add(self.name)
        assert {x.device for x in args if isinstance(x, torch.Tensor)} == {META}


@pytest.mark.parametrize(("mode", "kernels"), [("clamped", False), *((mode, True) for mode in MODES)])
def test_the_code_around_flex_attention(monkeypatch, mode, kernels):
    """Checks its mask, its arguments and the merge with the sinks. FlexAttention itself refuses `meta`."""
    calls, launched = [], set()

    def attend(query, keys, values, block_mask, scale, enable_gqa):
        assert keys.shape == values.shape
        assert keys.shape[2] % flex.TILE == 0
        calls.append({x.device for x in (query, keys, values, *block_mask.as_tuple()) if isinstance(x, torch.Tensor)})
        return query.new_empty(*query.shape[:3], values.shape[-1]), query.new_empty(query.shape[:3], dtype=torch.float32)

    monkeypatch.setattr(flex, "_DEVICES", {"meta"})
    monkeypatch.setattr(flex, "_compiled", lambda kind: attend)
    if kernels:
        monkeypatch.setattr(rope, "_DEVICES", {"meta"})
        monkeypatch.setattr(rope, "_kernels", lambda: SimpleNamespace(**{x: Launched(x, launched) for x in ("rotate", "merge")}))
    read = decoder(meta_model("llama"), replace(config_of(SinkWindow(4), mode, 70), limit=90), 2, Method(flex=True))
    sizes = [60, 40, 128, 1, 128, 1]  # while sinks reach the limit one by one, a block is walked, which takes long
    for size in sizes:
        with nothing_of_the_host():
            assert read(tokens_of(size)).shape == (2, size, VOCABULARY)
    assert calls == [{META}] * 2 * len(meta_model("llama").layers)
    assert launched == ({"rotate", "merge"} if kernels else set())


@pytest.mark.slow("takes seconds")
@needs_triton
@pytest.mark.parametrize(("policy", "mode"), [(p, m) for p in CACHED for m in MODES if m == "cache" or p in IN_EVERY_MODE])
def test_the_code_around_the_kernels_in_triton(monkeypatch, policy, mode):
    """Checks the arguments of steps and walks. No kernel runs."""
    launched: set[str] = set()
    kernels = SimpleNamespace(**{name: Launched(name, launched) for name in ("attend", "join", "release")})
    monkeypatch.setitem(choose._MODULES, "meta", cuda)
    monkeypatch.setattr(cuda_attention, "kernels", lambda: kernels)
    config = config_of(policy, mode)
    read = CachedDecoder(meta_model("llama"), config, 2, KERNELS)
    read_in(read, [5, 1, 4, 1])
    assert any("step kernel" in walk.offers for walk in read.walks) == (launched >= {"attend", "join"})
    released = [not why_untraced(w.slots.policy) and not why_unserved(w.slots) and w.slots.capacity for w in read.walks]
    assert ("release" in launched) == any(released)
    assert launched or not config.policy.evicts or not any(released)
    assert policy not in IN_EVERY_MODE or launched >= {"attend", "join"}


FAULTS = {
    "reads a number": lambda rows, rank: rank.max().item(),
    "branches on a tensor": lambda rows, rank: bool((rank > CAPACITY).any()),
    "indexes by a mask": lambda rows, rank: rank[rank > 0].sum(),
    "forgets the device": lambda rows, rank: rows.rank.mul_(torch.ones(rows.rank.shape[1], dtype=torch.int64)),
    "copies from the host": lambda rows, rank: rows.rank[0].copy_(torch.zeros(rows.rank.shape[1], dtype=torch.int64)),
    "asks the host for a number": lambda rows, rank: rank.add(torch.tensor([1], device=rank.device)),
    "indexes by a list": lambda rows, rank: rows.rank[[0]].sum(),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("size", [1, 20])
def test_sabotage_of_the_step_is_noticed(monkeypatch, fault, size):
    """Each does something that a step must not do, and that goes unnoticed on the CPU."""
    plain = Rows.place

    def place(self: Rows, rank, step, now) -> None:
        fault(self, rank)
        plain(self, rank, step, now)

    monkeypatch.setattr(Rows, "place", place)
    decoder(adopt(tiny_model("llama")), config_of("h2o"), 2)(torch.zeros(2, size, dtype=torch.int64))
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        read_in(decoder(meta_model("llama"), config_of("h2o"), 2), [size])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("capacity", [CAPACITY, 40])
def test_bytes_are_those_of_the_formula(family, capacity):
    """2 (K and V) x layers x streams x KV heads x (slots kept + 1) x head dim x bytes; a window of 16 keeps 15."""
    model = meta_model(family, torch.bfloat16)
    heads = 4 if family == "gpt_neox" else 2
    kinds = getattr(model.hf.config, "layer_types", None) or ["full_attention"] * 2
    slots = sum((min(capacity, 15) if kind == "sliding_attention" else capacity) + 1 for kind in kinds)
    read = decoder(model, config_of(H2O(), capacity=capacity), 3)
    assert read.kv_bytes == 2 * 3 * heads * slots * 16 * torch.bfloat16.itemsize == model.kv_bytes(capacity, 3)
    assert read.fork([0]).kv_bytes == model.kv_bytes(capacity)


def test_bytes_of_a_shape_that_no_test_machine_holds():
    """Llama-2-7B, dense, 4,096 tokens in 16 bits: 2 GiB of K/V per stream, 16 streams."""
    shape = LayerShape(heads=32, group=1, key_dim=128, value_dim=128, rotation=None, sliding_window=None)
    config = CacheConfig(H2O(), 4095)
    slots = slots_for(shape, config, [*range(32)], 32, 16, torch.bfloat16, META)
    assert slots.kv_bytes == 16 * 2 * 2**30
    assert slots.state_bytes == 32 * 16 * 32 * (4096 * (8 + 8 + 4) + 8)
