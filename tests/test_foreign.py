"""Somebody else's cache in the model's own loop: what it must equal, what is refused, and what its records say.

Transformers' quantized cache is one: what it stores, how many bytes it takes, and what happens where quanto is missing.
"""

import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers import FAMILIES, Dense, SinkWindow, adopt, bench_in, decoder, in_blocks, model_of, nll, tiny_model, tokens_of

from kvbench.harness.core import contestants, plugins
from kvbench.harness.core.codec import Codec
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.parameters import parameters_of, policy_from
from kvbench.harness.core.source_digests import source_digest
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.foreign import ForeignDecoder
from kvbench.harness.engine.foreigncheck import own_loop
from kvbench.harness.engine.method import EAGER, OwnLoop
from kvbench.harness.engine.slot_stores import decoded, encoded
from kvbench.harness.engine.stored import storage_bytes, tensors_in
from kvbench.harness.records import RecordStore

HALF = '''"""A layer that keeps the newest tokens, and the first."""
from transformers.cache_utils import DynamicLayer
import torch

class Half(DynamicLayer):
    def __init__(self, tokens=32):
        super().__init__()
        self.tokens = tokens

    def update(self, keys, values, *args, **kwargs):
        keys, values = super().update(keys, values)
        if keys.shape[2] > self.tokens:
            self.keys, self.values = (torch.cat([x[:, :, :1], x[:, :, 1 - self.tokens:]], 2) for x in (keys, values))
        return keys, values
'''


@pytest.fixture
def half(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(HALF)
    return f"{tmp_path / 'mine.py'}:Half"


def contestant(name: str, **parameters: object) -> CacheConfig:
    return CacheConfig(policy_from(name, parameters), positions="stream")


def opened(family: str, name: str, streams: int = 1, blocks: int = 0, **parameters: object) -> ForeignDecoder:
    read = decoder(model_of(family), contestant(name, **parameters), streams, replace(EAGER, own_loop=OwnLoop(blocks=blocks)))
    assert isinstance(read, ForeignDecoder)
    return read


@pytest.mark.parametrize(
    ("family", "name", "blocks"),
    [
        (family, name, 0 if (i + j) % 2 else 10**6)  # every two of them occur together
        for i, family in enumerate([*FAMILIES, "gemma2", "gemma3_text", "olmo2", "phi3"])
        for j, name in enumerate(["hf:DynamicCache", "hf:StaticCache"])
    ],
)
def test_a_cache_that_keeps_everything_equals_dense(family, name, blocks):
    tokens, model = tokens_of(90, 2), model_of(family)
    expected = nll(decoder(model, CacheConfig(Dense()), 2)(tokens), tokens)
    parameters = {"max_cache_len": 90} if "Static" in name else {}
    config = contestant(name, **parameters)
    loop = own_loop(model, config).loop
    assert loop.blocks > 10**6, "its blocks were not found to equal its steps"
    read = decoder(model, config, 2, replace(EAGER, own_loop=loop._replace(blocks=blocks)))
    found = nll(in_blocks(read, tokens, 30), tokens)
    assert (found - expected).abs().max() < 3e-4
    assert abs(found.mean() - expected.mean()) < 1e-5


def test_an_evicting_layer_is_read_step_by_step_and_equals_the_policy_that_keeps_the_same(half):
    """Its positions are ours: by its own length, which stays at 32, RoPE would put every later token at one place."""
    model, tokens = model_of("llama"), tokens_of(120)
    config = contestant(half)
    check = own_loop(model, config)
    assert (check.loop.blocks, check.wrong_length) == (0, "get_seq_length says 32 after 256 tokens")
    assert check.slow == "blocks of 16 tokens give other results than single tokens"
    found = decoder(model, config, 1, replace(EAGER, own_loop=check.loop))(tokens)
    expected = decoder(model, CacheConfig(SinkWindow(sinks=1), 32, "stream"))(tokens)
    assert (found - expected).abs().max() < 1e-4


def test_blocks_of_a_users_cache_are_trusted_as_far_as_they_were_checked(half):
    """The cache would evict its first token after 400 tokens, which the check does not reach."""
    model, tokens = model_of("llama"), tokens_of(500)
    config = contestant(half, tokens=400)
    loop = own_loop(model, config).loop
    assert loop.blocks == 256
    singly, in_one = (decoder(model, config, 1, replace(EAGER, own_loop=x)) for x in (loop._replace(blocks=0), loop))
    assert (singly(tokens) - in_blocks(in_one, tokens, 100)).abs().max() < 1e-4
    assert singly.held_bytes == in_one.held_bytes


def test_bytes_are_those_of_the_cache_s_storages(half):
    shape, tokens = model_of("llama").layers, tokens_of(70, 2)
    token = 2 * sum(s.kv_bytes(1, torch.float32) for s in shape)  # of both streams
    grown, static = opened("llama", "hf:DynamicCache", 2), opened("llama", "hf:StaticCache", 2, max_cache_len=100)
    for read in (grown, static):
        read(tokens)
    assert (grown.kv_bytes, grown.held_bytes, grown.slots) == (70 * token, 70 * token, (70, 70))
    counters = sum(layer.cumulative_length.nbytes for layer in static.cache.layers)
    assert (static.kv_bytes, static.held_bytes) == (100 * token + counters, 70 * token + counters)
    assert (static.slots, static.held([0])) == ((70, 100), 1)
    evicting = opened("llama", half, 2)
    evicting(tokens)
    assert (evicting.kv_bytes, evicting.slots) == (32 * token, (32, 32))


def skip_without_fp8(name: str = "hf:QuantizedCache") -> None:
    try:
        contestant("hf:QuantizedCache", backend="fp8").policy.new_cache(model_of("llama").hf.config)
    except ValueError as error:
        if "Quantized" in name:
            pytest.skip(f"transformers {transformers.__version__}: {error}")


@pytest.mark.parametrize("name", ["hf:DynamicCache", "hf:StaticCache", "fp8", "half"])
def test_a_fork_is_a_replay(name, half):
    given = {"hf:StaticCache": {"max_cache_len": 60}, "fp8": {"backend": "fp8"}}.get(name, {})
    name = {"fp8": "hf:QuantizedCache", "half": half}.get(name, name)
    skip_without_fp8(name)
    tokens, rows = tokens_of(60, 2), [1, 1, 0]
    read, replayed = opened("llama", name, 2, **given), opened("llama", name, 3, **given)
    read(tokens[:, :50])
    fork, same = read.fork(rows), read.fork([0, 1])
    assert fork.streams == 3
    replayed(tokens[rows, :50])
    expected = replayed(tokens[rows, 50:])
    assert (fork(tokens[rows, 50:]) - expected).abs().max() < 1e-4
    assert torch.equal(same(tokens[:, 50:]), read(tokens[:, 50:]))


def test_a_cache_that_holds_more_than_keys_and_values_is_not_reordered_by_halves(tmp_path):
    text = HALF.replace("return keys, values", "self.scores = keys.sum((1, 3)); return keys, values")
    (tmp_path / "scored.py").write_text(text)
    read = opened("llama", f"{tmp_path / 'scored.py'}:Half", 2)
    read(tokens_of(4, 2))
    assert read.fork([0, 1]).streams == 2
    with pytest.raises(ValueError, match="holds more than keys and values, and has no reorder_cache"):
        read.fork([1, 0])


def test_a_prompt_is_read_in_one_pass(half):
    """`generate` passes the whole prompt at once, so a cache evicts after the whole prompt."""
    tokens = tokens_of(60, 2)
    read = opened("llama", half, 2)
    logits = read.read_prompt(tokens, 8)
    expected = decoder(model_of("llama"), CacheConfig(Dense()), 2)(tokens)[:, -1]
    assert (logits - expected).abs().max() < 1e-4
    assert read.slots == (32, 32)


def test_the_key_holds_versions_and_the_user_s_source(half, monkeypatch, tmp_path):
    dynamic, mine = contestant("hf:DynamicCache").policy, contestant(half).policy
    assert dynamic.code == f"transformers {transformers.__version__}"
    assert mine.code == f"mine.py, transformers {transformers.__version__}"
    (tmp_path / "yours.py").write_text(HALF.replace("1 - self.tokens", "2 - self.tokens"))
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "mine.py").write_text(HALF)
    same, other = (contestant(f"{tmp_path / file}:Half").policy for file in ("copy/mine.py", "yours.py"))
    digests = [source_digest(x) for x in (dynamic, mine, same, other)]
    assert digests[1] == digests[2]
    assert len({*digests}) == 3
    monkeypatch.setattr(contestants, "version", lambda package: "9.9")
    assert source_digest(dynamic) != digests[0]
    assert source_digest(mine) != digests[1]


SUITE = """
suite: theirs
version: 1
model: {id: "builtin:sink_1"}
task: {name: perplexity, data: prose, tokens: 120}
capacity: [16, 24]
positions: [cache, stream]
policies: [dense, sink_window, "hf:DynamicCache", {name: "mine.py:Recent", tokens: 16}]
"""


def documented() -> str:
    """The layer of the documentation."""
    page = (Path(__file__).parents[1] / "docs" / "contestants.md").read_text()
    return page.split("```python\n")[1].split("```")[0]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "mine.py").write_text(documented())
    (folder / "theirs.yaml").write_text(SUITE)
    done = bench_in("run", "theirs.yaml", "--threads", 1, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "its own" in done.stderr, "the closing table"
    return folder


def test_a_suite_measures_a_contestant_once_as_it_does_dense(ran):
    records, problems = RecordStore(ran / "results").read_all()
    assert not problems
    counts = Counter(r.cell.policy for r in records)
    assert counts == {"dense": 1, "sink_window": 4, "hf:DynamicCache": 1, "mine.py:Recent": 1}
    of = {r.cell.policy: r for r in records}
    theirs, mine = of["hf:DynamicCache"], of["mine.py:Recent"]
    assert abs(theirs.metrics.nll - of["dense"].metrics.nll) < 1e-5
    assert (theirs.facts.code, theirs.facts.wrong_length) == (f"transformers {transformers.__version__}", None)
    assert theirs.facts.method == "the model's own attention (sdpa), in blocks"
    assert mine.facts.method == "the model's own attention (sdpa), token by token"
    assert mine.facts.wrong_length == "get_seq_length says 16 after 256 tokens"
    assert (mine.cell.capacity, mine.cell.positions, mine.cell.parameters) == (None, "stream", {"attention": None, "tokens": 16})


def test_quantized_bytes_are_counted_and_its_blocks_refused():
    skip_without_fp8()
    config = contestant("hf:QuantizedCache", backend="fp8")
    read = decoder(model_of("llama"), config)
    read(tokens_of(50))
    full = model_of("llama").kv_bytes(49)
    assert full / 4 <= read.kv_bytes < full / 4 + 100  # a byte for each of 4, and the scales
    assert read.slots == (50, 50)
    check = own_loop(model_of("llama"), config)
    assert check.loop.blocks == 0  # its scale is that of the first block


def test_a_wrapper_s_tensors_are_counted():
    from torch.testing._internal.two_tensor import TwoTensor

    assert storage_bytes(tensors_in({"x": TwoTensor(torch.zeros(8), torch.zeros(8))}, ())) == 64


def test_what_it_can_t_do_is_refused():
    tokens = tokens_of(8, 2)
    with pytest.raises(ValueError, match="unequal length"):
        opened("llama", "hf:DynamicCache", 2)(tokens, valid=torch.ones_like(tokens, dtype=torch.bool))
    with pytest.raises(ValueError, match="the cache ends at 7: raise max_cache_len"):
        opened("llama", "hf:StaticCache", 2, max_cache_len=7)(tokens)
    with pytest.raises(UserError, match=r"^transformers 5\.\d+\.\d+ has no cache 'DynamicCach', did you mean 'DynamicCache'\?$"):
        plugins.policy_class("hf:DynamicCach")
    with pytest.raises(ValueError, match=r"^its backend is not installed: pip install hqq$"):
        decoder(model_of("llama"), contestant("hf:QuantizedCache", backend="hqq"))
    with pytest.raises(ValueError, match="only our loop can read it"):
        decoder(adopt(tiny_model("llama", vocab_size=96, zero_sink=True)), contestant("hf:DynamicCache"))


def test_its_records_verify_and_are_not_measured_again(ran):
    done = bench_in("records", "verify", "results", cwd=ran)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished before and skipped" in bench_in("run", "theirs.yaml", "--threads", 1, cwd=ran).stderr


def test_holds_is_for_the_flag_and_not_for_the_constructor(half):
    policy = contestant(half, tokens=16, holds=16).policy
    assert parameters_of(policy) == {"attention": None, "tokens": 16, "holds": 16}
    assert policy.new_cache(model_of("llama").hf.config).layer_class_to_replicate().tokens == 16
    with pytest.raises(ValueError, match="holds is 0, expected"):
        contestant(half, holds=0)


QUANTIZED = "hf:QuantizedCache"
QUANTIZED_SHAPE = (2, 3, 8, 16)  # streams, heads, tokens, channels


@pytest.fixture
def quanto(monkeypatch):
    """Quanto, with its function in C++ in a line of Python: on first use it takes minutes to compile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses what torch deprecates
        pytest.importorskip("optimum.quanto", reason="pip install 'kv-bench[quanto]'")
        from optimum.quanto.library.extensions.cpp import ext
    monkeypatch.setattr(ext, "_lib", SimpleNamespace(unpack=unpacked))


def unpacked(codes, bits):
    return torch.cat([codes >> shift & 2**bits - 1 for shift in range(0, 8, bits)])


def opened_quantized(streams=1, **parameters):
    return decoder(model_of("llama"), contestant(QUANTIZED, backend="quanto", **parameters), streams)


def stored_quantized(**parameters):
    """A layer that has taken in 8 tokens at once; and their keys and values."""
    layer = opened_quantized(q_group_size=16, **parameters).cache.layers[0]
    keys, values = torch.randn(2, *QUANTIZED_SHAPE, generator=torch.Generator().manual_seed(3)).unbind(0)
    layer.update(keys, values)
    return layer, keys, values


@pytest.mark.parametrize("bits", [4, 2])
def test_a_group_of_all_channels_on_axis_0_is_a_token_and_head_as_ours(quanto, bits):
    layer, keys, values = stored_quantized(nbits=bits)
    for held, x in ((layer._quantized_keys, keys), (layer._quantized_values, values)):
        ours = decoded(*encoded(x, Codec(f"int{bits}", 16)), bits)
        assert (held.dequantize() - ours).abs().max() < 1e-6
        assert (held.dequantize() - x).abs().max() > 0.01, "nothing was coded"


@pytest.mark.parametrize("bits", [4, 2])
def test_bytes_are_of_codes_and_scales_and_of_the_tokens_that_are_not_coded_yet(quanto, bits):
    """The first block is coded at once; 16 later tokens together, with all before; so 10 of 60 are still floats."""
    read = opened_quantized(nbits=bits, q_group_size=16, residual_length=16)
    read.read_prompt(tokens_of(18), 18)
    read(tokens_of(42))
    vectors = sum(2 * shape.heads for shape in model_of("llama").layers)
    assert all(shape.key_dim == shape.value_dim == 16 for shape in model_of("llama").layers)
    assert read.kv_bytes == read.held_bytes == vectors * (50 * Codec(f"int{bits}", 16).bytes_of(16, 4) + 10 * 16 * 4)
    assert read.slots == (60, 60)
    assert opened_quantized(nbits=bits, q_group_size=16).config.policy.code.startswith("optimum-quanto ")


def test_a_fork_of_some_streams_holds_the_bytes_of_these(quanto):
    """Transformers leaves the codes of all streams until it codes again; beside them is an index, 8 bytes a stream and layer."""
    tokens = tokens_of(20, 3)
    read, alone = (
        opened_quantized(3, q_group_size=16, residual_length=16),
        opened_quantized(1, q_group_size=16, residual_length=16),
    )
    for decoder_of, given in ((read, tokens), (alone, tokens[2:])):
        decoder_of(given)
    indices = 8 * len(alone.cache.layers)
    for fork in (read.fork([2]), read.fork([1, 2]).fork([1])):
        assert fork.kv_bytes == fork.held_bytes == alone.kv_bytes + indices
        assert (fork(tokens[2:, :1]) - alone.fork([0])(tokens[2:, :1])).abs().max() < 1e-5


def test_a_fork_shares_nothing_with_what_it_was_forked_from(quanto):
    tokens = tokens_of(40)
    read = opened_quantized(q_group_size=16, residual_length=16)
    read(tokens[:, :20])
    fork = read.fork([0])
    expected = read(tokens[:, 20:])
    assert torch.equal(fork(tokens[:, 20:]), expected)
