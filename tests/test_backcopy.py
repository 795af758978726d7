"""Bigram-Backcopy: its text is what it says, and the models that read it are trained, loaded and driven like any others."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DEVICE, tokens_of

from kvbench.harness.core.errors import RefusedModelError, UserError
from kvbench.harness.data import backcopy
from kvbench.harness.data.stream import opening, stream
from kvbench.harness.data.texts import texts
from kvbench.harness.engine.own_attention import own_attention
from kvbench.harness.engine.variants.base import attention_weights, nonzero, weighing_of
from kvbench.harness.engine.watch import check as check_watch
from kvbench.harness.models.load import load_model, load_tokenizer
from kvbench.harness.pretrain.config import find, load
from kvbench.harness.pretrain.new_model import new_model
from kvbench.harness.pretrain.samples import TrainingSamples
from kvbench.harness.pretrain.tokenizer import SINKS, of_words, wrapped
from kvbench.harness.pretrain.train import pretrain

pytestmark = pytest.mark.filterwarnings("ignore")  # accelerate and the Trainer give warnings
DOCS = Path(__file__).parents[1] / "docs"
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


def test_other_words_follow_as_often_as_the_word_before_says():
    pairs, copies = np.zeros((backcopy.OTHERS, len(backcopy.WORDS))), 0
    last = None
    for word, copied in itertools.islice(backcopy.words(random.Random(0)), 400_000):
        if copied:
            copies += 1
        elif last is not None:
            pairs[last - backcopy.TRIGGERS, word] += 1
        last = word
    expected = np.array(backcopy.successors())
    np.testing.assert_allclose(expected.sum(1), 1, atol=1e-12)
    often = pairs.sum(1) > 4_000
    np.testing.assert_allclose((pairs / pairs.sum(1, keepdims=True))[often], expected[often], atol=0.025)
    assert copies == pytest.approx(400_000 / 11, rel=0.02)


def test_nobody_can_do_better_than_the_best():
    """The nats of the words under the distribution that they are drawn from."""
    words = [backcopy.WORDS.index(word) for word in backcopy.text(5, 200_000).split()]
    costs = [
        0.0 if last < backcopy.TRIGGERS else -math.log(backcopy.successors()[last - backcopy.TRIGGERS][word])
        for last, word in itertools.pairwise(words)
    ]
    best = backcopy.best_nll([backcopy.WORDS[word] for word in words])
    assert best == pytest.approx(np.mean(costs), abs=4 * np.std(costs) / math.sqrt(len(costs)))


def test_a_text_is_the_same_everywhere():
    text = backcopy.text(0, 5_000)
    assert backcopy.text(0, 1_000) == " ".join(text.split()[:1_000])
    assert backcopy.text(1, 1_000) != backcopy.text(0, 1_000)
    assert hashlib.sha256(text.encode()).hexdigest() == "7b0b1645bc837caab436f34f67db2ca5ff65d21d2cc3f89b9aeab689e308c678"


def test_samples_open_with_the_sink_and_copies_are_answers():
    config = load(find("backcopy"), ["training.sample=100"])
    tokens = wrapped(of_words(backcopy.WORDS), 0)
    sample = TrainingSamples(config, ["backcopy"] * 3, np.zeros(0, np.uint16), tokens, 0)[2]
    ids, answers = sample["input_ids"][0].tolist(), sample["answers"][0].tolist()
    assert ids[0] == 0
    words = tokens.convert_ids_to_tokens(ids[1:])
    assert set(words) <= set(backcopy.WORDS)
    assert [word[0] == "t" for word in words[:-1]] == answers[2:]
    assert sample["weights"][0].tolist() == [0.0] * 2 + [1.0] * 99


def test_tasks_read_it_as_a_stream_of_its_words():
    source, text = texts("backcopy", "test", None, 7, 3_000, None)
    read = stream(text, source, wrapped(of_words(backcopy.WORDS), 1), 3_000)
    assert source == "Bigram-Backcopy from seed 7"
    assert read.ids[: read.prefix].tolist() == [0]
    assert [backcopy.WORDS[i - len(SINKS)] for i in read.ids[1:]] == backcopy.text(7, 3_000).split()


@pytest.mark.parametrize("name", ATTENTION)
def test_weights_of_a_gpt2_are_those_of_its_recipe(name):
    model = new_model(load(find("backcopy"), [f"attention={name}", *SHORT])).double().eval()
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
    model = new_model(load(find("backcopy"), ["attention=key_bias", *SHORT])).double().eval()
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
    model = new_model(load(find("backcopy"), [f"attention={name}", *SHORT, "shape.heads=2", "shape.kv_heads=2"])).eval()
    block, plain = model.transformer.h[0], new_model(load(find("backcopy"), [*SHORT])).transformer.h[0]
    x = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(0))
    ours, theirs = ([y.view(7, 2, 8) for y in layer.attn.c_attn(x)[0].chunk(3, -1)] for layer in (block, plain))
    for normed, given in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(normed, given / (given.square().mean(-1, keepdim=True) + 1.2e-7).sqrt(), atol=1e-5, rtol=0)
    assert torch.equal(ours[2], theirs[2])
    assert isinstance(block.ln_1, torch.nn.Identity) == (name == "protected")
    check_watch(model, input_ids=tokens_of(30).cpu() % 68)


def test_the_table_of_interventions_follows_from_its_figures(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import interventions

    rows = [json.loads(line) for line in interventions.FILE.read_text(encoding="utf-8").splitlines()]
    assert {row["name"] for row in rows} == set(interventions.RECIPES)
    shown = "\n".join(interventions.lines(rows)).strip()
    assert shown in interventions.PAGE.read_text(encoding="utf-8"), "run: python docs/interventions.py"


def test_a_query_whose_weights_are_all_0_gives_nothing_a_share():
    weighing = weighing_of(new_model(load(find("backcopy"), ["attention=relu", *SHORT])).config)
    assert weighing.shares(torch.zeros(1, 4)).tolist() == [[0.0] * 4]
    assert nonzero(torch.tensor([0.0, 2.0])).tolist() == [1.0, 2.0]


@pytest.mark.slow("training")
@pytest.mark.parametrize(
    "change", ["zero_sink=true", "sigma_reparam=true", "training.optimizer=sgd", "training.optimizer=ortho_adam"]
)
def test_it_trains_and_is_driven_as_it_was_trained(change, tmp_path):
    directory = pretrain(load(find("backcopy"), [*SHORT, change]), tmp_path, None, torch.device("cpu"), lambda line: None)
    model = load_model(directory, "float32", DEVICE)
    assert model.learned_positions
    assert model.check <= 1
    assert opening(load_tokenizer(directory)) == [0]
    assert "A GPT-2 with" in (directory / "README.md").read_text()


@pytest.mark.slow("training")
def test_weights_that_are_no_softmax_are_refused_by_the_loop(tmp_path):
    recipe = load(find("backcopy"), [*SHORT, "attention=relu"])
    directory = pretrain(recipe, tmp_path, None, torch.device("cpu"), lambda line: None)
    with pytest.raises(RefusedModelError, match="are no softmax"):
        load_model(directory, "float32", torch.device("cpu"))
    watched = load_model(directory, "float32", torch.device("cpu"), watched=True).hf
    ids = tokens_of(20).cpu() % 68
    with own_attention(watched), torch.inference_mode():
        assert watched(input_ids=ids).logits.isfinite().all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("attention=gated", "of shape.family gpt2, attention is one of .*, not gated"),
        ("shape.heads=2", "as many kv_heads as heads"),
        ("kinds.keys=1", "other kinds can't be beside them"),
        ("shape.vocabulary=70", "have 68 tokens"),
        ("kinds.backcopy=0", "all shares are 0"),
    ],
)
def test_recipes_that_cannot_be_are_refused(change, says):
    with pytest.raises(UserError, match=says):
        load(find("backcopy"), [change])
