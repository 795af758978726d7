"""Few kernels in a decode step: RoPE left out where it is the identity, and the step compiled. Logits stay what they are."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import DEVICE, EAGER, H2O, CacheConfig, Dense, RecomputeWindow, decoder, model_of, tiny_model, tokens_of

from kvbench.harness.engine.attention import RotaryFunctions, contiguous, unchanged
from kvbench.harness.engine.kernel_interface import FusedStepError
from kvbench.harness.engine.model import Model, UnsupportedModelError, adopt
from kvbench.harness.engine.own_attention import own_attention
from kvbench.harness.kernels import fused

ROTATE_AT_ZERO = {"deepseek_v3", "gpt_oss"}  # the one permutes dims, the other scales (YaRN)
COPIES = {"glm", "glm4", "glm4_moe", "gpt_neox", "minimax_m2", "nemotron", "phi3"}  # partial RoPE makes a layout of its own


def logits_of(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """A block and steps, past the first evictions."""
    out = []
    for policy, capacity in ((Dense(), None), (H2O(), 12), (RecomputeWindow(), 12)):
        read = decoder(model, CacheConfig(policy, capacity), len(tokens), EAGER)
        out += [read(block) for block in (tokens[:, :20], tokens[:, 20:21], tokens[:, 21:22], tokens[:, 22:])]
    return torch.cat(out, 1)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (f, torch.float32)
        for f in ["llama", "gpt_neox", "gemma2", "gpt_oss", "deepseek_v3", "glm4", "phi3", "qwen3_moe", "cohere2"]
    ]
    + [("llama", torch.bfloat16), ("phi3", torch.bfloat16)],
    ids=str,
)
def test_leaving_out_rope_changes_no_bit(family, dtype):
    try:
        model = adopt(tiny_model(family).to(DEVICE, dtype))
    except (KeyError, UnsupportedModelError) as error:
        pytest.skip(str(error))
    if model.learned_positions:
        pytest.skip(f"{family} has no RoPE")
    functions = model.idle_rotary
    assert bool(functions.places) == (family not in ROTATE_AT_ZERO)
    assert functions.stand_in == (None if not functions.places else contiguous if family in COPIES else unchanged)
    without = logits_of(model, tokens_of(30, 2))
    model.idle_rotary = RotaryFunctions()
    assert torch.equal(without, logits_of(model, tokens_of(30, 2)))


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_rope_is_left_out_of_our_forward_pass_alone(family):
    """Not of the model's own, nor of probes at other positions; nor in another thread, nor after an error."""
    model = adopt(tiny_model(family).to(DEVICE))
    file, name, _ = model.idle_rotary.places[0]
    assert file is sys.modules[type(model.hf).__module__]

    def rotates() -> bool:
        x = torch.ones(1, 1, 1, 4, device=DEVICE)
        return not torch.equal(getattr(file, name)(x, x, *torch.full((2, 1, 1, 4), 0.5, device=DEVICE))[0], x)

    class Fails:
        def attend(self, *_):
            assert not rotates()
            with ThreadPoolExecutor() as pool:
                assert pool.submit(rotates).result()
            raise RuntimeError("attention")

    with pytest.raises(RuntimeError, match="attention"):
        model(tokens_of(1), Fails())
    assert rotates()
    with own_attention(model.hf):
        places = [model.hf(input_ids=tokens_of(9), position_ids=torch.arange(9, device=DEVICE)[None] * k).logits for k in (0, 1)]
    assert not torch.equal(*places)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, *_: (q, k * 1.0000002),
        lambda q, k, *_: (q.flip(-1), k),
        lambda q, k, *_: (q.mT.contiguous().mT, k),  # the same numbers in another layout
    ],
    ids=["one rounding", "permuted dims", "layout"],
)
def test_a_model_whose_rotation_does_something_at_position_0_keeps_it(monkeypatch, wrong):
    hf = tiny_model("llama")
    assert adopt(hf).idle_rotary.places
    monkeypatch.setattr(sys.modules[type(hf).__module__], "apply_rotary_pos_emb", wrong)
    functions = RotaryFunctions()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvbench.harness.engine.probes.find_rotation", lambda *_: None)
        functions = adopt(hf).idle_rotary
    assert not functions.places


@pytest.fixture
def compiled_by(monkeypatch, tmp_path):
    """Lets a backend of the compiler make the fused steps of a test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = []

    def counting(backend):
        from torch._dynamo.backends.registry import lookup_backend

        def compile_graph(graph, inputs):
            compiled.append(graph)
            return lookup_backend(backend)(graph, inputs)

        monkeypatch.setattr(fused, "_BACKEND", compile_graph)
        return compiled

    yield counting
    torch._dynamo.reset()


@pytest.mark.slow("torch.compile")
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("llama", "inductor" if DEVICE.type == "cuda" else "aot_eager"),  # for a CPU, inductor compiles for half a minute
        *((family, "aot_eager") for family in ("gemma3_text", "gpt_neox", "qwen3_moe")),
    ],
)  # sliding windows, partial RoPE, experts and norms of queries and keys
def test_compiled_steps_give_the_logits_of_eager_ones(family, backend, compiled_by):
    """A single compilation serves all steps, and only steps of single tokens are compiled."""
    model, compiled, tokens = model_of(family), compiled_by(backend), tokens_of(14, 2)
    expected = in_steps(model, tokens)
    with model.fused_steps(2):
        torch.testing.assert_close(in_steps(model, tokens), expected, atol=1e-4, rtol=0)
    assert len(compiled) == 1
    assert torch.equal(in_steps(model, tokens), expected)


def in_steps(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of a block of 8 tokens, then of single tokens, with evictions."""
    read = decoder(model, CacheConfig(H2O(), 10), len(tokens), EAGER)
    return torch.cat([read(block) for block in (tokens[:, :8], *tokens[:, 8:].split(1, 1))], 1)


@pytest.mark.slow("torch.compile")
def test_a_model_that_cannot_be_compiled_is_refused_on_entry(monkeypatch, compiled_by):
    model, compiled = adopt(tiny_model("llama").to(DEVICE)), compiled_by("eager")
    mlp = model.hf.base_model.layers[1].mlp
    own = type(mlp).forward
    monkeypatch.setattr(mlp, "forward", lambda x: own(mlp, x) if x.sum().item() < torch.inf else x, raising=False)
    expected = in_steps(model, tokens_of(12))
    with pytest.raises(FusedStepError, match="can't be compiled: .*data-dependent"), model.fused_steps(1):
        pytest.fail("entered")
    assert not compiled
    assert torch.equal(in_steps(model, tokens_of(12)), expected)


@pytest.mark.slow("torch.compile")
def test_each_number_of_streams_is_compiled_once_up_to_a_limit(monkeypatch, compiled_by):
    """Beyond it a step is refused, while the compiler by itself would run the model's own code."""
    monkeypatch.setattr(fused, "_MOST_COMPILATIONS", 2)
    model, compiled = model_of("llama"), compiled_by("eager")
    for streams in (1, 3, 1, 3):
        with model.fused_steps(streams):
            in_steps(model, tokens_of(10, streams))
    assert len(compiled) == 2
    with pytest.raises(FusedStepError, match="2 of other models or streams were"), model.fused_steps(2):
        pytest.fail("entered")
