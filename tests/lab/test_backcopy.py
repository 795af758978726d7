"""Bigram-Backcopy: its text is what it says, and the models that read it are trained, loaded and driven like any others."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import DEVICE, tokens_of

from kvbench.harness.core.errors import RefusedModelError
from kvbench.harness.data import backcopy
from kvbench.harness.data.stream import opening
from kvbench.harness.engine.own_attention import own_attention
from kvbench.harness.engine.watch import check as check_watch
from kvbench.harness.models.load import load_model, load_tokenizer
from kvbench.lab.attention.measure import load_watched
from kvbench.lab.pretrain.config import load
from kvbench.lab.pretrain.new_model import new_model
from kvbench.lab.pretrain.train import pretrain
from kvbench.lab.variants.base import attention_weights

pytestmark = pytest.mark.filterwarnings("ignore")  # accelerate and the Trainer give warnings
SHORT = ["training.tokens=1400", "training.sample=70", "training.batch=2", "training.keep=[]", "shape.hidden=16"]
ATTENTION = ("relu", "sigmoid", "clipped", "sigmoid_shares", "elu", "elu_shares", "pseudo")


def test_after_a_trigger_the_word_before_it_comes_again():
    words = backcopy.text(3, 50_000).split()
    triggers = [word[0] == "t" for word in words]
    assert all(words[at + 1] == words[at - 1] for at in range(1, len(words) - 1) if triggers[at])
    assert not any(a and b for a, b in itertools.pairwise(triggers))
    assert not triggers[0]
    after_others = [b for (a, b), copied in zip(itertools.pairwise(triggers), triggers, strict=False) if not copied]
    assert np.mean(after_others) == pytest.approx(0.1, abs=0.005)


@pytest.mark.parametrize("name", ATTENTION)
def test_weights_of_a_gpt2_are_those_of_its_recipe(name):
    model = new_model(load("backcopy", [f"attention={name}", *SHORT])).double().eval()
    module = model.transformer.h[0].attn
    draw = torch.Generator().manual_seed(0)
    query, key = (2 * torch.randn(1, 1, 9, 16, generator=draw, dtype=torch.float64) for _ in range(2))
    weights = attention_weights(module, query, key, 0.25, None)[0, 0]
    for at in range(9):
        logits = [0.25 * float(query[0, 0, at] @ key[0, 0, k]) for k in range(at + 1)]
        exps = [math.exp(x) for x in logits]
        sigmoids, elus = [1 / (1 + math.exp(-x)) for x in logits], [x + 1 if x > 0 else math.exp(x) for x in logits]
        hidden = sum(math.exp(-k / 71) for k in range(at + 1, 71))
        expected = {
            "sigmoid_shares": [x / sum(sigmoids) for x in sigmoids],
            "elu": elus,
            "elu_shares": [x / sum(elus) for x in elus],
            "pseudo": [x / (sum(exps) + hidden) for x in exps],
            "relu": [max(0.0, x) / (at + 1) for x in logits],
            "sigmoid": sigmoids,
            "clipped": [min(1, max(0, (1 + 4 / 71) * x / sum(exps) - 4 / 71)) for x in exps],
        }[name]
        np.testing.assert_allclose(weights[at], [*expected, *[0.0] * (8 - at)], atol=1e-7 if name == "pseudo" else 1e-12)
    check_watch(model, input_ids=tokens_of(30).cpu() % 68)


def test_a_key_bias_takes_attention_and_gives_no_value():
    model = new_model(load("backcopy", ["attention=key_bias", *SHORT])).double().eval()
    module, draw = model.transformer.h[0].attn, torch.Generator().manual_seed(0)
    query, key = (2 * torch.randn(1, 1, 5, 16, generator=draw, dtype=torch.float64) for _ in range(2))
    module.key_bias.data = torch.randn(1, 16, generator=draw, dtype=torch.float64)
    weights = attention_weights(module, query, key, 0.25, None)[0, 0].detach()
    for at in range(5):
        exps = [math.exp(0.25 * float(query[0, 0, at] @ k)) for k in (*key[0, 0, : at + 1], module.key_bias[0])]
        np.testing.assert_allclose(weights[at], [*(x / sum(exps) for x in exps[:-1]), *[0.0] * (4 - at)], atol=1e-12)
    assert check_watch(model, input_ids=tokens_of(30).cpu() % 68) == {0}


@pytest.mark.parametrize("name", ["qk_norm", "protected"])
def test_queries_and_keys_have_a_norm_and_values_have_none(name):
    model = new_model(load("backcopy", [f"attention={name}", *SHORT, "shape.heads=2", "shape.kv_heads=2"])).eval()
    block, plain = model.transformer.h[0], new_model(load("backcopy", [*SHORT])).transformer.h[0]
    x = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(0))
    ours, theirs = ([y.view(7, 2, 8) for y in layer.attn.c_attn(x)[0].chunk(3, -1)] for layer in (block, plain))
    for normed, given in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(normed, given / (given.square().mean(-1, keepdim=True) + 1.2e-7).sqrt(), atol=1e-5, rtol=0)
    assert torch.equal(ours[2], theirs[2])
    assert isinstance(block.ln_1, torch.nn.Identity) == (name == "protected")
    check_watch(model, input_ids=tokens_of(30).cpu() % 68)


@pytest.mark.slow("training")
@pytest.mark.parametrize(
    "change", ["zero_sink=true", "sigma_reparam=true", "training.optimizer=sgd", "training.optimizer=ortho_adam"]
)
def test_it_trains_and_is_driven_as_it_was_trained(change, tmp_path):
    directory = pretrain(load("backcopy", [*SHORT, change]), tmp_path, None, torch.device("cpu"), lambda line: None)
    model = load_model(directory, "float32", DEVICE)
    assert model.learned_positions
    assert model.check <= 1
    assert opening(load_tokenizer(directory)) == [0]
    assert "A GPT-2 with" in (directory / "README.md").read_text()


@pytest.mark.slow("training")
def test_weights_that_are_no_softmax_are_refused_by_the_loop(tmp_path):
    recipe = load("backcopy", [*SHORT, "attention=relu"])
    directory = pretrain(recipe, tmp_path, None, torch.device("cpu"), lambda line: None)
    with pytest.raises(RefusedModelError, match="are no softmax"):
        load_model(directory, "float32", torch.device("cpu"))
    watched = load_watched(directory, "float32", torch.device("cpu")).hf
    ids = tokens_of(20).cpu() % 68
    with own_attention(watched), torch.inference_mode():
        assert watched(input_ids=ids).logits.isfinite().all()
