"""Training samples: answers follow from the text before them, and a sample depends only on the seed and its number."""

import random
import re

import numpy as np
import pytest
import torch
from helpers import tiny_model, tokens_of

from kvbench.harness.data import lookups
from kvbench.harness.data.lookups import register_answer, register_line, register_question
from kvbench.lab.pretrain import text, tokenizer
from kvbench.lab.pretrain.config import Mix, PretrainConfig
from kvbench.lab.pretrain.held_out import right_answers
from kvbench.lab.pretrain.samples import NAMES, TrainingSamples
from kvbench.lab.pretrain.train import _Trainer

PROSE = Mix(pg19=0, prose=1)


def config(**changes) -> PretrainConfig:
    training = {"tokens": 64 * 4 * 100, "sample": 64, "batch": 4, "short": [{"until": 0.25, "sample": 16}]}
    shape = {"hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "vocabulary": 1700}
    kinds = {"text": 1, "needles": 1, "registers": 2, "keys": 1, "chains": 1}
    values = {"name": "tiny", "training": training, "shape": shape, "kinds": kinds, "text": PROSE.model_dump()}
    return PretrainConfig(**(values | {"repeats": {"share": 0.5, "later": 0.1, "until": 0.4}} | changes))


@pytest.fixture(scope="module")
def tokens():
    return tokenizer.wrapped(tokenizer.learn(text.for_tokenizer(PROSE, 0, None), config().shape), 0)


def samples(tokens, kinds, seed=0, staged=True, **changes) -> TrainingSamples:
    ids = np.array(tokens(next(text.pieces(PROSE, 0, None)))["input_ids"], np.uint16)
    return TrainingSamples(config(**changes), kinds, np.resize(ids, 64 * (len(kinds) + 1)), tokens, seed, staged)


def test_numbers_below_a_thousand_are_one_token_and_what_stands_around_them_too(tokens):
    for number in (0, 7, 42, 999):
        assert tokens.tokenize(str(number)) == [str(number)]
    for number, split in {1234: "12 34", 44605: "446 05", 50000: "500 00", 123456: "1 234 56", 1234567: "12 345 67"}.items():
        assert tokens.tokenize(str(number)) == split.split()
    pieces = [tokens.decode([i]) for i in tokens(register_line(12, 44615))["input_ids"]]
    assert pieces == ["line", " ", "12", ": REGISTER_CONTENT is <", "446", "15", ">\n"]
    asked = register_question(12) + register_answer(44615)
    assert len(tokens(asked)["input_ids"]) == 7
    for written in (asked, register_line(1, 50000), "Line 3's end, 1,234 words.\n", lookups.key_line(3, [5, 77])):
        assert tokens.decode(tokens(written)["input_ids"]) == written


@pytest.mark.parametrize("seed", range(5))
def test_every_answer_follows_from_the_text_before_it(seed):
    draw = random.Random(seed)
    made = {kind: getattr(lookups, kind)(draw, 40) for kind in ("registers", "keys", "chains")}
    for kind, asked in made.items():
        assert len(asked.answers) > 3
        for start, end in asked.answers:
            before, said = asked.text[:start], asked.text[start:end].strip()
            name = re.search(r"(\d+)(?:\?| lead to\?)\nAnswer:$", before)[1]
            if kind == "registers":
                assert f"line {name}: REGISTER_CONTENT is {said}\n" in before
            else:
                if kind == "chains":  # the key that is named, and its value
                    assert f"#{name} = #{said.split()[0]}\n" in before
                    name, said = said.split()
                assert re.search(rf"^#{name} = {said}$", before, re.M)


def test_needles_are_asked_for_at_the_end_and_replace_no_more_text_than_they_take(tokens):
    made = samples(tokens, ["needles"] * 20, staged=False)
    for i in range(20):
        sample = made[i]
        whole = tokens.decode(sample["input_ids"][0])
        told = dict(re.findall(r"The secret number of (\w+) = (\d+)\.", whole))
        asked = re.findall(r"\nQuestion: What is the secret number of (\w+)\?\nAnswer: (\d+)\.", whole)
        assert told
        assert dict(asked) == told
        answered = sample["input_ids"][sample["answers"]].tolist()
        assert all(number in tokens.decode(answered) for number in told.values())


def test_a_sample_is_a_function_of_seed_and_number(tokens):
    kinds = ["repeats", *NAMES] * 20
    first, again, other = samples(tokens, kinds), samples(tokens, kinds), samples(tokens, kinds, seed=1)
    for place in (119, 3, 60, 61):  # in any order
        assert all(torch.equal(first[place][k], again[place][k]) for k in first[place])
    assert not all(torch.equal(first[i]["input_ids"], other[i]["input_ids"]) for i in range(6))


def test_running_text_is_read_once_whole_and_in_pieces(tokens):
    whole, cut = (samples(tokens, ["text"] * 3, staged=cut) for cut in (False, True))
    for place in range(3):
        assert torch.equal(cut[place]["input_ids"].flatten(), whole[place]["input_ids"].flatten())
        assert (whole[place]["weights"][0, 1:] == 1).all()


def test_what_is_no_answer_counts_as_little_as_the_recipe_says(tokens):
    sample = samples(tokens, ["keys"], staged=False)[0]
    answers, weights = sample["answers"][0, 1:], sample["weights"][0, 1:]
    assert answers.any()
    assert set(weights[answers].tolist()) == {1.0}
    torch.testing.assert_close(weights[~answers], torch.full_like(weights[~answers], config().kinds.rest))


def test_the_loss_is_the_weighted_mean_over_predicted_tokens(tokens):
    model = tiny_model("llama", vocab_size=len(tokens))
    made = samples(tokens, ["keys", "text"])
    batch = {k: torch.stack([made[0][k], made[1][k]]) for k in made[0]}  # 2 samples of 4 pieces
    total = weight = 0.0
    for ids, weights in zip(batch["input_ids"].flatten(0, 1), batch["weights"].flatten(0, 1), strict=True):
        scores = model(input_ids=ids[None]).logits[0].log_softmax(-1).detach()
        for t in range(1, len(ids)):
            total -= float(scores[t - 1, ids[t]] * weights[t])
            weight += float(weights[t])
    assert _Trainer.compute_loss(None, model, batch).item() == pytest.approx(total / weight, abs=1e-4)


def test_an_answer_is_right_if_all_its_tokens_are():
    model, ids = tiny_model("llama", vocab_size=96), tokens_of(40, 2).cpu()
    right = model(input_ids=ids).logits.argmax(-1)
    ids[:, 1:] = torch.where(torch.arange(1, 40) >= 39, right[:, :-1], ids[:, 1:])  # the last token alone is predicted
    answers = torch.zeros_like(ids, dtype=torch.bool)
    answers[:, 39] = True

    def counted() -> tuple[list[int], list[int]]:
        right, asked = right_answers(model, ids, answers)
        return right.tolist(), asked.tolist()

    assert counted() == ([1, 1], [1, 1])
    answers[0, 38] = True  # now the first stream's answer has two tokens
    assert counted() == ([0, 1], [1, 1])
    answers[1, 10:12] = True  # and the second stream two answers
    assert counted() == ([0, 1], [1, 2])
