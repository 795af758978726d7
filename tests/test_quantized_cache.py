"""Transformers' quantized cache on quanto: what it stores, how many bytes it takes, and what happens where quanto is missing."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from conftest import model_of, tokens_of
from test_foreign import contestant

from kvbench.harness.core.codec import Codec
from kvbench.harness.engine.loop import decoder
from kvbench.harness.engine.slot_stores import decoded, encoded

NAME = "hf:QuantizedCache"
SHAPE = (2, 3, 8, 16)  # streams, heads, tokens, channels


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


def opened(streams=1, **parameters):
    return decoder(model_of("llama"), contestant(NAME, backend="quanto", **parameters), streams)


def stored(**parameters):
    """A layer that has taken in 8 tokens at once; and their keys and values."""
    layer = opened(q_group_size=16, **parameters).cache.layers[0]
    keys, values = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(3)).unbind(0)
    layer.update(keys, values)
    return layer, keys, values


@pytest.mark.parametrize("bits", [4, 2])
def test_a_group_of_all_channels_on_axis_0_is_a_token_and_head_as_ours(quanto, bits):
    layer, keys, values = stored(nbits=bits)
    for held, x in ((layer._quantized_keys, keys), (layer._quantized_values, values)):
        ours = decoded(*encoded(x, Codec(f"int{bits}", 16)), bits)
        assert (held.dequantize() - ours).abs().max() < 1e-6
        assert (held.dequantize() - x).abs().max() > 0.01, "nothing was coded"


@pytest.mark.parametrize("bits", [4, 2])
def test_bytes_are_of_codes_and_scales_and_of_the_tokens_that_are_not_coded_yet(quanto, bits):
    """The first block is coded at once; 16 later tokens together, with all before; so 10 of 60 are still floats."""
    read = opened(nbits=bits, q_group_size=16, residual_length=16)
    read.read_prompt(tokens_of(18), 18)
    read(tokens_of(42))
    vectors = sum(2 * shape.heads for shape in model_of("llama").layers)
    assert all(shape.key_dim == shape.value_dim == 16 for shape in model_of("llama").layers)
    assert read.kv_bytes == read.held_bytes == vectors * (50 * Codec(f"int{bits}", 16).bytes_of(16, 4) + 10 * 16 * 4)
    assert read.slots == (60, 60)
    assert opened(nbits=bits, q_group_size=16).config.policy.code.startswith("optimum-quanto ")


def test_a_fork_of_some_streams_holds_the_bytes_of_these(quanto):
    """Transformers leaves the codes of all streams until it codes again; beside them is an index, 8 bytes a stream and layer."""
    tokens = tokens_of(20, 3)
    read, alone = opened(3, q_group_size=16, residual_length=16), opened(1, q_group_size=16, residual_length=16)
    for decoder_of, given in ((read, tokens), (alone, tokens[2:])):
        decoder_of(given)
    indices = 8 * len(alone.cache.layers)
    for fork in (read.fork([2]), read.fork([1, 2]).fork([1])):
        assert fork.kv_bytes == fork.held_bytes == alone.kv_bytes + indices
        assert (fork(tokens[2:, :1]) - alone.fork([0])(tokens[2:, :1])).abs().max() < 1e-5


def test_a_fork_shares_nothing_with_what_it_was_forked_from(quanto):
    tokens = tokens_of(40)
    read = opened(q_group_size=16, residual_length=16)
    read(tokens[:, :20])
    fork = read.fork([0])
    expected = read(tokens[:, 20:])
    assert torch.equal(fork(tokens[:, 20:]), expected)
