"""The self-check: which families pass, and that it refuses models that would run wrongly."""

import dataclasses

import pytest
import torch
from helpers import DEVICE, model_of

from kvbench.harness.engine import probes, walk
from kvbench.harness.engine.model import UnsupportedModelError, adopt
from kvbench.harness.engine.rotary import Rotation
from kvbench.harness.models import selfcheck
from kvbench.harness.models.families import FAMILIES, tiny_model
from kvbench.harness.models.selfcheck import check

pytestmark = pytest.mark.fast


REFUSED = {
    "bloom": "AttentionInterface",
    "codegen": "AttentionInterface",
    "falcon": "AttentionInterface",
    "gemma3n_text": "share K and V",
    "gemma4_text": "share K and V",
    "gptj": "AttentionInterface",
    "llama4_text": "differ",
    "mpt": "AttentionInterface",
    "qwen3_next": "AttentionInterface",
}


@pytest.mark.slow("every family")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_passes_or_is_refused_with_the_reason(family):
    try:
        hf = tiny_model(family).to(DEVICE)
    except KeyError:
        pytest.skip(f"the installed transformers has no {family}")
    if family in REFUSED:
        with pytest.raises(UnsupportedModelError, match=REFUSED[family]):
            check(adopt(hf))
    else:
        assert check(adopt(hf)) <= 1


def test_learned_sink_logits_matter(monkeypatch):
    """gpt_oss fails the check without its sink logits."""
    model = adopt(tiny_model("gpt_oss"))
    assert check(model) <= 1

    plain = walk.weights
    without = lambda scores, terms, heads, seen=None: plain(scores, terms._replace(sink_logits=None), heads, seen)  # noqa: E731
    monkeypatch.setattr(walk, "weights", without)
    with pytest.raises(UnsupportedModelError):
        check(model)


def test_a_wrong_rotation_is_refused():
    model = adopt(tiny_model("llama"))
    wrong = Rotation(model.layers[0].rotation.frequencies * 1.01, model.layers[0].rotation.order)
    model.layers = [dataclasses.replace(shape, rotation=wrong) for shape in model.layers]
    with pytest.raises(UnsupportedModelError, match="differ"):
        check(model)


def test_layers_of_equal_weights_do_not_share_k_and_v():
    hf = tiny_model("llama")
    first, second = (layer.self_attn for layer in hf.model.layers)
    for name in ("k_proj", "v_proj"):
        getattr(second, name).weight = getattr(first, name).weight
    assert check(adopt(hf)) <= 1


def test_a_copy_of_another_layers_k_and_v_is_refused_too(monkeypatch: pytest.MonkeyPatch):
    """Whatever the family calls it; and so is reuse of something else, such as a vector from which each layer makes its keys."""
    plain = probes.Probe.attend
    with monkeypatch.context() as patched:
        patched.setattr(
            probes.Probe,
            "attend",
            lambda self, layer, query, keys, values, terms: plain(self, layer, query, keys.clone(), values.clone(), terms),
        )
        with pytest.raises(UnsupportedModelError, match="share K and V"):
            adopt(tiny_model("gemma3n_text"))
    hf = tiny_model("llama")
    hf.model.layers[1].self_attn.is_kv_shared_layer = True
    with pytest.raises(UnsupportedModelError, match="reuse what other layers cache"):
        adopt(hf)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_a_sliding_window_left_out_is_refused(family, monkeypatch):
    """The check crosses a window of any length, because it shrinks it, and puts it back."""
    hf = tiny_model(family, sliding_window=4096)
    assert check(adopt(hf)) <= 1
    assert hf.config.sliding_window == 4096
    plain = selfcheck.adopt

    def blind(*args, **options):
        model = plain(*args, **options)
        model.layers = [dataclasses.replace(s, sliding_window=None) for s in model.layers]
        return model

    monkeypatch.setattr(selfcheck, "adopt", blind)
    with pytest.raises(UnsupportedModelError, match="differ"):
        check(adopt(hf))


ROPE = {"factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    ],
    ids=lambda r: r["rope_type"],
)
def test_rope_that_depends_on_the_longest_position_needs_a_declared_length(rope):
    hf = tiny_model("llama", rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match="rope_length"):
        adopt(hf)
    for length in (48, 1024):
        hf = tiny_model("llama", rope_parameters=rope)
        assert check(adopt(hf, length), length) <= 1


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        ROPE | {"rope_type": "yarn"},
        ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=lambda r: r["rope_type"],
)
def test_scaled_rope_types_pass(rope):
    assert check(adopt(tiny_model("llama", rope_parameters=rope))) <= 1


def test_a_16_bit_model_is_checked_through_a_float32_copy():
    model = adopt(tiny_model("llama").to(torch.bfloat16))
    assert check(model) <= 1
    assert model.dtype == torch.bfloat16


def test_the_model_itself_is_left_as_it_was():
    hf = tiny_model("llama")
    before = {k: v.clone() for k, v in hf.state_dict().items()}
    check(adopt(hf))
    assert all(torch.equal(v, before[k]) for k, v in hf.state_dict().items())
    assert model_of("llama").hf.config._attn_implementation == "kv_bench"


def test_the_window_is_put_back_after_the_check():
    hf = tiny_model("mistral", sliding_window=4096)
    check(adopt(hf))
    assert hf.config.sliding_window == 4096
    assert adopt(hf).layers[0].sliding_window == 4096
