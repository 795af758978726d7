"""The Triton kernel that reads codes, in Triton's interpreter, against the plain reading."""

import pytest
import torch
from factories import needs_triton
from helpers import DEVICE, H2O, CacheConfig, CachedDecoder, Dense, SinkWindow, tokens_of
from test_coded_kernels import BY_KERNEL, model_with, parts_of, refuse_unequal

from kvbench.harness.core.codec import Codec, Kivi
from kvbench.harness.engine.fastcheck import fast_method
from kvbench.harness.engine.method import PLAIN_WALK
from kvbench.harness.kernels import choose, cuda, cuda_attention

pytestmark = [
    pytest.mark.slow("Triton's interpreter and compiler"),
    needs_triton,
    pytest.mark.usefixtures("bfloat16_as_on_a_gpu"),
]


@pytest.fixture(autouse=True)
def in_triton(monkeypatch):
    monkeypatch.setitem(choose._MODULES, DEVICE.type, cuda)


@pytest.mark.parametrize(
    ("codec", "policy", "mode", "dtype"),
    [
        (Codec("int8", 8), Dense(), "cache", torch.bfloat16),
        (Codec("int4", 16, 2, 3), H2O(), "clamped", torch.float32),
        (Codec("int2", recent=3), SinkWindow(2), "stream", torch.float32),
        (Codec("int2", 8, sinks=2), H2O(), "cache", torch.bfloat16),
        (Codec("int8", keys="rotated"), Dense(), "stream", torch.float32),
    ],
    ids=str,
)  # each takes the interpreter seconds
def test_the_kernel_reads_what_is_decoded_plainly(codec, policy, mode, dtype):
    model = model_with(32, 2, dtype, num_hidden_layers=1, initializer_range=0.1)
    most = 0.2 if dtype == torch.float32 else 1  # the check's limit: plain code rounds scores to 16 bits, the kernel doesn't
    refuse_unequal(model, policy, mode, 6, 9, codec, most)


@pytest.mark.parametrize(("dims", "queries"), [(96, 1), (8, 24)])
def test_several_parts_programs_and_padded_groups(monkeypatch, dims, queries):
    """Parts of 16 slots; 24 queries are read by two programs; three groups of a head, where a tile has room for four."""
    monkeypatch.setattr(cuda_attention, "_MAX_TILE_BYTES", 16)
    model = model_with(dims, queries, num_hidden_layers=1)
    refuse_unequal(model, H2O(), "cache", 18, 21, Codec("int4", 32, 1, 2))


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        (Codec("int8", 8), torch.float32),
        (Codec("int4", 8), torch.bfloat16),
        (Codec("int2", 8), torch.float32),
        (Codec("int4", 32, 2, 3), torch.bfloat16),
    ],
    ids=str,
)
def test_a_token_is_coded_as_plain_code_does_digit_for_digit(codec, dtype):
    model, config = model_with(32, 1, dtype, num_hidden_layers=1), CacheConfig(H2O(), 6, kv=codec)
    reads = [CachedDecoder(model, config, method=method) for method in (BY_KERNEL, PLAIN_WALK)]
    assert "step kernel" in reads[0].walks[0].offers
    for token in tokens_of(9).split(1, 1):
        for read in reads:
            read(token)
    assert reads[0].kept() == reads[1].kept()
    for ours, theirs in zip(*map(parts_of, reads), strict=True):
        assert torch.equal(ours, theirs)


def test_the_check_before_a_run_holds_it_to_the_plain_reading(monkeypatch):
    model, config = model_with(16, 1, num_hidden_layers=1), CacheConfig(H2O(), 8, kv=Codec("int4", 8))
    check = fast_method(model, config)
    blocks = "compiled walk" if DEVICE.type == "cpu" else "walk"  # where a launch costs little
    assert (check.step, check.blocks, check.refused) == ("compiled", blocks, "")
    join = cuda.CodedAttentionKernels.joining

    def broken(self, size, attended, *arguments, **asked):
        launch, out = join(self, size, attended, *arguments, **asked), arguments[4]
        return lambda: (launch(), out.fill_(float("nan")))

    monkeypatch.setattr(cuda.CodedAttentionKernels, "joining", broken)
    check = fast_method(model, config)
    assert (check.step, check.refused) == ("plain", "step kernels: its attention differs from the plain walk's")


@pytest.mark.parametrize("codec", [Kivi("kivi4", 8, residual=8), Codec("int8", 24)], ids=str)
def test_what_it_has_no_groups_for_is_decoded(codec):
    read = CachedDecoder(model_with(48, 1, num_hidden_layers=1), CacheConfig(Dense(), kv=codec), method=BY_KERNEL)
    assert "step kernel" not in read.walks[0].offers
